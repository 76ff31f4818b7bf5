"""A worker's side: whatever a server says, each request ends, and errors name who and why."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from helpers.mail import Clock
from helpers.serving import LARGEST, LEAST, Box, Letter, Office
from wingbeat.errors import PeerError
from wingbeat.exchanges.client import Client, Part
from wingbeat.exchanges.hosting import _Watched, placement
from wingbeat.exchanges.request import Request
from wingbeat.servers.outbox import Order
from wingbeat.servers.protocol import Ids, Kind, wish_of
from wingbeat.servers.service import Service
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Limits, Mailbox
from wingbeat.transport.messages.endpoint import Endpoint, Membership, Route
from wingbeat.transport.messages.loopback import Faults, Network
from wingbeat.transport.messages.mailbox import RECONNECT_S


@dataclass
class Rig:
    """One worker and the mailboxes of two servers, 1 and 2."""

    client: Client
    box: Box
    servers: list[Box]
    office: Office
    clock: Clock
    memory: np.ndarray  # type: ignore[type-arg]
    ended: list[str]
    told: list[str]
    news: list[str]

    def start(
        self,
        kind: Kind = Kind.PUSH,
        turn: int = 0,
        count: int = 2,
        finish: Callable[[], None] = lambda: None,
    ) -> Request:
        view = memoryview(self.memory).cast("B")
        parts = [
            Part(1 + n % 2, Ids(0, n, turn, wish_of(0, n)), view[8 * n : 8 * n + 8], 1, n)
            for n in range(count)
        ]
        return self.client.start(kind, "float32", parts, "bucket 7", finish)

    def answer(self, number: int, **more: object) -> None:
        fields = {"server": 1 + number % 2, "kind": Kind.SUM, "dtype": "float32", "turn": 0}
        fields |= {"payload": np.full(2, 9.0, "f4"), **more}
        ids = (0, number, fields["turn"], 0)
        self.servers[fields["server"] - 1].post(  # type: ignore[operator]
            0, fields["kind"], fields["payload"], ids=ids, dtype=str(fields["dtype"])  # type: ignore[arg-type]
        )  # fmt: skip

    def run(self) -> None:
        for _ in range(60):
            self.office.move()
            self.client.step(self.box.poll())

    def following(self) -> None:
        """Have what the thread itself does find the network."""

        def following(_seconds: float) -> object:
            self.office.move()
            return self.box.poll()

        self.box.next = following  # type: ignore[attr-defined]


def rig(timeout: float = 5.0) -> Rig:
    office, clock = Office(random.Random(0), 1), Clock()
    ended: list[str] = []
    told: list[str] = []
    news: list[str] = []
    box, *servers = (office.box(number) for number in range(3))
    client = Client(
        box, [1, 2], me="rank 0", name="server {}".format, timeout=timeout, clock=clock,
        watch=lambda: ended[0] if ended else None, tell=told.append,
        hear=lambda: news[0] if news else None,
    )  # type: ignore[arg-type]  # fmt: skip
    return Rig(client, box, servers, office, clock, np.arange(4, dtype="f4"), ended, told, news)


def test_a_request_is_done_when_all_sums_are_there() -> None:
    made = rig()
    request = made.start()
    calls: list[Request] = []
    request.add_done_callback(calls.append)
    made.run()
    made.answer(0)
    made.run()
    assert not request.done()
    assert made.memory.tolist() == [9.0, 9.0, 2.0, 3.0]
    made.answer(1)
    made.run()
    assert request.done()
    request.wait()
    request.add_done_callback(calls.append)
    assert calls == [request, request]


def test_what_is_stored_is_done_when_all_has_arrived() -> None:
    made = rig()
    request = made.start(Kind.STORE)
    made.client.step(None)
    assert not request.done()
    made.run()
    assert request.done()


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.STORE, Kind.PULL])
def test_a_request_for_nothing_is_done_at_once(kind: Kind) -> None:
    made = rig()
    request = made.start(kind, count=0)
    made.client.step(None)
    assert request.done()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"number": 5}, "server 2 sent what was not asked for"),
        ({"number": 0, "turn": 1}, "server 1 sent what was not asked for"),
        ({"number": 0, "kind": Kind.PUSH}, "server 1 sent what was not asked for"),
        ({"number": 0, "server": 2}, "server 2 sent a malformed sum of slice 0"),
        ({"number": 0, "dtype": "float16"}, "malformed sum of slice 0: 8 bytes of float16"),
        ({"number": 0, "dtype": ""}, "malformed sum of slice 0: 8 bytes of nothing"),
        ({"number": 0, "payload": b""}, "malformed sum of slice 0: 0 bytes"),
        ({"number": 0, "payload": b"x" * 12}, "malformed sum of slice 0: 12 bytes"),
        ({"number": 0, "kind": Kind.FAILED, "payload": b"a\nb\x1b\xff"}, "server 1: a?b?"),
    ],
)
def test_what_is_no_sum_is_refused_in_a_line_and_not_written(
    answer: dict[str, object], text: str
) -> None:
    made = rig()
    made.start()
    made.run()
    made.answer(**answer)  # type: ignore[arg-type]
    with pytest.raises(PeerError) as caught:
        made.run()
    assert text in str(caught.value)
    assert str(caught.value).startswith("rank 0: ")
    assert "\n" not in str(caught.value)
    assert made.memory.tolist() == [0.0, 1.0, 2.0, 3.0]


def broken() -> None:
    raise ValueError("no residual")


@pytest.mark.parametrize(
    ("payload", "finish", "text"),
    [
        (b"x" * 12, lambda: None, "malformed sum of slice 0: 12 bytes"),
        (b"x" * 8, broken, "rank 0: ValueError: no residual"),
    ],
    ids=["malformed", "not to be used"],
)
def test_a_request_ends_also_if_its_last_sum_is_what_fails(
    payload: bytes, finish: Callable[[], None], text: str
) -> None:
    made = rig()
    request = made.start(count=1, finish=finish)
    made.run()
    made.answer(0, payload=payload)
    made.following()
    made.client._run()
    assert request.done(), "whoever waits for it would wait for ever"
    with pytest.raises(PeerError, match=text):
        request.wait()


def test_requests_end_also_if_nobody_can_be_told_why() -> None:
    made = rig()
    request = made.start()

    def tell(_text: str) -> None:
        raise RuntimeError("can't start new thread")

    made.client._tell = tell
    made.ended.append("server 1 has ended by signal 9")
    made.clock.now = 1.0
    made.following()
    with pytest.raises(RuntimeError, match="can't start"):
        made.client._run()
    assert request.done()
    assert made.box.closed


def test_a_sum_that_comes_twice_is_refused() -> None:
    made = rig()
    made.start()
    made.run()
    made.answer(0)
    made.answer(0)
    with pytest.raises(PeerError, match="sent what was not asked for"):
        made.run()


def test_whoever_does_not_answer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made = rig()
    made.start()
    made.run()
    made.answer(0)
    made.clock.now = 4.0
    made.run()
    made.clock.now = 53.9
    made.run()
    assert "has waited for gradients of other workers for 49 s; the servers live" in caplog.text
    made.clock.now = 54.2
    with pytest.raises(PeerError, match="no sum of bucket 7 from server 2 within 50 s"):
        made.run()


def test_nobody_is_late_for_whom_nothing_waits() -> None:
    made = rig()
    made.clock.now = 100.0
    made.box.gone.add(1)
    made.run()
    made.clock.now = 101.0
    made.start()
    with pytest.raises(PeerError, match="server 1 has ended"):
        made.run()


@pytest.mark.parametrize("waits", [False, True])
def test_a_process_that_was_started_here_and_has_ended_is_said(waits: bool) -> None:
    made = rig()
    if waits:
        made.start()
    made.ended.append("server 1 has ended by signal 9")
    made.clock.now = 1.0
    with pytest.raises(PeerError, match="rank 0: server 1 has ended by signal 9"):
        made.run()


def test_a_server_without_connections_for_a_second_is_named() -> None:
    made = rig()
    made.start()
    made.box.cut[1] = RECONNECT_S
    made.clock.now = 1.0
    made.run()
    made.box.cut[1] = RECONNECT_S + 0.1
    made.clock.now = 2.0
    with pytest.raises(PeerError) as caught:
        made.run()
    named = "rank 0: server 1 has ended without a word: its connections are closed"
    assert str(caught.value) == named


def test_what_another_worker_tells_is_said_once_it_is_quiet() -> None:
    """A server that is gone can tell nobody; who has started it can."""
    made = rig()
    made.news.append("server 2 (started by rank 1) has ended by signal 9")
    made.clock.now = 1.0
    made.run()
    made.start()
    made.run()
    made.clock.now = 1.2
    made.run()
    made.clock.now = 1.3
    with pytest.raises(PeerError) as caught:
        made.run()
    assert str(caught.value) == "rank 0: server 2 (started by rank 1) has ended by signal 9"


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PULL])
def test_a_card_over_which_nothing_comes_is_probed_by_who_waits(kind: Kind) -> None:
    """What was pushed has arrived: without that nothing of this worker would be missed there."""
    made = rig()
    made.box.interfaces = lambda peer: (0, 1, 2)  # type: ignore[method-assign]
    view = memoryview(made.memory).cast("B")
    parts = [
        Part(server, Ids(0, number, 0, wish_of(0, number, link)), view[:8], 1, number)
        for number, (server, link) in enumerate([(1, 0), (2, 2), (2, 2)])
    ]
    for server in made.servers:
        server.interfaces = made.box.interfaces  # type: ignore[method-assign]

    def probed() -> list[tuple[int, int]]:
        found = [(s._number, m) for s in made.servers for m in iter(s.poll, None)]
        return sorted((n, m.interface) for n, m in found if m.kind == Kind.ALIVE)

    made.client.start(kind, "float32", parts, "bucket 7")
    made.run()
    assert probed() == []
    for made.clock.now in (0.3, 0.7):
        made.client.step(None)  # and nothing has arrived in between
    made.run()
    assert probed() == [(1, 0), (2, 2)], "one at a time"
    made.clock.now = 1.1
    made.run()
    assert probed() == [(1, 0), (2, 2)]
    made.servers[0].post(0, Kind.ALIVE)
    made.run()  # which is nothing


def test_nobody_is_probed_for_whom_nothing_waits() -> None:
    made = rig()
    made.clock.now = 4.0
    made.run()
    assert [server.poll() for server in made.servers] == [None, None]


def test_a_worker_that_an_exception_ended_is_named_before_what_was_noticed() -> None:
    made = rig()
    made.client._blame = lambda: "rank 2 failed with ValueError: boom"
    made.client._fail(PeerError("rank 0: server 1: rank 2 has ended"))
    said = "rank 2 failed with ValueError: boom (noticed as: server 1: rank 2 has ended)"
    assert made.told == [said]
    assert str(made.client._failure()) == f"rank 0: {said}"


def test_others_are_told_why_it_has_failed_without_its_own_name_before() -> None:
    made = rig()
    made.client._fail(PeerError("rank 0: server 1 has ended by signal 9"))
    assert made.told == ["server 1 has ended by signal 9"]
    assert made.client.failed


def test_the_last_words_of_a_server_count_more_than_that_it_has_left() -> None:
    made = rig()
    made.start()
    made.run()
    for _ in range(2):
        made.answer(0, kind=Kind.FAILED, payload=b"rank 1 has ended")
    for _ in range(100):
        made.office.move()
    made.box.gone.add(1)
    made.clock.now = 0.3
    with pytest.raises(PeerError, match="server 1: rank 1 has ended"):
        made.client.step(None)


def test_sums_that_came_before_a_server_left_are_taken() -> None:
    made = rig()
    request = made.start()
    made.run()
    made.answer(0)
    made.answer(1)
    for _ in range(100):
        made.office.move()
    made.box.gone.update((1, 2))
    made.clock.now = 0.3
    made.client.step(None)
    assert request.done()
    request.wait()


def test_all_that_is_under_way_fails_when_it_is_closed() -> None:
    made = rig()
    requests = [made.start(), made.start(Kind.STORE, turn=1)]
    made.run()
    requests.append(made.start(Kind.PULL, turn=1))
    made.client.close()
    made.client.close()
    for request in (requests[0], requests[2]):
        with pytest.raises(PeerError, match="rank 0: the servers were left"):
            request.wait()
    requests[1].wait()
    with pytest.raises(PeerError, match="the servers were left"):
        made.start()
    assert made.box.closed


def mailboxes(network: Network, workers: int, servers: int) -> list[Mailbox]:
    """Of all, each joined to those on the other side; in real time."""
    size = workers + servers
    sessions = {number: 100 + number for number in range(size)}
    carriers = [network.carrier(number) for number in range(size)]
    limits, made = Limits(message=LARGEST, window=4 * LEAST, silence=30.0), []
    for number, carrier in enumerate(carriers):
        endpoint = Endpoint(Membership(number, sessions[number], sessions), limits)
        for peer in sessions:
            if (peer < workers) != (number < workers):
                for urgency in range(2):
                    place = carrier.connect(peer, 0, urgency, theirs=0)
                    endpoint.add(Route(peer, 0, urgency), place, time.monotonic())
        made.append(Mailbox(endpoint, carrier))
    return made


@pytest.mark.parametrize("order", Order)
def test_threads_on_a_network_with_faults_have_all_sums(order: Order) -> None:
    workers, slices, rounds = 3, 6, 5
    faults = Faults(repeat=0.1, delay=0.002, reorder=True)
    boxes = mailboxes(Network(faults, seed=7), workers, 2)
    services = [Service(box, workers, most=1 << 20, order=order) for box in boxes[workers:]]
    servers = [threading.Thread(target=each.run) for each in services]
    clients = [
        Client(box, [3, 4], me=f"rank {rank}", name="process {}".format, timeout=30.0).serve()
        for rank, box in enumerate(boxes[:workers])
    ]
    for thread in servers:
        thread.start()

    def work(rank: int) -> None:
        for turn in range(rounds):
            memory = np.full(slices * 10, 1.0 + rank + turn, "f4")
            view = memoryview(memory).cast("B")
            parts = [
                Part(
                    3 + n % 2, Ids(0, n, turn, wish_of(n % 2, n)), view[40 * n : 40 * n + 40], 1, n
                )
                for n in range(slices)
            ]
            ready = turn % 2 == 0
            kind = Kind.PUSH if ready else Kind.STORE
            clients[rank].start(kind, "float32", parts, "all").wait()
            if not ready:
                clients[rank].start(Kind.PULL, "float32", parts, "all").wait()
            total = float(sum(1 + other + turn for other in range(workers)))
            assert memory.tolist() == [total] * (10 * slices)

    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
        clients[rank].close()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in (*threads, *servers):
        thread.join(30.0)
        assert not thread.is_alive()
    assert not errors


def test_servers_are_placed_on_hosts_in_turn_and_there_on_ranks_in_turn() -> None:
    assert placement(["a", "a", "b", "b"], 0) == (0, 2)
    assert placement(["a", "a", "b", "b"], 6) == (0, 2, 1, 3, 0, 2)
    assert placement(["a", "b", "a"], 3) == (0, 1, 2)
    assert placement(["a", "b", "a"], 4) == (0, 1, 2, 1)
    with pytest.raises(PeerError, match="rank 1 sent a malformed identity"):
        placement(["a", None], 0)


def test_nothing_is_waited_for_once_a_server_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wingbeat.exchanges.hosting._LOOK_S", 0.01)
    told: list[str] = []

    def check() -> None:
        told.append("")
        if len(told) == 3:
            raise PeerError("server 0 has ended")

    board = Switchboard()
    store = _Watched(board, check)
    with pytest.raises(PeerError, match="server 0 has ended"):
        store.get("a", 1e9)
    told.clear()
    with contextlib.suppress(PeerError), pytest.raises(TimeoutError):
        store.get("a", 0.015)
    store.set("a", "b")
    assert store.has("a")
    assert store.get("a", 0.0) == board.get("a", 0.0) == "b"


def test_time_counts_from_when_a_sum_is_asked_for() -> None:
    made = rig()
    made.clock.now = 100.0
    made.start()
    made.run()
    made.clock.now = 104.0
    made.run()


def test_it_leaves_when_what_was_pushed_is_posted_and_not_before() -> None:
    made = rig()
    made.start()
    made.client._ending = True
    assert not made.client._left(), "the others need what was pushed"
    made.run()
    assert made.client._left()
    made.start(turn=1)
    made.client._quick = True
    assert made.client._left()


# -- servers that update ---------------------------------------------------------------------


def _ask_for_state(made: Rig) -> Request:
    parts = [Part(1, Ids(0, 0, 0, 0), memoryview(b""), 0, -1)]
    return made.client.start(Kind.STATE, "", parts, "state")


def test_state_that_comes_in_pieces() -> None:
    made = rig()
    request = _ask_for_state(made)
    made.run()
    assert made.servers[0].poll().kind == Kind.STATE
    for kind, payload in [(Kind.STATE, b'{"a": 1, "nbytes": 5}'), (Kind.MORE, b"abc")]:
        made.answer(0, kind=kind, payload=payload, dtype="")
        made.run()
        assert not request.done()
    made.answer(0, kind=Kind.MORE, payload=b"de", dtype="")
    made.run()
    request.wait()
    document = request.documents[0, 0, 0]
    assert (document.words["a"], bytes(document.data)) == (1, b"abcde")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"kind": Kind.STATE, "payload": b"spam"}, "sent a malformed state: b'spam' says nothing"),
        ({"kind": Kind.MORE, "payload": b"abc"}, "sent a malformed state"),
        ({"kind": Kind.SUM}, "server 1 sent what was not asked for"),
        ({"kind": Kind.STATE, "payload": b'{"nbytes": 0}', "server": 2}, "another server has it"),
    ],
    ids=["no words", "more of nothing", "a sum", "another server"],
)
def test_what_is_no_state_is_an_error(answer: dict[str, object], text: str) -> None:
    made = rig()
    request = _ask_for_state(made)
    made.run()
    made.answer(0, **answer)
    with pytest.raises(PeerError, match=text):
        made.run()
    assert not request.done()


@pytest.mark.parametrize("kind", [Kind.FETCH, Kind.EXPECT])
def test_parameters_that_are_asked_for_or_expected(kind: Kind) -> None:
    made = rig()
    request = made.start(kind)
    made.run()
    asked = [server.poll() for server in made.servers]
    assert [bool(letter) for letter in asked] == [kind is Kind.FETCH] * 2
    with pytest.raises(PeerError, match="not asked for"):
        made.client._take(_letter(Kind.SUM))
    for number in range(2):
        made.answer(number, kind=Kind.PARAMETERS)
    made.run()
    request.wait()
    assert made.memory.tolist() == [9.0] * 4


def _letter(kind: Kind) -> Any:
    return Letter(1, kind, memoryview(b""), (0, 0, 0, 0), "float32", 0)
