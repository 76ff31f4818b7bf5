"""Factors that all workers sum: low rank as PowerSGD has it (Vogels et al., 2019, Algorithms 1, 2).

A matrix M of ``rows x cols`` travels as ``P = M Q``, of ``rows x rank``, and ``M.T P``, of
``cols x rank``. Both are linear in M, so sums of all workers' factors are the factors of the sum of
their matrices: nobody encodes anew what others have encoded, and bytes grow with no number of
workers.

Q begins as the last sum of ``M.T P``, so that the columns turn towards the singular vectors from
one iteration to the next. What is no matrix, or gains nothing, travels beside the first factors as
it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wingbeat.errors import UsageError
from wingbeat.types import Span

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
