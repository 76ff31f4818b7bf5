"""What every `Link` keeps to; a new one is a line in `LINKS`.

Each is tested as it is and as the link of a channel. All ranks are in this process, so receives are
waited for first: a link may send no sooner than that. What fails if it blocks is called in threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers import late, tcp
from wingbeat.transport.link import MAX_CHANNELS, TAG_BITS, Link, Pending, channel_tag
from wingbeat.transport.loopback import LoopbackLink, Switchboard
from wingbeat.transport.tcp import GroupLink
from wingbeat.types import Group

NAME = "lo"
RANKS = 3
PATIENCE = 20.0
"""Seconds: nothing that works takes as long."""

Ends = list[Link]


def loopback() -> Ends:
    board = Switchboard()
    return [LoopbackLink(board, rank, NAME) for rank in range(RANKS)]


def late_loopback() -> Ends:
    board = late.Board()
    return [late.LateLink(board, rank, NAME) for rank in range(RANKS)]


def over_tcp() -> Ends:
    return [links[0] for links in tcp.links(RANKS, shared_memory=False)]


def in_shared_memory() -> Ends:
    return [links[0] for links in tcp.links(RANKS)]


def of_a_group() -> Ends:
    """Of the ranks 1 to 3 of four."""
    made = tcp.links(RANKS + 1)
    group = Group(range(1, RANKS + 1), 5)
    return [GroupLink(links[0], group) for links in made[1:]]


LINKS: dict[str, Callable[[], Ends]] = {
    "loopback": loopback,
    "late": late_loopback,
    "tcp": over_tcp,
    "group": of_a_group,
    "shared memory": in_shared_memory,
}


@pytest.fixture(params=LINKS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = LINKS[request.param]()
    yield made
    for end in made:
        end.close()


def finish(*pending: Pending) -> None:
    for each in pending:
        each.wait(PATIENCE)


def error_of(body: Callable[[], object]) -> tuple[str, float]:
    """What ``body`` raises, and after how many seconds."""
    said: list[str] = []

    def work() -> None:
        try:
            body()
        except RuntimeError as err:
            said.append(str(err))

    thread = threading.Thread(target=work, daemon=True)
    begin = time.monotonic()
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for ever"
    assert said, "nothing was raised"
    return said[0], time.monotonic() - begin


def test_it_has_the_interfaces_name(ends: Ends) -> None:
    assert {end.name for end in ends} == {NAME}


def test_messages_with_equal_tags_keep_their_order(ends: Ends) -> None:
    given = [torch.full((1000 * n,), float(n)) for n in range(1, 6)]
    got = [torch.zeros_like(each) for each in given]
    coming = [ends[1].recv(out, 0, 7) for out in got]
    sent = [ends[0].send(each, 1, 7) for each in given]
    finish(*coming, *sent)
    assert all(map(torch.equal, got, given))


def test_tags_do_not_wait_for_each_other(ends: Ends) -> None:
    """What is sent first may be received last; the highest tag is one of them."""
    tags = (0, 5, (1 << TAG_BITS) - 1)
    sent = [ends[0].send(torch.full((9,), float(tag)), 1, tag) for tag in tags]
    for tag in reversed(tags):
        out = torch.zeros(9)
        finish(ends[1].recv(out, 0, tag))
        assert torch.equal(out, torch.full((9,), float(tag)))
    finish(*sent)


@pytest.mark.parametrize("first", ["send", "recv"])
def test_either_side_may_be_first(ends: Ends, first: str) -> None:
    given, out = torch.arange(50.0), torch.zeros(50)
    if first == "send":
        sent = ends[0].send(given, 2, 1)
        coming = ends[2].recv(out, 0, 1)
    else:
        coming = ends[2].recv(out, 0, 1)
        sent = ends[0].send(given, 2, 1)
    finish(coming, sent)
    assert torch.equal(out, given)


def test_peers_are_told_apart(ends: Ends) -> None:
    """Everyone sends to everyone under one tag, both directions at once."""
    out = {(a, b): torch.zeros(4) for a in range(RANKS) for b in range(RANKS) if a != b}
    pending = [ends[b].recv(into, a, 3) for (a, b), into in out.items()]
    pending += [ends[a].send(torch.full((4,), 10.0 * a + b), b, 3) for a, b in out]
    finish(*pending)
    for (a, b), into in out.items():
        assert torch.equal(into, torch.full((4,), 10.0 * a + b))


def test_large_messages_cross(ends: Ends) -> None:
    """Both ends send more than a socket holds before either has received."""
    given = [torch.randn(1 << 20) for _ in range(2)]
    out = [torch.zeros(1 << 20) for _ in range(2)]
    sent = [ends[rank].send(given[rank], 1 - rank, 2) for rank in range(2)]
    finish(*[ends[rank].recv(out[rank], 1 - rank, 2) for rank in range(2)], *sent)
    assert torch.equal(out[0], given[1])
    assert torch.equal(out[1], given[0])


@pytest.mark.parametrize("numel", [0, 1])
def test_a_message_may_be_empty_and_keeps_its_place(ends: Ends, numel: int) -> None:
    given = [torch.ones(3), torch.ones(numel), torch.full((3,), 2.0)]
    out = [torch.zeros_like(each) for each in given]
    coming = [ends[1].recv(into, 0, 4) for into in out]
    sent = [ends[0].send(each, 1, 4) for each in given]
    finish(*coming, *sent)
    assert all(map(torch.equal, out, given))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64),
    ],
    ids=str,
)
def test_every_dtype_arrives_bit_for_bit(ends: Ends, dtype: torch.dtype) -> None:
    given = torch.tensor([0, 1, 3, 100, 255], dtype=torch.uint8).to(dtype)
    if dtype.is_floating_point:
        given = torch.cat([given, torch.tensor([-0.0, torch.nan, torch.inf, 2.5]).to(dtype)])
    out = torch.zeros_like(given)
    finish(ends[1].recv(out, 0, 6), ends[0].send(given, 1, 6))
    assert torch.equal(out.view(torch.uint8), given.view(torch.uint8))


def test_a_part_of_a_buffer_travels_and_nothing_beside_it_changes(ends: Ends) -> None:
    given, out = torch.arange(10.0), torch.full((10,), -1.0)
    finish(ends[1].recv(out[3:6], 0, 6), ends[0].send(given[5:8], 1, 6))
    assert out.tolist() == [-1.0] * 3 + [5.0, 6.0, 7.0] + [-1.0] * 4
    assert torch.equal(given, torch.arange(10.0))


def test_what_is_sent_may_be_overwritten_after_the_wait(ends: Ends) -> None:
    given, out = torch.ones(100_000), torch.zeros(100_000)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(lambda: finish(ends[1].recv(out, 0, 8)))
        finish(ends[0].send(given, 1, 8))
        given.fill_(7.0)
        receiving.result(PATIENCE)
    assert torch.equal(out, torch.ones(100_000))


def test_a_wait_ends_after_its_own_seconds(ends: Ends) -> None:
    pending = ends[0].recv(torch.zeros(4), 1, 7)
    said, seconds = error_of(lambda: pending.wait(0.2))
    assert "time" in said.lower()
    assert 0.15 < seconds < PATIENCE / 2


def test_who_closes_is_noticed_by_those_who_wait(ends: Ends) -> None:
    pending = ends[0].recv(torch.zeros(4), 1, 7)
    ends[1].close()
    said, seconds = error_of(lambda: pending.wait(PATIENCE))
    assert "\n" not in said.split(". This is typically")[0].strip()
    assert seconds < PATIENCE / 2


def test_a_closed_end_carries_nothing_and_may_be_closed_again(ends: Ends) -> None:
    ends[0].close()
    ends[0].close()
    error_of(lambda: ends[0].send(torch.zeros(1), 1, 1).wait(PATIENCE))
    error_of(lambda: ends[0].recv(torch.zeros(1), 1, 1).wait(PATIENCE))


@pytest.mark.parametrize("name", LINKS)
def test_channels_of_a_link_are_apart_and_end_together(name: str) -> None:
    """After a failure none can go on."""
    made = LINKS[name]()
    tags = [channel_tag(channel, 1) for channel in (0, 1, 3, MAX_CHANNELS)]
    out = [torch.zeros(5) for _ in tags]
    coming = [made[1].recv(into, 0, tag) for into, tag in zip(out, tags, strict=True)]
    sent = [made[0].send(torch.full((5,), float(n)), 1, tags[n]) for n in reversed(range(4))]
    finish(*coming, *sent)
    assert [float(into[0]) for into in out] == [0.0, 1.0, 2.0, 3.0]
    sent.clear()
    pending = made[1].recv(torch.zeros(1), 0, tags[1])
    made[0].close()
    error_of(lambda: pending.wait(PATIENCE))
    for end in made:
        end.close()
