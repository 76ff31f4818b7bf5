"""How a process leaves: it sees that all has arrived, and tells its peers."""

from __future__ import annotations

from collections.abc import Callable

from wingbeat.transport.messages.carrier import Carrier
from wingbeat.transport.messages.compose import farewell
from wingbeat.transport.messages.endpoint import Endpoint


def part(
    endpoint: Endpoint,
    carrier: Carrier,
    pump: Callable[[float], None],
    clock: Callable[[], float],
    seconds: float,
) -> set[int]:
    """Leave, within ``seconds``.

    Args:
        endpoint: the flows.
        carrier: what carries their frames.
        pump: sends and takes in what comes, until the time that it is given at the latest.
        clock: seconds.
        seconds: how long it may take.

    Returns:
        The peers at which not all has arrived.
    """
    gone = endpoint.left | set(endpoint.lost)
    flows = {r: f for r, f in endpoint.flows.items() if r.peer not in gone}
    now = clock()
    for route in flows:
        endpoint.post(route, farewell(), carrier.send, now)
    deadline = now + seconds
    # A peer that has left hears no more: that this end leaves need not arrive there.
    while any(
        not flow.empty and not (flow.ended and flow.only_leave)
        for route, flow in flows.items()
        if route.peer not in endpoint.lost
    ):
        if clock() >= deadline:
            break
        pump(deadline)
    endpoint.tell(clock())
    endpoint.flush(carrier.send, clock())
    return {route.peer for route, flow in flows.items() if not flow.only_leave}
