"""Runs the user's optimizer on the slices of a server. Needs torch."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wingbeat.engine.updates.json_values import decode, dtype_of, encode
from wingbeat.methods.parameter_server.aggregator import ITEMSIZE, Array
from wingbeat.methods.parameter_server.protocol import RequestError
from wingbeat.transport.text import describe_error

_CPU = torch.device("cpu")

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def rebuild_optimizer(description: Mapping[str, Any]) -> Any:
    """Return an optimizer without parameters, rebuilt from its description.

    The description has ``module`` and ``name`` of the class, the import ``path``, and the
    ``attributes`` and ``defaults`` by name, see `json_values.encode`.
    """
    sys.path.extend(place for place in description["path"] if place not in sys.path)
    found: Any = importlib.import_module(description["module"])
    for name in description["name"].split("."):
        found = getattr(found, name)
    # As in pickle, without __init__. The description comes from the worker that started the server.
    made = object.__new__(found)
    inside = made.__dict__
    inside.update({key: decode(value, _CPU) for key, value in description["attributes"].items()})
    inside["defaults"] = {k: decode(v, _CPU) for k, v in description["defaults"].items()}
    inside.update({key: {} for key in HOOKS})
    inside.update(param_groups=[], state=defaultdict(dict))
    return made


# -- optimizer state of a part of a parameter ----------------------------------------------


def encode_state(
    key: str,
    value: Any,
    shape: torch.Size,
    elementwise: Mapping[str, bool],
    arrays: list[torch.Tensor],
    part: slice = slice(None),
) -> dict[str, Any]:
    """Encode one value of the optimizer state of a parameter of this shape.

    Of a value for each element, ``part`` is appended to the arrays. ``elementwise`` maps names of
    optimizer state to whether it has a value for each element.

    Raises:
        ValueError: such a value does not have the parameter's shape.
        TypeError: the value cannot be encoded.
    """
    if not (isinstance(value, torch.Tensor) and elementwise.get(key, value.shape == shape)):
        return {"all": encode(value)}
    if value.shape != shape:
        raise ValueError(f"has shape {tuple(value.shape)}")
    arrays.append(value.detach().reshape(-1)[part].contiguous())
    return {"each": str(value.dtype).removeprefix("torch.")}


def decode_state(
    state: Mapping[str, Any] | None, numel: int, data: bytearray, start: int
) -> tuple[dict[str, Any], set[str], int]:
    """Return the optimizer state of a part of a parameter, which has ``numel`` elements.

    The arrays begin at a position in the data. Also returned are the names of the state with a
    value for each element, and where the arrays end.
    """
    values, each = dict[str, Any](), set[str]()
    for key, kind in (state or {}).items():
        if "all" in kind:
            values[key] = decode(kind["all"], _CPU)
            continue
        dtype = dtype_of(kind["each"])
        end = start + numel * dtype.itemsize
        values[key] = _tensor(data, start, end, dtype)
        each.add(key)
        start = end
    return values, each, start


def _tensor(data: bytearray, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy bytes to aligned memory."""
    if not 0 <= start <= stop <= len(data):
        raise ValueError(f"bytes {start} to {stop} of {len(data)}")
    array = np.frombuffer(data, np.uint8)[start:stop].copy()
    return torch.from_numpy(array).view(dtype)


# -- the optimizer of a server -------------------------------------------------------------


@dataclass(eq=False, slots=True)
class ParameterPiece:
    """The part of parameter ``slot`` that lies in a slice; ``param`` shares the slice's memory."""

    slot: int
    group: int
    offset: int
    param: torch.nn.Parameter


@dataclass(eq=False, slots=True)
class SliceParameters:
    """The parameters of one slice, with zeros where the optimizer has no parameter.

    ``nbytes`` includes the optimizer state.
    """

    dtype: str
    values: torch.Tensor
    pieces: list[ParameterPiece] = field(default_factory=list)
    nbytes: int = 0

    @property
    def memory(self) -> Array:
        """The bytes of the values."""
        array: Array = self.values.view(torch.uint8).numpy()
        return array

    def set_storage(self, values: torch.Tensor) -> None:
        """Make the parameters views of another tensor."""
        self.values = values
        for piece in self.pieces:
            piece.param.data = values[piece.offset : piece.offset + piece.param.numel()]


class ShardOptimizer:
    """One optimizer for all slices of a server, which it updates one at a time.

    In addition to the fields of `rebuild_optimizer`, the description has ``elementwise``, see
    `encode_state`, and ``dtype``, torch's default.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        default = dtype_of(description["dtype"])
        if torch.get_default_dtype() is not default:
            torch.set_default_dtype(default)  # the dtype of step counters
        self._optimizer = rebuild_optimizer(description)
        self._elementwise: dict[str, bool] = description["elementwise"]
        self._state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self._groups: list[dict[str, Any]] = []
        self._scaler: dict[str, Any] = {}
        step: Callable[[Any], Any] = type(self._optimizer).step
        # Bypasses the optimizer hooks of the process, where workers are threads.
        self._step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step

    def load(self, fields: Mapping[str, Any], data: bytearray) -> SliceParameters:
        """Load the parameters and optimizer state of a slice; RequestError if they are malformed.

        The fields are ``dtype``, ``numel``, ``pieces`` (slot, group, offset and length of each),
        and ``state``: for each piece by name the result of `encode_state`, or None. The data are
        the values, then the elementwise state of each piece.
        """
        try:
            dtype, numel = str(fields["dtype"]), int(fields["numel"])
            end = numel * ITEMSIZE[dtype]
            params = SliceParameters(dtype, _tensor(data, 0, end, dtype_of(dtype)))
            for numbers, state in zip(fields["pieces"], fields["state"], strict=True):
                slot, group, offset, length = map(int, numbers)
                if not (0 <= offset < offset + length <= numel and slot >= 0 <= group):
                    raise ValueError(f"malformed piece {numbers}")
                param = torch.nn.Parameter(params.values[offset : offset + length])
                params.pieces.append(ParameterPiece(slot, group, offset, param))
                values, _, end = decode_state(state, length, data, end)
                if values:
                    self._state[param] = values
            if end != len(data):
                raise ValueError(f"{len(data) - end} bytes too many")
        except (
            AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError
        ) as error:  # fmt: skip
            raise RequestError(f"malformed parameters: {error}") from None
        self._count_bytes(params)
        return params

    def set_values(self, params: SliceParameters, data: bytearray) -> None:
        """Replace the values, in new memory."""
        if len(data) != params.values.nbytes:
            raise RequestError(
                f"received {len(data)} bytes of parameters for a slice of {params.values.nbytes}"
            )
        params.set_storage(_tensor(data, 0, len(data), params.values.dtype))

    def copy_values(self, params: SliceParameters) -> None:
        """Move the values to new memory, because the old memory is still being sent."""
        params.set_storage(params.values.clone())

    def drop(self, params: SliceParameters) -> None:
        """Drop the optimizer state of a slice."""
        for piece in params.pieces:
            self._state.pop(piece.param, None)

    def export_state(self, params: SliceParameters) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the optimizer state of a slice, as `load` accepts it; the arrays are copies."""
        arrays: list[torch.Tensor] = []
        state = [
            {
                key: encode_state(key, value, piece.param.shape, self._elementwise, arrays)
                for key, value in self._state[piece.param].items()
            }
            if piece.param in self._state
            else None
            for piece in params.pieces
        ]
        pieces = [[p.slot, p.group, p.offset, p.param.numel()] for p in params.pieces]
        copies = [array.clone().view(torch.uint8).numpy().data for array in arrays]
        return {"pieces": pieces, "state": state}, copies

    def _count_bytes(self, params: SliceParameters) -> None:
        state = (
            value.nbytes
            for piece in params.pieces
            for value in self._state.get(piece.param, {}).values()
            if isinstance(value, torch.Tensor)
        )
        params.nbytes = params.values.nbytes + sum(state)

    def set_options(self, groups: list[dict[str, Any]], scaler: dict[str, Any]) -> None:
        """Set the options of the following steps."""
        try:
            self._groups = [{k: decode(v, _CPU) for k, v in each.items()} for each in groups]
            self._scaler = {key: decode(value, _CPU) for key, value in scaler.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise RequestError(f"malformed settings: {error}") from None

    def step(self, params: SliceParameters, gradients: Array, used: frozenset[int]) -> None:
        """Update the parameters of a slice.

        ``gradients`` are bytes in the parameters' dtype, which the optimizer may overwrite.
        ``used`` are the slots of the parameters that have a gradient; others stay unchanged.
        """
        flat = torch.from_numpy(gradients.view(np.uint8)).view(params.values.dtype)
        members: dict[int, list[torch.nn.Parameter]] = {}
        for piece in params.pieces:
            if piece.slot in used:
                piece.param.grad = flat[piece.offset : piece.offset + piece.param.numel()]
                members.setdefault(piece.group, []).append(piece.param)
        if not members:
            return
        if max(members) >= len(self._groups):
            raise RequestError(f"no settings for param group {max(members)}")
        groups = [{**self._groups[i], "params": members[i]} for i in sorted(members)]
        inside = self._optimizer.__dict__
        inside.update(self._scaler, param_groups=groups, state=self._state)
        try:
            with torch.no_grad():
                self._step(self._optimizer)
        except Exception as error:
            name = type(self._optimizer).__name__
            raise RequestError(f"optimizer {name}: {describe_error(error)}") from None
        finally:
            for key in self._scaler:
                inside.pop(key, None)
            for piece in params.pieces:
                piece.param.grad = None
        base, size = params.values.data_ptr(), params.values.element_size()
        for piece in params.pieces:
            if piece.param.data_ptr() != base + piece.offset * size:  # the optimizer replaced it
                end = piece.offset + piece.param.numel()
                params.values[piece.offset : end].copy_(piece.param.data)
        params.set_storage(params.values)
        self._count_bytes(params)
