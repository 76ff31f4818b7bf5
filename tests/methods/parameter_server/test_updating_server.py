"""`Server` with an optimizer: failures, timeouts and invalid requests."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from helpers.mail import Clock
from helpers.server_simulation import LARGEST, FakeNetwork, SentMessage
from helpers.server_update_simulation import DESCRIPTION, SETTINGS
from wingbeat.methods.parameter_server.aggregator import Aggregator
from wingbeat.methods.parameter_server.protocol import (
    NO_ROUND,
    UPDATE_KINDS,
    Document,
    Kind,
    Order,
    pack_route,
    split_document,
)
from wingbeat.methods.parameter_server.server import Server
from wingbeat.methods.parameter_server.shard_optimizer import ShardOptimizer
from wingbeat.methods.parameter_server.shard_updates import ShardUpdates

SERVER = 2


class Rig:
    """Two workers, and a server that has slices of four numbers each."""

    def __init__(
        self, order: Order = Order.READY, numel: int = 4, slices: int = 1, **changed: Any
    ) -> None:
        self.network, self.clock = FakeNetwork(random.Random(0), 2), Clock()
        self.workers = [self.network.box(rank) for rank in range(2)]
        self.box = self.network.box(SERVER)
        self.numel, self.slices = numel, slices
        aggregator = Aggregator(2, 1 << 20)
        updates = ShardUpdates(
            2, lambda: ShardOptimizer(DESCRIPTION | changed), aggregator.completed_sum, 1 << 20
        )
        self.service = Server(
            self.box, 2, aggregator, updates, order=order, timeout=5.0, clock=self.clock
        )

    def send(self, rank: int, kind: int, payload: Any = b"", ids: Any = (1, 0, 0, 0),
             dtype: str = "") -> None:  # fmt: skip
        self.workers[rank].post(SERVER, kind, payload, ids=ids, dtype=dtype, urgency=0)

    def hold(self) -> None:
        words = {"dtype": "float32", "numel": self.numel,
                 "pieces": [[0, 0, 0, self.numel]], "state": [None]}  # fmt: skip
        data = memoryview(np.ones(self.numel, "f4")).cast("B")
        for number in range(self.slices):
            for count, payload in enumerate(split_document(words, [data], LARGEST)):
                kind = Kind.CONTINUATION if count else Kind.LOAD
                self.send(0, kind, bytes(payload), (1, number, 0, 0))
        for rank in (0, 1):
            self.send(rank, Kind.BARRIER)

    def step(self, rank: int, number: int = 1, turn: int = 0, **more: Any) -> None:
        words = {"digest": "", "groups": [SETTINGS], "used": "1"} | more
        self.send(rank, Kind.STEP, json.dumps(words).encode(), (1, turn, number, 1))

    def push(self, turn: int = 0) -> None:
        for rank in (0, 1):
            payload = np.ones(self.numel, "f4")
            for number in range(self.slices):
                ids = (1, number, turn, pack_route(1, 3))
                self.send(rank, Kind.PUSH, payload, ids, "float32")

    def run(self) -> None:
        for _ in range(300):
            for _ in range(5):
                self.network.move()
            self.service.step(self.box.poll(keep=True))

    def received(self, rank: int) -> list[SentMessage]:
        out = []
        while (message := self.workers[rank].poll()) is not None:
            out.append(message)
        return out

    def counting(self) -> int:
        """Bytes that count against the workers' windows."""
        return sum(sum(worker._used.values()) for worker in self.workers)

    def reasons(self) -> list[str]:
        found = [message for rank in (0, 1) for message in self.received(rank)]
        return [bytes(each.payload).decode() for each in found if each.kind == Kind.FAILED]


def test_parameters_are_sent_in_class_of_last_push() -> None:
    rig = Rig()
    rig.hold()
    rig.run()
    rig.push()
    rig.step(0)
    rig.step(1)
    rig.run()
    for rank in (0, 1):
        [message] = rig.received(rank)
        assert (message.kind, message.dtype, message.urgency) == (Kind.PARAMETERS, "float32", 1)
        assert tuple(message.ids) == (1, 0, 1, pack_route(1, 3))
        torch.testing.assert_close(
            torch.frombuffer(bytearray(message.payload), dtype=torch.float32),
            torch.full((4,), 0.8),
        )


def test_fetch_in_forward_order_reserves_its_place() -> None:
    rig = Rig(Order.FORWARD)
    rig.hold()
    rig.push()
    rig.run()
    rig.send(0, Kind.FETCH, ids=(1, 0, 1, 0))
    rig.run()
    assert rig.service._queue.queued == 1
    rig.step(0)
    rig.step(1)
    rig.run()
    assert [message.kind for message in rig.received(0)] == [Kind.PARAMETERS]
    assert [message.kind for message in rig.received(1)] == [Kind.PARAMETERS]


def test_state_is_split_into_messages() -> None:
    rig = Rig(numel=100)
    rig.hold()
    rig.push()
    rig.step(0)
    rig.step(1)
    rig.run()
    rig.received(1)
    rig.box.largest = 150
    rig.send(1, Kind.STATE, ids=(1, 0, 1, 0))
    rig.run()
    first, *more = rig.received(1)
    assert first.kind == Kind.STATE
    assert [message.kind for message in more] == [Kind.CONTINUATION] * 3
    document = Document(first.payload, 1 << 20)
    for message in more:
        assert not document.complete
        document.append(message.payload)
    assert document.complete
    assert document.fields["state"] == [{"momentum_buffer": {"each": "float32"}}]
    assert np.frombuffer(document.data, "f4").tolist() == [2.0] * 100


def test_update_request_without_optimizer_fails() -> None:
    for kind in sorted(UPDATE_KINDS):
        network, clock = FakeNetwork(random.Random(0), 1), Clock()
        worker, box = network.box(0), network.box(1)
        service = Server(box, 1, Aggregator(1, 1 << 20), clock=clock)  # type: ignore[arg-type]
        worker.post(1, kind, b"", ids=(0, 0, 0, 0))
        for _ in range(60):
            network.move()
            service.step(box.poll(keep=True))
        assert f"a message of kind {int(kind)}" in bytes(worker.poll().payload).decode()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Kind.SUM, "rank 1 sent a message of kind 4"),
        (Kind.PARAMETERS, "rank 1 sent a message of kind 14"),
        (Kind.EXPECT, "rank 1 sent a malformed message: kind is 16; allowed: 1, "),
        (99, "rank 1 sent a malformed message: kind is 99; allowed: 1, "),
    ],
)
def test_other_kinds_fail(kind: int, why: str) -> None:
    rig = Rig()
    rig.send(1, kind)
    rig.run()
    assert [reason[: len(why)] for reason in rig.reasons()] == [why] * 2


def test_optimizer_failure_is_sent_to_all_once() -> None:
    rig = Rig()
    rig.hold()
    rig.push()
    rig.step(0, groups=[{**SETTINGS, "lr": None}])
    rig.step(1, groups=[{**SETTINGS, "lr": None}])
    rig.run()
    first, second = rig.reasons()
    assert first == second
    assert first.startswith("optimizer SGD: TypeError: ")
    assert not rig.service.has_work
    rig.push(1)
    rig.run()
    assert rig.reasons() == []


def test_optimizer_import_error_is_sent_to_all() -> None:
    rig = Rig(module="wingbeat.nowhere")
    rig.hold()
    rig.run()
    why = "cannot create the optimizer on a server: ModuleNotFoundError: No module named"
    assert [text[: len(why)] for text in rig.reasons()] == [why] * 2


def test_missing_step_request_times_out() -> None:
    rig = Rig()
    rig.hold()
    rig.step(0, turn=NO_ROUND)
    rig.run()
    rig.clock.now += 4.9
    rig.run()
    assert rig.reasons() == []
    rig.clock.now += 0.3
    rig.run()
    assert rig.reasons() == ["no step from rank 1 within 5 s"] * 2


def test_missing_barrier_times_out() -> None:
    rig = Rig()
    rig.hold()
    rig.run()
    rig.send(0, Kind.BARRIER)
    rig.send(0, Kind.STATE)
    rig.run()
    rig.clock.now += 5.1
    rig.run()
    assert rig.reasons() == ["no optimizer state from rank 1 within 5 s"] * 2


def test_lost_worker_fails_only_with_pending_step() -> None:
    rig = Rig()
    rig.hold()
    rig.push()
    rig.run()
    rig.box.gone.add(1)
    rig.clock.now += 1.0
    rig.run()
    assert rig.reasons() == []
    rig.step(0)
    rig.run()
    rig.clock.now += 1.0
    rig.run()
    assert rig.reasons() == ["rank 1 has left"]


def test_server_with_work_does_not_block() -> None:
    rig = Rig(slices=5)
    rig.hold()
    rig.push()
    for rank in (0, 1):
        rig.step(rank)
    waits: list[tuple[bool, float]] = []

    def take(seconds: float, *, keep: bool) -> Any:
        waits.append((rig.service.has_work, seconds))
        for _ in range(5):
            rig.network.move()
        return rig.box.poll(keep=keep)

    rig.box.next = take  # type: ignore[attr-defined]
    rig.service.run(lambda: len(waits) < 200)
    assert {seconds for busy, seconds in waits if busy} == {0.0}
    assert all(seconds > 0 for busy, seconds in waits if not busy)
    rig.run()
    made = [message.ids[1] for message in rig.received(0) if message.kind == Kind.PARAMETERS]
    assert made == [0, 1, 2, 3, 4]


def test_handled_messages_free_their_window() -> None:
    rig = Rig()
    rig.hold()
    rig.push()
    for rank in (0, 1):
        rig.step(rank)
    rig.run()
    rig.send(0, Kind.GRADIENTS, np.ones(4, "f4"), (1, 0, 2, 0))
    rig.send(1, Kind.STATE, ids=(1, 0, 1, 0))
    rig.run()
    assert rig.reasons() == []
    assert rig.counting() == 0
    rig.send(0, Kind.PUSH, np.ones(4, "f4"), (1, 0, 1, 0), "float32")
    rig.run()
    assert rig.counting() == 0, "rank 0's are added at once"
    rig.send(1, Kind.FETCH, ids=(1, 0, 7, 0))
    rig.send(1, Kind.BARRIER)
    rig.run()
    assert rig.reasons() == ["rank 1 requested slice 0 after update 7"] * 2
    assert rig.counting() == 0


@pytest.mark.parametrize(
    ("kind", "route", "why"),
    [
        (Kind.PUSH, pack_route(5, 0), "rank 1 requested class 5; there are 2"),
        (Kind.STEP, pack_route(5, 0), "rank 1 requested class 5; there are 2"),
        (Kind.PUSH, 0, "rank 1 pushed slice 0 of round 3 in round -1"),
        (Kind.CONTINUATION, 0, "rank 1 sent a fragment without a document"),
    ],
)
def test_refused_messages_free_their_window(kind: Kind, route: int, why: str) -> None:
    rig = Rig()
    rig.send(1, kind, np.ones(4, "f4"), (1, 0, 3, route), "float32")
    rig.run()
    assert rig.reasons() == [why] * 2
    assert rig.counting() == 0


def test_server_process_without_optimizer_loads_no_torch() -> None:
    """It takes a second and a hundred megabytes."""
    main = "wingbeat.methods.parameter_server.__main__"
    code = f"import sys, {main}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
