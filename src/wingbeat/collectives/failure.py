"""Why the lanes of a world have failed: what the first of them says, all say."""

from __future__ import annotations

import threading

from wingbeat.errors import PeerError


class Failure:
    """Shared by all lanes of one world.

    It keeps the reason and no exception: one that was raised holds the frames it came by, with
    their buffers and worlds.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._claimed = False
        self._settled = threading.Event()
        self._reason = ""

    def claim(self) -> bool:
        """Whether the caller is the first to fail, and is to `settle` why."""
        with self._changing:
            first, self._claimed = not self._claimed, True
        return first

    def settle(self, reason: str) -> None:
        """Say why, to whoever waits for it and whoever starts anything after this."""
        self._reason = reason
        self._settled.set()

    def reason(self) -> str:
        """Return what the first says, as soon as it has found that out."""
        self._settled.wait()
        return self._reason

    def refuse(self) -> None:
        """Go on if nothing has failed.

        Raises:
            PeerError: something has, so that the workers are no longer in step.
        """
        if self._settled.is_set():
            raise PeerError(self._reason)
