"""A replica as bytes, for a worker that pulls it: parameters, buffers, and the optimizer's state.

First eight bytes that say how long the words are; then the words, JSON: what tensors there are, of
which dtype and shape, and the numbers among the state; then the tensors' elements. All is checked
before any of it is taken over, and nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wingbeat.errors import PeerError

_LENGTH = struct.Struct("<Q")

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip

_SIMPLE = (bool, int, float, str, type(None))

State = dict[str, Any]


def written(
    tensors: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    last: Any,
) -> bytes:
    """Return a replica as bytes.

    Args:
        tensors: parameters and whatever else is to be the same everywhere, on the CPU.
        params: those that the optimizer keeps state of, in the same order everywhere.
        optimizer: has the state.
        last: what else there is, as JSON can say it.

    Raises:
        PeerError: the state has something that cannot be sent; names it.
    """
    bodies: list[torch.Tensor] = []
    states = []
    for number, param in enumerate(params):
        state = {}
        for key, value in optimizer.state.get(param, {}).items():
            state[str(key)] = _word(value, bodies, f"{type(optimizer).__name__}: {key!r}, {number}")
        states.append(state)
    found: list[torch.Tensor] = []
    kinds = [_word(tensor, found, "a tensor of the model") for tensor in tensors]
    words = json.dumps({"tensors": kinds, "states": states, "last": last}).encode()
    raw = [_bytes(tensor) for tensor in (*found, *bodies)]
    return b"".join([_LENGTH.pack(len(words)), words, *raw])


def _word(value: Any, bodies: list[torch.Tensor], what: str) -> Any:
    if isinstance(value, torch.Tensor) and str(value.dtype) in _DTYPES:
        bodies.append(value)
        return {"dtype": str(value.dtype), "shape": list(value.shape)}
    if type(value) in _SIMPLE:
        return {"value": value}
    raise PeerError(
        f"another worker needs these parameters to go on, and {what}: {value!r:.60} cannot be "
        "sent; start the job again from a checkpoint"
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class Copy:
    """A replica that has come, read and checked.

    Args:
        payload: what `written` has returned.
        tensors: as for `written`: those of this worker, which have the same dtypes and shapes.
        params: as for `written`.

    Attributes:
        last: what else there was.

    Raises:
        PeerError: it is none of this model; says why.
    """

    def __init__(
        self, payload: Any, tensors: Sequence[torch.Tensor], params: Sequence[torch.Tensor]
    ) -> None:
        self._tensors, self._params = tensors, params
        try:
            (length,) = _LENGTH.unpack_from(payload)
            words = json.loads(bytes(payload[_LENGTH.size : _LENGTH.size + length]))
            kinds, states, self.last = words["tensors"], words["states"], words["last"]
            if len(kinds) != len(tensors) or len(states) != len(params):
                raise ValueError(f"{len(kinds)} tensors and {len(states)} states")
            body = memoryview(payload)[_LENGTH.size + length :]
            self._new = list(_read(kinds, body))
            body = body[sum(map(_size, self._new)) :]
            self._states = _states(states, params, body)
            _check(self._new, tensors)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as e:
            raise PeerError(
                f"parameters have come that are none of this model ({e!s:.80}); check that all "
                "workers train the same one"
            ) from None

    def put(self, optimizer: torch.optim.Optimizer) -> None:
        """Take everything over, in place."""
        with torch.no_grad():
            for mine, theirs in zip(self._tensors, self._new, strict=True):
                mine.copy_(theirs)
        for param, state in zip(self._params, self._states, strict=True):
            optimizer.state.pop(param, None)
            if state:
                optimizer.state[param] = state


def _read(kinds: Sequence[Any], body: memoryview) -> Iterator[torch.Tensor]:
    """Yield the tensors that ``body`` begins with."""
    for kind in kinds:
        dtype, shape = _DTYPES[kind["dtype"]], kind["shape"]
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"shape {shape!r:.40}")
        size = math.prod(shape) * dtype.itemsize
        if size > len(body):
            raise ValueError(f"{len(body)} bytes where {size} were due")
        flat = torch.frombuffer(bytearray(body[:size]), dtype=dtype) if size else torch.empty(0)
        yield flat.to(dtype).reshape(shape)
        body = body[size:]


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _states(states: Sequence[Any], params: Sequence[torch.Tensor], body: memoryview) -> list[State]:
    out = []
    for state, param in zip(states, params, strict=True):
        mine: State = {}
        for key, word in state.items():
            if "dtype" not in word:
                mine[key] = _simple(word["value"])
                continue
            (mine[key],) = _read([word], body)
            if mine[key].numel() > max(param.numel(), 1):
                raise ValueError(f"{key!r:.40} of {mine[key].numel()} elements")
            body = body[_size(mine[key]) :]
        out.append(mine)
    if len(body):
        raise ValueError(f"{len(body)} bytes too many")
    return out


def _simple(value: Any) -> Any:
    if type(value) not in _SIMPLE:
        raise ValueError(f"{value!r:.40} in a state")
    return value


def _check(new: Sequence[torch.Tensor], mine: Sequence[torch.Tensor]) -> None:
    for theirs, own in zip(new, mine, strict=True):
        if theirs.shape != own.shape or theirs.dtype != own.dtype:
            raise ValueError(
                f"{theirs.dtype} {tuple(theirs.shape)} for {own.dtype} {tuple(own.shape)}"
            )
