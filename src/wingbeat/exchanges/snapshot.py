"""Snapshots of a replica for a joining worker: parameters, buffers and optimizer state as bytes.

A snapshot consists of the length of a JSON header in eight bytes; the header, with dtypes and
shapes of the tensors and the numbers in the optimizer state; and the elements of the tensors.
Everything is checked before any of it is loaded, and nothing is unpickled. Of a `DTensor` it has
the part that this rank holds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wingbeat.engine.gradients.placed import is_placed, local, place
from wingbeat.errors import PeerError

_LENGTH = struct.Struct("<Q")

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip

_SCALARS = (bool, int, float, str, type(None))

State = dict[str, Any]


def encode_snapshot(
    tensors: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    extra: Any,
) -> bytes:
    """Encode a replica.

    ``tensors`` are parameters and other tensors that are equal on all workers, on the CPU.
    ``params`` are the parameters with optimizer state, in the same order on all workers; of the
    state of a `DTensor` the part that this rank holds is sent. ``extra`` is any JSON value. A
    `PeerError` names a tensor or value that cannot be sent.
    """
    bodies: list[torch.Tensor] = []
    states = []
    for number, param in enumerate(params):
        state = {}
        for key, value in optimizer.state.get(param, {}).items():
            what = f"{type(optimizer).__name__}: {key!r}, {number}"
            state[str(key)] = _describe(value, bodies, what)
        states.append(state)
    found: list[torch.Tensor] = []
    kinds = [_describe(tensor, found, "a tensor of the model") for tensor in tensors]
    header = json.dumps({"tensors": kinds, "states": states, "last": extra}).encode()
    raw = [_bytes(tensor) for tensor in (*found, *bodies)]
    return b"".join([_LENGTH.pack(len(header)), header, *raw])


def _describe(value: Any, bodies: list[torch.Tensor], what: str) -> Any:
    if isinstance(value, torch.Tensor) and str(value.dtype) in _DTYPES:
        part = local(value.detach())
        bodies.append(part)
        return {"dtype": str(part.dtype), "shape": list(part.shape)}
    if type(value) in _SCALARS:
        return {"value": value}
    raise PeerError(
        f"another worker needs these parameters to continue, and {what}: {value!r:.60} cannot be "
        "sent; start the job again from a checkpoint"
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class Snapshot:
    """A received snapshot, decoded and checked.

    ``tensors`` and ``params`` are this worker's, as in `encode_snapshot`, with the same dtypes and
    shapes. ``extra`` is as encoded. A `PeerError` if the snapshot does not fit this model.
    """

    def __init__(
        self, payload: Any, tensors: Sequence[torch.Tensor], params: Sequence[torch.Tensor]
    ) -> None:
        self._tensors, self._params = tensors, params
        try:
            (length,) = _LENGTH.unpack_from(payload)
            header = json.loads(bytes(payload[_LENGTH.size : _LENGTH.size + length]))
            kinds, states, self.extra = header["tensors"], header["states"], header["last"]
            if len(kinds) != len(tensors) or len(states) != len(params):
                raise ValueError(f"{len(kinds)} tensors and {len(states)} states")
            body = memoryview(payload)[_LENGTH.size + length :]
            self._new = list(_decode_tensors(kinds, body))
            body = body[sum(map(_nbytes, self._new)) :]
            self._states = _decode_states(states, params, body)
            _check_shapes(self._new, tensors)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as e:
            raise PeerError(
                f"another worker sent parameters that do not fit this model ({e!s:.80}); check "
                "that all workers train the same one"
            ) from None

    def load_tensors(self, first: int = 0) -> None:
        """Load the tensors from number ``first`` on, in place."""
        with torch.no_grad():
            for mine, theirs in zip(self._tensors[first:], self._new[first:], strict=True):
                local(mine).copy_(theirs)

    def load_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Load everything in place.

        State is moved to the device of its parameter, as `torch.optim.Optimizer.load_state_dict`
        does: ``step`` only for groups with ``capturable`` or ``fused``.
        """
        self.load_tensors()
        on_device = {
            param
            for group in optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for param in group["params"]
        }
        for param, state in zip(self._params, self._states, strict=True):
            optimizer.state.pop(param, None)
            if state:
                steps_stay = param not in on_device
                optimizer.state[param] = {
                    key: value if key == "step" and steps_stay else _beside(value, param)
                    for key, value in state.items()
                }


def _beside(value: Any, param: torch.Tensor) -> Any:
    """Return state on the device of its parameter."""
    return value.to(param.device) if isinstance(value, torch.Tensor) else value


def _decode_tensors(kinds: Sequence[Any], body: memoryview) -> Iterator[torch.Tensor]:
    for kind in kinds:
        dtype, shape = _DTYPES[kind["dtype"]], kind["shape"]
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"shape {shape!r:.40}")
        size = math.prod(shape) * dtype.itemsize
        if size > len(body):
            raise ValueError(f"{len(body)} bytes where {size} were due")
        flat = (
            torch.frombuffer(bytearray(body[:size]), dtype=dtype)
            if size
            else torch.empty(0, device="cpu")
        )
        yield flat.to(dtype).reshape(shape)
        body = body[size:]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _decode_states(
    states: Sequence[Any], params: Sequence[torch.Tensor], body: memoryview
) -> list[State]:
    out = []
    for state, param in zip(states, params, strict=True):
        mine: State = {}
        for key, kind in state.items():
            if "dtype" not in kind:
                if type(kind["value"]) not in _SCALARS:
                    raise ValueError(f"{kind['value']!r:.40} in a state")
                mine[key] = kind["value"]
                continue
            (mine[key],) = _decode_tensors([kind], body)
            part = local(param)
            if mine[key].numel() > max(part.numel(), 1):
                raise ValueError(f"{key!r:.40} of {mine[key].numel()} elements")
            body = body[_nbytes(mine[key]) :]
            if is_placed(param) and mine[key].shape == part.shape:
                mine[key] = place(mine[key], param)
        out.append(mine)
    if len(body):
        raise ValueError(f"{len(body)} bytes too many")
    return out


def _check_shapes(new: Sequence[torch.Tensor], mine: Sequence[torch.Tensor]) -> None:
    for theirs, own in zip(new, map(local, mine), strict=True):
        if theirs.shape != own.shape or theirs.dtype != own.dtype:
            raise ValueError(
                f"{theirs.dtype} {tuple(theirs.shape)} for {own.dtype} {tuple(own.shape)}"
            )
