"""Profiles as Markdown tables, for documentation and the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wingbeat_lab.paced.profile import Profile


def table(profiles: Iterable[Profile]) -> str:
    """One row per profile: layers, tensors, millions of parameters, MB (1e6 bytes), ms."""
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


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
