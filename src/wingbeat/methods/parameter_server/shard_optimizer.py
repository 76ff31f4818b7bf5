"""What applies an optimizer on a server: the part of one that needs torch, and is loaded for it."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from wingbeat.methods.parameter_server.aggregator import Refused
from wingbeat.methods.parameter_server.dtypes import ITEMSIZE, Array
from wingbeat.updates.json_values import decode, dtype_of, encode

_CPU = torch.device("cpu")

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def rebuilt(description: Mapping[str, Any]) -> Any:
    """Return an optimizer without parameters that does what the described one does.

    Args:
        description: ``module`` and ``name`` of its class, ``path`` to find that by; its
            ``attributes`` and ``defaults``, by name, as `encode` makes them.
    """
    sys.path.extend(place for place in description["path"] if place not in sys.path)
    found: Any = importlib.import_module(description["module"])
    for name in description["name"].split("."):
        found = getattr(found, name)
    # As pickle makes one; and what is imported is what the worker that started this server says.
    made = object.__new__(found)
    inside = made.__dict__
    inside.update({key: decode(value, _CPU) for key, value in description["attributes"].items()})
    inside["defaults"] = {k: decode(v, _CPU) for k, v in description["defaults"].items()}
    inside.update({key: {} for key in HOOKS})
    inside.update(param_groups=[], state=defaultdict(dict))
    return made


@dataclass(eq=False, slots=True)
class Piece:
    """A part of one parameter that lies in a slice.

    Attributes:
        slot: the parameter's number.
        group: of the optimizer's groups, the one whose settings count.
        offset: of its first element in the slice.
        param: shape ``(length,)``; shares the slice's memory.
    """

    slot: int
    group: int
    offset: int
    param: torch.nn.Parameter


@dataclass(eq=False, slots=True)
class Held:
    """The parameters of one slice.

    Attributes:
        dtype: of the parameters.
        values: all of them, end to end; zeros where the optimizer has none.
        pieces: the parts of parameters among them.
        nbytes: of the values and of all that the optimizer remembers of them.
    """

    dtype: str
    values: torch.Tensor
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0

    @property
    def memory(self) -> Array:
        """The values' bytes, as they travel."""
        array: Array = self.values.view(torch.uint8).numpy()
        return array

    def numbers(self) -> list[list[int]]:
        """Say what there is: each piece's slot, group, offset and length."""
        return [[p.slot, p.group, p.offset, p.param.numel()] for p in self.pieces]

    def place(self, values: torch.Tensor) -> None:
        """Have the parameters in other memory."""
        self.values = values
        for piece in self.pieces:
            piece.param.data = values[piece.offset : piece.offset + piece.param.numel()]


class Applier:
    """One optimizer, run on the parameters of one slice after the other.

    Args:
        description: of the optimizer, see `rebuilt`; ``each`` says by name whether what it
            remembers has a value for each element, ``dtype`` is torch's default.

    Attributes:
        name: of the optimizer's class.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        default = dtype_of(description["dtype"])
        if torch.get_default_dtype() is not default:
            torch.set_default_dtype(default)  # counters are made in it
        self._optimizer = rebuilt(description)
        self._each: dict[str, bool] = description["each"]
        self._state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self._settings: list[dict[str, Any]] = []
        self._words: dict[str, Any] = {}
        step: Callable[[Any], Any] = type(self._optimizer).step
        # Without hooks for all optimizers of the process, where workers are threads of it.
        self._step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        self.name = type(self._optimizer).__name__

    # -- parameters and state in and out --------------------------------------------------

    def hold(self, words: Mapping[str, Any], data: bytearray) -> Held:
        """Take the parameters of a slice, with what is remembered of them.

        Args:
            words: ``dtype``, ``numel``, ``pieces`` as `Held.numbers` has them, and for each in
                ``state`` what there is by name: ``{"each": dtype}`` or ``{"all": value}``, or None.
            data: the values, then each piece's state.

        Raises:
            Refused: they do not belong together.
        """
        try:
            dtype, numel = str(words["dtype"]), int(words["numel"])
            nbytes = numel * ITEMSIZE[dtype]
            values = _tensor(data, 0, nbytes, dtype_of(dtype))
            held, at = Held(dtype, values), nbytes
            for numbers, memory in zip(words["pieces"], words["state"], strict=True):
                slot, group, offset, length = map(int, numbers)
                if not (0 <= offset < offset + length <= numel and slot >= 0 <= group):
                    raise ValueError(f"no piece {numbers}")
                param = torch.nn.Parameter(values[offset : offset + length])
                held.pieces.append(Piece(slot, group, offset, param))
                at = self._remember(param, memory, data, at)
            if at != len(data):
                raise ValueError(f"{len(data) - at} bytes too many")
        except (
            AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError
        ) as error:  # fmt: skip
            raise Refused(f"malformed parameters: {error}") from None
        self._count(held)
        return held

    def _remember(self, param: Any, memory: Any, data: bytearray, at: int) -> int:
        """Take the state of one piece, which begins at a byte; return where it ends."""
        for key, kind in (memory or {}).items():
            if "all" in kind:
                self._state[param][key] = decode(kind["all"], _CPU)
                continue
            dtype = dtype_of(kind["each"])
            end = at + param.numel() * dtype.itemsize
            self._state[param][key] = _tensor(data, at, end, dtype)
            at = end
        return at

    def put(self, held: Held, data: bytearray) -> None:
        """Take other values of the parameters, in new memory.

        Raises:
            Refused: they are more or fewer.
        """
        if len(data) != held.values.nbytes:
            raise Refused(f"{len(data)} bytes of parameters where {held.values.nbytes} were due")
        held.place(_tensor(data, 0, len(data), held.values.dtype))

    def renew(self, held: Held) -> None:
        """Leave the memory to those who still read it."""
        held.place(held.values.clone())

    def drop(self, held: Held) -> None:
        """Forget a slice."""
        for piece in held.pieces:
            self._state.pop(piece.param, None)

    def export(self, held: Held) -> tuple[dict[str, Any], list[memoryview]]:
        """Return what is remembered of each piece, as `hold` takes it; the arrays are copies."""
        arrays: list[memoryview] = []
        state = [self._memory(piece.param, arrays) for piece in held.pieces]
        return {"pieces": held.numbers(), "state": state}, arrays

    def _memory(self, param: Any, arrays: list[memoryview]) -> dict[str, Any] | None:
        if param not in self._state:
            return None
        memory: dict[str, Any] = {}
        for key, value in self._state[param].items():
            if self._is_each(key, value, param):
                flat = value.detach().reshape(-1).clone()
                memory[key] = {"each": str(flat.dtype).removeprefix("torch.")}
                arrays.append(flat.view(torch.uint8).numpy().data)
            else:
                memory[key] = {"all": encode(value)}
        return memory

    def _is_each(self, key: str, value: Any, param: torch.Tensor) -> bool:
        return isinstance(value, torch.Tensor) and self._each.get(key, value.shape == param.shape)

    def _count(self, held: Held) -> None:
        remembered = (
            value.nbytes
            for piece in held.pieces
            for value in self._state.get(piece.param, {}).values()
            if isinstance(value, torch.Tensor)
        )
        held.nbytes = held.values.nbytes + sum(remembered)

    # -- the step -------------------------------------------------------------------------

    def settle(self, groups: list[dict[str, Any]], words: dict[str, Any]) -> None:
        """Have these settings for the steps that follow.

        Args:
            groups: of each of the optimizer's groups, its settings, as `encode` makes them.
            words: what a GradScaler has left in the optimizer's attributes.

        Raises:
            Refused: they are none.
        """
        try:
            self._settings = [{k: decode(v, _CPU) for k, v in each.items()} for each in groups]
            self._words = {key: decode(value, _CPU) for key, value in words.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise Refused(f"malformed settings: {error}") from None

    def step(self, held: Held, gradients: Array, used: frozenset[int]) -> None:
        """Update the parameters of a slice.

        Args:
            held: the slice.
            gradients: of all its elements, in the parameters' dtype, whatever numpy calls that;
                the optimizer may write to them.
            used: the parameters that have a gradient; others are left alone.

        Raises:
            Refused: the optimizer has failed.
        """
        flat = torch.from_numpy(gradients.view(np.uint8)).view(held.values.dtype)
        members: dict[int, list[torch.nn.Parameter]] = {}
        for piece in held.pieces:
            if piece.slot in used:
                piece.param.grad = flat[piece.offset : piece.offset + piece.param.numel()]
                members.setdefault(piece.group, []).append(piece.param)
        if not members:
            return
        if max(members) >= len(self._settings):
            raise Refused(f"no settings came for group {max(members)}")
        groups = [{**self._settings[i], "params": members[i]} for i in sorted(members)]
        inside = self._optimizer.__dict__
        inside.update(self._words, param_groups=groups, state=self._state)
        try:
            with torch.no_grad():
                self._step(self._optimizer)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise Refused(f"optimizer {self.name}: {type(error).__name__}: {reason}") from None
        finally:
            for key in self._words:
                inside.pop(key, None)
            for piece in held.pieces:
                piece.param.grad = None
        for piece in _moved(held):
            held.values[piece.offset : piece.offset + piece.param.numel()].copy_(piece.param.data)
        held.place(held.values)
        self._count(held)


def _moved(held: Held) -> Iterator[Piece]:
    """Yield pieces for which the optimizer has put other memory in the place of the slice's."""
    base, size = held.values.data_ptr(), held.values.element_size()
    return (p for p in held.pieces if p.param.data_ptr() != base + p.offset * size)


def _tensor(data: bytearray, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy bytes into memory of their own, where they are aligned."""
    if not 0 <= start <= stop <= len(data):
        raise ValueError(f"bytes {start} to {stop} of {len(data)}")
    array = np.frombuffer(data, np.uint8)[start:stop].copy()
    return torch.from_numpy(array).view(dtype)
