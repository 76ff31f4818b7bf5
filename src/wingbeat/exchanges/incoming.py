"""What another worker says, as the lanes bring it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from wingbeat.exchanges.lanes.lanes import BEGIN
from wingbeat.stale.letters import Malformed, epoch_of, letters_in, message_of
from wingbeat.stale.messages import Message
from wingbeat.transport.messages.reassembly import Reassembly


class Incoming:
    """Puts together what one worker has sent in parts (`wingbeat.exchanges.outgoing`).

    Args:
        workers: how many there may be.
        colayers: k.
        most: bytes that a payload may take.
        epoch: how often colayers have changed.
    """

    def __init__(self, workers: int, colayers: int, most: int, epoch: int = 0) -> None:
        self._workers, self._colayers, self._most = workers, colayers, most
        self._epoch = epoch
        self._early: list[tuple[Sequence[int], bytearray | None]] = []
        self._numbers: Sequence[int] = ()  # of a letter whose payload is still to come
        self._payload: Reassembly | None = None

    def take(self, kind: int, part: Any) -> Iterator[tuple[int, Message]]:
        """Yield the sender's life and what it says, for each message that is whole now.

        What was said before this worker's colayers changed is left out; what is said by who has
        changed sooner waits for `rebundled`.

        Raises:
            Malformed: no worker of this job sends such a part.
        """
        if (kind == BEGIN) != (self._payload is None):
            raise Malformed(f"a part of kind {kind} in the wrong place")
        if self._payload is None:
            for letter in letters_in(part, self._most):
                if len(letter.payload) < letter.nbytes:
                    self._numbers, self._payload = letter.numbers, Reassembly(letter.nbytes)
                else:
                    # A copy: in a part numbers lie at any address, which kernels cannot read.
                    yield from self._read(letter.numbers, bytearray(letter.payload) or None)
            return
        payload = self._payload
        try:
            payload.append(part)
        except ValueError as error:
            raise Malformed(str(error)) from None
        if payload.complete:
            self._payload = None
            yield from self._read(self._numbers, payload.data)

    def rebundled(self, colayers: int) -> Iterator[tuple[int, Message]]:
        """Yield what has waited, as there are so many colayers now.

        Raises:
            Malformed: as `take`.
        """
        self._colayers, self._epoch = colayers, self._epoch + 1
        early, self._early = self._early, []
        for numbers, payload in early:
            yield from self._read(numbers, payload)

    def _read(
        self, numbers: Sequence[int], payload: bytearray | None
    ) -> Iterator[tuple[int, Message]]:
        epoch = epoch_of(numbers)
        if epoch == self._epoch:
            yield message_of(numbers, self._workers, self._colayers, payload)
        elif epoch > self._epoch + 1:
            raise Malformed(f"{epoch} changes of colayers, and there were {self._epoch} here")
        elif epoch > self._epoch:
            self._early.append((numbers, payload))
