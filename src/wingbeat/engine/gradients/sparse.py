"""Sparse gradients of embeddings: each worker gathers all indices and values, and sums them.

As under DDP, these are the gradients of ``torch.nn.Embedding`` and ``EmbeddingBag`` weights with
``sparse=True``. They are not in buckets, and are exchanged once per backward, after all buckets:
first each worker's number of indices, then indices and values, in rows of bytes as long as the
longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from wingbeat.collectives import Collectives, Rows
from wingbeat.collectives.handle import Handle
from wingbeat.engine.gradients.bucket import COUNT_MODULUS, StepCounter
from wingbeat.engine.gradients.bucketing import synchronised
from wingbeat.errors import PeerError, UsageError
from wingbeat.parts.strategy import Strategy
from wingbeat.traits import MEANS

_NONE, _SPARSE, _DENSE = range(3)
"""Kinds of a worker's gradient. It is dense where the weight is tied to a dense layer."""

_INDEX = torch.int64


def sparse_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the synchronised parameters whose gradients are sparse, by name."""
    tables = {
        id(module._parameters.get("weight"))
        for module in model.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }
    return {n: p for n, p in synchronised(model) if p.requires_grad and id(p) in tables}


def check_sparse(model: torch.nn.Module, strategy: Strategy) -> None:
    """Raise a `UsageError` if ``strategy`` cannot gather the model's sparse gradients."""
    found = next(iter(sparse_parameters(model)), None)
    if found is None or MEANS in strategy.exchange.has or gathers_sparse(strategy):
        return
    raise UsageError(
        f"parameter {found!r} has sparse gradients (an embedding with sparse=True), which "
        f"{strategy} cannot exchange: use wingbeat.AllReduce() or wingbeat.DeAR() without a codec "
        "and without shard_optimizer, or sparse=False"
    )


def gathers_sparse(strategy: Strategy) -> bool:
    """Whether a strategy gathers sparse gradients from all workers."""
    plain = strategy.codec is None and strategy.plan.merging() is None
    return strategy.exchange.collective and plain and not strategy.update_part.divides


class _Size(NamedTuple):
    """The kind of one worker's gradient, and its number of rows."""

    kind: int
    rows: int


class SparseGradients:
    """Averages the sparse gradients of one model over all workers."""

    def __init__(
        self, params: Mapping[str, torch.nn.Parameter], collectives: Collectives, steps: StepCounter
    ) -> None:
        self.names, self.params = list(params), list(params.values())
        self._collectives, self._steps = collectives, steps
        self._mine: list[torch.Tensor] = []
        self._counts: Rows | None = None
        self._sizes: list[list[_Size]] = []
        self._rows: torch.Tensor | None = None
        self._handle = Handle([])

    def __bool__(self) -> bool:
        return bool(self.params)

    def check(self, index: int) -> None:
        """Raise a `UsageError` if a gradient's layout cannot be exchanged."""
        grad = self.params[index].grad
        if grad is None or grad.layout is torch.strided:
            return
        if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
            raise UsageError(
                f"the gradient of parameter {self.names[index]!r} has the layout {grad.layout}: "
                "sparse gradients are exchanged by their first dimension (torch.sparse_coo); use "
                "sparse=False"
            )

    @torch.no_grad()
    def start(self, scale: float, *, shadowing: bool) -> None:
        """Scale the gradients, and send their sizes; with ``shadowing`` no step is counted."""
        if not self:
            return
        self._mine, numbers = [], [0 if shadowing else self._steps.count % COUNT_MODULUS + 1]
        for param in self.params:
            grad, kind = param.grad, _NONE
            if grad is not None:
                kind = _DENSE if grad.layout is torch.strided else _SPARSE
                grad = (grad.to_sparse(1) if kind == _DENSE else grad).detach().coalesce()
                self._mine += [grad.indices()[0], grad.values() * scale]
            numbers += [kind, 0 if grad is None else grad.values().shape[0]]
        self._counts = Rows(self._collectives, numbers, "the sizes of sparse gradients")

    @torch.no_grad()
    def send(self) -> None:
        """Wait for all workers' sizes, and start the all-gather of indices and values."""
        if self._counts is None:
            return
        world = self._collectives.world
        counts, self._counts = self._counts.wait().long().tolist(), None
        self._steps.check([row[0] for row in counts])
        self._sizes = [self._parse_sizes(rank, row[1:]) for rank, row in enumerate(counts)]
        longest = max(self._nbytes(sizes) for sizes in self._sizes)
        device = self.params[0].device
        mine = [part.contiguous().view(torch.uint8).reshape(-1).to(device) for part in self._mine]
        self._mine = []
        self._rows = torch.zeros(world.size, longest, dtype=torch.uint8, device=device)
        if mine:
            packed = torch.cat(mine)
            self._rows[world.rank, : packed.numel()] = packed
        self._handle = Handle([])
        if longest:
            flat = self._rows.view(-1)
            self._handle = self._collectives.all_gather(flat, label="sparse gradients")

    @torch.no_grad()
    def show(self) -> None:
        """Set ``p.grad`` to the means; leave None where no worker has a gradient."""
        if self._rows is None:
            return
        # `wait` may block until the next collective is done, which a peer may start only after it
        # has gathered the gradients of another model of the same backward.
        self._handle.wait_received()
        rows, self._rows = self._rows, None
        parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.params]
        for rank, sizes in enumerate(self._sizes):
            begin = 0
            for index, (param, size) in enumerate(zip(self.params, sizes, strict=True)):
                end = begin + size.rows * _INDEX.itemsize
                indices = rows[rank, begin:end].clone().view(_INDEX)
                begin, end = end, end + size.rows * _row_nbytes(param)
                values = rows[rank, begin:end].clone().view(param.dtype)
                begin = end
                self._check_indices(rank, index, indices)
                parts[index].append((indices, values.view(size.rows, *param.shape[1:])))
        for index, param in enumerate(self.params):
            kinds = {sizes[index].kind for sizes in self._sizes}
            if kinds == {_NONE}:
                continue
            summed = torch.sparse_coo_tensor(
                torch.cat([indices for indices, _ in parts[index]])[None],
                torch.cat([values for _, values in parts[index]]),
                param.shape,
                device=param.device,
                check_invariants=False,  # checked above
            ).coalesce()
            param.grad = summed.to_dense() if _DENSE in kinds else summed

    # -- checks of received values ---------------------------------------------------------

    def _parse_sizes(self, rank: int, numbers: Sequence[int]) -> list[_Size]:
        sizes = [_Size(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        for name, param, size in zip(self.names, self.params, sizes, strict=True):
            most = 0 if size.kind == _NONE else param.shape[0]
            if size.kind not in (_NONE, _SPARSE, _DENSE) or not 0 <= size.rows <= most:
                raise self._malformed(rank, name, f"{size.rows} rows of {param.shape[0]}")
        return sizes

    def _check_indices(self, rank: int, index: int, indices: torch.Tensor) -> None:
        rows = self.params[index].shape[0]
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= rows):
            raise self._malformed(rank, self.names[index], f"an index outside of its {rows} rows")

    def _malformed(self, rank: int, name: str, what: str) -> PeerError:
        return PeerError(
            f"rank {self._collectives.world.rank}: rank {rank} sent {what} as the sparse gradient "
            f"of parameter {name!r}; all workers have to run the same wingbeat"
        )

    def _nbytes(self, sizes: Sequence[_Size]) -> int:
        pairs = zip(self.params, sizes, strict=True)
        return sum(size.rows * (_INDEX.itemsize + _row_nbytes(param)) for param, size in pairs)


def _row_nbytes(param: torch.Tensor) -> int:
    return param[:1].numel() * param.element_size() if param.shape[0] else 0
