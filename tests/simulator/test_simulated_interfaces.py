"""Interfaces and ports with classes: who is carried first, and that nothing is lost or idle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.simulator import Links
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.interfaces import Interfaces, Stream

URGENT, BULK = 0, 1
Frame = tuple[float, Stream, int]
"""When it is sent, where, and how many bytes."""


def play(
    frames: list[Frame], priorities: bool = True, quantum: int = 10, latency_s: float = 0.0
) -> list[float]:
    """When each has arrived, at 100 bytes a second; every process has a host of its own."""
    agenda = Agenda()
    links = Links(bytes_per_s=100.0, latency_s=latency_s, priorities=priorities, quantum=quantum)
    interfaces = Interfaces(agenda, links, lambda number: number)
    ended = [-1.0] * len(frames)

    def arrived(number: int) -> None:
        assert ended[number] < 0, "it came twice"
        ended[number] = agenda.now

    for number, (when, stream, nbytes) in enumerate(frames):

        def send(number: int = number, stream: Stream = stream, nbytes: int = nbytes) -> None:
            interfaces.carry(stream, nbytes, lambda: arrived(number))

        agenda.at(when, send)
    agenda.run()
    return ended


def test_a_frame_takes_its_time_and_the_latency() -> None:
    assert play([(1.0, Stream(0, 1, 0), 205)], latency_s=0.5) == [pytest.approx(3.55)]


def test_frames_of_a_stream_keep_their_order() -> None:
    stream = Stream(0, 1, 0)
    assert play([(0.0, stream, 100), (0.0, stream, 10)]) == pytest.approx([1.0, 1.1])


def test_what_is_urgent_leaves_first_after_a_quantum_that_has_begun() -> None:
    frames = [(0.0, Stream(0, 1, BULK), 200), (0.55, Stream(0, 2, URGENT), 100)]
    assert play(frames) == pytest.approx([3.0, 1.6])
    # Without classes in the network both have half of the card until the shorter is through.
    assert play(frames, priorities=False) == pytest.approx([3.0, 2.5])


def test_streams_of_a_class_share_a_card_evenly() -> None:
    frames = [(0.0, Stream(0, to, URGENT), 100) for to in (1, 2)]
    assert play(frames) == pytest.approx([1.9, 2.0])


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_an_urgent_transfer_takes_its_time_alone_where_the_network_has_classes(
    servers: int,
) -> None:
    """Geryon's Fig. 5: servers send to one worker, one of them what is urgent, the others not."""
    worker, nbytes = 9, 10_000
    frames = [(0.0, Stream(0, worker, URGENT), nbytes)]
    frames += [(0.0, Stream(n, worker, BULK), nbytes) for n in range(1, servers)]
    alone = play(frames[:1])[0]
    urgent, *bulk = play(frames)
    assert alone - 1e-9 <= urgent <= alone + 0.1 + 1e-9  # a quantum that had begun
    assert max(bulk) == pytest.approx(servers * alone)
    shared, *_ = play(frames, priorities=False)
    assert shared == pytest.approx(servers * alone, rel=servers * 1e-3)


def test_what_stays_on_a_host_needs_no_card() -> None:
    agenda = Agenda()
    interfaces = Interfaces(agenda, Links(bytes_per_s=1.0), lambda number: number % 2)
    ended: list[float] = []
    interfaces.carry(Stream(0, 2, 0), 10**9, lambda: ended.append(agenda.now))
    agenda.run()
    assert ended == [0.0]


frames_to_one = st.lists(
    st.tuples(
        st.floats(0, 5),
        # By one card: each of several has a port of its own.
        st.builds(Stream, st.integers(0, 3), st.just(9), st.integers(0, 3), st.just(0)),
        st.integers(1, 300),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=examples(200))
@given(frames=frames_to_one, quantum=st.sampled_from([1, 10, 64]))
def test_a_port_never_idles_while_something_waits_for_it(frames: list[Frame], quantum: int) -> None:
    """Then all is through when one queue would be: each sender's card is as fast as the port."""
    for priorities in (True, False):
        ended = play(frames, priorities, quantum)
        assert min(ended) > 0
        out: dict[int, float] = {}
        arriving = []
        for when, stream, nbytes in sorted(frames, key=lambda f: f[0]):
            begins = max(when, out.get(stream.source, 0.0))
            out[stream.source] = begins + nbytes / 100
            arriving.append((begins, nbytes))
        through = 0.0
        for begins, nbytes in sorted(arriving):
            through = max(through, begins) + nbytes / 100
        assert max(ended) == pytest.approx(through)


@settings(max_examples=examples(200))
@given(frames=frames_to_one, quantum=st.sampled_from([1, 10, 64]))
def test_classes_never_keep_the_most_urgent_longer(frames: list[Frame], quantum: int) -> None:
    """The last of the most urgent class is there no later, but for a quantum at each port."""
    first = min(stream.urgency for _, stream, _ in frames)
    urgent = [n for n, (_, stream, _) in enumerate(frames) if stream.urgency == first]
    with_classes, without = play(frames, True, quantum), play(frames, False, quantum)
    latest = max(without[n] for n in urgent)
    assert max(with_classes[n] for n in urgent) <= latest + 2 * quantum / 100 + 1e-9
