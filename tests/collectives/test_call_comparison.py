"""Calls of the same number that differ are found; what means nothing is passed over."""

from __future__ import annotations

import pytest

from wingbeat.collectives.waits import CallTable
from wingbeat.transport import loopback
from wingbeat.transport.world import World


def test_different_call_of_the_same_number_is_found() -> None:
    first, second = loopback.worlds(2)
    mine, theirs = CallTable(first, 0), CallTable(second, 0)
    assert mine.compare({3: "sum", 4: "gather"}, [0, 1]) is None
    assert theirs.compare({4: "sum", 5: "gather"}, [0]) == (0, "sum", "gather")
    assert mine.compare({3: "sum", 4: "gather"}, [0, 1]) == (1, "gather", "sum")


def test_calls_of_other_numbers_lanes_channels_and_ranks_are_not_compared() -> None:
    def body(world: World) -> list[object]:
        channel = world.open_channel()
        calls = [CallTable(world, 0), CallTable(world, 1), CallTable(channel, 0)]
        said = [f"{n} of rank {world.rank}" if n else "the same" for n in range(3)]
        if world.rank == 0:
            for each, call in zip(calls, said, strict=True):
                each.compare({7: call}, [])
        world.exchange("said", 0)
        if world.rank == 0:
            return []
        return [
            calls[0].compare({7: "the same"}, [0]),
            calls[0].compare({6: "another"}, [0]),
            calls[0].compare({7: "another"}, [1]),
            calls[1].compare({7: "1 of rank 0"}, [0]),
            calls[2].compare({7: "2 of rank 0"}, [0]),
        ]

    members = loopback.worlds(2)
    assert loopback.run(members, body) == [[], [None] * 5]
    for world in members:
        world.close()


@pytest.mark.parametrize("said", ["", "\n\n", "x sum", "-3 sum", "3", "3.0 sum", " 3 sum", "4 sum"])
def test_malformed_entries_are_ignored(said: str) -> None:
    first, _ = loopback.worlds(2)
    first.store.set(f"{first.path}/calls/0/1", said)
    found = CallTable(first, 0).compare({3: "sum"}, [1])
    assert found == ((1, "sum", "") if said == "3" else None)


def test_call_of_a_peer_is_shortened_to_one_line() -> None:
    first, _ = loopback.worlds(2)
    first.store.set(f"{first.path}/calls/0/1", "3 \x1b[31m" + "x" * 5000)
    found = CallTable(first, 0).compare({3: "sum"}, [1])
    assert found is not None
    assert found[2].isprintable()
    assert len(found[2]) <= 120
