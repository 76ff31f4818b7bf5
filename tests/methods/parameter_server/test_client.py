"""`Client`: each request ends whatever a server sends, and errors name the process and reason."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from helpers.mail import Clock
from helpers.server_simulation import LARGEST, MIN_WINDOW, FakeMailbox, FakeNetwork, SentMessage
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.parameter_server.aggregator import Aggregator
from wingbeat.methods.parameter_server.client import Client, Request, Transfer
from wingbeat.methods.parameter_server.launch import _WatchedStore, place_servers
from wingbeat.methods.parameter_server.protocol import Ids, Kind, Order, pack_route
from wingbeat.methods.parameter_server.server import Server
from wingbeat.transport.detector import RECONNECT_S
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.mesh import Replica
from wingbeat.transport.messages import Limits, Mailbox, open_mailbox
from wingbeat.types import Layout


@dataclass
class Rig:
    """One worker and the mailboxes of two servers, 1 and 2."""

    client: Client
    box: FakeMailbox
    servers: list[FakeMailbox]
    network: FakeNetwork
    clock: Clock
    memory: np.ndarray  # type: ignore[type-arg]
    ended: list[str]
    told: list[str]
    news: list[str]

    def start(
        self,
        kind: Kind = Kind.PUSH_PULL,
        turn: int = 0,
        count: int = 2,
        on_complete: Callable[[], None] = lambda: None,
    ) -> Request:
        view = memoryview(self.memory).cast("B")
        parts = [
            Transfer(1 + n % 2, Ids(0, n, turn, pack_route(0, n)), view[8 * n : 8 * n + 8], 1, n)
            for n in range(count)
        ]
        return self.client.request(kind, "float32", parts, "bucket 7", on_complete)

    def answer(self, number: int, **more: object) -> None:
        fields = {"server": 1 + number % 2, "kind": Kind.SUM, "dtype": "float32", "turn": 0}
        fields |= {"payload": np.full(2, 9.0, "f4"), **more}
        ids = (0, number, fields["turn"], 0)
        self.servers[fields["server"] - 1].post(  # type: ignore[operator]
            0, fields["kind"], fields["payload"], ids=ids, dtype=str(fields["dtype"])  # type: ignore[arg-type]
        )  # fmt: skip

    def run(self) -> None:
        for _ in range(60):
            self.network.move()
            self.client.step(self.box.poll())

    def following(self) -> None:
        """Have what the thread itself does find the network."""

        def following(_seconds: float, *, keep: bool) -> object:
            self.network.move()
            return self.box.poll()

        self.box.next = following  # type: ignore[attr-defined]


def rig(timeout: float = 5.0) -> Rig:
    network, clock = FakeNetwork(random.Random(0), 1), Clock()
    ended: list[str] = []
    told: list[str] = []
    news: list[str] = []
    box, *servers = (network.box(number) for number in range(3))
    client = Client(
        box, [1, 2], me="rank 0", name="server {}".format, timeout=timeout, clock=clock,
        check_servers=lambda: ended[0] if ended else None, publish_failure=told.append,
        poll_failure=lambda: news[0] if news else None,
    )  # type: ignore[arg-type]  # fmt: skip
    return Rig(client, box, servers, network, clock, np.arange(4, dtype="f4"), ended, told, news)


def test_request_is_done_once_all_sums_arrive() -> None:
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


def test_push_is_done_once_delivered() -> None:
    made = rig()
    request = made.start(Kind.PUSH)
    made.client.step(None)
    assert not request.done()
    made.run()
    assert request.done()


@pytest.mark.parametrize("kind", [Kind.PUSH_PULL, Kind.PUSH, Kind.PULL])
def test_empty_request_is_done_at_once(kind: Kind) -> None:
    made = rig()
    request = made.start(kind, count=0)
    made.client.step(None)
    assert request.done()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"number": 5}, "server 2 sent an unexpected message"),
        ({"number": 0, "turn": 1}, "server 1 sent an unexpected message"),
        ({"number": 0, "kind": Kind.PUSH_PULL}, "server 1 sent an unexpected message"),
        ({"number": 0, "server": 2}, "server 2 sent a malformed reply for slice 0"),
        ({"number": 0, "dtype": "float16"}, "malformed reply for slice 0: 8 bytes of float16"),
        ({"number": 0, "dtype": ""}, "malformed reply for slice 0: 8 bytes of nothing"),
        ({"number": 0, "payload": b""}, "malformed reply for slice 0: 0 bytes"),
        ({"number": 0, "payload": b"x" * 12}, "malformed reply for slice 0: 12 bytes"),
        ({"number": 0, "kind": Kind.FAILED, "payload": b"a\nb\x1b\xff"}, "server 1: a?b?"),
    ],
)
def test_malformed_reply_raises_and_writes_nothing(answer: dict[str, object], text: str) -> None:
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
        (b"x" * 12, lambda: None, "malformed reply for slice 0: 12 bytes"),
        (b"x" * 8, broken, "rank 0: ValueError: no residual"),
    ],
    ids=["malformed", "not to be used"],
)
def test_request_fails_if_last_reply_fails(
    payload: bytes, finish: Callable[[], None], text: str
) -> None:
    made = rig()
    request = made.start(count=1, on_complete=finish)
    made.run()
    made.answer(0, payload=payload)
    made.following()
    with pytest.raises(Exception, match=text.rpartition(": ")[2]):
        made.client.run()
    assert request.done(), "whoever waits for it would wait for ever"
    with pytest.raises(PeerError, match=text):
        request.wait()


def test_request_fails_if_reason_cannot_be_published() -> None:
    made = rig()
    request = made.start()

    def tell(_text: str) -> None:
        raise RuntimeError("can't start new thread")

    made.client._publish_failure = tell
    made.ended.append("server 1 has ended by signal 9")
    made.clock.now = 1.0
    made.following()
    with pytest.raises(RuntimeError, match="can't start"):
        made.client.run()
    assert request.done()
    assert made.box.closed


def test_repeated_sum_raises() -> None:
    made = rig()
    made.start()
    made.run()
    made.answer(0)
    made.answer(0)
    with pytest.raises(PeerError, match="sent an unexpected message"):
        made.run()


def test_silent_server_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made = rig()
    made.start()
    made.run()
    made.answer(0)
    made.clock.now = 4.0
    made.run()
    made.clock.now = 53.9
    made.run()
    assert "waiting for gradients of other workers for 49 s; the servers are alive" in caplog.text
    made.clock.now = 54.2
    with pytest.raises(PeerError, match="no sum of bucket 7 from server 2 within 50 s"):
        made.run()


def test_idle_client_does_not_time_out() -> None:
    made = rig()
    made.clock.now = 100.0
    made.box.gone.add(1)
    made.run()
    made.clock.now = 101.0
    made.start()
    with pytest.raises(PeerError, match="server 1 has ended"):
        made.run()


@pytest.mark.parametrize("waits", [False, True])
def test_ended_server_process_raises(waits: bool) -> None:
    made = rig()
    if waits:
        made.start()
    made.ended.append("server 1 has ended by signal 9")
    made.clock.now = 1.0
    with pytest.raises(PeerError, match="rank 0: server 1 has ended by signal 9"):
        made.run()


def test_unconnected_server_raises_after_a_second() -> None:
    made = rig()
    made.start()
    made.box.cut[1] = RECONNECT_S
    made.clock.now = 1.0
    made.run()
    made.box.cut[1] = RECONNECT_S + 0.1
    made.clock.now = 2.0
    with pytest.raises(PeerError) as caught:
        made.run()
    named = "rank 0: server 1 has ended unexpectedly: its connections are closed"
    assert str(caught.value) == named


def test_published_failure_raises_after_silence() -> None:
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


@pytest.mark.parametrize("kind", [Kind.PUSH_PULL, Kind.PULL])
def test_silence_pings_servers_over_awaited_links(kind: Kind) -> None:
    """What was pushed has arrived: without that nothing of this worker would be missed there."""
    made = rig()
    made.box.interfaces = lambda peer: (0, 1, 2)  # type: ignore[method-assign]
    view = memoryview(made.memory).cast("B")
    parts = [
        Transfer(server, Ids(0, number, 0, pack_route(0, number, link)), view[:8], 1, number)
        for number, (server, link) in enumerate([(1, 0), (2, 2), (2, 2)])
    ]
    for server in made.servers:
        server.interfaces = made.box.interfaces  # type: ignore[method-assign]

    def probed() -> list[tuple[int, int]]:
        found = [(s._number, m) for s in made.servers for m in iter(s.poll, None)]
        return sorted((n, m.interface) for n, m in found if m.kind == Kind.PING)

    made.client.request(kind, "float32", parts, "bucket 7")
    made.run()
    assert probed() == []
    for made.clock.now in (0.3, 0.7):
        made.client.step(None)  # and nothing has arrived in between
    made.run()
    assert probed() == [(1, 0), (2, 2)], "one at a time"
    made.clock.now = 1.1
    made.run()
    assert probed() == [(1, 0), (2, 2)]
    made.servers[0].post(0, Kind.PING)
    made.run()  # which is nothing


def test_idle_client_sends_no_pings() -> None:
    made = rig()
    made.clock.now = 4.0
    made.run()
    assert [server.poll() for server in made.servers] == [None, None]


def test_attributed_failure_precedes_noticed_error() -> None:
    made = rig()
    made.client._attribute_failure = lambda: "rank 2 failed with ValueError: boom"
    error = made.client.describe(PeerError("rank 0: server 1: rank 2 has ended"))
    said = "rank 2 failed with ValueError: boom (noticed as: server 1: rank 2 has ended)"
    assert made.told == [said]
    assert str(error) == f"rank 0: {said}"


def test_published_failure_omits_own_rank() -> None:
    made = rig()
    made.client.describe(PeerError("rank 0: server 1 has ended by signal 9"))
    assert made.told == ["server 1 has ended by signal 9"]


def test_failed_message_takes_precedence_over_left_server() -> None:
    made = rig()
    made.start()
    made.run()
    for _ in range(2):
        made.answer(0, kind=Kind.FAILED, payload=b"rank 1 has ended")
    for _ in range(100):
        made.network.move()
    made.box.gone.add(1)
    made.clock.now = 0.3
    with pytest.raises(PeerError, match="server 1: rank 1 has ended"):
        made.client.step(None)


def test_sums_received_before_server_left_are_written() -> None:
    made = rig()
    request = made.start()
    made.run()
    made.answer(0)
    made.answer(1)
    for _ in range(100):
        made.network.move()
    made.box.gone.update((1, 2))
    made.clock.now = 0.3
    made.client.step(None)
    assert request.done()
    request.wait()


def test_close_fails_pending_requests() -> None:
    made = rig()
    requests = [made.start(), made.start(Kind.PUSH, turn=1)]
    made.run()
    requests.append(made.start(Kind.PULL, turn=1))
    made.client.close()
    made.client.close()
    for request in (requests[0], requests[2]):
        with pytest.raises(PeerError, match="rank 0: the connection to the servers is closed"):
            request.wait()
    requests[1].wait()
    with pytest.raises(UsageError, match="the connection to the servers is closed"):
        made.start()
    assert made.box.closed


def mailboxes(workers: int, servers: int) -> list[Mailbox]:
    """Of all, each joined to those on the other side."""
    store, size = Switchboard(), workers + servers
    limits = Limits(message=LARGEST, window=4 * MIN_WINDOW, silence=30.0)

    def opened(number: int) -> Mailbox:
        peers = range(workers, size) if number < workers else range(workers)
        return open_mailbox(store, number, peers, interfaces=["lo"], limits=limits, seconds=30.0)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(opened, range(size)))


@pytest.mark.parametrize("order", Order)
def test_clients_and_servers_over_real_mailboxes_complete(order: Order) -> None:
    workers, slices, rounds = 3, 6, 5
    boxes = mailboxes(workers, 2)
    services = [
        Server(box, workers, Aggregator(workers, 1 << 20), order=order) for box in boxes[workers:]
    ]
    servers = [threading.Thread(target=each.run) for each in services]
    clients = [
        Client(box, [3, 4], me=f"rank {rank}", name="process {}".format, timeout=30.0)
        for rank, box in enumerate(boxes[:workers])
    ]
    for each in (*servers, *clients):
        each.start()

    def work(rank: int) -> None:
        for turn in range(rounds):
            memory = np.full(slices * 10, 1.0 + rank + turn, "f4")
            view = memoryview(memory).cast("B")
            parts = [
                Transfer(
                    3 + n % 2,
                    Ids(0, n, turn, pack_route(n % 2, n)),
                    view[40 * n : 40 * n + 40],
                    1,
                    n,
                )
                for n in range(slices)
            ]
            ready = turn % 2 == 0
            kind = Kind.PUSH_PULL if ready else Kind.PUSH
            clients[rank].request(kind, "float32", parts, "all").wait()
            if not ready:
                clients[rank].request(Kind.PULL, "float32", parts, "all").wait()
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


def test_place_servers_is_round_robin_over_hosts_and_ranks() -> None:
    assert place_servers(Layout([0, 0, 1, 1]), 0) == (0, 2)
    assert place_servers(Layout([0, 0, 1, 1]), 6) == (0, 2, 1, 3, 0, 2)
    assert place_servers(Layout([0, 1, 0]), 3) == (0, 1, 2)
    assert place_servers(Layout([0, 1, 0]), 4) == (0, 1, 2, 1)


def replica_at(place: int, size: int) -> Replica:
    """What a rank of the first of two replicas knows of them."""
    ranks = tuple(range(size)), tuple(range(size, 2 * size))
    return Replica(
        0, place, ranks[0], ("shard",), (None,), "cpu", ranks, Switchboard(), ranks[0][0]
    )


def test_columns_of_a_mesh_have_one_server_each_on_the_hosts_in_turn() -> None:
    two = Layout([0, 1])
    assert [place_servers(two, 0, replica_at(p, 4)) for p in range(4)] == [(0,), (1,)] * 2
    assert place_servers(two, 0, replica_at(0, 1)) == (0, 1)
    assert [place_servers(two, 2, replica_at(p, 2)) for p in range(2)] == [(0, 1)] * 2
    four = Layout([0, 1, 2, 3])  # more hosts than columns: one server on each
    assert [place_servers(four, 0, replica_at(p, 2)) for p in range(2)] == [(0, 1), (2, 3)]
    one = Layout([0, 0])
    assert [place_servers(one, 0, replica_at(p, 2)) for p in range(2)] == [(0,), (1,)]


def test_watched_store_raises_once_server_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wingbeat.methods.parameter_server.launch._POLL_S", 0.01)
    told: list[str] = []

    def check() -> None:
        told.append("")
        if len(told) == 3:
            raise PeerError("server 0 has ended")

    board = Switchboard()
    store = _WatchedStore(board, check)
    with pytest.raises(PeerError, match="server 0 has ended"):
        store.get("a", 1e9)
    told.clear()
    with contextlib.suppress(PeerError), pytest.raises(TimeoutError):
        store.get("a", 0.015)
    store.set("a", "b")
    assert store.has("a")
    assert store.get("a", 0.0) == board.get("a", 0.0) == "b"


def test_timeout_starts_with_request() -> None:
    made = rig()
    made.clock.now = 100.0
    made.start()
    made.run()
    made.clock.now = 104.0
    made.run()


def test_close_finishes_after_pushes_are_posted() -> None:
    made = rig()
    made.start()
    made.client.closing = True
    assert not made.client._has_finished(), "the others need what was pushed"
    made.run()
    assert made.client._has_finished()
    made.start(turn=1)
    made.client.quick = True
    assert made.client._has_finished()


# -- servers that update ---------------------------------------------------------------------


def _ask_for_state(made: Rig) -> Request:
    parts = [Transfer(1, Ids(0, 0, 0, 0), memoryview(b""), 0, -1)]
    return made.client.request(Kind.STATE, "", parts, "state")


def test_state_in_fragments_is_reassembled() -> None:
    made = rig()
    request = _ask_for_state(made)
    made.run()
    assert made.servers[0].poll().kind == Kind.STATE
    for kind, payload in [(Kind.STATE, b'{"a": 1, "nbytes": 5}'), (Kind.CONTINUATION, b"abc")]:
        made.answer(0, kind=kind, payload=payload, dtype="")
        made.run()
        assert not request.done()
    made.answer(0, kind=Kind.CONTINUATION, payload=b"de", dtype="")
    made.run()
    request.wait()
    document = request.documents[0, 0, 0]
    assert (document.fields["a"], bytes(document.data)) == (1, b"abcde")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            {"kind": Kind.STATE, "payload": b"spam"},
            "sent a malformed state: malformed document: document is not JSON",
        ),
        ({"kind": Kind.CONTINUATION, "payload": b"abc"}, "sent a malformed state"),
        ({"kind": Kind.SUM}, "server 1 sent an unexpected message"),
        (
            {"kind": Kind.STATE, "payload": b'{"nbytes": 0}', "server": 2},
            "another server has this slice",
        ),
    ],
    ids=["no words", "more of nothing", "a sum", "another server"],
)
def test_malformed_state_raises(answer: dict[str, object], text: str) -> None:
    made = rig()
    request = _ask_for_state(made)
    made.run()
    made.answer(0, **answer)
    with pytest.raises(PeerError, match=text):
        made.run()
    assert not request.done()


@pytest.mark.parametrize("kind", [Kind.FETCH, Kind.EXPECT])
def test_fetch_and_expect_receive_parameters(kind: Kind) -> None:
    made = rig()
    request = made.start(kind)
    made.run()
    asked = [server.poll() for server in made.servers]
    assert [bool(message) for message in asked] == [kind is Kind.FETCH] * 2
    with pytest.raises(PeerError, match="unexpected message"):
        made.client.handle(_message(Kind.SUM), Ids(0, 0, 0, 0))
    for number in range(2):
        made.answer(number, kind=Kind.PARAMETERS)
    made.run()
    request.wait()
    assert made.memory.tolist() == [9.0] * 4


def _message(kind: Kind) -> Any:
    return SentMessage(1, kind, memoryview(b""), (0, 0, 0, 0), "float32", 0)
