"""`ProcessGroupWingbeat`: the operations of ``torch.distributed`` on collectives and messages."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from wingbeat.collectives import Collectives
from wingbeat.errors import UsageError
from wingbeat.integrations.process_group.connections import (
    USER_TAG_BITS,
    Connections,
    OtherDevices,
    striped,
)
from wingbeat.integrations.process_group.sparse import SparseSum
from wingbeat.integrations.process_group.tensors import (
    Packed,
    Reduction,
    describe,
    flatten,
    tensors_in,
    unpack_all,
)
from wingbeat.integrations.process_group.work import (
    Operation,
    ProcessGroupError,
    Several,
    Transfers,
    Work,
)
from wingbeat.transport.graceful_shutdown import pending_exception
from wingbeat.transport.link import TAG_BITS
from wingbeat.types import Span

NAME = "wingbeat"

_SHORT_BYTES = 80 << 10
"""Size below which latency matters more than bandwidth: fewer rounds than a ring's. A buffer that
is summed in one round takes less time than by doubling: 0.8 to 0.9 of it with 2 to 8 ranks on
loopback, 1 to 4 KB.
"""

_KEPT_WORKS = 256
"""Small all-reduces kept after completion. DDP's ``join`` keeps the C++ half of one from a forward
to its backward, which does not keep the half in Python.
"""


def _needs_cpu(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Pass tensors on other devices to the backend of their device."""
    name = operation.__name__

    @functools.wraps(operation)
    def carry(self: ProcessGroupWingbeat, *args: Any, **kwargs: Any) -> Any:
        device = next((tensor.device for tensor in tensors_in(args)), torch.device("cpu"))
        if device.type != "cpu":
            other = self._others.get(device.type)
            known = name if hasattr(other, name) else _FORMER_NAMES[name]
            return getattr(other, known)(*args, **kwargs)
        # A tensor that is created in inference mode could not be written to by other threads.
        with torch.inference_mode(False), torch.no_grad():
            return operation(self, *args, **kwargs)

    return carry


_FORMER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Names before torch 2.15, by which older versions call these methods."""


class ProcessGroupWingbeat(dist.ProcessGroup):  # type: ignore[misc]
    """A process group of ``torch.distributed`` over wingbeat's links.

    ``init_process_group`` and ``new_group`` create it. Operations are as in ``torch.distributed``,
    for CPU tensors of any dtype, contiguous or not. A wait for a peer ends after ``timeout``.

    Args:
        store: a store that all ranks reach, with a prefix that no other group uses.
        rank: this process, 0 to ``size - 1``.
        size: number of processes.
        timeout: limit of each wait.

    Raises:
        RendezvousError: ranks are missing.
    """

    supports_coalescing = supports_splitting = supports_shrinking = False

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = c10d.default_pg_timeout,
        *,
        _shared: Connections | None = None,
        _ranks: Sequence[int] = (),
        _options: Any = None,
    ) -> None:
        super().__init__(store, rank, size)
        self._timeout = timeout
        seconds = timeout.total_seconds()
        self._connections = _shared or Connections(store, rank, size, seconds)
        self._shared = _shared is not None
        if _shared:
            self._world = _shared.open(tuple(_ranks), seconds)
        else:
            self._world = self._connections.open_default()
        self._where = str(self._world.group or "the default group")
        self._ring = Collectives(self._world)
        self._short = self._ring.in_few_rounds()
        self._exchanges, self._barriers = itertools.count(), itertools.count()
        self._unsettled: set[Work] = set()
        self._kept: deque[Work] = deque(maxlen=_KEPT_WORKS)
        self._group_name, self._group_desc = "", "undefined"
        self._others = OtherDevices(self, store, timeout, _ranks, _options)
        if self._shared and rank == 0:
            self._number  # noqa: B018  (the other members wait for it)
        _open.add(self)

    @functools.cached_property
    def _number(self) -> int:
        group = self._world.group
        return self._connections.number(group) if self._shared and group is not None else 0

    # Names, devices and options

    def getBackendName(self) -> str:
        """Return "wingbeat"."""
        return NAME

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        """The name by which ``torch.distributed`` finds this group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name
        self._others.call("_set_group_name", name)

    @property
    def group_desc(self) -> str:
        """The description of this group."""
        return self._group_desc

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    def getGroupName(self) -> str:
        """As `group_name`, for C++."""
        return self._group_name

    def getGroupDesc(self) -> str:
        """As `group_desc`, for C++."""
        return self._group_desc

    @property
    def options(self) -> Any:
        """The options, with the timeout."""
        return c10d.C10DBackend.Options(NAME, self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the limit of each wait for operations between two ranks."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    @property
    def _device_types(self) -> list[torch.device]:
        if self not in c10d._world.pg_map:
            return []  # torch would attach its flight recorder, which needs a group written in C++
        return [torch.device("cpu"), *map(torch.device, self._others.backends())]

    def get_backend(self, device: torch.device) -> Any:
        """Return the backend for tensors on a device: this group for the CPU.

        A `RuntimeError` if there is none for the device.
        """
        device = torch.device(device)
        return self if device.type == "cpu" else self._others.get(device.type)._get_backend(device)

    _get_backend = get_backend

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002
        """Return False: tensors need no special memory."""
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        self._others.get(device.type)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._others.get(device.type)._end_coalescing(device)

    # Operations

    @_needs_cpu
    def allreduce(self, tensors: Any, opts: Any = dist.ReduceOp.SUM) -> Work:
        """Reduce each tensor over all ranks, in place."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(tensor.is_sparse for tensor in tensors):
            return self._allreduce_sparse(tensors, opts)
        reduction = Reduction(opts)
        packed = Packed(tensors, reads=True)
        buffer = reduction.prepare(packed.flat)
        if self.size() == 1 or not buffer.numel():
            return self._work("all-reduce", None, tensors, packed.unpack, opts)
        handle: Operation | None
        if reduction.combine is None:
            handle = self._collectives(buffer).all_reduce(buffer)
        else:
            rows = self._rows(buffer)
            handle = self._all_gather(rows)

        def finish() -> None:
            if reduction.combine is not None:
                buffer.copy_(functools.reduce(reduction.combine, rows.unbind()))
            reduction.finish(buffer, self.size())
            packed.unpack()

        work = self._work("all-reduce", handle, tensors, finish, opts)
        if buffer.nbytes < _SHORT_BYTES:
            self._kept.append(work)
        return work

    allreduce_coalesced = allreduce

    def _allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        if len(tensors) != 1 or Reduction(opts).kind != dist.ReduceOp.SUM:
            raise UsageError("all_reduce of sparse tensors: allowed is ReduceOp.SUM of one tensor")
        summed = SparseSum(self, tensors[0].coalesce())
        return self._work("all-reduce", summed, tensors, lambda: summed.write(tensors[0]), opts)

    @_needs_cpu
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """Reduce a tensor over all ranks; only the root's tensor changes."""
        root = self._is_root(opts)
        work: Work = self.allreduce(tensors if root else [t.clone() for t in tensors], opts)
        return work

    @_needs_cpu
    def broadcast(self, tensors: Any, opts: Any) -> Work:
        """Copy the root's tensors to all ranks."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        root = self._is_root(opts)
        packed = Packed(tensors, reads=root)
        handle = None
        if self.size() > 1 and packed.flat.numel():
            buffer = packed.flat.view(torch.uint8)
            handle = self._collectives(buffer).broadcast(buffer, opts.rootRank)
        finish = None if root else packed.unpack
        return self._work("broadcast", handle, tensors, finish, opts)

    @_needs_cpu
    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Copy the tensor of rank r into ``outputs[0][r]`` on all ranks. Sizes may differ."""
        (pieces,), (mine,) = outputs, inputs
        self._check_pieces("all_gather", "outputs", pieces)
        self._check_same("all_gather", mine, pieces[self.rank()])
        packed = Packed(pieces, reads=False)
        packed.part(self.rank()).copy_(flatten(mine))
        operation = self._all_gather(packed.flat, packed.spans)
        return self._work("all-gather", operation, pieces, packed.unpack, opts)

    @_needs_cpu
    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        """Copy the tensors of all ranks into ``output``, in the order of ranks.

        A `UsageError` if their sizes or dtypes differ.
        """
        self._check_whole("all_gather_into_tensor of", tensor, "output", output)
        packed = Packed([output], reads=False)
        packed.flat.view(self.size(), -1)[self.rank()].copy_(flatten(tensor))
        operation = self._all_gather(packed.flat)
        return self._work("all-gather", operation, [output], packed.unpack, opts)

    @_needs_cpu
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Call `all_gather_single` for each pair of tensors."""
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._work("all-gather", Several(works), outputs, None, opts)

    @_needs_cpu
    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Copy tensor i of rank r into ``outputs[r][i]`` on all ranks."""
        works = [
            self.allgather([[pieces[i] for pieces in outputs]], [tensor], opts)
            for i, tensor in enumerate(inputs)
        ]
        return self._work("all-gather", Several(works), outputs, None, opts)

    @_needs_cpu
    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any = dist.ReduceOp.SUM,
    ) -> Work:
        """Reduce ``inputs[0][r]`` of all ranks into the output of rank r. Sizes may differ."""
        (output,), (pieces,) = outputs, inputs
        self._check_pieces("reduce_scatter", "inputs", pieces)
        self._check_same("reduce_scatter", output, pieces[self.rank()])
        return self._reduce_scatter(output, pieces, outputs, opts)

    @_needs_cpu
    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = dist.ReduceOp.SUM
    ) -> Work:
        """Reduce ``tensor`` over all ranks and write part r of it to the output of rank r.

        A `UsageError` if their sizes or dtypes differ.
        """
        self._check_whole("reduce_scatter_tensor into", output, "input", tensor)
        pieces = flatten(tensor).view(self.size(), -1).unbind()
        return self._reduce_scatter(output, pieces, [output], opts)

    @_needs_cpu
    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = dist.ReduceOp.SUM,
    ) -> Work:
        """Call `reduce_scatter_single` for each pair of tensors."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(*pair, opts) for pair in pairs]
        return self._work("reduce-scatter", Several(works), outputs, None, opts)

    def _reduce_scatter(
        self, output: torch.Tensor, pieces: Sequence[torch.Tensor], result: Any, opts: Any
    ) -> Work:
        reduction, mine = Reduction(opts), self.rank()
        packed = Packed(pieces, reads=True, copies=True)
        buffer = reduction.prepare(packed.flat)
        own = buffer[packed.spans[mine].start : packed.spans[mine].stop]
        operation: Operation | None = None
        rows: list[torch.Tensor] = []
        if self.size() > 1 and buffer.numel():
            if reduction.combine is None:
                collectives = self._collectives(buffer)
                operation = collectives.reduce_scatter(buffer, blocks=packed.spans)
            else:
                rows = [own if r == mine else torch.empty_like(own) for r in range(self.size())]
                parts = [buffer[span.start : span.stop] for span in packed.spans]
                operation = self._exchange("reduce-scatter", parts, rows)

        def finish() -> None:
            total = functools.reduce(reduction.combine, rows) if reduction.combine and rows else own
            reduction.finish(total, self.size())
            output.copy_(total.view(output.dtype).view(output.shape))

        return self._work("reduce-scatter", operation, result, finish, opts)

    @_needs_cpu
    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it. Sizes may differ."""
        self._check_pieces("all_to_all", "outputs", outputs)
        self._check_pieces("all_to_all", "inputs", inputs)
        self._check_same("all_to_all", inputs[self.rank()], outputs[self.rank()])
        into = [Packed([output], reads=False) for output in outputs]
        into[self.rank()].flat.copy_(flatten(inputs[self.rank()]))
        received = [packed.flat for packed in into]
        transfers = self._exchange("all-to-all", list(map(flatten, inputs)), received)
        return self._work("all-to-all", transfers, outputs, lambda: unpack_all(into), opts)

    @_needs_cpu
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """Send a part of ``tensor`` to each rank, divided along the first dimension."""
        packed = Packed([output], reads=False)
        outputs = self._divided("output", output, packed.flat, output_sizes)
        inputs = self._divided("input", tensor, flatten(tensor), input_sizes)
        work = self.alltoall(outputs, inputs)

        def finish() -> None:
            work._complete()
            packed.unpack()

        return self._work("all-to-all", work._operation, [output], finish, opts)

    def _divided(
        self, which: str, tensor: torch.Tensor, flat: torch.Tensor, sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 1
        sizes = list(sizes) or [rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != rows:
            raise UsageError(
                f"all_to_all_single: the {which} has {rows} rows, and the {which} split sizes are "
                f"{sizes}: allowed are {self.size()} numbers with that sum, or none if the number "
                "of ranks divides the rows"
            )
        width = flat.numel() // rows if rows else 0
        return list(flat.split([size * width for size in sizes]))

    @_needs_cpu
    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Work:
        """Copy the tensor of rank r into ``outputs[0][r]`` on the root."""
        root, mine = opts.rootRank, self.rank()
        if not self._is_root(opts):
            sends = [flatten(inputs[0]) if r == root else None for r in range(self.size())]
            transfers = self._exchange("gather", sends, [None] * self.size())
            return self._work("gather", transfers, [], None, opts)
        (pieces,) = outputs
        self._check_pieces("gather", "outputs", pieces)
        self._check_same("gather", inputs[0], pieces[mine])
        into = [Packed([piece], reads=False) for piece in pieces]
        into[mine].flat.copy_(flatten(inputs[0]))
        none: list[torch.Tensor | None] = [None] * self.size()
        transfers = self._exchange("gather", none, [packed.flat for packed in into])
        return self._work("gather", transfers, pieces, lambda: unpack_all(into), opts)

    @_needs_cpu
    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work:
        """Copy the tensors of all ranks into the root's ``output``, in the order of ranks."""
        if not self._is_root(opts):
            work: Work = self.gather([], [tensor], opts)
            return work
        packed = Packed([output], reads=False)
        inner = self.gather([list(packed.flat.view(self.size(), -1))], [flatten(tensor)], opts)

        def finish() -> None:
            inner._complete()
            packed.unpack()

        return self._work("gather", inner._operation, [output], finish, opts)

    gather_into_tensor = gather_single

    @_needs_cpu
    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> Work:
        """Copy the root's ``inputs[0][r]`` into the output of rank r."""
        root, mine = opts.rootRank, self.rank()
        packed = Packed(outputs, reads=False)
        nothing: list[torch.Tensor | None] = [None] * self.size()
        if not self._is_root(opts):
            into = [packed.flat if r == root else None for r in range(self.size())]
            transfers = self._exchange("scatter", nothing, into)
        else:
            (pieces,) = inputs
            self._check_pieces("scatter", "inputs", pieces)
            self._check_same("scatter", pieces[mine], outputs[0])
            packed.flat.copy_(flatten(pieces[mine]))
            transfers = self._exchange("scatter", list(map(flatten, pieces)), nothing)
        return self._work("scatter", transfers, outputs, packed.unpack, opts)

    def barrier(self, opts: Any = None) -> Work:
        """Wait until all ranks have called this, and earlier collectives have completed."""
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            work: Work = self._others.get(device.type).barrier(opts)
            return work
        before = list(self._unsettled)
        flag = torch.zeros(1, dtype=torch.uint8, device="cpu")
        handle = self._collectives(flag).all_reduce(flag) if self.size() > 1 else None
        met = self._work("barrier", handle, [], None, opts)
        return self._work("barrier", Several([*before, met]), [], None, opts) if before else met

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """As `barrier`; the error names the first missing rank, or with ``wait_all_ranks`` all."""
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        deadline, ranks, store = time.monotonic() + seconds, self._world.ranks, self._world.store
        prefix = f"{self._world.path}/monitored barrier/{next(self._barriers)}"
        # As gloo's texts, by which programs find the ranks.
        if self.rank():
            store.set(f"{prefix}/{self.rank()}", "")
            error = "timed out"
            with contextlib.suppress(TimeoutError):
                error = store.get(f"{prefix}/result", seconds)
            if error:
                me = ranks[self.rank()]
                raise ProcessGroupError(
                    f"Rank {me} successfully reached monitoredBarrier, but received errors while "
                    f"waiting for send/recv from rank {ranks[0]}: {error}"
                )
            return
        missing: list[int] = []
        for member in range(1, self.size()):
            key = f"{prefix}/{member}"
            try:
                store.get(key, max(deadline - time.monotonic(), 0.001))
            except TimeoutError:
                # The wait for another rank may have taken all the time, and the store's reply more
                # than what is left.
                if store.has(key):
                    continue
                missing.append(ranks[member])
                if not wait_all_ranks:
                    break
        listed = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        error = f"{listed} failed to pass monitoredBarrier in {1000 * seconds:g} ms"
        store.set(f"{prefix}/result", error if missing else "")
        if missing:
            raise ProcessGroupError(error)

    @_needs_cpu
    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        """Send a tensor to rank ``peer`` of this group."""
        (tensor,) = tensors
        transfers = self._transfers("send")
        self._start(transfers, flatten(tensor), peer, self._user_tag(peer, tag), "send")
        return self._work("send", transfers, tensors, None)

    @_needs_cpu
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        """Receive a tensor from rank ``peer`` of this group."""
        (tensor,) = tensors
        packed, transfers = Packed([tensor], reads=False), self._transfers("recv")
        self._start(transfers, packed.flat, peer, self._user_tag(peer, tag), "recv")
        return self._work("recv", transfers, tensors, packed.unpack)

    def recv_anysource(self, *_: Any) -> Work:
        """Raise a `UsageError`: the source must be known."""
        raise UsageError("recv(src=None) is not possible with the backend wingbeat: name the rank")

    recvAnysource = recv_anysource  # the name in C++

    def abort(self) -> None:
        """Fail the operations in progress, on all ranks, and close the group's connections.

        Messages between two ranks of a subgroup fail when the default group is aborted.
        """
        self._ring.abandon()
        if not self._shared:
            world = self._connections.world
            for link in world.links:
                link.abort_waits()
                link.close()
        self._others.call("abort")

    def shutdown(self) -> None:
        """Close the group's connections and threads; the default group's close all others'."""
        self._close(pending_exception())

    def _close(self, error: BaseException | None) -> None:
        _open.discard(self)
        if error is not None:
            self._ring.abandon()  # a peer may never complete what is in progress
        self._world.close()
        self._others.call("shutdown")
        if not self._shared:
            self._connections.close(error)

    # Shared by the operations

    def _work(
        self,
        what: str,
        operation: Operation | None,
        result: Any,
        finish: Callable[[], object] | None,
        opts: Any = None,
    ) -> Work:
        timeout = getattr(opts, "timeout", None)
        seconds = max(0.0, timeout.total_seconds()) if isinstance(timeout, timedelta) else 0.0
        where = f"rank {self._world.ranks[self.rank()]}: {what} in {self._where}"
        unsettled = set() if what in ("send", "recv") else self._unsettled
        return Work(operation, result, finish, seconds, where, unsettled)

    def _collectives(self, buffer: torch.Tensor) -> Collectives:
        small = buffer.nbytes < _SHORT_BYTES and not self._ring.sums_in_one_round(buffer)
        return self._short if small else self._ring

    def _rows(self, flat: torch.Tensor) -> torch.Tensor:
        rows = flat.new_empty(self.size(), flat.numel())
        rows[self.rank()].copy_(flat)
        return rows

    def _all_gather(
        self, buffer: torch.Tensor, spans: tuple[Span, ...] | None = None
    ) -> Operation | None:
        if self.size() == 1 or not buffer.numel():
            return None
        flat = buffer.view(-1).view(torch.uint8)  # moved, whatever the dtype
        width = buffer.element_size()
        blocks = spans and tuple(Span(s.start * width, s.stop * width) for s in spans)
        return self._collectives(flat).all_gather(flat, blocks=blocks)

    def _exchange(
        self,
        what: str,
        sends: Sequence[torch.Tensor | None],
        receives: Sequence[torch.Tensor | None],
        tag: int | None = None,
    ) -> Transfers:
        """Exchange one message with each rank, except this one; None: no message."""
        transfers = self._transfers(what)
        if tag is None:
            tag = self._collective_tag()
        for kind, flats in (("recv", receives), ("send", sends)):
            for peer, flat in enumerate(flats):
                if flat is not None and peer != self.rank():
                    self._start(transfers, flat, peer, tag, kind)
        return transfers

    def _transfers(self, what: str) -> Transfers:
        connected = self._connections.world
        what = f"{what} in {self._where}"
        return Transfers(connected.rank, connected, what, self._timeout.total_seconds())

    def _start(
        self, transfers: Transfers, flat: torch.Tensor, peer: int, tag: int, kind: str
    ) -> None:
        if not flat.numel():
            return
        data = flat.view(torch.uint8)
        for link, part in striped(self._connections.world, data):
            transfers.start(getattr(link, kind), part, self._world.ranks[peer], tag)

    def _collective_tag(self) -> int:
        turn = next(self._exchanges) % (1 << USER_TAG_BITS)
        return 1 << (TAG_BITS - 1) | self._number << USER_TAG_BITS | turn

    def _user_tag(self, peer: int, tag: int) -> int:
        if not 0 <= tag < 1 << USER_TAG_BITS:
            raise UsageError(f"tag={tag}: allowed are 0 to {(1 << USER_TAG_BITS) - 1}")
        if not 0 <= peer < self.size() or peer == self.rank():
            raise UsageError(
                f"rank {self.rank()} of a group of {self.size()} cannot exchange a message with "
                f"rank {peer}: name another rank of the group"
            )
        return self._number << USER_TAG_BITS | tag

    def _is_root(self, opts: Any) -> bool:
        if not 0 <= opts.rootRank < self.size():
            raise UsageError(
                f"root rank {opts.rootRank} of a group of {self.size()}: allowed are ranks of the "
                f"group, 0 to {self.size() - 1}"
            )
        return bool(opts.rootRank == self.rank())

    def _check_pieces(self, what: str, which: str, pieces: Sequence[torch.Tensor]) -> None:
        if len(pieces) != self.size():
            raise UsageError(
                f"{what} over {self.size()} ranks: {which} has {len(pieces)} tensors; pass one for "
                "each rank"
            )

    def _check_whole(self, what: str, part: torch.Tensor, which: str, whole: torch.Tensor) -> None:
        numel = part.numel() * self.size()
        if whole.numel() != numel or whole.dtype != part.dtype:
            raise UsageError(
                f"{what} {describe(part)} over {self.size()} ranks: the {which} has "
                f"{describe(whole)}; allowed are {numel} elements of {part.dtype}"
            )

    def _check_same(self, what: str, one: torch.Tensor, other: torch.Tensor) -> None:
        if one.numel() != other.numel() or one.dtype != other.dtype:
            raise UsageError(
                f"{what}: this rank's input has {describe(one)} and its output "
                f"{describe(other)}: pass tensors of the same size and dtype"
            )


for _name, _former in _FORMER_NAMES.items():
    setattr(ProcessGroupWingbeat, _former, getattr(ProcessGroupWingbeat, _name))

_open: weakref.WeakSet[ProcessGroupWingbeat] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what the script has left open: peers would wait for this process."""
    for group in sorted(_open, key=lambda each: not each._shared):
        group._close(getattr(sys, "last_value", None))


os.register_at_fork(after_in_child=_open.clear)
