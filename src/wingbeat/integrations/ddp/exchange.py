"""What happens to one bucket: encoding, collectives and decoding, for each of the two codecs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wingbeat.codecs.feedback import Residuals
from wingbeat.errors import PeerError
from wingbeat.kernels import layout

_ALIGN = 16
"""Payloads begin and blocks are cut at multiples of this, which every kernel reads fast."""

Between = Callable[[], None]
"""What a worker can do while a collective is on its way."""


@dataclass(frozen=True)
class Group:
    """A process group that nobody else uses, and this worker's place in it."""

    handle: Any
    rank: int
    size: int

    def all_to_all(self, out: Tensor, given: Tensor, between: Between, where: str) -> None:
        """Send the p-th of the equal parts of ``given`` to rank p."""
        with self._named("all-to-all", where):
            work = dist.all_to_all_single(out, given, group=self.handle, async_op=True)
        between()
        with self._named("all-to-all", where):
            work.wait()

    def all_gather(self, out: Tensor, given: Tensor, between: Between, where: str) -> None:
        """Send ``given`` to everyone; ``out`` has those of all ranks in order."""
        with self._named("all-gather", where):
            work = dist.all_gather_into_tensor(out, given, group=self.handle, async_op=True)
        between()
        with self._named("all-gather", where):
            work.wait()

    @contextlib.contextmanager
    def _named(self, what: str, where: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as err:
            raise PeerError(
                f"rank {self.rank}: the {what} of {where} among {self.size} workers failed: "
                f"{_first_line(err)}; look for the worker that died or stopped first"
            ) from err


@dataclass(frozen=True)
class Bucket:
    """One of DDP's buckets in one iteration.

    Attributes:
        where: its number and first parameter, for messages.
        buffer: DDP's flat gradients, any float dtype; the average takes their place.
        names: its parameters, in their order in the buffer.
        numels: elements of each.
        keep_unused: whether DDP may drop the average of parameters that no worker used.
    """

    where: str
    buffer: Tensor
    names: Sequence[str]
    numels: Sequence[int]
    keep_unused: bool

    def scaled(self, size: int) -> Tensor:
        """Return this worker's part of the average, float32; in place where the dtype allows."""
        return self.buffer.to(torch.float32).mul_(1.0 / size)

    def average(self, found: Tensor) -> Tensor:
        """Return the buffer, holding ``found``."""
        if found is not self.buffer:
            self.buffer.copy_(found)
        return self.buffer

    def parameters_in(self, start: int, stop: int) -> list[slice]:
        """Return where parameters lie in elements ``start`` to ``stop``, counted from ``start``."""
        parts, begin = [], 0
        for numel in self.numels:
            low, high = max(start, begin), min(stop, begin + numel)
            if low < high:
                parts.append(slice(low - start, high - start))
            begin += numel
        return parts


class Exchange(Protocol):
    """What is done with one bucket; both methods are called once, in this order."""

    def prepare(self) -> None:
        """Do what needs no other worker."""

    def run(self, between: Between) -> Tensor:
        """Do the rest, and return the bucket's buffer, which has the average.

        Raises:
            PeerError: a worker is gone, or sent what cannot be.
        """


class SketchExchange:
    """Each worker reduces a block from sketches, and sends everyone a sketch of the result.

    One residual serves both: of the others' blocks it is what this worker has not sent to their
    owners, of its own block what it has not sent to everyone.
    """

    def __init__(
        self, bucket: Bucket, group: Group, residuals: Residuals, kernels: ModuleType, bits: int
    ) -> None:
        self._bucket = bucket
        self._group = group
        self._residuals = residuals
        self._kernels = kernels
        self._bits = bits
        numel = bucket.buffer.numel()
        block = -(-numel // (group.size * _ALIGN)) * _ALIGN
        self._spans = [
            (min(numel, p * block), min(numel, (p + 1) * block)) for p in range(group.size)
        ]
        self._slot = -(-layout.sketch_bytes(block, bits) // _ALIGN) * _ALIGN

    def prepare(self) -> None:
        """Sketch what the other workers will reduce."""
        self._values = self._bucket.scaled(self._group.size)
        self._residual = _residual(self._residuals, self._bucket)
        self._sent = self._slots()
        for peer in range(self._group.size):
            if peer != self._group.rank:
                start, stop = self._spans[peer]
                self._encode(self._values[start:stop], self._sent, peer)

    def run(self, between: Between) -> Tensor:
        """Reduce this worker's block, and take everyone's."""
        group, bucket = self._group, self._bucket
        start, stop = self._spans[group.rank]
        received = self._slots()
        group.all_to_all(received, self._sent, between, bucket.where)
        total = torch.zeros(stop - start, device=bucket.buffer.device)
        for peer in range(group.size):
            if peer == group.rank:
                total += self._values[start:stop]
            else:
                self._decode(received, peer, total, add=True)
        self._encode(total, self._sent, group.rank)
        mine = self._sent[group.rank * self._slot : (group.rank + 1) * self._slot]
        group.all_gather(received, mine, between, bucket.where)
        for peer, (low, high) in enumerate(self._spans):
            # This worker's own block too: everyone has to have the same bits.
            self._decode(received, peer, self._values[low:high], add=False)
        return bucket.average(self._values)

    def _slots(self) -> Tensor:
        """Memory for one payload from or to each worker; the end of each stays unread."""
        length = self._slot * self._group.size
        return torch.empty(length, dtype=torch.uint8, device=self._bucket.buffer.device)

    def _payload(self, slots: Tensor, peer: int, numel: int) -> Tensor:
        first = peer * self._slot
        return slots[first : first + layout.sketch_bytes(numel, self._bits)]

    def _encode(self, values: Tensor, slots: Tensor, peer: int) -> None:
        start, stop = self._spans[peer]
        residual = self._residual[start:stop]
        payload = self._payload(slots, peer, values.numel())
        with _unused_kept(self._bucket, start, values, residual):
            self._kernels.sketch_encode(values, payload, bits=self._bits, residual=residual)

    def _decode(self, slots: Tensor, peer: int, out: Tensor, *, add: bool) -> None:
        # A received slot holds a payload for this worker's block first, then for the peer's own.
        payload = self._payload(slots, peer, out.numel())
        self._kernels.sketch_decode(payload, out, bits=self._bits, add=add)


class TopKExchange:
    """Each worker sends everyone its largest values."""

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        residuals: Residuals,
        kernels: ModuleType,
        density: float,
        momentum: float,
    ) -> None:
        self._bucket = bucket
        self._group = group
        self._residuals = residuals
        self._kernels = kernels
        self._momentum = momentum
        numel = bucket.buffer.numel()
        self._k = layout.count_of(numel, density)
        self._bytes = layout.topk_bytes(numel, self._k)
        self._slot = -(-self._bytes // _ALIGN) * _ALIGN

    def prepare(self) -> None:
        """Choose the values."""
        bucket, device = self._bucket, self._bucket.buffer.device
        self._values = bucket.scaled(self._group.size)
        self._sent = torch.empty(self._slot, dtype=torch.uint8, device=device)
        residual, velocity = _residual(self._residuals, bucket), None
        if self._momentum:
            length = bucket.buffer.numel()
            velocity = self._residuals.velocity_for(bucket.names, bucket.numels, length, device)
        with _unused_kept(bucket, 0, self._values, residual, velocity):
            self._kernels.topk_encode(
                self._values,
                self._sent[: self._bytes],
                k=self._k,
                residual=residual,
                velocity=velocity,
                momentum=self._momentum,
            )

    def run(self, between: Between) -> Tensor:
        """Add everyone's."""
        group, bucket = self._group, self._bucket
        length = self._slot * group.size
        received = torch.empty(length, dtype=torch.uint8, device=bucket.buffer.device)
        group.all_gather(received, self._sent, between, bucket.where)
        for peer in range(group.size):
            payload = received[peer * self._slot : peer * self._slot + self._bytes]
            try:
                self._kernels.topk_decode(payload, self._values, k=self._k, add=peer > 0)
            except ValueError as err:
                raise PeerError(
                    f"rank {group.rank}: what rank {peer} sent for {bucket.where} cannot be: "
                    f"{_first_line(err)}; check that all ranks run the same version"
                ) from err
        return bucket.average(self._values)


def _residual(residuals: Residuals, bucket: Bucket) -> Tensor:
    buffer = bucket.buffer
    return residuals.flat_for(bucket.names, bucket.numels, buffer.numel(), buffer.device)


@contextlib.contextmanager
def _unused_kept(
    bucket: Bucket, start: int, values: Tensor, *memories: Tensor | None
) -> Iterator[None]:
    """Keep the residuals of parameters without any gradient now.

    DDP drops the average of a parameter that no worker used (``find_unused_parameters``). What was
    sent for it would be lost, so it waits for the next gradient.
    """
    parts = bucket.parameters_in(start, start + values.numel()) if bucket.keep_unused else []
    unused = _all_zero(values, parts)
    kept = [
        (memory[part], memory[part].clone())
        for memory in memories
        for part in unused
        if memory is not None
    ]
    for place, _ in kept:
        place.zero_()
    yield
    for place, before in kept:
        place += before


def _all_zero(values: Tensor, parts: Sequence[slice]) -> list[slice]:
    if not parts:
        return []
    used = torch.stack([values[part].any() for part in parts]).tolist()
    return [part for part, any_used in zip(parts, used, strict=True) if not any_used]


def _first_line(err: BaseException) -> str:
    return (str(err).strip() or type(err).__name__).splitlines()[0]
