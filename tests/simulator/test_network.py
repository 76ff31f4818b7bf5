from __future__ import annotations

from collections.abc import Callable

from wingbeat.simulator import Links
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.network import Network

A, B, C = (0, 0), (1, 0), (2, 0)


class Scene:
    """Two seconds for each chunk of 200 bytes, half a second of latency."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.network = Network(self.agenda, Links(bytes_per_s=100.0, latency_s=0.5))
        self.taken: dict[str, float] = {}

    def at(self, when: float, action: Callable[[], None]) -> None:
        self.agenda.at(when, action)

    def take(self, key: str) -> None:
        if self.network.receive(key, lambda: self.take(key)):
            self.taken[key] = self.agenda.now

    def send(self, key: str, source: tuple[int, int], target: tuple[int, int]) -> None:
        self.network.announce(key)
        self.network.send(key, source, target, 200)

    def play(self, *keys: str) -> dict[str, float]:
        for key in keys:
            self.at(0.0, lambda key=key: self.take(key))  # type: ignore[misc]
        self.agenda.run()
        return self.taken


def test_a_chunk_takes_its_time_and_the_latency() -> None:
    scene = Scene()
    scene.at(1.0, lambda: scene.send("a", A, B))
    assert scene.play("a") == {"a": 3.5}


def test_chunks_leave_an_interface_one_after_the_other() -> None:
    scene = Scene()
    scene.at(0.0, lambda: scene.send("to b", A, B))
    scene.at(0.0, lambda: scene.send("to c", A, C))
    assert scene.play("to b", "to c") == {"to b": 2.5, "to c": 4.5}


def test_two_senders_wait_for_each_other_at_one_receiver() -> None:
    scene = Scene()
    scene.at(0.0, lambda: scene.send("from a", A, C))
    scene.at(0.1, lambda: scene.send("from b", B, C))
    assert scene.play("from a", "from b") == {"from a": 2.5, "from b": 4.5}


def test_directions_and_interfaces_do_not_disturb_each_other() -> None:
    scene = Scene()
    scene.at(0.0, lambda: scene.send("there", A, B))
    scene.at(0.0, lambda: scene.send("back", B, A))
    scene.at(0.0, lambda: scene.send("other", (0, 1), (1, 1)))
    assert scene.play("there", "back", "other") == {"there": 2.5, "back": 2.5, "other": 2.5}


def test_nothing_leaves_before_the_receiver_has_room_for_it() -> None:
    scene = Scene()
    scene.at(0.0, lambda: scene.network.send("a", A, B, 200))
    scene.at(3.0, lambda: scene.network.announce("a"))
    scene.at(3.0, lambda: scene.send("b", A, B))
    assert scene.play("a", "b") == {"a": 5.5, "b": 7.5}


def test_what_is_there_is_taken_at_once_and_once() -> None:
    scene = Scene()
    scene.at(0.0, lambda: scene.send("a", A, B))
    scene.at(9.0, lambda: scene.take("a"))
    assert scene.play() == {"a": 9.0}
    assert not scene.network.receive("a", lambda: None)
