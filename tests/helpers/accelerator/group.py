"""Process groups of the accelerator of tests, whose collectives run as those of NCCL.

A collective runs on a stream of its group, after what the calling thread's current stream was given
before the call. ``work.wait()`` makes the current stream wait for it. Neither waits for the device.
Values travel between hosts by gloo, in a thread of the group, in the order of the calls::

    init_process_group("cpu:gloo,late:late")
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: F401  (defines operators)
from torch.futures import Future

from helpers import accelerator

NAME = "late"
"""Of the backend."""

Op = dist.ReduceOp.RedOpType

Rows = list[list[torch.Tensor]]
"""The inputs of each rank, as flat tensors."""

Rule = Callable[[Rows], Sequence[torch.Tensor]]
"""What computes the outputs of this rank from the inputs of all."""


class Call(NamedTuple):
    """A collective between its copies: memory of the host, and the gate that opens when done."""

    copied: torch.Event
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    rule: Rule
    gate: int


class LateWork(dist.Work):  # type: ignore[misc]
    """A collective in progress."""

    def __init__(self, group: LateGroup, done: torch.Event, result: Any) -> None:
        super().__init__()
        self._group, self._done, self._result = group, done, result

    def wait(self, timeout: Any = None) -> bool:
        """Have the current stream wait."""
        self._group.raise_error()
        torch.accelerator.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        return bool(self._done.query())

    def get_future(self) -> Future[Any]:
        """Return a future whose callbacks run on the current stream, after the collective."""
        made: Future[Any] = Future()
        self.wait()
        made.set_result(self._result)
        return made


def _reduce(op: Any, values: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = torch.stack(list(values))
    if op in (Op.MAX, Op.MIN):
        return wide.amax(0) if op == Op.MAX else wide.amin(0)
    if op not in (Op.SUM, Op.AVG):
        raise NotImplementedError(f"late: {op}")
    total = values[0].clone()  # in the dtype of the tensors, one rank after the other
    for value in values[1:]:
        total += value
    return total / len(values) if op == Op.AVG else total


class LateGroup(Backend):
    """The backend of one process group for tensors on the device."""

    supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._late = accelerator.load()
        self._device = torch.device(accelerator.NAME, torch.accelerator.current_device_index())
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = torch.Stream(self._device)
        self._error: BaseException | None = None
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="late-group", daemon=True).start()

    def getBackendName(self) -> str:
        return NAME

    # -- streams --------------------------------------------------------------------------

    def follow_caller(self, stream: torch.Stream) -> None:
        """Order the group's stream after a stream."""
        self._stream.wait_stream(stream)

    def _start(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], rule: Rule
    ) -> LateWork:
        self.raise_error()
        sent, found = [_pinned(each) for each in inputs], [_pinned(each) for each in outputs]
        gate = self._late.late_gate()
        self.follow_caller(torch.accelerator.current_stream(self._device))
        with torch.no_grad(), self._stream:
            for host, tensor in zip(sent, inputs, strict=True):
                host.view(tensor.shape).copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            copied = self._stream.record_event()
            self._late.late_gate_wait(gate, self._device.index, self._stream.stream_id)
            for host, tensor in zip(found, outputs, strict=True):
                tensor.copy_(host.view(tensor.shape), non_blocking=True)
                tensor.record_stream(self._stream)
            done = self._stream.record_event()
        self._calls.put(Call(copied, sent, found, rule, gate))
        return LateWork(self, done, list(outputs))

    def _serve(self) -> None:
        while True:
            call = self._calls.get()
            call.copied.synchronize()
            try:
                rows = [[torch.empty_like(each) for each in call.inputs] for _ in range(self._size)]
                for place, each in enumerate(call.inputs):
                    self._gloo.allgather([[row[place] for row in rows]], [each]).wait()
                for host, value in zip(call.outputs, call.rule(rows), strict=True):
                    host.copy_(value.flatten())
            except BaseException as error:  # what was not written stays NaN
                traceback.print_exc()
                self._error = error
            self._late.late_gate_open(call.gate)

    def raise_error(self) -> None:
        """Raise an error if a collective has failed."""
        if self._error is not None:
            raise dist.DistBackendError(f"late group: {self._error}")

    # -- collectives ----------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> LateWork:
        op = opts.reduceOp.op  # the options live as long as this call

        def rule(rows: Rows) -> list[torch.Tensor]:
            return [_reduce(op, values) for values in zip(*rows, strict=True)]

        return self._start(tensors, tensors, rule)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> LateWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> LateWork:
        root = opts.rootRank
        return self._start(tensors, tensors, lambda rows: rows[root])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> LateWork:
        return self._start(
            inputs, outputs, lambda rows: [torch.cat(each) for each in zip(*rows, strict=True)]
        )

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> LateWork:
        return self.all_gather_single_coalesced([output], [tensor])

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> LateWork:
        [outs], [tensor] = outputs, inputs
        return self._start([tensor], outs, lambda rows: [row[0] for row in rows])

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> LateWork:
        op = opts.reduceOp.op

        def rule(rows: Rows) -> list[torch.Tensor]:
            parts = [[each.chunk(self._size)[self._rank] for each in row] for row in rows]
            return [_reduce(op, values) for values in zip(*parts, strict=True)]

        return self._start(inputs, outputs, rule)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any
    ) -> LateWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> LateWork:
        [output], root = outputs, opts.rootRank
        whole = output.new_zeros(output.numel() * self._size)
        if self._rank == root:
            whole = torch.cat([each.flatten() for each in inputs[0]])

        def rule(rows: Rows) -> list[torch.Tensor]:
            return [rows[root][0].chunk(self._size)[self._rank]]

        return self._start([whole], [output], rule)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> LateWork:
        if output_sizes or input_sizes:
            raise NotImplementedError("late: all_to_all of unequal parts")

        def rule(rows: Rows) -> list[torch.Tensor]:
            return [torch.cat([row[0].chunk(self._size)[self._rank] for row in rows])]

        return self._start([tensor], [output], rule)

    def barrier(self, opts: Any = None) -> LateWork:
        one = torch.ones(1, device=self._device)
        work = self.allreduce([one], dist.AllreduceOptions())
        work.wait()
        torch.accelerator.current_stream(self._device).synchronize()
        return work

    # Names before torch 2.15.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)


def register() -> None:
    """Load the device, and register the backend. Once per process."""
    accelerator.load()
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, LateGroup, devices=[accelerator.NAME])
        record = torch.library.impl("fsdp::record_grad_output_stream", "PrivateUse1")
        record(_record_reader)


def _record_reader(buffer: torch.Tensor, stream: int, index: int, kind: int) -> None:
    """Have a release of sharded gradients wait for their readers: on this stream and on another.

    The device overwrites memory as soon as it is released, as ``fully_shard`` allows for.
    """
    buffer.record_stream(torch.accelerator.current_stream())
    buffer.record_stream(torch.Stream(stream_id=stream, device_index=index, device_type=kind))
