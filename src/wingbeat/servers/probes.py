"""Messages that say nothing and have to arrive: so a card that died is found by who waits for it.

What is lost on a card shows to its sender alone. Who only waits for something to come has sent
nothing that could fail to arrive, and would give up without knowing over which card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from wingbeat.errors import PeerError
from wingbeat.servers.protocol import Kind, interface_of

if TYPE_CHECKING:
    from wingbeat.transport.messages.frames import Posted
    from wingbeat.transport.messages.mailbox import Mailbox

_QUIET_S, _PART = 0.5, 0.05


def quiet_of(timeout: float) -> float:
    """Return after how many seconds without a word somebody is probed.

    So soon that the silence which follows is over before any wait is: see `config.SILENT`.

    >>> quiet_of(300.0), quiet_of(4.0)
    (0.5, 0.2)
    """
    return min(_QUIET_S, _PART * timeout)


class Probes:
    """One process's probes: one under way to each peer over each interface.

    Args:
        mailbox: joins it to the peers.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._under_way: dict[tuple[int, int], Posted] = {}

    def send(self, peer: int, links: Iterable[int]) -> None:
        """Probe a peer over each of these links, unless it has not had the last one yet."""
        reach = self._mailbox.interfaces(peer)
        for interface in sorted({interface_of(reach, link) for link in links}):
            before = self._under_way.get((peer, interface))
            if before is not None and not before.arrived:
                continue
            # Who is gone, or has no room for it, is found out without.
            with contextlib.suppress(PeerError):
                self._under_way[peer, interface] = self._mailbox.post(
                    peer, Kind.ALIVE, interface=interface, urgency=0, seconds=0.0
                )
