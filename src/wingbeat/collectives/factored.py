"""A sum of factors: two small all-reduces one after the other, with arithmetic between them.

The first goes with all other collectives. The second has a channel of its own: when it can begin
depends on each worker's pace, and in one queue with the first ones of later buckets workers would
have to agree where. In its own, the order is that of the buckets, on every worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from wingbeat.codecs.factors import Factors, Round
from wingbeat.collectives.callbacks import run_callback
from wingbeat.collectives.handle import Handle
from wingbeat.errors import PeerError

Sums = Callable[[torch.Tensor], Handle]
"""Starts a sum over all workers, in place."""


class FactoredSum(Handle):
    """A sum of factors under way; waiting writes it into the buffer, once.

    Args:
        factors: how the buffer travels.
        buffer: each worker's own numbers before, the sum after.
        where: what is exchanged, for messages.
    """

    __slots__ = ("_callbacks", "_error", "_lock", "_round", "_second", "_turned", "_where")

    def __init__(self, factors: Factors, buffer: torch.Tensor, where: str) -> None:
        super().__init__([])
        self._where = where
        self._round: Round | None = factors.begin(buffer)
        self._second = Handle([])
        self._error = ""
        self._turned = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Handle], None]] = []

    @property
    def first(self) -> torch.Tensor:
        """What is to be summed first."""
        assert self._round is not None
        return self._round.first

    def turn(self, first: Handle, second: Sums) -> None:
        """Wait for the first sum and start the second; raises nothing: a `PeerError` is `wait`'s.

        Args:
            first: the sum of `first`, under way.
            second: starts the other.
        """
        try:
            assert self._round is not None
            # Not until it is sent: that may take as long as the collective behind it, for which
            # another worker may need the second sum first. Nobody writes to what is read here.
            first.wait_received()
            self._round.turn()
            if not bool(self._round.agreed):
                raise PeerError(
                    f"{self._where}: the workers' low-rank factors began differently: load the "
                    "optimizer's state on all workers or on none"
                )
            self._second = second(self._round.second)
            self._round.keep()
        except PeerError as err:
            self._error = str(err)
        except Exception as err:  # whoever waits has to hear it
            self._error = f"{self._where} failed between its two sums: {err!r}"
        with self._lock:
            self._turned.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call_when_done(callback)

    def done(self) -> bool:
        """Whether both sums are here. The buffer holds the result after `wait`."""
        return self._turned.is_set() and (bool(self._error) or self._second.done())

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """As for any handle; the buffer holds the result after `wait`."""
        with self._lock:
            if not self._turned.is_set():
                self._callbacks.append(callback)
                return
        self._call_when_done(callback)

    def _call_when_done(self, callback: Callable[[Handle], None]) -> None:
        if self._error:
            run_callback(lambda: callback(self))
        else:
            self._second.add_done_callback(lambda _: callback(self))

    def wait(self) -> None:
        """Block until the buffer holds the sum, whichever thread writes it there.

        Raises:
            PeerError: a peer failed, was silent for too long, or began with other factors.
        """
        self._turned.wait()  # every transfer before has a deadline, so this ends
        if self._error:
            self._round = None
            raise PeerError(self._error)
        self._second.wait_received()
        with self._lock:
            mine, self._round = self._round, None
            if mine is not None:
                mine.end()

    def wait_received(self) -> None:
        """As `wait`."""
        self.wait()
