"""Sums of encoded gradients: by blocks, gathered, and as low-rank factors.

Payloads cannot be summed, so they are decoded and added, in one of two ways.

By blocks: each worker encodes the other workers' blocks and sends them to their owners. An owner
decodes them and adds them to its block in the order of ranks, encodes the sum once, and sends it to
all workers. Every worker, including the owner, decodes the result from the same payload. The number
of bytes does not grow with the number of workers; every value is rounded twice.

Gathered: each worker encodes its whole buffer once, for all workers, and adds all payloads in the
order of ranks. This suits small payloads, such as those of top-k (OMGS-SGD, section II-C): values
are rounded once, but the number of bytes grows with the number of workers.

Here payloads are rows of a tensor. An executor sums by blocks chunk by chunk (`Encoded`); process
groups exchange whole blocks (`wingbeat.collectives.nccl`).

A sum of factors consists of two small all-reduces with computation in between. The second has a
separate channel, on which the order is that of the buckets: it starts at a time that depends on
each worker's speed, so its position among the first sums would differ between workers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from wingbeat.codecs.lowrank import Factors, Round
from wingbeat.collectives.handle import Handle
from wingbeat.collectives.packing import Encoded, malformed_text
from wingbeat.collectives.threads import SerialQueue, run_callback
from wingbeat.errors import PeerError
from wingbeat.types import Span

if TYPE_CHECKING:
    from wingbeat.collectives.nccl import GroupRows


_ALIGNMENTS = {"cuda": 16}
"""Alignment of rows in bytes by device; 16 allows kernels to use wide loads."""

_ALIGNMENT = 8
"""Alignment in bytes on other devices."""


@dataclass(eq=False)
class GatheredSum:
    """One gathered sum, in place on a flat float buffer.

    ``where`` names the operation in error messages, and ``ranks`` has the job's rank of each rank.
    ``velocity``, of the buffer's length, accumulates momentum for momentum correction. ``rows``
    holds the payloads of all workers once they are gathered.
    """

    buffer: torch.Tensor
    wire: Encoded
    rank: int
    size: int
    where: str
    velocity: torch.Tensor | None = None
    ranks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._span = Span(0, self.buffer.numel())
        self._nbytes = self.wire.size_of(self._span)
        self.rows = payload_rows(self.size, self._nbytes, self.buffer.device)

    def encode(self) -> None:
        """Encode the buffer into this worker's row, without communication."""
        wire, payload = self.wire, self.rows[self.rank, : self._nbytes]
        wire.coding.encode(self.buffer, self._span, payload, wire.residual, self.velocity)

    def exchange(self, rows: GroupRows) -> None:
        """Gather the rows of all workers, and `add` them."""
        rows.all_gather(self.rows)
        self.add()

    def add(self) -> None:
        """Replace the buffer by the sum of all rows, added in the order of ranks.

        A `PeerError` if a peer sent a malformed payload.
        """
        called = self.ranks or range(self.size)
        for rank, row in enumerate(self.rows):
            with named_malformed(called[self.rank], called[rank], self.where):
                self.wire.coding.decode(row[: self._nbytes], self.buffer, self._span, add=rank > 0)


class Addable(Protocol):
    """Sums rows once they are gathered."""

    def add(self) -> None:
        """Add the rows into the buffer; raises `PeerError` if a payload is malformed."""


class Gathered(Handle):
    """A gathered sum in progress, whose rows are added into the buffer once.

    ``beside`` adds the rows in the background when they arrive; without it the first caller of
    `wait` adds them.
    """

    __slots__ = ("_added", "_adding", "_error", "_sum")

    def __init__(
        self, handle: Handle, gathered: Addable, beside: SerialQueue | None = None
    ) -> None:
        super().__init__(handle.jobs)
        self._sum = gathered
        self._adding = threading.Lock()
        self._added = False
        self._error = ""
        if beside is not None:
            handle.add_done_callback(lambda _: beside.start(self._add_beside))

    def _add_beside(self) -> None:
        with contextlib.suppress(PeerError):  # raised by `wait`
            self.wait()

    def done(self) -> bool:
        """Whether all rows have arrived. The buffer holds the sum after `wait`."""
        return super().done()

    def wait(self) -> None:
        """Block until the buffer holds the sum.

        A `PeerError` if a peer failed, timed out, or sent a malformed payload.
        """
        super().wait()
        with self._adding:
            if self._error:
                raise PeerError(self._error)
            if self._added:
                return
            try:
                self._sum.add()
            except PeerError as err:
                self._error = str(err)
                raise
            self._added = True  # not earlier: other exceptions must reach every caller

    def wait_received(self) -> None:
        """As `wait`."""
        self.wait()


@contextlib.contextmanager
def named_malformed(rank: int, sender: int, where: str) -> Iterator[None]:
    """Convert a `ValueError` about the payload of ``sender`` to a `PeerError`."""
    try:
        yield
    except ValueError as err:
        raise PeerError(f"rank {rank}: {where}: rank {sender} {malformed_text(err)}") from None


def payload_rows(size: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate a payload of up to ``nbytes`` for each of ``size`` workers."""
    alignment = _ALIGNMENTS.get(device.type, _ALIGNMENT)
    width = -(-nbytes // alignment) * alignment
    return torch.empty(size, width, dtype=torch.uint8, device=device)


Sums = Callable[[torch.Tensor], Handle]
"""Starts an in-place all-reduce."""


class FactoredSum(Handle):
    """A sum of factors in progress; the first `wait` writes the result into the buffer."""

    __slots__ = ("_callbacks", "_error", "_is_turned", "_lock", "_round", "_second", "_where")

    def __init__(self, factors: Factors, buffer: torch.Tensor, where: str) -> None:
        super().__init__([])
        self._where = where
        self._round: Round | None = factors.begin(buffer)
        self._second = Handle([])
        self._error = ""
        self._is_turned = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Handle], None]] = []

    @property
    def first(self) -> torch.Tensor:
        """The buffer to sum first."""
        assert self._round is not None
        return self._round.first

    def start_second(self, first: Handle, second: Sums) -> None:
        """Wait for the ``first`` sum and start the ``second``. `wait` raises any `PeerError`."""
        try:
            assert self._round is not None
            # Not `wait`: sending may take as long as the next collective, before which another
            # worker may need the second sum. The buffer is only read here.
            first.wait_received()
            self._round.compute_second()
            if not bool(self._round.agreed):
                raise PeerError(
                    f"{self._where}: the workers' low-rank factors began differently: load the "
                    "optimizer's state on all workers or on none"
                )
            self._second = second(self._round.second)
            self._round.keep_residual()
        except PeerError as err:
            self._error = str(err)
        except Exception as err:  # raised by `wait`
            self._error = f"{self._where} failed between its two sums: {err!r}"
        with self._lock:
            self._is_turned.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call_when_done(callback)

    def done(self) -> bool:
        """Whether both sums are done. The buffer holds the result after `wait`."""
        return self._is_turned.is_set() and (bool(self._error) or self._second.done())

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """As `Handle.add_done_callback`. The buffer holds the result after `wait`."""
        with self._lock:
            if not self._is_turned.is_set():
                self._callbacks.append(callback)
                return
        self._call_when_done(callback)

    def _call_when_done(self, callback: Callable[[Handle], None]) -> None:
        if self._error:
            run_callback(lambda: callback(self))
        else:
            self._second.add_done_callback(lambda _: callback(self))

    def wait(self) -> None:
        """Block until the buffer holds the sum.

        A `PeerError` if a peer failed, timed out, or began with different factors.
        """
        self._is_turned.wait()  # every earlier transfer has a deadline
        if self._error:
            self._round = None
            raise PeerError(self._error)
        self._second.wait_received()
        with self._lock:
            mine, self._round = self._round, None
            if mine is not None:
                mine.write_result()

    def wait_received(self) -> None:
        """As `wait`."""
        self.wait()
