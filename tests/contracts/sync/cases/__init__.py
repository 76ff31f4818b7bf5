"""The scenarios and checks, one module a theme; importing this package registers them all."""

from . import (
    accumulation,
    digits,
    errors,
    forwards,
    graphs,
    layers,
    lifecycle,
    modes,
    optimizers,
    precision,
    randomised,
    ranks,
    readers,
    refusals,
    state,
    wrappers,
)

__all__ = [
    "accumulation",
    "digits",
    "errors",
    "forwards",
    "graphs",
    "layers",
    "lifecycle",
    "modes",
    "optimizers",
    "precision",
    "randomised",
    "ranks",
    "readers",
    "refusals",
    "state",
    "wrappers",
]
