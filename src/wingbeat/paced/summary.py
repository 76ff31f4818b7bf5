"""Profiles as small Markdown tables, for documentation and for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wingbeat.paced.profile import Profile


def table(profiles: Iterable[Profile]) -> str:
    """One row a profile: layers, tensors, millions of parameters, MB (1e6 bytes), milliseconds."""
    head = ["model", "batch", "layers", "tensors", "params (M)", "MB", "forward ms", "backward ms"]
    rows = [
        [
            p.name,
            str(p.batch_size),
            str(len(p.layers)),
            str(p.tensors),
            f"{p.params / 1e6:.2f}",
            f"{p.nbytes / 1e6:.1f}",
            f"{p.forward_ms:.1f}",
            f"{p.backward_ms:.1f}",
        ]
        for p in profiles
    ]
    return _markdown(head, rows)


def by_kind(profile: Profile) -> str:
    """One row a kind of layer of one profile: how many, parameters, shares of both times."""
    kinds = sorted({layer.kind for layer in profile.layers})
    rows = []
    for kind in kinds:
        layers = [layer for layer in profile.layers if layer.kind == kind]
        rows.append(
            [
                kind,
                str(len(layers)),
                f"{sum(layer.numel for layer in layers) / 1e6:.2f}",
                f"{sum(layer.forward_ms for layer in layers):.2f}",
                f"{sum(layer.backward_ms for layer in layers):.2f}",
            ]
        )
    return _markdown(["kind", "layers", "params (M)", "forward ms", "backward ms"], rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
