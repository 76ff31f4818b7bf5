"""Copies of tensors of an accelerator in pinned memory of the host, made on side streams.

::

    current stream     ready ...........................................  wait(written)
    out stream         wait(ready), copy to the host, copied
    another thread     waits for copied, uses the host's copies
    in stream          wait(ready), copy to the device, written

No call here waits for the device, except `read`, which waits for its copies alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from wingbeat.collectives.handle import OneShotEvent
from wingbeat.collectives.threads import SerialQueue, ThreadPool, run_callback
from wingbeat.errors import PeerError, UsageError

_threads = ThreadPool("wingbeat-staging")


class Pair(NamedTuple):
    """A tensor of an accelerator and its copy on the host: contiguous, of one dtype and shape."""

    device: torch.Tensor
    host: torch.Tensor


class Waitable(Protocol):
    """An operation on the host's copies."""

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None:
        """Call ``callback`` when `wait` would not block."""

    def wait(self) -> None:
        """Wait until the host's copies hold the result; raise a `PeerError` if a peer failed."""


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory of the host for a copy of a contiguous tensor of an accelerator."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")


def pinned_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of zeros in pinned memory."""
    return torch.zeros(numel, dtype=dtype, pin_memory=True, device="cpu")


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream and its device those of the calling thread, as ``with stream`` does.

    A `torch.Stream` keeps what it restores in itself, so threads that are in ``with`` blocks of the
    same stream would restore each other's streams.
    """
    with torch.accelerator.device_index(stream.device_index):
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


class Copies:
    """Copies between an accelerator and the host, on one stream for each direction.

    Operations for which something is copied to the host begin in the order of the calls of `start`,
    also across devices whose copies share a ``queue``.
    """

    def __init__(self, device: torch.device, queue: SerialQueue | None = None) -> None:
        self._device = device
        self._out, self._into = torch.Stream(device=device), torch.Stream(device=device)
        self._queue = queue or SerialQueue(_threads)

    def ready(self) -> torch.Event:
        """Return an event after everything that the current stream was given."""
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def out(self, pairs: Sequence[Pair], ready: torch.Event) -> torch.Event:
        """Queue copies to the host after ``ready``; return their event."""
        self._out.wait_event(ready)
        with on_stream(self._out):
            for device, host in pairs:
                host.copy_(device, non_blocking=True)
                device.record_stream(self._out)
            copied = torch.Event(self._device)
            copied.record(self._out)
        return copied

    def back(self, pairs: Sequence[Pair], ready: torch.Event) -> torch.Event:
        """Queue copies to the device after ``ready``; return their event."""
        with on_stream(self._into):
            self._into.wait_event(ready)
            for device, host in pairs:
                # The allocator must not reuse memory before a copy that nothing waits for is done.
                device.copy_(host, non_blocking=True)
                device.record_stream(self._into)
            written = torch.Event(self._device)
            written.record(self._into)
        return written

    def wait(self, event: torch.Event) -> None:
        """Have the current stream wait for an event."""
        torch.accelerator.current_stream(self._device).wait_event(event)

    def read(self, pairs: Sequence[Pair]) -> None:
        """Copy to the host, and wait for these copies; the device continues."""
        if pairs:
            self.out(pairs, self.ready()).synchronize()

    def write(self, pairs: Sequence[Pair]) -> torch.Event:
        """Copy to the device: the current stream waits. The host's copies are in use until then."""
        written = self.back(pairs, self.ready())
        self.wait(written)
        return written

    def start(
        self,
        what: str,
        out: Sequence[Pair],
        submit: Callable[[], Waitable],
        back: Sequence[Pair],
    ) -> HostOperation:
        """Copy ``out`` to the host, then ``submit`` in another thread; copy ``back`` at its end.

        Without ``out`` it is submitted before this returns, and possibly before earlier ones: a
        reply may come as soon as the caller sends its next message.
        """
        operation = HostOperation(self, what, self.ready(), back)
        if out:
            self.queue(operation, out, submit)
        else:
            operation.submit(submit, None)
        return operation

    def queue(
        self, operation: HostOperation, out: Sequence[Pair], submit: Callable[[], Waitable]
    ) -> None:
        """As `start`, for an operation that exists."""
        copied = self.out(out, operation.ready) if out else None
        self._queue.start(lambda: operation.submit(submit, copied))


class CopiesByDevice:
    """The `Copies` of each device, with one order of operations."""

    def __init__(self) -> None:
        self._queue, self._lock = SerialQueue(_threads), threading.Lock()
        self._copies: dict[torch.device, Copies] = {}

    def of(self, device: torch.device) -> Copies:
        """Return the copies of a device."""
        with self._lock:
            if device not in self._copies:
                self._copies[device] = Copies(device, self._queue)
            return self._copies[device]


class HostMirror:
    """Copies lists of tensors of any device to memory of the host, and back.

    Only `read` waits: for its copies, and for copies from memory that it is about to overwrite.
    """

    def __init__(self) -> None:
        self._copies = CopiesByDevice()
        self._written: list[torch.Event] = []

    @torch.no_grad()
    def read(self, hosts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors to ``hosts``, of the same shapes, and wait until they are there."""
        if all(tensor.device.type == "cpu" for tensor in tensors):
            if tensors:
                torch._foreach_copy_(list(hosts), list(tensors))
            return
        while self._written:
            self._written.pop().synchronize()
        there: dict[torch.device, list[Pair]] = {}
        for host, tensor in zip(hosts, tensors, strict=True):
            if tensor.device.type == "cpu":
                host.copy_(tensor)
            else:
                # Converted on the device: to convert on the host, torch would wait for it.
                sent = tensor.to(host.dtype).contiguous()
                there.setdefault(tensor.device, []).append(Pair(sent, host))
        for device, pairs in there.items():
            self._copies.of(device).read(pairs)

    @torch.no_grad()
    def write(self, tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
        """Copy ``hosts`` to tensors. The memory of ``hosts`` is in use until the next `read`."""
        direct: dict[torch.device, list[Pair]] = {}
        others: list[Pair] = []
        for tensor, host in zip(tensors, hosts, strict=True):
            pair, alike = Pair(tensor, host), tensor.dtype is host.dtype
            if tensor.device.type != "cpu" and alike and tensor.is_contiguous():
                direct.setdefault(tensor.device, []).append(pair)
            else:
                others.append(pair)
        if others:
            targets = [pair.device for pair in others]
            torch._foreach_copy_(targets, self.moved([pair.host for pair in others], targets))
        self._write(direct)

    @torch.no_grad()
    def moved(
        self, hosts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return ``hosts`` on the devices of the tensors: copies, except on the CPU."""
        made = list(hosts)
        there: dict[torch.device, list[Pair]] = {}
        for place, (host, tensor) in enumerate(zip(hosts, tensors, strict=True)):
            if tensor.device.type != "cpu":
                made[place] = torch.empty(host.shape, dtype=host.dtype, device=tensor.device)
                there.setdefault(tensor.device, []).append(Pair(made[place], host))
        self._write(there)
        return made

    def _write(self, there: dict[torch.device, list[Pair]]) -> None:
        self._written = [event for event in self._written if not event.query()]
        for device, pairs in there.items():
            self._written.append(self._copies.of(device).write(pairs))


class HostOperation:
    """An operation in progress on the host's copies of tensors of an accelerator."""

    def __init__(
        self, copies: Copies, what: str, ready: torch.Event, back: Sequence[Pair] = ()
    ) -> None:
        self.what, self.ready, self.back = what, ready, back
        self.copies = copies
        self._written: torch.Event | None = None
        self._error: PeerError | UsageError | None = None
        self._known = OneShotEvent()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Any], None]] = []

    # -- the calling thread ---------------------------------------------------------------

    def done(self) -> bool:
        """Whether `wait` would return or raise immediately."""
        return self._known.is_set

    def wait(self) -> None:
        """Wait until the result is known, and have the current stream wait for its copy.

        A `PeerError` if a peer failed or timed out; a `UsageError` if the operation raised one.
        """
        self._known.wait()  # each transfer of the operation has a deadline
        self.raise_error()
        if self._written is not None:
            self.copies.wait(self._written)

    def raise_error(self) -> None:
        """Raise a new exception like that with which the operation has ended, if one has."""
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def wait_received(self) -> None:
        """As `wait`."""
        self.wait()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` when the copy back is queued or the operation has failed."""
        with self._lock:
            if not self._known.is_set:
                self._callbacks.append(callback)
                return
        run_callback(lambda: callback(self))

    # -- the staging thread, and those that complete operations ----------------------------

    def submit(self, submit: Callable[[], Waitable], copied: torch.Event | None) -> None:
        """Wait for the copy, and begin the operation on the host's copies."""
        try:
            if copied is not None:
                copied.synchronize()
            submit().add_done_callback(self._finish)
        except Exception as err:
            self._fail(err)

    def write_back(self) -> torch.Event | None:
        """Queue the copies of the result, and return their event."""
        return self.copies.back(self.back, self.ready) if self.back else None

    def _finish(self, handle: Any) -> None:
        try:
            handle.wait()
            self._written = self.write_back()
            self._complete()
        except Exception as err:
            self._fail(err)

    def _fail(self, err: Exception) -> None:
        """End the operation with an error, which `wait` raises."""
        if isinstance(err, (PeerError, UsageError)):
            self._error = type(err)(str(err))  # the raised one references its frames
        else:
            self._error = PeerError(f"{self.what}: {err!r}")
        self._complete()

    def _complete(self) -> None:
        self.back = ()  # a view of a bucket's buffer shows that the buffer is in use
        with self._lock:
            self._known.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            run_callback(lambda each=callback: each(self))  # type: ignore[misc]
