"""Low rank: a large matrix travels as two thin factors (Canary, section 4.3.1, case 1).

The factors are found by randomised subspace iteration (Halko, Martinsson and Tropp, 2011,
sections 4.5 and 5.1), with a few columns more than asked for, of which the best are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wingbeat.codecs.codec import Codec, check_size
from wingbeat.codecs.coding import ALIGNMENT
from wingbeat.codecs.dense import Dense
from wingbeat.errors import UsageError

OVERSAMPLE = 4
"""Columns beyond the rank. Measured on spectra that fall like 1/j, with one iteration: the error
is within 3 % of the best possible; without these columns up to 1.5 times of it."""

TAME = 2.0**40
"""Products of matrices whose values are much larger than this, or smaller than its reciprocal,
might leave float32's range; those are scaled first."""

SEED = 4_3_1
"""Of the random test matrix: equal input, equal payload."""


@dataclass(frozen=True)
class LowRankCodec:
    """A matrix is written as ``P @ Q.T``, and each factor by the inner codec.

    Payload: ``[P: rows * rank elements][Q: cols * rank elements]``, each as the inner codec writes
    it; the second begins at the next multiple of 4 bytes. One factor's columns are orthonormal,
    the other's have the singular values' sizes. Where there is no matrix, or the factors' payload
    would not be smaller than half of the inner codec's for the whole, the inner codec is used
    directly.

    A row with a value that is not finite arrives as NaN; the other rows are not affected. Decoding
    sums ``rank`` products in the order that the device's matrix product has, so receivers have the
    same bits if they have the same hardware and software. On a GPU encoding waits for the device.

    Args:
        rank: columns of each factor, at least 1.
        inner: how the factors are written, and what is no matrix.
        iterations: of the subspace iteration, at least 0; each reads the matrix twice, and it is
            read twice besides.

    Raises:
        UsageError: a number is out of range.
    """

    rank: int
    inner: Codec = field(default_factory=Dense)
    iterations: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (("rank", self.rank, 1), ("iterations", self.iterations, 0)):
            if type(value) is not int or value < least:
                raise UsageError(f"{name}={value!r}: allowed are whole numbers from {least}")

    @property
    def feedback(self) -> bool:
        """As the inner codec has it; yes with dense factors, which lose something all the same."""
        return self.inner.feedback or isinstance(self.inner, Dense)

    @property
    def bytes_per_element(self) -> float:
        """The inner codec's, for all that is no matrix."""
        return self.inner.bytes_per_element

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """Return the payload's size in bytes.

        Raises:
            ValueError: ``numel`` elements are not whole rows of ``cols``.
        """
        rows = self._rows(numel, cols)
        return sum(self._sizes(rows, cols)) if rows else self.inner.nbytes(numel, cols)

    def encode(
        self, x: Tensor, payload: Tensor, *, residual: Tensor | None = None, cols: int = 0
    ) -> None:
        """Find the factors and write them.

        Raises:
            ValueError: the payload's size is wrong, or ``x`` is not whole rows.
        """
        rows = self._rows(x.numel(), cols)
        if not rows:
            self.inner.encode(x, payload, residual=residual, cols=cols)
            return
        first, second = self._fields(payload, rows, cols)
        total = x if residual is None else residual.add_(x)
        p, q = _factors(total.view(rows, cols), self.rank, self.iterations)
        payload.zero_()
        self.inner.encode(p.view(-1), first)
        self.inner.encode(q.view(-1), second)
        if residual is not None:
            p, q = self._read(payload, rows, cols)
            residual.view(rows, cols).addmm_(p, q.T, alpha=-1.0)
            residual.nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool = False, cols: int = 0) -> None:
        """Multiply the factors, straight into ``out``.

        Raises:
            ValueError: the payload's size is wrong, ``out`` is not whole rows, or the inner codec
                cannot have written a factor; ``out`` is as it was.
        """
        rows = self._rows(out.numel(), cols)
        if not rows:
            self.inner.decode(payload, out, add=add, cols=cols)
            return
        p, q = self._read(payload, rows, cols)
        # beta=0 does not read what is there, so old NaN do not stay.
        out.view(rows, cols).addmm_(p, q.T, beta=1.0 if add else 0.0)

    def _rows(self, numel: int, cols: int) -> int:
        """Return the matrix's rows, or 0 if it is not worth factors; of the sizes alone."""
        if cols == 0:
            return 0
        if cols < 0 or numel % cols:
            raise ValueError(f"{numel} elements are not whole rows of cols={cols}")
        rows = numel // cols
        if self.rank >= min(rows, cols):
            return 0
        worth = 2 * sum(self._sizes(rows, cols)) < self.inner.nbytes(numel, cols)
        return rows if worth else 0

    def _sizes(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the bytes of each factor, of the first with what fills it up."""
        first = self.inner.nbytes(rows * self.rank)
        return -(-first // ALIGNMENT) * ALIGNMENT, self.inner.nbytes(cols * self.rank)

    def _fields(self, payload: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Return views of the two factors' payloads."""
        start, size = self._sizes(rows, cols)
        check_size(payload, start + size)
        return payload[: self.inner.nbytes(rows * self.rank)], payload[start:]

    def _read(self, payload: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Return the factors as the receiver sees them."""
        first, second = self._fields(payload, rows, cols)
        p = torch.empty(rows * self.rank, dtype=torch.float32, device=payload.device)
        q = torch.empty(cols * self.rank, dtype=torch.float32, device=payload.device)
        self.inner.decode(first, p)
        self.inner.decode(second, q)
        return p.view(rows, self.rank), q.view(cols, self.rank)


def _factors(matrix: Tensor, rank: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Return ``P`` and ``Q`` with ``P @ Q.T`` near ``matrix``; NaN rows in P where it has any."""
    # The orthonormal factor is that of the shorter side: it is the cheaper one to make.
    tall = matrix.shape[0] > matrix.shape[1]
    found = _factorise(matrix.T if tall else matrix, rank, iterations)
    if found is None:
        return _wild_factors(matrix, rank, iterations)
    return found[::-1] if tall else found


def _wild_factors(matrix: Tensor, rank: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Do the same for a matrix that is zero, not all finite, or very large or small."""
    finite = matrix.isfinite()
    clean = torch.where(finite, matrix, 0.0)
    peak = float(clean.abs().max())
    if peak == 0.0:
        p, q = (matrix.new_zeros(size, rank) for size in matrix.shape)
    else:
        # In two halves, because the reciprocal of the smallest denormal is no float32. Each half
        # goes back onto one factor, so that neither overflows.
        exponent = math.frexp(peak)[1]
        half = exponent // 2
        clean.mul_(2.0**-half).mul_(2.0 ** (half - exponent))
        p, q = _factors(clean, rank, iterations)
        p.mul_(2.0**half)
        q.mul_(2.0 ** (exponent - half))
    p[~finite.all(dim=1)] = torch.nan
    return p, q


def _factorise(a: Tensor, rank: int, iterations: int) -> tuple[Tensor, Tensor] | None:
    """Return ``U``, orthonormal, and ``V`` with ``U @ V.T`` near ``a``, float32 (short, long).

    None if ``a`` needs cleaning or scaling first, which its first product shows.
    """
    short, long = a.shape
    width = min(rank + OVERSAMPLE, short)
    generator = torch.Generator(a.device).manual_seed(SEED)
    # Stored by columns, like all that follows: matrix products with few columns are faster so.
    test = torch.randn(width, long, generator=generator, device=a.device).T
    y = a @ test
    if not 1.0 / TAME < float(y.abs().max()) < TAME:
        return None
    for _ in range(iterations):
        y = a @ _orthonormal((_orthonormal(y).T @ a).T)
    basis = _orthonormal(y)
    b = basis.T @ a
    # The singular vectors of the thin b, from its small Gram matrix: squaring loses half of the
    # digits, so it is in float64.
    wide = b.double()
    best = torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -rank:].float()
    return basis @ best, b.T @ best


def _orthonormal(y: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns' space, of as many columns."""
    basis: Tensor = torch.linalg.qr(y).Q
    return basis
