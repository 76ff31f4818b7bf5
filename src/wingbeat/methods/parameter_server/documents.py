"""A few words in JSON and the arrays that belong to them, in messages of a limited size. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from wingbeat.methods.parameter_server.aggregator import Refused
from wingbeat.transport.messages.reassembly import Reassembly

NBYTES = "nbytes"
"""Where the words tell how many bytes of arrays follow."""


def messages(words: dict[str, Any], arrays: Sequence[memoryview], largest: int) -> Iterator[Any]:
    """Yield the payloads: first the words, then the arrays, each in as many pieces as it takes.

    Args:
        words: what JSON can say; not ``"nbytes"``.
        arrays: their bytes, one after the other.
        largest: bytes of a message.
    """
    yield json.dumps({**words, NBYTES: sum(map(len, arrays))}).encode()
    for array in arrays:
        for start in range(0, len(array), largest):
            yield array[start : start + largest]


class Document(Reassembly):
    """What such messages say, as they come.

    Args:
        payload: of the first.
        most: bytes that the arrays may take.

    Attributes:
        words: what the first one says.

    Raises:
        Refused: it begins no such messages, or there would be more than ``most`` bytes.
    """

    def __init__(self, payload: Any, most: int) -> None:
        try:
            words = json.loads(bytes(payload))
            nbytes = words[NBYTES]
            if type(nbytes) is not int or nbytes < 0:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Refused(f"{bytes(payload[:40])!r} says nothing of arrays that follow") from None
        if nbytes > most:
            raise Refused(f"{nbytes} bytes would follow, and there is room for {most}")
        super().__init__(nbytes)
        self.words: dict[str, Any] = words

    def append(self, fragment: Any) -> None:
        """As `Reassembly.append`.

        Raises:
            Refused: the fragment is empty, or larger than the rest.
        """
        try:
            super().append(fragment)
        except ValueError as error:
            raise Refused(str(error)) from None
