"""Who is lost or has left, and what a wait for them says. Pure."""

from __future__ import annotations

from wingbeat.errors import PeerError
from wingbeat.transport.messages.endpoint import Endpoint
from wingbeat.transport.messages.routes import Routes


class Absent:
    """The peers of one endpoint that will not answer."""

    def __init__(self, endpoint: Endpoint, routes: Routes) -> None:
        self._endpoint, self._routes = endpoint, routes
        self._reported: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._endpoint.lost or self._endpoint.left)

    def error(self, what: str) -> PeerError:
        """Return what to raise: this process's name, and ``what``."""
        return PeerError(f"{self._routes.me}: {what}")

    def check(self, peer: int, what: str) -> None:
        """Raise a `PeerError` if ``peer`` is gone, so that this process cannot do ``what``."""
        if peer in self._endpoint.lost:
            raise self.error(f"{self._routes.name(peer)} {self._endpoint.lost[peer]}")
        if peer in self._endpoint.left:
            raise self.error(f"{self._routes.name(peer)} has left, so this process cannot {what}")

    def check_waiting(self, wanted: frozenset[int] | None) -> None:
        """Raise a `PeerError` if no message can come, or once for each peer that was lost."""
        if wanted is not None:
            for peer in wanted:
                self.check(peer, "wait for a message of it")
            return
        self._reported &= self._endpoint.lost.keys()  # others were heard again
        for peer in self._endpoint.lost.keys() - self._reported:
            self._reported.add(peer)
            self.check(peer, "wait for messages")
        peers = self._routes.peers
        if self._endpoint.left.union(self._endpoint.lost).issuperset(peers):
            raise self.error(f"everyone has left: {self._routes.names(peers)}")
