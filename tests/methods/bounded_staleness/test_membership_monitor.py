"""Failure detection and the membership log, with killed workers and partitions."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Collection, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.cards import Cards, bcube, star
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.membership import (
    MembershipMonitor,
    WorkerLost,
    WorkerRejoined,
)
from wingbeat.methods.bounded_staleness.messages import ViewProposal
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.transport.failures import publish_failure
from wingbeat.transport.graceful_shutdown import Departures
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.membership import (
    LogEntry,
    MembershipChange,
    MembershipClient,
    View,
)
from wingbeat.transport.mesh import Replica
from wingbeat.transport.messages.peers import PeerInfo


class Store(Switchboard):
    """A store that some workers cannot reach."""

    unreachable = False

    def claim(self, key: str, value: str) -> str:
        if self.unreachable:
            raise TimeoutError("connection reset")
        return super().claim(key, value)


def replica_of(n: int) -> Any:
    """What a rank knows of n replicas of two ranks each."""
    replicas = tuple((2 * number, 2 * number + 1) for number in range(n))
    return Replica(0, 0, (0, 1), ("shard",), (None,), "cpu", replicas, Store(), 0)


class Cluster:
    """Failure detectors of n workers, on one interface each unless ``reach`` is given."""

    def __init__(
        self,
        n: int,
        *,
        tolerates_loss: bool = True,
        reach: Sequence[Sequence[Collection[int]]] | None = None,
        said: Store | None = None,
        store: Store | None = None,
        column: int = -1,
    ) -> None:
        self.cards = Cards(star(n, 1) if reach is None else reach, patience=5.0)
        self.store, self.lines = store or Store(), list[str]()
        inside = None if column < 0 else replica_of(n)
        name: Any = "rank {}".format if column < 0 else lambda w: f"rank {2 * w + column}"
        self.said = said
        self.hidden = Store()
        self.hidden.unreachable = True
        self.machines = [Worker(w, n, StalenessBound(1, 1, 1), lambda *_: None) for w in range(n)]
        self.clients = [
            MembershipClient(self.store, "r", w, n, name=name, clock=self.cards.clock)
            for w in range(n)
        ]
        self.detectors = [
            MembershipMonitor(
                self.cards.boxes[w], self.cards.streams[w], self.machines[w], self.clients[w],
                tolerates_loss=tolerates_loss, clock=self.cards.clock, name=name, inside=inside,
                departures=Departures(
                    self.said, name(w), () if column < 0 else range(column, 2 * n, 2),
                    everyone=range(n), record=lambda _, text, **__: self.lines.append(text),
                ),
            )
            for w in range(n)
        ]  # fmt: skip
        self.ended: dict[int, str] = {}
        self.gone: dict[int, list[WorkerLost | WorkerRejoined]] = {w: [] for w in range(n)}

    def look(self) -> None:
        for worker, detector in enumerate(self.detectors):
            if worker in self.ended or worker in self.cards.dead:
                continue
            try:
                self._work(worker)
                for event in detector.poll(detector.suspects()):
                    self.gone[worker].append(event)
                    if isinstance(event, WorkerLost):
                        self.cards.streams[worker].forget(event.worker)
                    if isinstance(event, WorkerLost) and event.needed:
                        self.machines[worker].mark_lost(event.worker, event.incarnation)
            except PeerError as error:
                self.ended[worker] = str(error)
                self.cards.dead.add(worker)

    def _work(self, worker: int) -> None:
        try:
            self.clients[worker].synchronize()
        except TimeoutError as error:
            self.clients[worker]._failure = str(error)

    def run(self, seconds: float) -> Cluster:
        self.cards.run(seconds, 0.1, self.look)
        return self

    def split(self, *halves: tuple[int, ...], resets: bool = False) -> None:
        """Partition the network; with ``resets`` connections are closed, as by some firewalls."""
        for a, b in itertools.combinations(halves, 2):
            pairs = {frozenset(pair) for pair in itertools.product(a, b)}
            self.cards.apart |= pairs
            if resets:
                self.cards.ended |= dict.fromkeys(pairs, self.cards.clock.now)

    def mend(self) -> None:
        """End the partition, with new connections."""
        self.cards.apart.clear()
        self.cards.ended.clear()
        for way, flow in self.cards._flows.items():
            if flow:
                self.cards._later(way)


def test_loss_not_tolerated_names_worker_with_exception() -> None:
    """Not the worker that is lost first, which had waited for it."""
    cluster = Cluster(3, tolerates_loss=False, said=Store()).run(2.0)
    assert cluster.said is not None
    publish_failure(cluster.said, 2, ValueError("boom"))
    publish_failure(cluster.said, 1, PeerError("rank 1: rank 2 failed"))
    cluster.cards.dead.add(1)
    cluster.run(12.0)
    assert cluster.ended[0] == (
        "rank 0: lost a worker before training ended: rank 2 failed with ValueError: boom; "
        "start the job again from a checkpoint"
    )


def test_lost_worker_is_logged_once_by_each() -> None:
    cluster = Cluster(4).run(2.0)
    cluster.cards.dead.add(2)
    cluster.run(12.0)
    assert cluster.ended == {}
    for worker in (0, 1, 3):
        assert cluster.gone[worker] == [WorkerLost(2, 0, needed=True)]
        assert cluster.machines[worker].incarnation_of(2) is None
    assert len(cluster.lines) == 3
    assert any("rank 0: rank 2 has been silent for" in line for line in cluster.lines)
    assert all(line.endswith("; the others continue without it") for line in cluster.lines)


def test_replica_that_lost_a_rank_is_lost_in_all_columns() -> None:
    """The rank that still lives ends, and both columns say why."""
    store = Store()
    first, second = (Cluster(3, store=store, column=column) for column in range(2))
    first.run(2.0)
    second.run(2.0)
    first.cards.kill(2)
    first.run(2.0)
    second.run(1.0)
    assert first.ended == {}
    assert [first.gone[w] for w in (0, 1)] == [[WorkerLost(2, 0, needed=True)]] * 2
    assert [second.gone[w] for w in (0, 1)] == [[WorkerLost(2, 0, needed=True)]] * 2
    assert first.clients[0].log.length == 1
    by = [f"replica {w} (ranks {2 * w}, {2 * w + 1})" for w in range(3)]
    said = f"rank 5: {by[2]} was removed by {by[0]}, which received nothing from one of its ranks"
    other = said.replace(by[0], by[1])
    assert [text.startswith((said, other)) for text in second.ended.values()] == [True]
    assert list(second.ended) == [2]
    assert any(
        line.startswith(f"rank 1: rank 5 is of {by[2]}, which replica") for line in second.lines
    )
    assert any(line.startswith("rank 0: rank 4 has ended unexpectedly") for line in first.lines)


def test_halves_of_a_partition_do_not_remove_different_replicas_in_two_columns() -> None:
    store = Store()
    first, second = (Cluster(2, store=store, column=column) for column in range(2))
    first.run(2.0)
    second.run(2.0)
    first.split((0,), (1,), resets=True)
    second.split((0,), (1,), resets=True)
    for _ in range(100):
        second.run(0.1)
        first.run(0.1)
    assert first.ended.keys() == second.ended.keys()
    assert len(first.ended) == 1


def test_killed_worker_is_lost_one_second_after_disconnect() -> None:
    """And not earlier: a living process reconnects."""
    cluster = Cluster(3).run(2.0)
    cluster.cards.kill(2)
    cluster.run(0.9)
    assert not any(cluster.gone.values())
    cluster.run(1.1)
    assert cluster.ended == {}
    assert cluster.gone[0] == cluster.gone[1] == [WorkerLost(2, 0, needed=True)]
    said = (
        "rank 2 has ended unexpectedly: its connections are closed; the others continue without it"
    )
    assert sorted(cluster.lines) == [f"rank {worker}: {said}" for worker in (0, 1)]
    assert cluster.clients[0].log.length == 1


def test_killed_worker_in_bcube_is_reported_by_neighbours() -> None:
    """Each of 8 hosts has 3 neighbours; the membership log tells the others."""
    cluster = Cluster(8, reach=bcube(2, 3)).run(2.0)
    cluster.cards.kill(5)
    cluster.run(2.5)
    assert cluster.ended == {}
    for worker in set(range(8)) - {5}:
        assert cluster.gone[worker] == [WorkerLost(5, 0, needed=True)]
    knew = {
        int(line[5])
        for line in cluster.lines
        if "rank 5 has ended unexpectedly: its connections are closed" in line
    }
    assert {1, 4, 7} >= knew != set()
    told = {int(line[5]) for line in cluster.lines if "rank 5 was reported lost by rank" in line}
    assert knew | told == set(range(8)) - {5}


def test_two_workers_killed_together_are_both_lost() -> None:
    cluster = Cluster(5).run(2.0)
    cluster.cards.kill(1)
    cluster.cards.kill(4)
    cluster.run(2.0)
    assert cluster.ended == {}
    for worker in (0, 2, 3):
        assert {event.worker for event in cluster.gone[worker]} == {1, 4}


def test_killed_worker_ends_training_if_loss_is_not_tolerated() -> None:
    cluster = Cluster(3, tolerates_loss=False).run(2.0)
    cluster.cards.kill(2)
    cluster.run(2.0)
    assert set(cluster.ended) == {0, 1}
    said = "rank 0: lost a worker before training ended: rank 2 has ended unexpectedly"
    assert cluster.ended[0].startswith(said)


def test_killed_worker_is_named_before_worker_that_left() -> None:
    cluster = Cluster(3, tolerates_loss=False).run(2.0)
    cluster.cards.kill(2)
    cluster.run(0.9)
    cluster.cards.boxes[0].left = cluster.cards.boxes[2].left = frozenset(
        {1}
    )  # has detected it first
    cluster.run(0.1)
    assert cluster.ended[0].startswith(
        "rank 0: lost a worker before training ended: rank 2 has ended unexpectedly"
    )


def test_left_worker_is_named_before_recent_disconnect() -> None:
    cluster = Cluster(3, tolerates_loss=False).run(2.0)
    cluster.cards.kill(2)
    cluster.run(0.3)
    cluster.cards.boxes[0].left = frozenset({1})
    cluster.run(0.1)
    assert cluster.ended[0].startswith(
        "rank 0: lost a worker before training ended: rank 1 has left"
    )


def test_reconnecting_worker_is_not_lost() -> None:
    """Also repeatedly, and if it is heard over other workers."""
    cluster = Cluster(3).run(2.0)
    for _ in range(8):
        cluster.split((0,), (1,), resets=True)
        cluster.run(0.7)
        cluster.mend()
        cluster.run(0.3)
    cluster.cards.ended[frozenset((0, 2))] = 0.0
    cluster.run(10.0)
    assert cluster.ended == {}
    assert cluster.lines == []


def test_disconnect_of_partitioned_worker_is_no_death() -> None:
    """A partition closes connections after a minute; a worker heard over others is alive."""
    cluster = Cluster(3).run(2.0)
    cluster.split((0,), (1,))
    cluster.run(60.0)
    cluster.split((0,), (1,), resets=True)
    cluster.cards.dead.add(1)  # it computes, and none of its threads can send
    cluster.run(3.0)
    cluster.cards.dead.clear()
    cluster.mend()
    cluster.split((0,), (1,), resets=True)
    cluster.run(10.0)
    assert cluster.ended == {}
    assert cluster.lines == []


def test_stopped_worker_is_lost_after_silence() -> None:
    cluster = Cluster(3).run(2.0)
    cluster.cards.dead.add(2)
    cluster.run(4.0)
    assert not any(cluster.gone.values())
    cluster.run(4.0)
    assert cluster.gone[0] == cluster.gone[1] == [WorkerLost(2, 0, needed=True)]
    assert all("rank 2 has been silent for" in line for line in cluster.lines)


def test_restarted_worker_is_not_confused_with_killed_one() -> None:
    cluster = Cluster(3).run(2.0)
    cluster.cards.kill(2)
    cluster.run(2.0)
    for worker in (0, 1):
        cluster.clients[worker]._changes.append(MembershipChange(2, 1, True, 2, Mock(PeerInfo)))
    cluster.cards.ended.clear()
    cluster.cards.dead.clear()
    cluster.run(0.1)
    for worker in (0, 1):
        assert [type(event) for event in cluster.gone[worker]] == [WorkerLost, WorkerRejoined]
        cluster.cards.streams[worker].renew(2, 1)
    cluster.cards.dead.add(2)  # it loads data before it sends its first message
    cluster.run(20.0)
    assert [len(events) for events in cluster.gone.values()] == [2, 2, 0]


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("halves", [((0, 1), (2, 3, 4)), ((0, 1, 2, 3), (4,)), ((0,), (1, 2))])
def test_partition_leaves_one_part_training(
    halves: tuple[tuple[int, ...], tuple[int, ...]], resets: bool
) -> None:
    cluster = Cluster(sum(map(len, halves))).run(2.0)
    cluster.split(*halves, resets=resets)
    cluster.run(20.0)
    goes_on = [half for half in halves if not set(half) & set(cluster.ended)]
    assert len(goes_on) == 1, cluster.ended
    (winners,) = goes_on
    (losers,) = (half for half in halves if half != winners)
    assert set(cluster.ended) == set(losers)
    for worker in losers:
        assert (
            "which received nothing from it; the others continue: restart this worker"
            in cluster.ended[worker]
        )
    for worker in winners:
        assert {event.worker for event in cluster.gone[worker]} == set(losers)


def test_log_entry_waits_for_further_suspects() -> None:
    cluster = Cluster(4).run(2.0)
    cluster.split((0, 1), (2,))
    cluster.split((2,), (3,))
    cluster.run(1.5)
    cluster.split((0, 1), (3,))
    cluster.run(20.0)
    assert cluster.clients[0].log.view == (0, 0, 1, 1)
    assert cluster.clients[0].log.length == 1
    assert set(cluster.ended) == {2, 3}


def test_second_incarnation_can_be_lost() -> None:
    cluster = Cluster(3).run(2.0)
    for worker in (0, 1):
        cluster.clients[worker].log.append(json.dumps(LogEntry(2, View((0, 0, 2)))))
        cluster.clients[worker]._changes += [
            MembershipChange(2, 0, False, 2),
            MembershipChange(2, 1, True, 2, Mock(PeerInfo)),
        ]
    cluster.store.set("membership/r/0", json.dumps(LogEntry(2, View((0, 0, 2)))))
    cluster.ended[2] = "in its first life"
    cluster.run(0.2)
    for worker in (0, 1):
        assert [type(event) for event in cluster.gone[worker]] == [WorkerLost, WorkerRejoined]
        cluster.cards.streams[worker].renew(2, 1)
        cluster.machines[worker].receive(2, 1, ViewProposal(View((0, 0, 2)), -1, ()))
    cluster.cards.streams[2] = cluster.cards.new(2, [0, 0, 1], None, 5.0)
    cluster.run(2.0)
    cluster.cards.dead.add(2)
    cluster.run(12.0)
    assert cluster.clients[0].log.view == (0, 0, 3)
    for worker in (0, 1):
        assert cluster.gone[worker][2:] == [WorkerLost(2, 1, needed=True)]


def test_worker_that_left_after_drain_is_lost_if_training_resumes() -> None:
    cluster = Cluster(2).run(2.0)
    machine = Mock(rank=0, incarnation=0, drained=True)
    machine.incarnation_of.return_value = 0
    cluster.detectors[0]._machine = machine
    cluster.cards.boxes[0].left = frozenset({1})
    cluster.cards.dead.add(1)
    cluster.run(0.2)
    assert cluster.gone[0] == [WorkerLost(1, 0, needed=False)]
    cluster.cards.boxes[0].left = frozenset()
    cluster.run(0.2)
    assert len(cluster.gone[0]) == 1
    machine.drained = False
    cluster.run(0.4)
    assert cluster.gone[0][1:] == [WorkerLost(1, 0, needed=True)]


def test_part_without_store_ends() -> None:
    cluster = Cluster(5).run(2.0)
    for worker in (2, 3, 4):
        cluster.clients[worker]._store = cluster.hidden
    cluster.split((0, 1), (2, 3, 4))
    cluster.run(25.0)
    assert set(cluster.ended) == {2, 3, 4}
    assert cluster.ended[2].startswith(
        "rank 2: lost rank 0, rank 1, and cannot reach the rendezvous store to decide"
    )
    assert "which workers continue: connection reset" in cluster.ended[2]


def test_workers_without_direct_link_communicate_over_third() -> None:
    cluster = Cluster(3).run(2.0)
    cluster.cards.apart.add(frozenset((0, 1)))
    cluster.run(20.0)
    assert cluster.ended == {}
    assert cluster.lines == []


def test_silent_worker_ends_training_if_loss_is_not_tolerated() -> None:
    cluster = Cluster(3, tolerates_loss=False).run(2.0)
    cluster.cards.dead.add(2)
    cluster.run(12.0)
    assert set(cluster.ended) == {0, 1}
    assert (
        "rank 0: lost a worker before training ended: rank 2 has been silent for"
        in cluster.ended[0]
    )
    assert not cluster.store.has("membership/r/0")


def test_suspect_that_is_heard_again_is_not_lost() -> None:
    cluster = Cluster(3).run(2.0)
    cluster.cards.apart.add(frozenset((0, 2)))
    cluster.cards.apart.add(frozenset((0, 1)))  # nothing is decided before all are suspected
    cluster.run(4.0)
    cluster.mend()
    cluster.run(10.0)
    assert cluster.ended == {}
    assert all(not events for events in cluster.gone.values())


def test_failed_membership_thread_raises_peer_error() -> None:
    cluster = Cluster(2)

    def broken(_key: str) -> bool:
        raise KeyError("torn")

    cluster.store.has = broken  # type: ignore[method-assign]
    heard = threading.Event()
    cluster.clients[0].start(heard.set)
    assert heard.wait(20.0)
    with pytest.raises(
        PeerError, match="rank 0: thread wingbeat-membership has ended by KeyError: "
    ):
        list(cluster.detectors[0].poll({}))
