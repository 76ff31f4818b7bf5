"""Profiles: parameter shapes and times of a network's layers on a stated device. No torch."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wingbeat.errors import UsageError

FLOAT32_BYTES = 4

_MOST = 2**53
"""Upper bound on elements, samples and milliseconds; floats represent all integers below it."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter tensor: its name within its layer, and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def scaled(self, scale: float) -> Parameter:
        """Shrink the dimension that rounds best to about ``scale`` of the elements, at least one.

        The rank is kept, because some codecs treat matrices differently.
        """
        if scale == 1.0 or not self.shape:
            return self

        def error(axis: int) -> tuple[float, int]:
            exact = self.shape[axis] * scale
            return abs(max(1, round(exact)) - exact) / exact, -self.shape[axis]

        axis = min(range(len(self.shape)), key=error)
        shape = list(self.shape)
        shape[axis] = max(1, round(shape[axis] * scale))
        return Parameter(self.name, tuple(shape))


@dataclass(frozen=True, slots=True)
class ProfiledLayer:
    """A layer: its parameters (possibly none) and its times for a whole batch in milliseconds.

    ``kind`` names the operation (``conv``, ``linear``, ``bn``, ...) for information only.
    """

    name: str
    kind: str
    parameters: tuple[Parameter, ...]
    forward_ms: float
    backward_ms: float

    @property
    def attribute(self) -> str:
        """Its name as an attribute of a module, which cannot contain dots."""
        return self.name.replace(".", "_")

    @property
    def numel(self) -> int:
        """Number of parameter elements of the layer."""
        return sum(p.numel for p in self.parameters)


@dataclass(frozen=True, slots=True)
class Profile:
    """A network's layers in execution order, and the source of their times.

    ``samples_per_second`` is the training throughput of one device at ``batch_size``; the times of
    the layers add up to ``batch_size / samples_per_second``. ``source`` names where the throughput
    was published or how it was derived. ``scale`` is 1 unless :meth:`scaled` made the profile;
    multiply link rates by it to keep the ratio of communication to computation.
    """

    name: str
    device: str
    batch_size: int
    samples_per_second: float
    source: str
    shapes_from: str
    split: str
    layers: tuple[ProfiledLayer, ...]
    scale: float = 1.0

    @property
    def params(self) -> int:
        """Number of parameter elements."""
        return sum(layer.numel for layer in self.layers)

    @property
    def tensors(self) -> int:
        """Number of parameter tensors."""
        return sum(len(layer.parameters) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Size of the parameters, and of the gradients, in bytes of float32."""
        return self.params * FLOAT32_BYTES

    @property
    def forward_ms(self) -> float:
        """Forward time of a whole batch in milliseconds."""
        return math.fsum(layer.forward_ms for layer in self.layers)

    @property
    def backward_ms(self) -> float:
        """Backward time of a whole batch in milliseconds."""
        return math.fsum(layer.backward_ms for layer in self.layers)

    def scaled(self, scale: float) -> Profile:
        """Shrink every parameter tensor to about ``scale`` of its elements; times stay the same.

        Multiply link rates by the result's ``scale`` too. A tensor keeps its rank and at least one
        element, so the total is within rounding of ``scale * params``.

        Raises:
            UsageError: ``scale`` is not in (0, 1].
        """
        if not (math.isfinite(scale) and 0.0 < scale <= 1.0):
            raise UsageError(
                f"scale {scale:g} of model {self.name!r}: allowed is more than 0 and at most 1"
            )
        layers = tuple(
            replace(layer, parameters=tuple(p.scaled(scale) for p in layer.parameters))
            for layer in self.layers
        )
        return replace(self, layers=layers, scale=self.scale * scale)

    def paced_as(
        self,
        name: str,
        device: str,
        batch_size: int,
        samples_per_second: float,
        source: str,
        forward_share: float | None = None,
    ) -> Profile:
        """Return the network with another device's throughput; layers keep their shares of a pass.

        ``forward_share`` is forward's share of an iteration; None: as in this profile.
        """
        whole_ms = 1e3 * batch_size / samples_per_second
        if forward_share is None:
            forward_share = self.forward_ms / (self.forward_ms + self.backward_ms)
        forward = whole_ms * forward_share / self.forward_ms
        backward = whole_ms * (1 - forward_share) / self.backward_ms
        layers = tuple(
            replace(
                layer,
                forward_ms=layer.forward_ms * forward,
                backward_ms=layer.backward_ms * backward,
            )
            for layer in self.layers
        )
        return replace(
            self,
            name=name,
            device=device,
            batch_size=batch_size,
            samples_per_second=samples_per_second,
            source=source,
            split=f"the shares of {self.name}'s profile: {self.split}",
            layers=layers,
        )


def decode(text: str, *, where: str) -> Profile:
    """Read a profile from JSON text; ``where`` names it in messages.

    Raises:
        UsageError: the text is not JSON, lacks a field, or its totals contradict its layers.
    """
    return from_object(parse_object(text, where), where)


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Parse the text of a profile as a JSON object; `UsageError` for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"profile {where}: not JSON ({error})") from error
    if not isinstance(data, dict):
        raise UsageError(f"profile {where}: must be a JSON object")
    return data


def from_object(data: Mapping[str, Any], where: str) -> Profile:
    """Return the profile of a parsed file; `UsageError` as in `decode`."""
    rows = read_field(data, "layers", list, where)
    profile = Profile(
        name=read_field(data, "name", str, where),
        device=read_field(data, "device", str, where),
        batch_size=read_field(data, "batch_size", int, where),
        samples_per_second=read_number(data, "samples_per_second", where),
        source=read_field(data, "source", str, where),
        shapes_from=read_field(data, "shapes_from", str, where),
        split=read_field(data, "split", str, where),
        layers=tuple(_layer(row, f"{where} layer {i}") for i, row in enumerate(rows)),
    )
    check_totals(profile, data, where)
    return profile


def read_text(name: str) -> str:
    """Read a profile file; `UsageError` if it is missing or not UTF-8 text."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or an invalid file name
        reason = getattr(error, "strerror", "") or f"it cannot be read ({error})"
        raise UsageError(f"profile file {name!r}: {reason}") from error


def encode(profile: Profile) -> str:
    """Write a profile as JSON text, one layer per line, for readable diffs."""
    head = {
        "name": profile.name,
        "device": profile.device,
        "batch_size": profile.batch_size,
        "samples_per_second": profile.samples_per_second,
        "source": profile.source,
        "shapes_from": profile.shapes_from,
        "split": profile.split,
        "params": profile.params,
        "forward_ms": round(profile.forward_ms, 5),
        "backward_ms": round(profile.backward_ms, 5),
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = [
        json.dumps(
            {
                "name": layer.name,
                "kind": layer.kind,
                "parameters": {p.name: list(p.shape) for p in layer.parameters},
                "forward_ms": layer.forward_ms,
                "backward_ms": layer.backward_ms,
            }
        )
        for layer in profile.layers
    ]
    body = ",\n".join("    " + row for row in rows)
    return "\n".join(["{", *lines, '  "layers": [', body, "  ]", "}"]) + "\n"


def read_field(data: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """Return a field of a JSON object; `UsageError` if it is missing or of another kind."""
    value = data.get(key)
    wrong = not isinstance(value, kind) or isinstance(value, bool)
    if wrong or (isinstance(value, int) and abs(value) >= _MOST):
        raise UsageError(
            f"profile {where}: field {key!r} must be a {kind.__name__}, is {_short(value)}"
        )
    return value


def read_number(data: Mapping[str, Any], key: str, where: str) -> float:
    """Return a field that is a number of 0 or more; `UsageError` otherwise."""
    value: Any = data.get(key)
    # The range also rejects NaN.
    if type(value) not in (int, float) or not 0 <= value < _MOST:
        raise UsageError(
            f"profile {where}: field {key!r} must be a number >= 0, is {_short(value)}"
        )
    return float(value)


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _layer(row: Any, where: str) -> ProfiledLayer:
    if not isinstance(row, dict):
        raise UsageError(f"profile {where}: must be a JSON object, is {_short(row)}")
    shapes = read_field(row, "parameters", dict, where)
    for name, shape in shapes.items():
        sizes = shape if isinstance(shape, list) else [0]
        fine = all(type(size) is int and 0 < size < _MOST for size in sizes)
        if "." in name or not fine or math.prod(sizes) >= _MOST:
            raise UsageError(
                f"profile {where}: parameter {name!r} needs a name without dots and a list of "
                f"positive sizes, has {_short(shape)}"
            )
    return ProfiledLayer(
        name=read_field(row, "name", str, where),
        kind=read_field(row, "kind", str, where),
        parameters=tuple(Parameter(name, tuple(shape)) for name, shape in shapes.items()),
        forward_ms=read_number(row, "forward_ms", where),
        backward_ms=read_number(row, "backward_ms", where),
    )


def check_totals(profile: Profile, data: Mapping[str, Any], where: str) -> None:
    """Check that values are positive and stated totals those of the layers; else `UsageError`."""
    if profile.batch_size < 1 or profile.samples_per_second <= 0 or not profile.params:
        raise UsageError(
            f"profile {where}: batch_size, samples_per_second and the parameter count must be > 0"
        )
    layer_names = [layer.name.replace(".", "_") for layer in profile.layers]
    repeated = sorted({name for name in layer_names if layer_names.count(name) > 1})
    if repeated:
        raise UsageError(f"profile {where}: layer name {repeated[0]!r} is there more than once")
    for key, total in (
        ("params", profile.params),
        ("forward_ms", profile.forward_ms),
        ("backward_ms", profile.backward_ms),
    ):
        if key not in data:
            continue
        if not math.isclose(read_number(data, key, where), total, rel_tol=1e-6, abs_tol=1e-4):
            raise UsageError(f"profile {where}: {key} is {data[key]!r} but its layers make {total}")
    stated = 1000.0 * profile.batch_size / profile.samples_per_second
    made = profile.forward_ms + profile.backward_ms
    if not math.isclose(stated, made, rel_tol=1e-3):
        raise UsageError(
            f"profile {where}: batch_size / samples_per_second is {stated:.3f} ms but its layers "
            f"make {made:.3f} ms"
        )
