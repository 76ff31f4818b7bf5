"""What a `Mailbox` gives its users, with and without encryption, and while connections break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from helpers.mailboxes import arrive, receive
from helpers.waiting import until
from wingbeat.errors import PeerError, UsageError
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Limits, Mailbox, open_mailbox
from wingbeat.transport.messages.mailbox import CLOSE_TIMEOUT_S

PATIENCE = 20.0
"""Seconds: nothing that works takes as long."""

CLASSES = 2
Maker = Callable[[int, Limits], list[Mailbox]]


def in_threads(*bodies: Callable[[], object]) -> list[object]:
    """Run each in a thread; return their results, or raise what the first has raised."""
    results: list[object] = [None] * len(bodies)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "it waits for ever"
    if errors:
        raise errors[0]
    return results


def over_tcp(*, encrypted: bool) -> Maker:
    def make(size: int, limits: Limits) -> list[Mailbox]:
        store = Switchboard()

        def one(number: int) -> Callable[[], Mailbox]:
            return lambda: open_mailbox(
                store,
                number,
                range(size),
                interfaces=["lo"],
                classes=CLASSES,
                encrypted=encrypted,
                limits=limits,
                seconds=PATIENCE,
            )

        made = in_threads(*map(one, range(size)))
        return [m for m in made if isinstance(m, Mailbox)]

    return make


MAKERS: dict[str, Maker] = {
    "encrypted": over_tcp(encrypted=True),
    "clear": over_tcp(encrypted=False),
}


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Mailbox]]]:
    made: list[Mailbox] = []

    def make(size: int = 2, limits: Limits | None = None) -> list[Mailbox]:
        made.extend(MAKERS[request.param](size, limits or Limits(silence=PATIENCE)))
        return list(made)

    yield make
    for box in made:
        box.abandon()


def test_a_message_arrives_as_it_was_posted(maker: Callable[..., list[Mailbox]]) -> None:
    a, b = maker()
    payload = np.arange(1000, dtype=np.float32)

    def send() -> None:
        sent = a.post(1, 7, payload, ids=(1, 2, 3, 2**32 - 1), dtype="float32", spans=[(5, 1000)])
        arrive([sent])
        assert sent.done()

    def take() -> object:
        return drained(b, receive(b))

    _, got = in_threads(send, take)
    assert (got.peer, got.kind, got.ids) == (0, 7, (1, 2, 3, 2**32 - 1))
    assert (got.dtype, got.spans) == ("float32", ((5, 1000),))
    assert np.array_equal(np.frombuffer(got.payload, np.float32), payload)


def drained(box: Mailbox, result: object, seconds: float = 0.05) -> object:
    """Let a mailbox go on for a moment, so that its last words are sent."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert box.poll() is None
        time.sleep(0.001)
    return result


@pytest.mark.parametrize("nbytes", [0, 1, 16 * 1024, 16 * 1024 + 1, 1 << 20])
def test_messages_of_every_size_keep_their_order(
    maker: Callable[..., list[Mailbox]], nbytes: int
) -> None:
    a, b = maker()
    count = 5

    def send() -> None:
        arrive([a.post(1, n, bytes([n]) * nbytes) for n in range(count)])

    def take() -> object:
        return drained(b, [receive(b) for _ in range(count)])

    _, got = in_threads(send, take)
    assert [m.kind for m in got] == list(range(count))
    assert all(bytes(m.payload) == bytes([m.kind]) * nbytes for m in got)


def test_everyone_speaks_to_everyone(maker: Callable[..., list[Mailbox]]) -> None:
    boxes = maker(3)

    def body(number: int) -> Callable[[], object]:
        def run() -> object:
            box = boxes[number]
            others = [n for n in range(3) if n != number]
            posted = [box.post(peer, 10 * number + peer) for peer in others]
            got = {receive(box).kind for _ in others}
            arrive(posted)
            return drained(box, got)

        return run

    assert in_threads(*map(body, range(3))) == [{10, 20}, {1, 21}, {2, 12}]


def test_a_window_is_never_exceeded_and_opens_again(maker: Callable[..., list[Mailbox]]) -> None:
    a, b = maker(2, Limits(message=50_000, window=100_000, silence=PATIENCE))
    count, rooms = 8, []

    def send() -> None:
        posted = []
        for n in range(count):
            posted.append(a.post(1, n, bytes(30_000)))
            rooms.append(a.room(1))
        arrive(posted)

    def take() -> object:
        return drained(b, [receive(b).kind for _ in range(count)])

    _, got = in_threads(send, take)
    assert got == list(range(count))
    assert min(rooms) >= 0


def test_who_takes_nothing_is_named(maker: Callable[..., list[Mailbox]]) -> None:
    a, _ = maker(2, Limits(message=4000, window=9000, silence=PATIENCE))
    for n in range(2):
        a.post(1, n, bytes(4000))
    with pytest.raises(PeerError, match=r"rank 0: rank 1 consumed nothing for 0.2 s: 8152 of"):
        a.post(1, 2, bytes(4000), seconds=0.2)


def test_a_message_that_does_not_arrive_is_told_at_the_end(
    maker: Callable[..., list[Mailbox]],
) -> None:
    a, b = maker()
    b.abandon()
    sent = a.post(1, 0)
    with pytest.raises(PeerError, match=r"rank 0: not all messages have arrived at rank 1 within"):
        a.close(0.1)
    assert not sent.arrived


def test_leaving_is_told_after_the_last_message(maker: Callable[..., list[Mailbox]]) -> None:
    a, b = maker()

    def leave() -> None:
        a.post(1, 5, bytes(100_000))
        a.close()

    def take() -> object:
        kind = receive(b).kind
        until(lambda: b.next(0.01) is None and b.left == {0})
        with pytest.raises(PeerError, match="rank 0 has left"):
            b.post(0, 1)
        begin = time.monotonic()
        b.close(0.5)
        assert time.monotonic() - begin < CLOSE_TIMEOUT_S / 2, "nobody is there to wait for"
        return kind

    assert in_threads(leave, take)[1] == 5


def test_both_may_leave_at_once(maker: Callable[..., list[Mailbox]]) -> None:
    boxes = maker(3)
    begin = time.monotonic()
    in_threads(*(box.close for box in boxes))
    assert time.monotonic() - begin < CLOSE_TIMEOUT_S
    with pytest.raises(UsageError, match="closed"):
        boxes[0].post(1, 1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"peer": 5}, r"no connection to rank 5; allowed: rank 1"),
        ({"kind": -1}, r"kind=-1"),
        ({"ids": (1, 2)}, r"ids=\(1, 2\)"),
        ({"ids": (1, 2, 3, 2**32)}, r"allowed are a kind and four"),
        ({"spans": [(0, -1)]}, r"spans="),
        ({"spans": [(0, 1)] * 256}, r"256 spans; allowed are up to 255"),
        ({"dtype": "complex64"}, r"dtype='complex64'; allowed: uint8"),
        ({"payload": "text"}, r"payload of type str"),
        ({"payload": np.ones((4, 4))[:, 0]}, r"contiguous"),
        ({"payload": bytes(5000)}, r"5000 bytes; allowed are 4000"),
        ({"urgency": 2}, r"urgency=2.*classes \[0, 1\]"),
        ({"interface": 3}, r"interface=3.*interfaces \[0\]"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_one_line(values: dict, said: str) -> None:
    box = MAKERS["clear"](2, Limits(message=4000, silence=PATIENCE))[0]
    with pytest.raises(UsageError, match=said) as caught:
        box.post(**{"peer": 1, "kind": 1, **values})
    assert "\n" not in str(caught.value)


def test_urgent_messages_overtake(maker: Callable[..., list[Mailbox]]) -> None:
    """Taken first, although they were posted last; order holds only within a class."""
    a, b = maker()

    def send() -> None:
        posted: list = [a.post(1, n, bytes(1000), urgency=1) for n in range(3)]
        posted.append(a.post(1, 9, urgency=0))
        arrive(posted)

    def take() -> object:
        until(lambda: b._carrier.waiting == 4)
        return drained(b, [receive(b).kind for _ in range(4)])

    assert in_threads(send, take)[1] == [9, 0, 1, 2]


def test_interfaces_are_numbered(maker: Callable[..., list[Mailbox]]) -> None:
    a, _ = maker()
    assert a.peers == (1,)
    assert a.interfaces(1) == (0,)


def test_who_serves_is_interrupted_by_another_thread(
    maker: Callable[..., list[Mailbox]],
) -> None:
    a, _ = maker()
    interrupt = a.interrupter()
    waiting = threading.Thread(target=a.next, args=(PATIENCE,), daemon=True)
    begin = time.monotonic()
    waiting.start()
    while waiting.is_alive() and time.monotonic() < begin + PATIENCE / 2:
        interrupt()
        waiting.join(0.05)
    assert not waiting.is_alive()


def test_an_interruption_before_the_wait_ends_it_too(maker: Callable[..., list[Mailbox]]) -> None:
    a, _ = maker()
    interrupt = a.interrupter()
    begin = time.monotonic()
    for _ in range(3):
        interrupt()
        assert a.next(PATIENCE) is None
    assert time.monotonic() < begin + PATIENCE / 2


def test_who_serves_sees_messages_and_who_has_left(
    maker: Callable[..., list[Mailbox]],
) -> None:
    a, b = maker()
    a.interrupter()
    b.post(0, 7, b"x")
    begin = time.monotonic()
    while (message := a.next(1.0)) is None and time.monotonic() < begin + PATIENCE:
        pass
    assert message is not None
    assert (message.peer, message.kind) == (1, 7)
    in_threads(b.close, lambda: until_left(a, 1))
    assert a.left == {1}
    assert not a.lost


def until_left(box: Mailbox, peer: int) -> None:
    begin = time.monotonic()
    while peer not in box.left and time.monotonic() < begin + PATIENCE:
        box.next(0.05)


def test_whose_connection_has_ended_is_known_before_it_falls_silent(
    maker: Callable[..., list[Mailbox]],
) -> None:
    a, b, c = maker(3)
    assert c.unconnected() == {}, "nobody has said anything for a while, and all are there"
    a.abandon()
    begin = time.monotonic()
    while c.unconnected().get(0, 0.0) < 0.1:
        assert time.monotonic() < begin + PATIENCE / 2
        c.next(0.01)
    assert set(c.unconnected()) == {0}, "the others are"
    assert not c.lost
    assert not c.left
    b.post(2, 7, b"x")
    got = receive(c)
    assert (got.peer, got.payload) == (1, b"x")
