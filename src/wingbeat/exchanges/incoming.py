"""What another worker says, as the lanes bring it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from wingbeat.exchanges.lanes.lanes import BEGIN
from wingbeat.servers.documents import InParts
from wingbeat.servers.sums import Refused
from wingbeat.stale.letters import Malformed, letters_in, message_of
from wingbeat.stale.messages import Message


class Incoming:
    """Puts together what one worker has sent in parts (`wingbeat.exchanges.outgoing`).

    Args:
        workers: how many there may be.
        colayers: k.
        most: bytes that a payload may take.
    """

    def __init__(self, workers: int, colayers: int, most: int) -> None:
        self._workers, self._colayers, self._most = workers, colayers, most
        self._numbers: Sequence[int] = ()  # of a letter whose payload is still to come
        self._payload: InParts | None = None

    def take(self, kind: int, part: Any) -> Iterator[tuple[int, Message]]:
        """Yield the sender's life and what it says, for each message that is whole now.

        Raises:
            Malformed: no worker of this job sends such a part.
        """
        if (kind == BEGIN) != (self._payload is None):
            raise Malformed(f"a part of kind {kind} in the wrong place")
        if self._payload is None:
            for letter in letters_in(part, self._most):
                if len(letter.payload) < letter.nbytes:
                    self._numbers, self._payload = letter.numbers, InParts(letter.nbytes)
                else:
                    # A copy: in a part numbers lie at any address, which kernels cannot read.
                    yield self._read(letter.numbers, bytearray(letter.payload) or None)
            return
        payload = self._payload
        try:
            payload.add(part)
        except Refused as error:
            raise Malformed(str(error)) from None
        if payload.complete:
            self._payload = None
            yield self._read(self._numbers, payload.data)

    def _read(self, numbers: Sequence[int], payload: bytearray | None) -> tuple[int, Message]:
        return message_of(numbers, self._workers, self._colayers, payload)
