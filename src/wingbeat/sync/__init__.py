"""When, relative to forward and backward: hooks on a model and its optimizer."""

from wingbeat.sync.entry import (
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
