"""`ShardUpdates`: valid and invalid requests to a server with an optimizer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from wingbeat.methods.parameter_server.aggregator import SLICE_OVERHEAD, SliceSum
from wingbeat.methods.parameter_server.protocol import (
    NO_ROUND,
    Ids,
    Kind,
    RequestError,
    pack_numbers,
    pack_route,
    split_document,
    unpack_numbers,
)
from wingbeat.methods.parameter_server.shard_updates import ParameterReply, ShardUpdates

NBYTES = 8


class FakeParameters:
    dtype = "float32"

    def __init__(self, values: Any) -> None:
        self.values, self.nbytes = values, NBYTES

    @property
    def memory(self) -> Any:
        return self.values


class FakeOptimizer:
    """Subtracts gradients from two numbers."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.remembers = 0

    def load(self, fields: Any, data: bytearray) -> Any:
        self.log.append("load")
        return FakeParameters(np.frombuffer(bytes(data), "f4").copy())

    def set_values(self, params: Any, data: bytearray) -> None:
        params.values = np.frombuffer(bytes(data), "f4").copy()

    def copy_values(self, params: Any) -> None:
        self.log.append("copy")
        params.values = params.values.copy()

    def drop(self, params: Any) -> None:
        self.log.append("drop")

    def export_state(self, params: Any) -> Any:
        return {"values": params.values.tolist()}, []

    def set_options(self, groups: Any, scaler: Any) -> None:
        self.log.append(("set_options", groups))

    def step(self, params: Any, gradients: Any, used: frozenset[int]) -> None:
        gradients = np.asarray(gradients).view("f4")
        self.log.append(("step", sorted(used)))
        params.values -= gradients
        params.nbytes += self.remembers
        gradients[:] = 99.0


class Rig:
    """Two workers, one server, some slices of two numbers."""

    def __init__(self, slices: int = 2, most: int = 1 << 20) -> None:
        self.optimizer, self.sums = FakeOptimizer(), dict[Any, SliceSum]()
        self.updates = ShardUpdates(2, lambda: self.optimizer, self.finished, most)
        self.slices = slices

    def finished(self, key: tuple[int, int], number: int) -> SliceSum | None:
        return self.sums.get((*key, number))

    def say(self, rank: int, kind: int, payload: bytes = b"", **ids: int) -> list[ParameterReply]:
        found = Ids(**({"plan": 1, "slice": 0, "round": 0, "route": 0} | ids))
        return list(self.updates.handle(rank, kind, found, payload, float(ids.get("now", 0))))

    def hold(self, rank: int, number: int, value: float = 10.0, *, plan: int = 1, of: int = 0,
             words: Any = None) -> None:  # fmt: skip
        data = np.full(2, value, "f4")
        said = {"pieces": []} if words is None else words
        first, *more = split_document(said, [memoryview(data).cast("B")], 1000)
        self.say(rank, Kind.LOAD, first, slice=number, plan=plan, round=of)
        for payload in more:
            self.say(rank, Kind.CONTINUATION, payload, slice=number, plan=plan, round=of)

    def ready(self, plan: int = 1) -> list[ParameterReply]:
        return [r for rank in (0, 1) for r in self.say(rank, Kind.BARRIER, plan=plan)]

    def begin(self) -> Rig:
        for number in range(self.slices):
            self.hold(number % 2, number)
        self.ready()
        return self

    def sum(self, number: int, turn: int = 0, value: float = 1.0) -> SliceSum:
        made = SliceSum(turn, "float32", np.full(2, value, "f4"))
        self.sums[1, number, turn] = made
        self.updates.sum_completed((1, number))
        return made

    def step(self, rank: int, number: int = 1, *, turn: int = 0, unasked: bool = True,
             plan: int = 1, **words: Any) -> None:  # fmt: skip
        said: dict[str, Any] = {"digest": "d"}
        if rank == 0:
            said |= {"groups": [{}], "used": "3"}
        payload = json.dumps(said | words).encode()
        self.say(rank, Kind.STEP, payload, slice=turn, round=number, route=unasked, plan=plan)

    def steps(self, number: int = 1, **options: Any) -> None:
        for rank in (0, 1):
            self.step(rank, number, **options)

    def work(self) -> list[ParameterReply]:
        out = []
        while self.updates.has_work:
            out += list(self.updates.update_next())
        return out


def values(reply: ParameterReply) -> float:
    assert reply.params is not None
    return float(reply.params.result[0])


def test_slice_is_updated_once_sum_is_complete_and_step_requested() -> None:
    rig = Rig(3).begin()
    rig.sum(1)
    rig.step(0)
    assert not rig.updates.has_work, "the other worker may still send what was changed"
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
    assert rig.optimizer.log.count(("step", [0, 1])) == 3


def test_updates_follow_forward_order_and_route() -> None:
    rig = Rig(3).begin()
    for number, (urgency, position) in enumerate([(1, 2), (0, 0), (1, 1)]):
        rig.updates.set_route((1, number), pack_route(urgency, position))
        rig.sum(number)
    rig.steps()
    found = rig.work()
    assert [r.ids.slice for r in found] == [1, 1, 2, 2, 0, 0]
    assert [r.ids.route for r in found[::2]] == [
        pack_route(0, 0),
        pack_route(1, 1),
        pack_route(1, 2),
    ]


def test_fetch_returns_current_or_next_parameters() -> None:
    rig = Rig(1).begin()
    assert rig.say(1, Kind.FETCH, round=1, route=5)[0].params is None
    rig.sum(0)
    rig.steps(unasked=False)
    assert [(r.worker, r.ids.route) for r in rig.work()] == [(1, 5)]
    late = rig.say(0, Kind.FETCH, round=1)
    assert [values(r) for r in late] == [9.0]
    with pytest.raises(RequestError, match="rank 0 requested slice 0 after update 3"):
        rig.say(0, Kind.FETCH, round=3)
    with pytest.raises(RequestError, match="rank 0 requested slice 0 after update 0"):
        rig.say(0, Kind.FETCH, round=0)
    rig.say(0, Kind.FETCH, round=2)
    with pytest.raises(RequestError, match="rank 0 requested slice 0 after update 2"):
        rig.say(0, Kind.FETCH, round=2)


def test_sent_gradients_replace_sum_once() -> None:
    rig = Rig(2).begin()
    rig.sum(0)
    payload = bytes(np.full(2, 4.0, "f4"))
    rig.say(1, Kind.GRADIENTS, payload, slice=0)
    rig.steps(turn=NO_ROUND)
    assert sorted((r.ids.slice, values(r)) for r in rig.work() if r.worker == 0) == [
        (0, 6.0),
        (1, 10.0),
    ]
    rig.steps(2, turn=NO_ROUND)
    assert [values(r) for r in rig.work()] == [6.0, 6.0, 10.0, 10.0]
    assert bytes(payload) == bytes(np.full(2, 4.0, "f4"))
    with pytest.raises(
        RequestError, match="rank 1 sent 3 bytes of gradients for slice 0, which has 8"
    ):
        rig.say(1, Kind.GRADIENTS, b"abc", slice=0)


def test_update_with_readers_copies_values() -> None:
    rig = Rig(1).begin()
    total = rig.sum(0)
    total.readers.append(lambda: False)
    rig.steps()
    first = rig.work()[0].params
    assert first is not None
    assert total.result.tolist() == [1.0, 1.0]
    first.readers.append(lambda: False)
    rig.sum(0, 1)
    rig.steps(2, turn=1)
    assert [values(r) for r in rig.work()] == [8.0, 8.0]
    assert first.result.tolist() == [9.0, 9.0]
    assert rig.optimizer.log.count("copy") == 1


def test_update_without_readers_copies_nothing() -> None:
    rig = Rig(1).begin()
    total = rig.sum(0)
    total.readers.append(lambda: True)
    rig.steps()
    first = rig.work()[0].params
    assert first is not None
    assert total.result.tolist() == [99.0, 99.0]
    rig.sum(0, 1)
    rig.steps(2, turn=1)
    rig.work()
    assert "copy" not in rig.optimizer.log


def test_requests_after_barrier_wait_for_all_workers() -> None:
    rig = Rig()
    rig.hold(0, 0)
    rig.say(0, Kind.BARRIER)
    assert rig.say(0, Kind.STATE, slice=1) == []
    assert rig.say(0, Kind.FETCH, slice=1, round=1) == []
    rig.hold(1, 1, 20.0)
    found = rig.say(1, Kind.BARRIER)
    assert found[0].state == ({"values": [20.0, 20.0]}, [])
    assert found[1].params is None


def test_state_is_visible_after_all_workers_loaded() -> None:
    rig = Rig().begin()
    rig.hold(0, 0, 30.0)
    rig.say(0, Kind.BARRIER)
    # This worker has loaded nothing yet: it asks for what was before.
    assert rig.say(1, Kind.STATE, slice=0)[0].state == ({"values": [10.0, 10.0]}, [])
    assert rig.say(0, Kind.STATE, slice=1) == []
    rig.hold(1, 1, 40.0)
    assert rig.say(1, Kind.BARRIER)[0].state == ({"values": [40.0, 40.0]}, [])
    assert rig.say(1, Kind.STATE, slice=0)[0].state == ({"values": [30.0, 30.0]}, [])


def test_load_of_values_takes_effect_at_once() -> None:
    rig = Rig(1).begin()
    rig.sum(0)
    rig.hold(0, 0, 50.0, words={})
    rig.steps()
    assert [values(r) for r in rig.work()] == [49.0, 49.0]


def test_barrier_of_new_plan_drops_older_plan() -> None:
    rig = Rig().begin()
    assert rig.updates.nbytes == 2 * NBYTES
    rig.hold(0, 0, plan=2)
    rig.say(0, Kind.BARRIER, plan=2)
    assert rig.say(1, Kind.STATE, slice=1)[0].state is not None
    rig.say(1, Kind.BARRIER, plan=2)
    assert rig.updates.nbytes == NBYTES
    assert rig.optimizer.log.count("drop") == 2
    with pytest.raises(RequestError, match="slice 1 of plan 1, which is not loaded"):
        rig.say(1, Kind.STATE, slice=1)


def test_load_and_update_over_limit_raise() -> None:
    rig = Rig(1, most=4 * SLICE_OVERHEAD).begin()
    rig.sum(0)
    rig.optimizer.remembers = 3 * SLICE_OVERHEAD
    rig.steps()
    with pytest.raises(
        RequestError, match=f"need {3 * SLICE_OVERHEAD + NBYTES} bytes; the server's limit is"
    ):
        rig.work()
    rig = Rig(most=3 * (NBYTES + SLICE_OVERHEAD))
    for number in range(3):
        rig.hold(0, number)
    with pytest.raises(RequestError, match="a document of 8 bytes; 0 bytes are free"):
        rig.hold(0, 3)


def test_queued_requests_over_limit_raise() -> None:
    rig = Rig(most=4 * SLICE_OVERHEAD)
    rig.say(0, Kind.BARRIER)
    for _ in range(2):
        rig.say(0, Kind.GRADIENTS, bytes(SLICE_OVERHEAD))
    with pytest.raises(
        RequestError,
        match=f"{5 * SLICE_OVERHEAD} bytes; the server's limit is {4 * SLICE_OVERHEAD}",
    ):
        rig.say(0, Kind.STATE)
    rig = Rig(2, most=6 * SLICE_OVERHEAD).begin()
    for _ in range(20):
        rig.hold(0, 0)
        rig.say(0, Kind.BARRIER)
        rig.say(1, Kind.BARRIER)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"digest": "e"}, "rank 1 has other settings .* than rank 0: set the same"),
        ({"number": 2}, "rank 1 requested update 2 of plan 1, and others update 1 of plan 1"),
        ({"plan": 2}, "rank 1 requested update 1 of plan 2, and others"),
        ({"turn": NO_ROUND}, "rank 1 requested update 1"),
    ],
    ids=["settings", "number", "plan", "round"],
)
def test_different_steps_raise(words: Any, why: str) -> None:
    rig = Rig().begin()
    rig.step(0)
    with pytest.raises(RequestError, match=why):
        rig.step(1, **words)


def test_step_without_digest_is_not_compared() -> None:
    rig = Rig(1).begin()
    rig.sum(0)
    rig.step(0, digest="")
    rig.step(1, digest="x")
    assert len(rig.work()) == 2


def test_invalid_step_raises() -> None:
    rig = Rig().begin()
    rig.step(0)
    with pytest.raises(RequestError, match="rank 0 requested update 1"):
        rig.step(0)
    rig = Rig().begin()
    rig.say(0, Kind.STEP, b'{"digest": ""}', round=1)
    with pytest.raises(RequestError, match="no worker sent the settings"):
        rig.say(1, Kind.STEP, b'{"digest": ""}', round=1)
    rig = Rig().begin()
    with pytest.raises(RequestError, match="update 5 came after update 0"):
        rig.steps(5)
    rig = Rig().begin()
    with pytest.raises(RequestError, match="malformed parameters of a step"):
        rig.steps(used="spam")
    for payload in (b"", b"[]", b"{}", b"\xff"):
        with pytest.raises(RequestError, match="rank 0 sent malformed settings"):
            Rig().begin().say(0, Kind.STEP, payload, round=1)


@pytest.mark.parametrize("leader", [0, 1])
def test_settings_that_are_invalid_name_the_rank_that_sent_them(leader: int) -> None:
    rig = Rig().begin()
    settings = {"digest": "d", "groups": [{}], "used": "spam"}
    payloads = [json.dumps({"digest": "d"}).encode()] * 2
    payloads[leader] = json.dumps(settings).encode()
    rig.say(0, Kind.STEP, payloads[0], round=1)
    with pytest.raises(RequestError, match=f"rank {leader}: malformed parameters of a step"):
        rig.say(1, Kind.STEP, payloads[1], round=1)


def test_invalid_request_raises() -> None:
    rig = Rig().begin()
    with pytest.raises(RequestError, match="rank 1 sent a fragment without a document"):
        rig.say(1, Kind.CONTINUATION, b"abc")
    with pytest.raises(RequestError, match="slice 7 of plan 1, which is not loaded"):
        rig.say(1, Kind.FETCH, slice=7, round=1)
    with pytest.raises(RequestError, match="state of slice 0 after update 4; the last one is 0"):
        rig.say(1, Kind.STATE, round=4)
    with pytest.raises(RequestError, match="rank 0 sent a message of kind 77"):
        rig.say(0, 77)


def test_find_incomplete_and_is_waiting_for_name_late_worker() -> None:
    rig = Rig().begin()
    assert not rig.updates.is_waiting_for(1)
    rig.step(0)
    assert rig.updates.is_waiting_for(1)
    assert not rig.updates.is_waiting_for(0)
    assert rig.updates.find_incomplete(-1.0) is None
    assert rig.updates.find_incomplete(1.0) == ("step", {1})
    rig.step(1)
    assert rig.updates.find_incomplete(1.0) is None, "sums are looked after by themselves"
    rig = Rig().begin()
    rig.hold(1, 1)
    rig.say(1, Kind.BARRIER)
    rig.say(1, Kind.STATE)
    assert rig.updates.find_incomplete(1.0) == ("optimizer state", {0})
    assert rig.updates.is_waiting_for(0)


def test_failed_optimizer_creation_raises() -> None:
    def fail() -> Any:
        raise ModuleNotFoundError("No module named 'mine'\nor so")

    updates = ShardUpdates(1, fail, lambda key, number: None, 2000)
    words = "cannot create the optimizer on a server: ModuleNotFoundError: No module named 'mine'$"
    list(updates.handle(0, Kind.LOAD, Ids(1, 0, 0, 0), b'{"pieces": [], "nbytes": 0}'))
    with pytest.raises(RequestError, match=words):
        list(updates.handle(0, Kind.BARRIER, Ids(1, 0, 0, 0), b""))


def test_step_without_slices_completes_at_once() -> None:
    rig = Rig(0).begin()
    rig.steps()
    rig.steps(2)
    assert not rig.updates.has_work


def test_pack_numbers_round_trips() -> None:
    for numbers in (set(), {0}, {3, 64, 129}):
        assert unpack_numbers(pack_numbers(numbers)) == numbers
