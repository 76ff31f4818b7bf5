"""Which flows lead to whom, and which one a message takes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from wingbeat.errors import UsageError
from wingbeat.transport.messages.endpoint import Route


class Routes:
    """The routes of one process.

    Args:
        routes: all that there are.
        own: this process's number.
        name: what messages call a process of that number.

    Attributes:
        me: what messages call this process.
    """

    def __init__(self, routes: Iterable[Route], own: int, name: Callable[[int], str]) -> None:
        self.name = name
        self.me = name(own)
        self.renew(routes)

    def renew(self, routes: Iterable[Route]) -> None:
        """Have these routes from now on."""
        self._by_peer: dict[int, list[Route]] = {}
        for route in routes:
            self._by_peer.setdefault(route.peer, []).append(route)
        self._usual = {peer: _usual(found) for peer, found in self._by_peer.items()}
        self._interfaces = {
            peer: tuple(dict.fromkeys(route.interface for route in found))
            for peer, found in self._by_peer.items()
        }

    @property
    def peers(self) -> tuple[int, ...]:
        """The numbers of those whom routes lead to."""
        return tuple(self._by_peer)

    def interfaces(self, peer: int) -> tuple[int, ...]:
        """The own interfaces that reach ``peer``.

        Raises:
            UsageError: no route leads there.
        """
        self.check([peer])
        return self._interfaces[peer]

    def choose(self, peer: int, interface: int | None, urgency: int | None) -> Route:
        """Return the route that a message takes; the first interface and the last class if None.

        Raises:
            UsageError: there is no such route.
        """
        usual = self._usual.get(peer) or _usual(self._to(peer))
        if interface is None and urgency is None:
            return usual
        route = Route(
            peer,
            usual.interface if interface is None else interface,
            usual.urgency if urgency is None else urgency,
        )
        routes = self._by_peer[peer]
        if route not in routes:
            raise UsageError(
                f"interface={interface!r}, urgency={urgency!r} to {self.name(peer)}: allowed are "
                f"interfaces {sorted({r.interface for r in routes})} and classes "
                f"{sorted({r.urgency for r in routes})}"
            )
        return route

    def check(self, peers: Iterable[int]) -> None:
        """Raise a `UsageError` if no route leads to one of them."""
        for peer in peers:
            self._to(peer)

    def names(self, peers: Iterable[int]) -> str:
        """Return what messages call these processes."""
        return ", ".join(self.name(peer) for peer in sorted(peers))

    def _to(self, peer: int) -> list[Route]:
        if peer not in self._by_peer:
            raise UsageError(
                f"{self.me} has no connection to {self.name(peer)}; allowed: "
                f"{self.names(self.peers) or 'none'}"
            )
        return self._by_peer[peer]


def _usual(routes: list[Route]) -> Route:
    first = routes[0].interface
    return max((r for r in routes if r.interface == first), key=lambda r: r.urgency)
