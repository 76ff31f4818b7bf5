"""When, relative to forward and backward: hooks on a model and its optimizer."""

from wingbeat.engine.entry import (
    abandon,
    begin_step,
    bounded_exchange,
    consensus,
    distribute,
    flush,
    join,
    no_sync,
    release,
)

__all__ = [
    "abandon",
    "begin_step",
    "bounded_exchange",
    "consensus",
    "distribute",
    "flush",
    "join",
    "no_sync",
    "release",
]
