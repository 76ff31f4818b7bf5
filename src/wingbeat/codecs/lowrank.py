"""Low rank: matrices are sent as two thin factors, encoded per worker or summed by all-reduces."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wingbeat.codecs.codec import ALIGNMENT, Codec, Dense, check_size
from wingbeat.codecs.feedback import is_plain
from wingbeat.errors import UsageError
from wingbeat.types import Span

OVERSAMPLE = 4
"""Additional columns. With spectra that decay like 1/j and one iteration, the error is within 3 %
of the optimum; without these columns it is up to 1.5 times the optimum.
"""

TAME = 2.0**40
"""Limit for unscaled products; beyond it or its reciprocal, matrices are scaled to avoid overflow
and underflow.
"""

SEED = 4_3_1
"""Seed of the random test matrix, so that equal input gives equal payloads."""


@dataclass(frozen=True)
class LowRankCodec(Codec):
    """Writes a matrix as ``P @ Q.T``, and encodes the factors by the inner codec (Canary, section
    4.3.1, case 1).

    The factors are computed by randomised subspace iteration (Halko, Martinsson and Tropp, 2011,
    sections 4.5 and 5.1), with oversampling.

    Payload: ``[P: rows * rank elements][Q: cols * rank elements]``, each encoded by the inner
    codec; the second begins at the next multiple of 4 bytes. One factor has orthonormal columns,
    the other has columns with the singular values as norms. The inner codec is used directly if
    there is no matrix, or if the factors would not be smaller than half of its payload.

    A row with a non-finite value is decoded as NaN; other rows are not affected. Decoded values are
    bitwise equal on workers with the same hardware and software. On a GPU encoding waits for the
    device.

    The inner codec also encodes elements that are not in a matrix. Each of the subspace iterations
    reads the matrix twice, in addition to two other passes. A `UsageError` if a number is out of
    range.
    """

    separate = True

    rank: int
    inner: Codec = field(default_factory=Dense)
    iterations: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (("rank", self.rank, 1), ("iterations", self.iterations, 0)):
            if type(value) is not int or value < least:
                raise UsageError(f"{name}={value!r}: allowed are whole numbers from {least}")

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        """As the inner codec; True with dense factors, which are lossy too."""
        return self.inner.feedback or self.inner.lossless

    @property
    def bytes_per_element(self) -> float:  # type: ignore[override]
        """Bytes per element of the inner codec."""
        return self.inner.bytes_per_element

    def without_matrix(self) -> Codec:
        """As `Codec.without_matrix`: not a sketch, whose regions would change."""
        return self.inner if self.inner.lossless else self

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """As `Codec.nbytes`. Raises `ValueError` if the elements are not complete rows."""
        rows = self._rows(numel, cols)
        return sum(self._sizes(rows, cols)) if rows else self.inner.nbytes(numel, cols)

    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        residual: Tensor | None = None,
        cols: int = 0,
        velocity: Tensor | None = None,
    ) -> None:
        """As `Codec.encode`. Also raises a `ValueError` if ``x`` does not have complete rows."""
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
        """As `Codec.decode`. Also raises a `ValueError` if ``out`` does not have complete rows."""
        rows = self._rows(out.numel(), cols)
        if not rows:
            self.inner.decode(payload, out, add=add, cols=cols)
            return
        p, q = self._read(payload, rows, cols)
        # beta=0 does not read the old values, which may be NaN.
        out.view(rows, cols).addmm_(p, q.T, beta=1.0 if add else 0.0)

    def _rows(self, numel: int, cols: int) -> int:
        """Return the number of rows, or 0 if factors do not save bytes."""
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
        """Return the size of each factor in bytes, the first one padded."""
        first = self.inner.nbytes(rows * self.rank)
        return -(-first // ALIGNMENT) * ALIGNMENT, self.inner.nbytes(cols * self.rank)

    def _fields(self, payload: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        start, size = self._sizes(rows, cols)
        check_size(payload, start + size)
        return payload[: self.inner.nbytes(rows * self.rank)], payload[start:]

    def _read(self, payload: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        first, second = self._fields(payload, rows, cols)
        p = torch.empty(rows * self.rank, dtype=torch.float32, device=payload.device)
        q = torch.empty(cols * self.rank, dtype=torch.float32, device=payload.device)
        self.inner.decode(first, p)
        self.inner.decode(second, q)
        return p.view(rows, self.rank), q.view(cols, self.rank)


def _factors(matrix: Tensor, rank: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Return ``P`` and ``Q`` with ``P @ Q.T`` near ``matrix``; non-finite rows are NaN in P."""
    # An orthonormal basis of the shorter side is cheaper.
    tall = matrix.shape[0] > matrix.shape[1]
    found = _factorise(matrix.T if tall else matrix, rank, iterations)
    if found is None:
        return _wild_factors(matrix, rank, iterations)
    return found[::-1] if tall else found


def _wild_factors(matrix: Tensor, rank: int, iterations: int) -> tuple[Tensor, Tensor]:
    """As `_factors`, for a matrix that is zero or has non-finite or extreme values."""
    finite = matrix.isfinite()
    clean = torch.where(finite, matrix, 0.0)
    peak = float(clean.abs().max())
    if peak == 0.0:
        p, q = (matrix.new_zeros(size, rank) for size in matrix.shape)
    else:
        # In two steps, because the reciprocal of the smallest denormal exceeds float32. Each step
        # is reverted on one factor, so that neither overflows.
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

    Return None if ``a`` must be cleaned or scaled first.
    """
    short, long = a.shape
    width = min(rank + OVERSAMPLE, short)
    generator = torch.Generator(a.device).manual_seed(SEED)
    # Column-major, as are the factors: products with few columns are faster.
    test = torch.randn(width, long, generator=generator, device=a.device).T
    y = a @ test
    if not 1.0 / TAME < float(y.abs().max()) < TAME:
        return None
    for _ in range(iterations):
        y = a @ _orthonormal((_orthonormal(y).T @ a).T)
    basis = _orthonormal(y)
    b = basis.T @ a
    # The Gram matrix of the thin b is small, but squaring loses half of the digits: use float64.
    wide = b.double()
    best = torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -rank:].float()
    return basis @ best, b.T @ best


def _orthonormal(y: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(y).Q
    return basis


_PRIME = 4093
"""Modulus of checksums, whose sum over up to 4,096 workers is exact in float32."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that begins at element ``start`` of a flat buffer, and the rank of its factors.

    The parameter's ``name`` seeds the first Q.
    """

    name: str
    start: int
    rows: int
    cols: int
    rank: int

    @property
    def span(self) -> Span:
        """The matrix's elements."""
        return Span(self.start, self.start + self.rows * self.cols)

    def of(self, flat: Tensor) -> Tensor:
        """Return the matrix as a view of its buffer."""
        return flat[self.start : self.span.stop].view(self.rows, self.cols)


class Factors:
    """The factors of a bucket's buffer, as in PowerSGD (Vogels et al., 2019, Algorithms 1, 2).

    A matrix M of ``rows x cols`` is sent as ``P = M Q``, ``rows x rank``, and ``M.T P``, ``cols x
    rank``. Both are linear in M, so all-reduces can sum them.

    The matrices in the buffer are in order, without overlaps; ``length`` counts its elements.
    Summed buffers are padded to a multiple of the number of workers. ``residual`` is float32, of
    the buffer's length; None: no error feedback. ``starts`` has each matrix's Q by name, ``(cols,
    rank)``; missing ones are created, and all become views of memory of this object.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        length: int,
        workers: int,
        residual: Tensor | None = None,
        starts: MutableMapping[str, Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.matrices = tuple(matrices)
        self.workers = workers
        self.residual = residual
        self.device = torch.device(device)
        self.dense = tuple(_between([matrix.span for matrix in matrices], length))
        self._beside = sum(map(len, self.dense))
        thin = sum(matrix.rows * matrix.rank for matrix in matrices)
        self._firsts = -(-(self._beside + thin + 1) // workers) * workers
        wide = sum(matrix.cols * matrix.rank for matrix in matrices)
        self._seconds = -(-wide // workers) * workers
        self._starts = self._zeros(self._seconds)
        known = {} if starts is None else starts
        for matrix, view in zip(self.matrices, self.wide(self._starts), strict=True):
            held = known.get(matrix.name)
            fits = held is not None and held.shape == view.shape
            view.copy_(held if fits and held is not None else fresh(matrix.name, *view.shape))
            known[matrix.name] = view

    @property
    def nbytes(self) -> int:
        """Total bytes of the two all-reduces."""
        return 4 * (self._firsts + self._seconds)

    def begin(self, buffer: Tensor) -> Round:
        """Compute the first factors of the buffer."""
        return Round(self, buffer, self._zeros(self._firsts), self._zeros(self._seconds))

    def thin(self, first: Tensor) -> list[Tensor]:
        """Return views of each matrix's P, ``(rows, rank)``, in the first summed buffer."""
        return _columns(first, self._beside, [(m.rows, m.rank) for m in self.matrices])

    def wide(self, second: Tensor) -> list[Tensor]:
        """Return views of each matrix's Q, ``(cols, rank)``, in the second summed buffer."""
        return _columns(second, 0, [(m.cols, m.rank) for m in self.matrices])

    @property
    def starts(self) -> list[Tensor]:
        """Each matrix's Q for the next round."""
        return self.wide(self._starts)

    def checksum(self) -> Tensor:
        """Return a checksum of all Q as a scalar tensor."""
        return (self._starts.view(torch.int32).sum() % _PRIME).float()

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.float32, device=self.device)


class Round:
    """One exchange of a buffer as factors.

    Sum ``first`` over all workers and call `compute_second`; sum ``second``, meanwhile call
    `keep_residual`, and call `write_result`. All operations are queued on the buffer's device, and
    the host does not wait for a GPU. If a P is not finite, its matrix becomes NaN on every worker,
    and its residual and next Q do not change.

    Attributes:
        factors: the starts, residual and shapes.
        buffer: what is summed, and gets the sum.
        first: float32: the dense part, then each P, then a checksum of every Q.
        second: float32: each ``M.T P``.
        agreed: after `compute_second`, whether all workers began with the same Q; otherwise results
            are NaN.
    """

    @torch.no_grad()
    def __init__(self, factors: Factors, buffer: Tensor, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second
        self.agreed = first.new_zeros((), dtype=torch.bool)
        self.factors, self.buffer = factors, buffer
        exact = buffer.dtype is torch.float32
        # A narrower buffer would lose precision.
        self._whole = buffer if exact else buffer.float()
        if factors.residual is not None:
            self._whole += factors.residual
            for span in factors.dense:
                factors.residual[span.start : span.stop] = 0.0
        offset = 0
        for span in factors.dense:
            first[offset : offset + len(span)] = self._whole[span.start : span.stop]
            offset += len(span)
        self._checksum = factors.checksum()
        first[-1] = self._checksum
        for matrix, p, q in zip(factors.matrices, factors.thin(first), factors.starts, strict=True):
            torch.mm(matrix.of(self._whole), q, out=p)

    @torch.no_grad()
    def compute_second(self) -> None:
        """Orthonormalise each P, and compute the second factors."""
        factors = self.factors
        self.agreed = self.first[-1] == factors.workers * self._checksum
        self._bases: list[Tensor] = []
        self._right: list[Tensor] = []
        pairs = zip(factors.thin(self.first), factors.wide(self.second), strict=True)
        for matrix, (p, q) in zip(factors.matrices, pairs, strict=True):
            right = p.isfinite().all() & self.agreed
            basis = torch.linalg.qr(torch.where(right, p, 0.0)).Q
            torch.mm(matrix.of(self._whole).T, basis, out=q)
            self._bases.append(basis)
            self._right.append(right)
        self._own = None if factors.residual is None else self.second.clone()

    @torch.no_grad()
    def keep_residual(self) -> None:
        """Keep this worker's error ``M - P (M.T P).T``, which does not need other workers' factors.

        The sum over all workers is the error of the sum, as with PowerSGD's difference to the mean.
        """
        factors, own = self.factors, self._own
        if factors.residual is None or own is None:
            return
        each = zip(factors.matrices, self._bases, factors.wide(own), self._right, strict=True)
        for matrix, basis, q, right in each:
            residual, whole = matrix.of(factors.residual), matrix.of(self._whole)
            finite = right & q.isfinite().all()
            if residual.device.type != "cpu":
                lost = torch.addmm(whole, basis, q.T, alpha=-1.0)
                torch.where(finite, lost, residual, out=residual)
            elif bool(finite):
                torch.addmm(whole, basis, q.T, alpha=-1.0, out=residual)
        self._own = None

    @torch.no_grad()
    def write_result(self) -> None:
        """Write the sum into the buffer, and keep the scaled second factors as the next Q."""
        factors = self.factors
        offset = 0
        for span in factors.dense:
            self.buffer[span.start : span.stop] = self.first[offset : offset + len(span)]
            offset += len(span)
        products = zip(self._bases, factors.wide(self.second), self._right, strict=True)
        starts = zip(factors.matrices, factors.starts, strict=True)
        for (matrix, start), (basis, q, right) in zip(starts, products, strict=True):
            left = torch.where(right, basis, torch.nan)
            out = matrix.of(self.buffer)
            if out.dtype is torch.float32:
                torch.mm(left, q.T, out=out)
            else:
                out.copy_(left @ q.T)
            peak = q.abs().amax(dim=0)
            start.copy_(torch.where(right, _scaled(q, peak, start), start))


def restart(starts: MutableMapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Load saved starts in place, and create those for which none of the right shape was saved."""
    for name, start in starts.items():
        held = saved.get(name)
        if held is None or held.shape != start.shape:
            held = fresh(name, *start.shape)
        start.copy_(held)
    for name in saved.keys() - starts.keys():
        starts[name] = saved[name].detach().to(torch.float32, copy=True)


def check_starts(state: Mapping[str, Any], where: str) -> None:
    """Raise a `UsageError` that begins with ``where`` unless a state's factors are usable."""
    saved = state.get("starts", {})
    right = isinstance(saved, dict) and all(
        is_plain(each)
        and each.dim() == 2
        and each.is_floating_point()
        and bool(each.to(torch.float32).isfinite().all())
        for each in saved.values()
    )
    if not right:
        raise UsageError(
            f"{where}: starts is no dict of finite matrices, which low rank begins with; use an "
            "earlier checkpoint"
        )


def fresh(name: str, cols: int, rank: int) -> Tensor:
    """Return a random initial Q, ``(cols, rank)``, equal on all workers."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rank, cols, generator=generator, dtype=torch.float32, device="cpu").T


def _scaled(q: Tensor, peak: Tensor, start: Tensor) -> Tensor:
    """Return columns scaled to a maximum magnitude of 1; zero columns are taken from ``start``.

    Otherwise small gradients would underflow in their square, and a zero matrix would stay zero.
    Orthonormalisation of P removes the scale.
    """
    some = peak.isfinite() & (peak > 0.0)
    return torch.where(some, q / torch.where(some, peak, 1.0), start)


def _columns(flat: Tensor, offset: int, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return column-major views of the given shapes: products with few columns are faster."""
    views = []
    for length, rank in shapes:
        end = offset + length * rank
        views.append(flat[offset:end].view(rank, length).T)
        offset = end
    return views


def _between(spans: Sequence[Span], length: int) -> Iterator[Span]:
    """Yield the gaps between the spans, up to ``length``."""
    start = 0
    for span in spans:
        if start < span.start:
            yield Span(start, span.start)
        start = span.stop
    if start < length:
        yield Span(start, length)
