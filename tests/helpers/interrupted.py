"""A store that can be down for a while."""

from __future__ import annotations

from wingbeat.transport.loopback import Switchboard


class InterruptedStore(Switchboard):
    """A store that does not answer while it is ``down``."""

    down = False

    def set(self, key: str, value: str) -> None:
        """As `Store.set`."""
        if self.down:
            raise RuntimeError("Connection reset by peer")
        super().set(key, value)

    def has(self, key: str) -> bool:
        """As `Store.has`."""
        return not self.down and super().has(key)
