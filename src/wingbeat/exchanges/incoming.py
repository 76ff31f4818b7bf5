"""What another worker says, as the lanes bring it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wingbeat.exchanges.lanes.lanes import BEGIN
from wingbeat.stale.letters import Malformed, Read, letters_in, message_of
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
        self._begun: Read | None = None
        self._data, self._filled = bytearray(), 0

    def take(self, kind: int, part: Any) -> Iterator[tuple[int, Message]]:
        """Yield the sender's life and what it says, for each message that is whole now.

        Raises:
            Malformed: no worker of this job sends such a part.
        """
        if (kind == BEGIN) != (self._begun is None):
            raise Malformed(f"a part of kind {kind}, while {self._filled} bytes of a letter are in")
        if kind == BEGIN:
            for come in letters_in(part, self._most):
                if len(come.payload) < come.nbytes:
                    self._begun = come
                    self._data, self._filled = bytearray(come.nbytes), 0
                else:
                    # A copy: in a part numbers lie at any address, which kernels cannot read.
                    yield self._read(come, bytearray(come.payload) or None)
            return
        letter = self._begun
        assert letter is not None
        end = self._filled + len(part)
        if end > letter.nbytes or not len(part):
            raise Malformed(f"{len(part)} bytes came where {letter.nbytes - self._filled} were due")
        self._data[self._filled : end] = part
        self._filled = end
        if end == letter.nbytes:
            data, self._begun, self._data = self._data, None, bytearray()
            yield self._read(letter, data)

    def _read(self, letter: Read, payload: bytearray | None) -> tuple[int, Message]:
        return message_of(letter.numbers, self._workers, self._colayers, payload)
