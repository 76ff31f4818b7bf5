"""What a server that updates does with what it is told, and with what it should not be told."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from wingbeat.methods.parameter_server.aggregator import EACH, Refused, Sum
from wingbeat.methods.parameter_server.documents import messages
from wingbeat.methods.parameter_server.notes import Reply, bits_of, numbers_in
from wingbeat.methods.parameter_server.protocol import NO_ROUND, Ids, Kind, wish_of
from wingbeat.methods.parameter_server.shard_updates import Updates

NBYTES = 8


class FakeHeld:
    dtype = "float32"

    def __init__(self, values: Any) -> None:
        self.values, self.nbytes = values, NBYTES

    @property
    def memory(self) -> Any:
        return self.values


class FakeApplier:
    """Subtracts gradients from two numbers."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.remembers = 0

    def hold(self, words: Any, data: bytearray) -> Any:
        self.log.append("hold")
        return FakeHeld(np.frombuffer(bytes(data), "f4").copy())

    def put(self, held: Any, data: bytearray) -> None:
        held.values = np.frombuffer(bytes(data), "f4").copy()

    def renew(self, held: Any) -> None:
        self.log.append("renew")
        held.values = held.values.copy()

    def drop(self, held: Any) -> None:
        self.log.append("drop")

    def export(self, held: Any) -> Any:
        return {"values": held.values.tolist()}, []

    def settle(self, groups: Any, words: Any) -> None:
        self.log.append(("settle", groups))

    def step(self, held: Any, gradients: Any, used: frozenset[int]) -> None:
        gradients = np.asarray(gradients).view("f4")
        self.log.append(("step", sorted(used)))
        held.values -= gradients
        held.nbytes += self.remembers
        gradients[:] = 99.0


class Rig:
    """Two workers, one server, some slices of two numbers."""

    def __init__(self, slices: int = 2, most: int = 1 << 20) -> None:
        self.applier, self.sums = FakeApplier(), dict[Any, Sum]()
        self.updates = Updates(2, lambda: self.applier, self.finished, most)
        self.slices = slices

    def finished(self, key: tuple[int, int], number: int) -> Sum | None:
        return self.sums.get((*key, number))

    def say(self, rank: int, kind: int, payload: bytes = b"", **ids: int) -> list[Reply]:
        found = Ids(**({"plan": 1, "slice": 0, "round": 0, "wish": 0} | ids))
        return list(self.updates.take(rank, kind, found, payload, float(ids.get("now", 0))))

    def hold(self, rank: int, number: int, value: float = 10.0, *, plan: int = 1, of: int = 0,
             words: Any = None) -> None:  # fmt: skip
        data = np.full(2, value, "f4")
        said = {"pieces": []} if words is None else words
        first, *more = messages(said, [memoryview(data).cast("B")], 1000)
        self.say(rank, Kind.HOLD, first, slice=number, plan=plan, round=of)
        for payload in more:
            self.say(rank, Kind.MORE, payload, slice=number, plan=plan, round=of)

    def ready(self, plan: int = 1) -> list[Reply]:
        return [r for rank in (0, 1) for r in self.say(rank, Kind.READY, plan=plan)]

    def begin(self) -> Rig:
        for number in range(self.slices):
            self.hold(number % 2, number)
        self.ready()
        return self

    def sum(self, number: int, turn: int = 0, value: float = 1.0) -> Sum:
        made = Sum(turn, "float32", np.full(2, value, "f4"))
        self.sums[1, number, turn] = made
        self.updates.summed((1, number))
        return made

    def step(self, rank: int, number: int = 1, *, turn: int = 0, unasked: bool = True,
             plan: int = 1, **words: Any) -> None:  # fmt: skip
        said: dict[str, Any] = {"digest": "d"}
        if rank == 0:
            said |= {"groups": [{}], "used": "3"}
        payload = json.dumps(said | words).encode()
        self.say(rank, Kind.STEP, payload, slice=turn, round=number, wish=unasked, plan=plan)

    def steps(self, number: int = 1, **options: Any) -> None:
        for rank in (0, 1):
            self.step(rank, number, **options)

    def work(self) -> list[Reply]:
        out = []
        while self.updates.due:
            out += list(self.updates.work())
        return out


def values(reply: Reply) -> float:
    assert reply.made is not None
    return float(reply.made.result[0])


def test_each_slice_is_updated_as_soon_as_its_sum_is_complete_and_all_have_told() -> None:
    rig = Rig(3).begin()
    rig.sum(1)
    rig.step(0)
    assert not rig.updates.due, "the other worker may still send what was changed"
    rig.step(1)
    first = rig.work()
    assert [(r.worker, r.ids.slice, r.ids.round, values(r)) for r in first] == [
        (0, 1, 1, 9.0),
        (1, 1, 1, 9.0),
    ]
    rig.sum(0)
    assert [r.ids.slice for r in rig.work()] == [0, 0]
    rig.sum(2)
    assert [r.ids.slice for r in rig.work()] == [2, 2]
    assert rig.applier.log.count(("step", [0, 1])) == 3


def test_what_forward_needs_first_is_updated_first_and_goes_in_its_class() -> None:
    rig = Rig(3).begin()
    for number, (urgency, position) in enumerate([(1, 2), (0, 0), (1, 1)]):
        rig.updates.wish((1, number), wish_of(urgency, position))
        rig.sum(number)
    rig.steps()
    found = rig.work()
    assert [r.ids.slice for r in found] == [1, 1, 2, 2, 0, 0]
    assert [r.ids.wish for r in found[::2]] == [wish_of(0, 0), wish_of(1, 1), wish_of(1, 2)]


def test_parameters_that_are_asked_for() -> None:
    rig = Rig(1).begin()
    assert rig.say(1, Kind.FETCH, round=1, wish=5)[0].made is None
    rig.sum(0)
    rig.steps(unasked=False)
    assert [(r.worker, r.ids.wish) for r in rig.work()] == [(1, 5)]
    late = rig.say(0, Kind.FETCH, round=1)
    assert [values(r) for r in late] == [9.0]
    with pytest.raises(Refused, match="rank 0 wants slice 0 after update 3"):
        rig.say(0, Kind.FETCH, round=3)
    with pytest.raises(Refused, match="rank 0 wants slice 0 after update 0"):
        rig.say(0, Kind.FETCH, round=0)
    rig.say(0, Kind.FETCH, round=2)
    with pytest.raises(Refused, match="rank 0 wants slice 0 after update 2"):
        rig.say(0, Kind.FETCH, round=2)


def test_final_gradients_take_the_place_of_sums_once() -> None:
    rig = Rig(2).begin()
    rig.sum(0)
    payload = bytes(np.full(2, 4.0, "f4"))
    rig.say(1, Kind.FINAL, payload, slice=0)
    rig.steps(turn=NO_ROUND)
    assert sorted((r.ids.slice, values(r)) for r in rig.work() if r.worker == 0) == [
        (0, 6.0),
        (1, 10.0),
    ]
    rig.steps(2, turn=NO_ROUND)
    assert [values(r) for r in rig.work()] == [6.0, 6.0, 10.0, 10.0]
    assert bytes(payload) == bytes(np.full(2, 4.0, "f4"))
    with pytest.raises(Refused, match="rank 1 sent 3 bytes of final gradients"):
        rig.say(1, Kind.FINAL, b"abc", slice=0)


def test_what_is_still_being_read_stays_as_it_is() -> None:
    rig = Rig(1).begin()
    total = rig.sum(0)
    total.readers.append(lambda: False)
    rig.steps()
    first = rig.work()[0].made
    assert first is not None
    assert total.result.tolist() == [1.0, 1.0]
    first.readers.append(lambda: False)
    rig.sum(0, 1)
    rig.steps(2, turn=1)
    assert [values(r) for r in rig.work()] == [8.0, 8.0]
    assert first.result.tolist() == [9.0, 9.0]
    assert rig.applier.log.count("renew") == 1


def test_nothing_is_copied_where_nobody_reads() -> None:
    rig = Rig(1).begin()
    total = rig.sum(0)
    total.readers.append(lambda: True)
    rig.steps()
    first = rig.work()[0].made
    assert first is not None
    assert total.result.tolist() == [99.0, 99.0]
    rig.sum(0, 1)
    rig.steps(2, turn=1)
    rig.work()
    assert "renew" not in rig.applier.log


def test_whoever_is_early_waits_until_all_have_held_what_they_have() -> None:
    rig = Rig()
    rig.hold(0, 0)
    rig.say(0, Kind.READY)
    assert rig.say(0, Kind.STATE, slice=1) == []
    assert rig.say(0, Kind.FETCH, slice=1, round=1) == []
    rig.hold(1, 1, 20.0)
    found = rig.say(1, Kind.READY)
    assert found[0].state == ({"values": [20.0, 20.0]}, [])
    assert found[1].made is None


def test_nobody_sees_state_that_only_some_have_loaded() -> None:
    rig = Rig().begin()
    rig.hold(0, 0, 30.0)
    rig.say(0, Kind.READY)
    # This worker has loaded nothing yet: it asks for what was before.
    assert rig.say(1, Kind.STATE, slice=0)[0].state == ({"values": [10.0, 10.0]}, [])
    assert rig.say(0, Kind.STATE, slice=1) == []
    rig.hold(1, 1, 40.0)
    assert rig.say(1, Kind.READY)[0].state == ({"values": [40.0, 40.0]}, [])
    assert rig.say(1, Kind.STATE, slice=0)[0].state == ({"values": [30.0, 30.0]}, [])


def test_values_alone_are_taken_at_once() -> None:
    rig = Rig(1).begin()
    rig.sum(0)
    rig.hold(0, 0, 50.0, words={})
    rig.steps()
    assert [values(r) for r in rig.work()] == [49.0, 49.0]


def test_an_older_plan_is_forgotten_when_all_have_the_new_one() -> None:
    rig = Rig().begin()
    assert rig.updates.nbytes == 2 * NBYTES
    rig.hold(0, 0, plan=2)
    rig.say(0, Kind.READY, plan=2)
    assert rig.say(1, Kind.STATE, slice=1)[0].state is not None
    rig.say(1, Kind.READY, plan=2)
    assert rig.updates.nbytes == NBYTES
    assert rig.applier.log.count("drop") == 2
    with pytest.raises(Refused, match="slice 1 of plan 1, whose parameters nobody has sent"):
        rig.say(1, Kind.STATE, slice=1)


def test_memory_is_limited() -> None:
    rig = Rig(1, most=4 * EACH).begin()
    rig.sum(0)
    rig.applier.remembers = 3 * EACH
    rig.steps()
    with pytest.raises(Refused, match=f"take {3 * EACH + NBYTES} bytes; the server has room for"):
        rig.work()
    rig = Rig(most=3 * (NBYTES + EACH))
    for number in range(3):
        rig.hold(0, number)
    with pytest.raises(Refused, match="8 bytes would follow, and there is room for 0"):
        rig.hold(0, 3)


def test_what_waits_for_other_workers_is_limited_too() -> None:
    rig = Rig(most=4 * EACH)
    rig.say(0, Kind.READY)
    for _ in range(2):
        rig.say(0, Kind.FINAL, bytes(EACH))
    with pytest.raises(Refused, match=f"{5 * EACH} bytes wait; the server has room for {4 * EACH}"):
        rig.say(0, Kind.STATE)
    rig = Rig(2, most=6 * EACH).begin()
    for _ in range(20):
        rig.hold(0, 0)
        rig.say(0, Kind.READY)
        rig.say(1, Kind.READY)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"digest": "e"}, "rank 1 has other settings .* than rank 0: set the same"),
        ({"number": 2}, "rank 1 makes update 2 in plan 1 while others make update 1 in plan 1"),
        ({"plan": 2}, "rank 1 makes update 1 in plan 2 while others"),
        ({"turn": NO_ROUND}, "rank 1 makes update 1"),
    ],
    ids=["settings", "number", "plan", "round"],
)
def test_workers_that_tell_of_other_steps(words: Any, why: str) -> None:
    rig = Rig().begin()
    rig.step(0)
    with pytest.raises(Refused, match=why):
        rig.step(1, **words)


def test_a_worker_that_follows_has_no_settings_to_compare() -> None:
    rig = Rig(1).begin()
    rig.sum(0)
    rig.step(0, digest="")
    rig.step(1, digest="x")
    assert len(rig.work()) == 2


def test_steps_that_cannot_be_begun() -> None:
    rig = Rig().begin()
    rig.step(0)
    with pytest.raises(Refused, match="rank 0 makes update 1"):
        rig.step(0)
    rig = Rig().begin()
    rig.say(0, Kind.STEP, b'{"digest": ""}', round=1)
    with pytest.raises(Refused, match="no worker sent the settings"):
        rig.say(1, Kind.STEP, b'{"digest": ""}', round=1)
    rig = Rig().begin()
    with pytest.raises(Refused, match="update 5 came after update 0"):
        rig.steps(5)
    rig = Rig().begin()
    with pytest.raises(Refused, match="malformed parameters of a step"):
        rig.steps(used="spam")
    for payload in (b"", b"[]", b"{}", b"\xff"):
        with pytest.raises(Refused, match="rank 0 sent malformed settings"):
            Rig().begin().say(0, Kind.STEP, payload, round=1)


def test_what_no_worker_should_send() -> None:
    rig = Rig().begin()
    with pytest.raises(Refused, match="rank 1 sent more of nothing"):
        rig.say(1, Kind.MORE, b"abc")
    with pytest.raises(Refused, match="slice 7 of plan 1, whose parameters nobody has sent"):
        rig.say(1, Kind.FETCH, slice=7, round=1)
    with pytest.raises(Refused, match="state of slice 0 after update 4, which had 0"):
        rig.say(1, Kind.STATE, round=4)
    with pytest.raises(Refused, match="rank 0 sent a message of kind 77"):
        rig.say(0, 77)


def test_who_is_late_and_who_is_missed() -> None:
    rig = Rig().begin()
    assert not rig.updates.lacking(1)
    rig.step(0)
    assert rig.updates.lacking(1)
    assert not rig.updates.lacking(0)
    assert rig.updates.missing(-1.0) is None
    assert rig.updates.missing(1.0) == ("step", {1})
    rig.step(1)
    assert rig.updates.missing(1.0) is None, "sums are looked after by themselves"
    rig = Rig().begin()
    rig.hold(1, 1)
    rig.say(1, Kind.READY)
    rig.say(1, Kind.STATE)
    assert rig.updates.missing(1.0) == ("optimizer state", {0})
    assert rig.updates.lacking(0)


def test_an_optimizer_that_cannot_be_made() -> None:
    def fail() -> Any:
        raise ModuleNotFoundError("No module named 'mine'\nor so")

    updates = Updates(1, fail, lambda key, number: None, 2000)
    words = "cannot be made here: ModuleNotFoundError: No module named 'mine'$"
    list(updates.take(0, Kind.HOLD, Ids(1, 0, 0, 0), b'{"pieces": [], "nbytes": 0}'))
    with pytest.raises(Refused, match=words):
        list(updates.take(0, Kind.READY, Ids(1, 0, 0, 0), b""))


def test_a_step_of_no_slices_is_over_at_once() -> None:
    rig = Rig(0).begin()
    rig.steps()
    rig.steps(2)
    assert not rig.updates.due


def test_numbers_as_bits() -> None:
    for numbers in (set(), {0}, {3, 64, 129}):
        assert numbers_in(bits_of(numbers)) == numbers
