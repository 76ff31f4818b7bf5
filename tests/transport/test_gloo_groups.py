"""Members of a group meet over gloo; ranks as threads of this process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wingbeat.collectives import Collectives
from wingbeat.errors import PeerError
from wingbeat.transport import gloo
from wingbeat.transport.failures import FailureAttribution, publish_exit
from wingbeat.transport.gloo import GlooGroups, _GroupStore
from wingbeat.transport.interfaces import Interface
from wingbeat.transport.link import GroupSetupError, Link, group_prefix
from wingbeat.transport.torch_store import TorchStore
from wingbeat.transport.world import World
from wingbeat.types import Group

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
PATIENT = 60.0
SIZE = 3


class Rank:
    """One worker: a client of the store, and its groups."""

    def __init__(self, port: int, rank: int) -> None:
        self.rank = rank
        self.store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=PATIENT))
        self.groups = GlooGroups(self.store, rank, SIZE, [LO])

    def meet(self, group: Group, timeout: float = PATIENT) -> Link:
        [link] = self.groups.links(group, timeout)
        mine = group.ranks.index(self.rank)
        sent = link.send(torch.full((1,), float(self.rank)), (mine + 1) % len(group.ranks), 1)
        got, before = torch.zeros(1), (mine - 1) % len(group.ranks)
        link.recv(got, before, 1).wait(PATIENT)
        sent.wait(PATIENT)
        assert got.item() == group.ranks[before]
        return link


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = [Rank(server.port, rank) for rank in range(SIZE)]
    yield made
    for rank in made:
        rank.groups.close()


def together(group: Group, act: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(len(group.ranks)) as pool:
        return list(pool.map(act, group.ranks))


def test_setup_leaves_no_key_and_closed_link_no_socket(
    ranks: list[Rank],
) -> None:
    keys = fds = -1
    for epoch in range(12):
        group = Group(((0, 1), (0, 2), (0, 1, 2))[epoch % 3], epoch)
        links = together(group, lambda rank, group=group: ranks[rank].meet(group))
        for link in links:
            link.close()  # type: ignore[attr-defined]
        if epoch == 5:
            keys, fds = ranks[0].store.num_keys(), open_files(-1)
    assert ranks[0].store.num_keys() == keys
    assert open_files(fds) <= fds


def test_member_that_aborted_the_setup_does_not_listen(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that comes after that would find half a connection, and end the process."""
    first = Group((0, 1), 0)
    links = together(first, lambda rank: ranks[rank].meet(first))
    before, kept = listening(), []  # the errors are kept, with what they hold
    given_up, get, late_ones = threading.Event(), _GroupStore.get, set[int]()

    def late(board: _GroupStore, key: str) -> bytes:
        """Rank 1 has rank 0's address in hand when rank 0 gives up."""
        address = get(board, key)
        if key.endswith("/0") and threading.get_ident() in late_ones:
            assert given_up.wait(PATIENT)
        return address

    def act(rank: int, group: Group) -> None:
        if rank == 1:
            late_ones.add(threading.get_ident())
        with pytest.raises(GroupSetupError) as caught:
            ranks[rank].meet(group, 0.2 if rank == 0 else 2.0)
        kept.append(caught.value)
        given_up.set()

    monkeypatch.setattr(_GroupStore, "get", late)
    for epoch in range(1, 5):  # who listens and who connects is chance
        late_ones.clear()
        given_up.clear()
        together(first, lambda rank, epoch=epoch: act(rank, Group((0, 1), epoch)))
    assert len(kept) == 8
    idle = sum(len(rank.groups._devices[0]._idle) for rank in ranks)
    assert listening() <= before + idle
    pending = links[0].recv(torch.ones(1), 1, 5)  # type: ignore[attr-defined]
    links[1].send(torch.ones(1), 0, 5).wait(PATIENT)  # type: ignore[attr-defined]
    pending.wait(PATIENT)


def listening() -> int:
    """How many sockets of this process wait for connections."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in own for row in rows)


def test_setup_is_cancelled_when_its_link_is_closed(ranks: list[Rank]) -> None:
    """Who fails must not wait for a member that waits for it elsewhere."""
    group, begin = Group((0, 1), 1), time.monotonic()
    store, here = (
        TorchStore(ranks[0].groups._start()),
        f"{group_prefix(Group((0, 1), 1))}link0/here/0",
    )
    world = World(0, SIZE, (), (1.0,), PATIENT, store, make_links=ranks[0].groups.links)
    handles = []

    def fail() -> None:
        with world.open_group(group) as members:
            handles.append(Collectives(members).all_reduce(torch.ones(3)))
            while not store.has(here):
                time.sleep(0.001)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert time.monotonic() - begin < PATIENT / 2
    with pytest.raises(PeerError, match="was closed before all members had joined"):
        handles[0].wait()


class Behind:
    """A store's client, behind which something happens between two of its calls."""

    def __init__(self, store: dist.Store, meanwhile: Callable[[str], None]) -> None:
        self._store, self._meanwhile = store, meanwhile

    def check(self, keys: list[str]) -> bool:
        there = bool(self._store.check(keys))
        self._meanwhile(keys[0])
        return there

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_key_deleted_after_a_check_does_not_block_the_store(ranks: list[Rank]) -> None:
    """A member that fails meanwhile clears what it has written."""
    mine, theirs = (ranks[k].store for k in (0, 1))
    mine.set_timeout(timedelta(seconds=3))
    theirs.set("room/0/1", "address")
    store: Any = Behind(mine, theirs.delete_key)

    def wait_until(done: Callable[[], bool], _: int) -> None:
        assert done()

    begin = time.monotonic()
    board = _GroupStore(store, "room/", 0, (0, 1), wait_until)
    assert board.get("0/1") == b"address"
    assert time.monotonic() - begin < 2


def test_groups_proceed_while_others_wait_in_the_worlds_store(ranks: list[Rank]) -> None:
    """They tell each other of failures by it."""
    ranks[0].store.set_timeout(timedelta(seconds=8))
    groups_store, waiting = ranks[0].groups.store(), threading.Event()

    def wait() -> None:
        waiting.set()
        with contextlib.suppress(RuntimeError):
            ranks[0].store.wait(["never"], timedelta(seconds=4))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait(PATIENT)
    begin = time.monotonic()
    for _ in range(100):
        FailureAttribution(groups_store, 0, SIZE, 1.0, "room/").publish_wait(1, "all-reduce")
        with pytest.raises(TimeoutError):
            groups_store.get("nothing", 0.001)
    assert time.monotonic() - begin < 3
    ranks[0].store.set_timeout(timedelta(seconds=1))
    thread.join(PATIENT)


def test_unavailable_store_is_named_and_no_member() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank, group = Rank(server.port, 0), Group((0, 1, 2), 1)
    store: Any = Behind(rank.groups._start(), gone_after(0.2))
    rank.groups._store = store
    with pytest.raises(GroupSetupError) as caught:
        rank.meet(group)
    assert caught.value.peer == 0
    assert "the rendezvous store does not answer: Broken pipe" in str(caught.value)


def gone_after(seconds: float) -> Callable[[str], None]:
    end = time.monotonic() + seconds

    def check(_: str) -> None:
        if time.monotonic() > end:
            raise RuntimeError("Broken pipe")

    return check


def open_files(wanted: int) -> int:
    """How many there are; gloo's thread closes them in its own time."""
    deadline = time.monotonic() + 5.0
    while True:
        count = len(os.listdir("/proc/self/fd"))
        if 0 <= count <= wanted or time.monotonic() > deadline or wanted < 0:
            return count
        time.sleep(0.01)


def test_setups_in_different_orders_do_not_deadlock(ranks: list[Rank]) -> None:
    """A wait inside the store would lock it for the process's other meetings."""
    order = {
        0: (Group((0, 1)), Group((0, 2))),
        1: (Group((1, 2)), Group((0, 1))),
        2: (Group((0, 2)), Group((1, 2))),
    }
    waiting = threading.Barrier(SIZE)

    def act(rank: int) -> bool:
        first, second = order[rank]
        thread = threading.Thread(target=ranks[rank].meet, args=(first, 5.0), daemon=True)
        thread.start()
        here = f"{group_prefix(first)}link0/here/{first.ranks.index(rank)}"
        while not ranks[rank].store.check([here]):
            time.sleep(0.001)
        waiting.wait(PATIENT)
        ranks[rank].meet(second, 5.0)
        thread.join(PATIENT)
        return thread.is_alive()

    assert together(Group(range(SIZE)), act) == [False] * SIZE


def test_missing_member_is_named_at_the_timeout(ranks: list[Rank]) -> None:
    group = Group((0, 1, 2), 1)

    def act(rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(GroupSetupError) as caught:
            ranks[rank].meet(group, 0.3)
        assert caught.value.peer == 1
        return str(caught.value)

    for text in (text for text in together(group, act) if text):
        assert str(text).startswith("rank 1 did not join group (0, 1, 2) of epoch 1 within 0.3")


def test_silent_connection_is_aborted_before_the_timeout(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, over, usual = Group((0, 1), 1), threading.Event(), gloo._barrier

    def greet(link: Any, mine: int, *rest: Any) -> None:
        if mine == 1:
            assert over.wait(PATIENT)
        usual(link, mine, *rest)

    def act(rank: int) -> None:
        begin = time.monotonic()
        with pytest.raises(
            GroupSetupError, match=f"rank {1 - rank} was lost during the connection setup of group"
        ):
            ranks[rank].meet(group)
        over.set()
        assert time.monotonic() - begin < PATIENT / 2

    monkeypatch.setattr(gloo, "_CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(gloo, "_barrier", greet)
    together(group, act)


@pytest.mark.parametrize("way", ["left", "given up"])
def test_exited_member_is_not_awaited(way: str, ranks: list[Rank]) -> None:
    group, store = Group((0, 2), 1), TorchStore(ranks[2].store)
    timer = threading.Timer(
        0.2,
        lambda: (
            publish_exit(store, 2, finished=True)
            if way == "left"
            else FailureAttribution(store, 2, SIZE, 1.0, group_prefix(group)).publish_wait(
                0, "broadcast"
            )
        ),
    )
    timer.start()
    begin = time.monotonic()
    with pytest.raises(GroupSetupError) as caught:
        ranks[0].meet(group)
    assert time.monotonic() - begin < PATIENT / 2
    words = {"left": "left before it joined group", "given up": "has aborted group"}
    assert f"rank 2 {words[way]} (0, 2) of epoch 1" in str(caught.value)
    assert caught.value.peer == 2


def test_link_after_close_connects_to_no_member(ranks: list[Rank]) -> None:
    ranks[0].groups.close()
    with pytest.raises(
        GroupSetupError, match=r"this rank is not connected: wingbeat\.shutdown\(\) was"
    ):
        ranks[0].meet(Group((0, 1)))
