"""What `wingbeat top` shows of a worker under bounded staleness. Pure."""

from __future__ import annotations

from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.observe.meter import Cell, Section

BITS = 16
"""Workers up to which a cell of the index shows each one's bit, and not how many are set."""


def shown(machine: Worker, workers: int, colayers: int) -> list[Section]:
    """Return how far this worker is, and the oldest row of its index that is not complete.

    Another thread than those that use the machine may ask: what is read takes no lock, and may be
    of two moments.

    Args:
        machine: this worker's.
        workers: how many there are.
        colayers: of how many columns to show; one for each.
    """
    at, in_flight = machine.at, machine.pace.ahead
    fastest = max(at, machine.zeta)  # between two iterations it is about to enter ``at``
    rows: dict[str, Cell] = {
        "iteration": at,
        "fastest": fastest,
        "behind": fastest - at,
        "dropped": len(machine.dropped),
        "in_flight": "any" if in_flight is None else in_flight,
        "waiting": machine.waiting,
        "pulled": machine.pulls,
    }
    row = machine.gei.retired
    index: dict[str, Cell] = {"row": row}
    for colayer, mask in enumerate(machine.gei.row(row, own=machine.rank)[:colayers]):
        index[f"c{colayer}"] = bits(mask, workers)
    return [Section("staleness", rows), Section("exchanged", index)]


def bits(mask: int, workers: int) -> str:
    """Return the workers whose bits are set, worker 0 first; of many, how many.

    >>> bits(0b101, 4), bits(0b101, 25)
    ('1.1.', '2/25')
    """
    if workers > BITS:
        return f"{mask.bit_count()}/{workers}"
    return "".join("1" if mask >> worker & 1 else "." for worker in range(workers))
