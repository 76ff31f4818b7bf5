"""Hooks on a model and its optimizer, gradients in buckets, and the optimizer's updates."""

from wingbeat.engine.api import (
    abandon,
    begin_step,
    bounded_exchange,
    distribute,
    join,
    no_sync,
    release,
    synchronize,
)

__all__ = [
    "abandon",
    "begin_step",
    "bounded_exchange",
    "distribute",
    "join",
    "no_sync",
    "release",
    "synchronize",
]
