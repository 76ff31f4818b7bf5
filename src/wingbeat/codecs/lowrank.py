"""Low rank: matrices travel as two thin factors, encoded alone or summed by all workers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wingbeat.codecs.codec import ALIGNMENT, Codec, Dense, check_size
from wingbeat.errors import UsageError
from wingbeat.types import Span

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


_PRIME = 4093
"""Marks are below this: float32 holds their sum exactly for up to 4,096 workers."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Elements of a flat buffer that are ``rows`` of ``cols``, and how many columns factors have.

    Attributes:
        name: the parameter's; what its factors begin with goes by it.
        start: the first element.
    """

    name: str
    start: int
    rows: int
    cols: int
    rank: int

    @property
    def span(self) -> Span:
        """The elements."""
        return Span(self.start, self.start + self.rows * self.cols)

    def of(self, flat: Tensor) -> Tensor:
        """Return the matrix as a view of the buffer that it is in."""
        return flat[self.start : self.span.stop].view(self.rows, self.cols)


class Factors:
    """How a bucket's buffer travels as factors: its matrices, what they lose, where they begin.

    Args:
        matrices: of the buffer, in their order, without overlaps; at least one.
        length: elements of the buffer.
        workers: how many there are; what is summed is a multiple of that long.
        residual: float32, as long as the buffer; None where nothing is kept.
        starts: each matrix's Q by name, ``(cols, rank)``; those that are missing are made, and all
            are views of memory of this object afterwards.
        device: where the buffer is.
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
        """Bytes that all workers sum, in two all-reduces."""
        return 4 * (self._firsts + self._seconds)

    def begin(self, buffer: Tensor) -> Round:
        """Make the first factors of the buffer; see `Round`."""
        return Round(self, buffer, self._zeros(self._firsts), self._zeros(self._seconds))

    def thin(self, first: Tensor) -> list[Tensor]:
        """Return the views of each matrix's P, ``(rows, rank)``, in what is summed first."""
        return _columns(first, self._beside, [(m.rows, m.rank) for m in self.matrices])

    def wide(self, second: Tensor) -> list[Tensor]:
        """Return the views of each matrix's Q, ``(cols, rank)``, in what is summed second."""
        return _columns(second, 0, [(m.cols, m.rank) for m in self.matrices])

    @property
    def starts(self) -> list[Tensor]:
        """Each matrix's Q of the next round."""
        return self.wide(self._starts)

    def mark(self) -> Tensor:
        """Return a number that differs where any Q does, most likely; a scalar."""
        return (self._starts.view(torch.int32).sum() % _PRIME).float()

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.float32, device=self.device)


class Round:
    """One exchange of a buffer as factors.

    ``first`` is to be summed over all workers, then `turn` called; then ``second`` is to be summed,
    meanwhile `keep` called, and `end` in the end. All of it is queued where the buffer is; nothing
    waits for a GPU.

    Where a P is not finite, the matrix arrives as NaN on every worker, and its residual and the
    next Q are as if this round had not been.

    Attributes:
        first: float32: what is dense, then each P, then a mark of every Q.
        second: float32: each ``M.T P``.
        agreed: after `turn`, whether all workers began with the same Q; else all is NaN.
    """

    @torch.no_grad()
    def __init__(self, factors: Factors, buffer: Tensor, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second
        self.agreed = first.new_zeros((), dtype=torch.bool)
        self._factors, self._buffer = factors, buffer
        exact = buffer.dtype is torch.float32
        # Out of the buffer where that is as wide; what it has no room for would be lost.
        self._whole = buffer if exact else buffer.float()
        if factors.residual is not None:
            self._whole += factors.residual
            for span in factors.dense:
                factors.residual[span.start : span.stop] = 0.0
        offset = 0
        for span in factors.dense:
            first[offset : offset + len(span)] = self._whole[span.start : span.stop]
            offset += len(span)
        self._mark = factors.mark()
        first[-1] = self._mark
        for matrix, p, q in zip(factors.matrices, factors.thin(first), factors.starts, strict=True):
            torch.mm(matrix.of(self._whole), q, out=p)

    @torch.no_grad()
    def turn(self) -> None:
        """Make each P orthonormal, and the second factors with it."""
        factors = self._factors
        self.agreed = self.first[-1] == factors.workers * self._mark
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
    def keep(self) -> None:
        """Keep what the factors lose of this worker's own matrices: ``M - P (M.T P).T``.

        The sum over all workers is what the sum of the matrices lacks, as it is with
        the difference to the mean that PowerSGD keeps; and it needs nobody else's factors.
        """
        factors, own = self._factors, self._own
        if factors.residual is None or own is None:
            return
        each = zip(factors.matrices, self._bases, factors.wide(own), self._right, strict=True)
        for matrix, basis, q, right in each:
            residual, whole = matrix.of(factors.residual), matrix.of(self._whole)
            finite = right & q.isfinite().all()
            if residual.is_cuda:
                lost = torch.addmm(whole, basis, q.T, alpha=-1.0)
                torch.where(finite, lost, residual, out=residual)
            elif bool(finite):
                torch.addmm(whole, basis, q.T, alpha=-1.0, out=residual)
        self._own = None

    @torch.no_grad()
    def end(self) -> None:
        """Write the sum into the buffer, and keep the second factors for the next round."""
        factors = self._factors
        offset = 0
        for span in factors.dense:
            self._buffer[span.start : span.stop] = self.first[offset : offset + len(span)]
            offset += len(span)
        products = zip(self._bases, factors.wide(self.second), self._right, strict=True)
        starts = zip(factors.matrices, factors.starts, strict=True)
        for (matrix, start), (basis, q, right) in zip(starts, products, strict=True):
            left = torch.where(right, basis, torch.nan)
            out = matrix.of(self._buffer)
            if out.dtype is torch.float32:
                torch.mm(left, q.T, out=out)
            else:
                out.copy_(left @ q.T)
            peak = q.abs().amax(dim=0)
            start.copy_(torch.where(right, _scaled(q, peak, start), start))


def restart(starts: MutableMapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Begin with what a run has ``saved``, and anew where it has nothing that fits.

    Tensors that are views of some `Factors` stay so.
    """
    for name, start in starts.items():
        held = saved.get(name)
        if held is None or held.shape != start.shape:
            held = fresh(name, *start.shape)
        start.copy_(held)
    for name in saved.keys() - starts.keys():
        starts[name] = saved[name].detach().to(torch.float32, copy=True)


def check_starts(state: Mapping[str, Any], where: str) -> None:
    """Raise a `UsageError` that begins with ``where`` unless a state's factors can be used."""
    saved = state.get("starts", {})
    right = isinstance(saved, dict) and all(
        isinstance(each, Tensor)
        and each.dim() == 2
        and each.is_floating_point()
        and bool(each.isfinite().all())
        for each in saved.values()
    )
    if not right:
        raise UsageError(
            f"{where}: starts is no dict of finite matrices, which low rank begins with; use an "
            "earlier checkpoint"
        )


def fresh(name: str, cols: int, rank: int) -> Tensor:
    """Return a Q to begin with, ``(cols, rank)``: random, the same wherever it is made."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rank, cols, generator=generator, dtype=torch.float32, device="cpu").T


def _scaled(q: Tensor, peak: Tensor, start: Tensor) -> Tensor:
    """Return columns as long as 1 at their peaks; as they were where there is nothing of them.

    A scale changes no P, once that is orthonormal; without one small gradients would vanish in the
    square of themselves, and a matrix that was once zero would be for ever.
    """
    some = peak.isfinite() & (peak > 0.0)
    return torch.where(some, q / torch.where(some, peak, 1.0), start)


def _columns(flat: Tensor, offset: int, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return views of ``(long, rank)``, stored by columns: products with few of them are faster."""
    views = []
    for length, rank in shapes:
        end = offset + length * rank
        views.append(flat[offset:end].view(rank, length).T)
        offset = end
    return views


def _between(spans: Sequence[Span], length: int) -> Iterator[Span]:
    """Yield what lies between the spans, up to ``length``."""
    start = 0
    for span in spans:
        if start < span.start:
            yield Span(start, span.start)
        start = span.stop
    if start < length:
        yield Span(start, length)
