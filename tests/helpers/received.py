"""Messages as a mailbox returns them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Received(NamedTuple):
    """The attributes of a message that receivers read."""

    kind: int
    ids: tuple[int, ...] = (0, 0, 0, 0)
    payload: Any = b""
    peer: int = 0
