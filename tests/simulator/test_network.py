"""Chunks on connections that share ports: when each arrives, and that shares are max-min fair."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.errors import UsageError
from wingbeat.simulator import Links
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.interfaces import Interfaces, Stream
from wingbeat.simulator.network import Channel, Network, Wires
from wingbeat.types import Layout

A, B, C, D, E = range(5)


class Scene:
    """Interfaces of 100 bytes a second and half a second of latency; within a host neither."""

    def __init__(self, host_of: list[int] | None = None) -> None:
        self.agenda = Agenda()
        links, local = (
            Links(bytes_per_s=100.0, latency_s=0.5),
            Links(bytes_per_s=1000.0, latency_s=0.0),
        )
        layout = Layout(host_of or list(range(5)))
        self.network = Network(self.agenda, Wires(layout, links, local))
        self.taken: dict[object, float] = {}

    def at(self, when: float, action: Callable[[], None]) -> None:
        self.agenda.at(when, action)

    def channel(self, name: object, source: int, target: int, link: int = 0) -> Channel:
        return self.network.channel((source, target, name), (source, link), (target, link))

    def take(self, name: object, channel: Channel) -> None:
        """Record when a chunk arrives, or that it had arrived before now."""

        def arriving(when: float) -> None:
            self.taken[name] = max(when, self.agenda.now)

        when = channel.receive(0, arriving)
        if when is not None:
            arriving(when)

    def send(
        self, name: object, source: int, target: int, nbytes: int = 200, link: int = 0
    ) -> None:
        channel = self.channel(name, source, target, link)
        channel.announce(0)
        channel.send(0, nbytes)
        self.take(name, channel)

    def play(self) -> dict[object, float]:
        self.agenda.run()
        return self.taken


def test_a_chunk_takes_its_time_and_the_latency() -> None:
    scene = Scene()
    scene.at(1.0, lambda: scene.send("a", A, B))
    assert scene.play() == {"a": 3.5}


def test_chunks_of_a_connection_leave_one_after_the_other() -> None:
    scene = Scene()
    scene.at(0.0, lambda: scene.send("first", A, B))
    scene.at(0.0, lambda: scene.send("second", A, B))
    assert scene.play() == {"first": 2.5, "second": 4.5}


@pytest.mark.parametrize(
    ("one", "other"), [((A, B), (A, C)), ((A, C), (B, C))], ids=["of a sender", "to a receiver"]
)
def test_connections_share_an_interface(one: tuple[int, int], other: tuple[int, int]) -> None:
    scene = Scene()
    scene.at(0.0, lambda: scene.send("first", *one))
    scene.at(1.0, lambda: scene.send("second", *other))
    # From 1 s on, half the rate each, until the first has its other 100 bytes.
    assert scene.play() == {"first": pytest.approx(3.5), "second": pytest.approx(4.5)}


def test_what_one_connection_cannot_use_another_does() -> None:
    scene = Scene()
    for source in (A, B, E):
        scene.at(0.0, lambda source=source: scene.send(source, source, C))  # type: ignore[misc]
    scene.at(0.0, lambda: scene.send("beside", A, D, nbytes=300))
    taken = scene.play()
    assert taken["beside"] == pytest.approx(300 / (100 - 100 / 3) + 0.5)
    assert [taken[source] for source in (A, B, E)] == pytest.approx([6.5] * 3)


def test_directions_and_interfaces_do_not_disturb_each_other() -> None:
    scene = Scene()
    scene.at(0.0, lambda: scene.send("there", A, B))
    scene.at(0.0, lambda: scene.send("back", B, A))
    scene.at(0.0, lambda: scene.send("other", A, B, link=1))
    assert scene.play() == {"there": 2.5, "back": 2.5, "other": 2.5}


def test_workers_of_a_host_share_its_interface_and_not_its_memory() -> None:
    scene = Scene([0, 0, 1, 1, 1])
    for source, target in ((A, C), (B, D)):
        scene.at(0.0, lambda s=source, t=target: scene.send((s, t), s, t))  # type: ignore[misc]
    for source, target in ((A, B), (C, D)):
        scene.at(0.0, lambda s=source, t=target: scene.send((s, t), s, t))  # type: ignore[misc]
    assert scene.play() == pytest.approx({(A, C): 4.5, (B, D): 4.5, (A, B): 0.2, (C, D): 0.2})


def test_nothing_leaves_before_the_receiver_has_room_for_it() -> None:
    scene = Scene()
    early = scene.channel("a", A, B)
    scene.at(0.0, lambda: early.send(0, 200))
    scene.at(0.0, lambda: scene.take("a", early))
    scene.at(3.0, lambda: early.announce(0))
    scene.at(3.0, lambda: scene.send("b", A, B))
    assert scene.play() == {"a": 5.5, "b": 7.5}


def test_what_is_there_is_taken_at_once_and_once() -> None:
    scene = Scene()
    channel = scene.channel("a", A, B)
    scene.at(0.0, lambda: channel.announce(0))
    scene.at(0.0, lambda: channel.send(0, 200))
    scene.at(9.0, lambda: scene.take("a", channel))
    assert scene.play() == {"a": 9.0}
    assert channel.receive(0, lambda _when: None) is None


def test_a_receiver_learns_the_arrival_when_the_last_byte_has_left() -> None:
    scene = Scene()
    channel, told = scene.channel("a", A, B), list[tuple[float, float]]()
    channel.announce(0)
    channel.send(0, 200)
    assert channel.receive(0, lambda when: told.append((scene.agenda.now, when))) is None
    scene.play()
    assert told == [(2.0, 2.5)]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_channel_on_which_one_end_waits_is_the_one_that_the_other_end_gets(side: str) -> None:
    """Nothing else refers to it until the other end comes."""
    scene = Scene()
    if side == "sender":
        scene.channel("a", A, B).send(0, 200)
    else:
        scene.take("a", scene.channel("a", A, B))
    gc.collect()
    again = scene.channel("a", A, B)
    again.announce(0)
    if side == "receiver":
        again.send(0, 200)
    else:
        scene.take("a", again)
    assert scene.play() == {"a": 2.5}
    assert not scene.network.waiting


flows = st.lists(
    st.tuples(st.floats(0, 6), st.integers(0, 4), st.integers(0, 4), st.integers(1, 400)).filter(
        lambda flow: flow[1] != flow[2]
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda flow: flow[1:3],
)


def rates_of(active: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Water-filling: all rates grow together, and those on a full port stop."""
    rates, growing = dict.fromkeys(active, 0.0), set(active)
    while growing:
        on = {
            (side, host): [f for f in active if f[side] == host]
            for side in (0, 1)
            for host in range(5)
        }
        growth = min(
            (100 - sum(rates[f] for f in port)) / sum(f in growing for f in port)
            for port in on.values()
            if growing.intersection(port)
        )
        for each in growing:
            rates[each] += growth
        full = [port for port in on.values() if sum(rates[f] for f in port) > 100 - 1e-9]
        growing -= {f for port in full for f in port}
    return rates


@settings(max_examples=examples(100))
@given(flows=flows)
def test_shares_are_those_of_water_filling(flows: list[tuple[float, int, int, int]]) -> None:
    scene = Scene()
    for when, source, target, nbytes in flows:
        scene.at(when, lambda f=(source, target, nbytes): scene.send(f[:2], *f))  # type: ignore[misc]
    found = scene.play()
    waiting = sorted(flows)
    left: dict[tuple[int, int], float] = {}
    ends, now = {}, 0.0
    while waiting or left:
        rates = rates_of(list(left))
        ahead = min((left[f] / rates[f] for f in left), default=float("inf"))
        then = min(now + ahead, waiting[0][0] if waiting else float("inf"))
        left = {f: amount - rates[f] * (then - now) for f, amount in left.items()}
        now = then
        ends |= {f: now + 0.5 for f, amount in left.items() if amount <= 1e-7}
        left = {f: amount for f, amount in left.items() if amount > 1e-7}
        while waiting and waiting[0][0] <= now:
            _, source, target, nbytes = waiting.pop(0)
            left[source, target] = nbytes
    assert found == pytest.approx(ends, abs=1e-6)


@pytest.mark.parametrize(
    ("links", "seconds"),
    [
        ({}, [2.0 + 0.5] * 2),
        ({"rates": {3: 25.0}}, [2.0 + 0.5, 8.0 + 0.5]),
        ({"rates": {(1, 0): 50.0}}, [2.0 + 0.5, 4.0 + 0.5]),
        ({"rates": {(1, 1): 50.0}}, [2.0 + 0.5] * 2),
        ({"latencies": {0: 2.5}}, [2.0 + 1.5, 2.0 + 0.5]),
        ({"leaf": 2, "trunk_bytes_per_s": 100.0}, [4.0 + 1.0] * 2),
        ({"leaf": 2, "trunk_bytes_per_s": 200.0}, [2.0 + 1.0] * 2),
        ({"leaf": 4, "trunk_bytes_per_s": 1.0}, [2.0 + 0.5] * 2),
    ],
)
@pytest.mark.parametrize("messages", [False, True])
def test_hosts_and_switches_that_differ(links: dict, seconds: list[float], messages: bool) -> None:
    """From 0 to 2 and from 1 to 3, 200 bytes each: two hosts on each leaf switch, if any."""
    made = Links(bytes_per_s=100.0, latency_s=0.5, quantum=1, **links)
    agenda, ended = Agenda(), dict[int, float]()
    network = Network(agenda, Wires(Layout.even(4, 1), made))
    interfaces = Interfaces(agenda, made, lambda number: number)
    for source in (0, 1):

        def arrived(when: float | None = None, source: int = source) -> None:
            ended[source] = agenda.now if when is None else when

        if messages:
            interfaces.carry(Stream(source, source + 2, 0), 200, arrived)
        else:
            name = (source, source + 2, "chunk")
            channel = network.channel(name, (source, 0), (source + 2, 0))
            channel.announce(0)
            channel.send(0, 200)
            channel.receive(0, arrived)
    agenda.run()
    assert [ended[0], ended[1]] == pytest.approx(seconds, abs=0.08)


@pytest.mark.parametrize(
    "wrong",
    [{"rates": {1: 0.0}}, {"latencies": {1: -1.0}}, {"leaf": -1}, {"trunk_bytes_per_s": 0.0}],
)
def test_links_that_nobody_has_are_refused(wrong: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Links(bytes_per_s=1.0, **wrong)
