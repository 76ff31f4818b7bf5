"""The one thread of a hook's state: buckets in order, one prepared ahead."""

from __future__ import annotations

import threading

import torch

from wingbeat.errors import WingbeatError
from wingbeat.integrations.ddp import Between, Executor, HookJob


class Noted:
    """An exchange of two collectives that notes what happens to it."""

    def __init__(self, name: str, said: list[str], gate: threading.Event) -> None:
        self._name, self._said, self._gate = name, said, gate

    def prepare(self) -> None:
        self._said.append(f"prepare {self._name}")

    def run(self, between: Between) -> torch.Tensor:
        assert self._gate.wait(20)
        between()
        between()
        self._said.append(f"run {self._name}")
        return torch.full((1,), float(self._name))


class Failing(Noted):
    def run(self, between: Between) -> torch.Tensor:
        super().run(between)
        raise KeyError("mine")


def jobs(kinds: list[type[Noted]], said: list[str]) -> list[torch.futures.Future[torch.Tensor]]:
    """Submit an exchange of each kind before the first can go on; return what is promised."""
    executor, gate = Executor(3), threading.Event()
    made = [
        HookJob(kind(str(n), said, gate), f"bucket {n}", torch.empty(1))
        for n, kind in enumerate(kinds)
    ]
    for job in made:
        executor.submit(job)
    gate.set()
    executor.close()
    assert not executor.alive
    assert all(job.done.done() for job in made), said
    return [job.done for job in made]


def test_buckets_are_done_in_order_and_one_is_prepared_ahead() -> None:
    said: list[str] = []
    done = jobs([Noted] * 4, said)
    assert [float(each.wait()) for each in done] == [0.0, 1.0, 2.0, 3.0]
    assert said == [
        *("prepare 0", "prepare 1", "run 0", "prepare 2", "run 1"),
        *("prepare 3", "run 2", "run 3"),
    ]


def test_what_comes_after_a_failure_fails_with_it() -> None:
    said: list[str] = []
    done = jobs([Noted, Failing, Noted, Noted], said)
    assert float(done[0].wait()) == 0.0
    for each in done[1:]:
        error = each.wait()
        assert isinstance(error, WingbeatError)
        assert str(error) == "rank 3: bucket 1: KeyError: 'mine'"
    assert "run 2" not in said
