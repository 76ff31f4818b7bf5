"""The scenarios and checks, one module a theme; importing this package registers them all."""

from . import (
    accumulation,
    digits,
    errors,
    graphs,
    layers,
    lifecycle,
    optimizers,
    precision,
    randomised,
    ranks,
    state,
)

__all__ = [
    "accumulation",
    "digits",
    "errors",
    "graphs",
    "layers",
    "lifecycle",
    "optimizers",
    "precision",
    "randomised",
    "ranks",
    "state",
]
