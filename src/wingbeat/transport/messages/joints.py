"""What makes and ends connections while a mailbox is open, as processes go and come again."""

from __future__ import annotations

from typing import Protocol

from wingbeat.transport.messages.card import Card
from wingbeat.transport.messages.endpoint import Endpoint


class Joints(Protocol):
    """Connects an endpoint to peers."""

    def part(self, endpoint: Endpoint, peer: int) -> None:
        """End all connections to a peer."""

    def join(self, endpoint: Endpoint, peer: int, card: Card) -> None:
        """Make the flows to a peer, over each interface and in each class that reach it."""
