"""Runs the user's optimizer on the slices of a server. Needs torch."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wingbeat.engine.updates.json_values import decode, dtype_of, encode
from wingbeat.methods.parameter_server.aggregator import ITEMSIZE, Array
from wingbeat.methods.parameter_server.protocol import RequestError

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

    def layout(self) -> list[list[int]]:
        """Return slot, group, offset and length of each piece."""
        return [[p.slot, p.group, p.offset, p.param.numel()] for p in self.pieces]

    def set_storage(self, values: torch.Tensor) -> None:
        """Make the parameters views of another tensor."""
        self.values = values
        for piece in self.pieces:
            piece.param.data = values[piece.offset : piece.offset + piece.param.numel()]


class ShardOptimizer:
    """One optimizer for all slices of a server, which it updates one at a time.

    In addition to the fields of `rebuild_optimizer`, the description has ``elementwise``, which
    maps names of optimizer state to whether it has a value for each element, and ``dtype``, torch's
    default.
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
        self.name = type(self._optimizer).__name__

    # -- parameters and state -------------------------------------------------------------

    def load(self, fields: Mapping[str, Any], data: bytearray) -> SliceParameters:
        """Load the parameters and optimizer state of a slice; RequestError if they are malformed.

        The fields are ``dtype``, ``numel``, ``pieces`` (see `SliceParameters.layout`), and
        ``state``: for each piece by name ``{"each": dtype}`` or ``{"all": value}``, or None. The
        data are the values, then the elementwise state of each piece.
        """
        try:
            dtype, numel = str(fields["dtype"]), int(fields["numel"])
            nbytes = numel * ITEMSIZE[dtype]
            params, end = SliceParameters(dtype, _tensor(data, 0, nbytes, dtype_of(dtype))), nbytes
            for numbers, state in zip(fields["pieces"], fields["state"], strict=True):
                slot, group, offset, length = map(int, numbers)
                if not (0 <= offset < offset + length <= numel and slot >= 0 <= group):
                    raise ValueError(f"malformed piece {numbers}")
                param = torch.nn.Parameter(params.values[offset : offset + length])
                params.pieces.append(ParameterPiece(slot, group, offset, param))
                end = self._load_state(param, state, data, end)
            if end != len(data):
                raise ValueError(f"{len(data) - end} bytes too many")
        except (
            AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError
        ) as error:  # fmt: skip
            raise RequestError(f"malformed parameters: {error}") from None
        self._count_bytes(params)
        return params

    def _load_state(self, param: Any, state: Any, data: bytearray, start: int) -> int:
        """Load the state of one piece from a position in the data; return where it ends."""
        for key, kind in (state or {}).items():
            if "all" in kind:
                self._state[param][key] = decode(kind["all"], _CPU)
                continue
            dtype = dtype_of(kind["each"])
            end = start + param.numel() * dtype.itemsize
            self._state[param][key] = _tensor(data, start, end, dtype)
            start = end
        return start

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
        arrays: list[memoryview] = []
        state = [self._export_piece(piece.param, arrays) for piece in params.pieces]
        return {"pieces": params.layout(), "state": state}, arrays

    def _export_piece(self, param: Any, arrays: list[memoryview]) -> dict[str, Any] | None:
        if param not in self._state:
            return None
        fields: dict[str, Any] = {}
        for key, value in self._state[param].items():
            if self._is_elementwise(key, value, param):
                flat = value.detach().reshape(-1).clone()
                fields[key] = {"each": str(flat.dtype).removeprefix("torch.")}
                arrays.append(flat.view(torch.uint8).numpy().data)
            else:
                fields[key] = {"all": encode(value)}
        return fields

    def _is_elementwise(self, key: str, value: Any, param: torch.Tensor) -> bool:
        return isinstance(value, torch.Tensor) and self._elementwise.get(
            key, value.shape == param.shape
        )

    def _count_bytes(self, params: SliceParameters) -> None:
        state = (
            value.nbytes
            for piece in params.pieces
            for value in self._state.get(piece.param, {}).values()
            if isinstance(value, torch.Tensor)
        )
        params.nbytes = params.values.nbytes + sum(state)

    # -- the step -------------------------------------------------------------------------

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
            reason = (str(error).strip().splitlines() or [""])[0]
            raise RequestError(f"optimizer {self.name}: {type(error).__name__}: {reason}") from None
        finally:
            for key in self._scaler:
                inside.pop(key, None)
            for piece in params.pieces:
                piece.param.grad = None
        for piece in _moved_pieces(params):
            params.values[piece.offset : piece.offset + piece.param.numel()].copy_(piece.param.data)
        params.set_storage(params.values)
        self._count_bytes(params)


def _moved_pieces(params: SliceParameters) -> Iterator[ParameterPiece]:
    """Yield the pieces whose memory the optimizer has replaced."""
    base, size = params.values.data_ptr(), params.values.element_size()
    return (p for p in params.pieces if p.param.data_ptr() != base + p.offset * size)


def _tensor(data: bytearray, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy bytes to aligned memory."""
    if not 0 <= start <= stop <= len(data):
        raise ValueError(f"bytes {start} to {stop} of {len(data)}")
    array = np.frombuffer(data, np.uint8)[start:stop].copy()
    return torch.from_numpy(array).view(dtype)
