"""The executor's rules, driven without a thread: every rank's machine, interleaved at random."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat import topologies
from wingbeat.collectives import program as programs
from wingbeat.collectives.program import Machine, Task, compile_rounds
from wingbeat.types import blocks_of

Values = list[int]
Place = tuple[str, int, int]
"""A topology, so many workers, and so many interfaces of each."""


class Sum(Task):
    """A task that knows which buffer it works on."""

    def __init__(self, number: int, program: Any, buffer: Values, after: Sum | None = None) -> None:
        super().__init__(program, after)
        self.number = number
        self.buffer = buffer


class Rank:
    """One worker: does what its machine says, with lists for tensors and queues for links."""

    def __init__(self, rank: int, mail: dict[Any, deque[Values]], **limits: int) -> None:
        self.rank = rank
        self.machine: Machine[Sum] = Machine(**limits)
        self.log: list[programs.Command[Sum]] = []
        self._mail = mail
        self._commands = self.machine.commands()
        self._next = next(self._commands)

    def go(self) -> bool:
        """Do one command if that is possible; whether it was."""
        if isinstance(self._next, programs.Idle) and not self.machine.waiting:
            return False
        if isinstance(self._next, programs.AwaitChunk) and not self._mail[self._key(self._next)]:
            return False
        self._do(self._next)
        self.log.append(self._next)
        self._next = next(self._commands)
        return True

    def _key(self, command: Any) -> Any:
        t, inward = command.transfer, isinstance(command, programs.AwaitChunk)
        ends = (t.peer, self.rank) if inward else (self.rank, t.peer)
        return command.task.number, *ends, t.link, t.tag

    def _do(self, command: programs.Command[Sum]) -> None:
        if isinstance(command, programs.SendChunk):
            span = command.transfer.span
            self._mail[self._key(command)].append(command.task.buffer[span.start : span.stop])
        if isinstance(command, programs.AwaitChunk):
            span, buffer = command.transfer.span, command.task.buffer
            came = self._mail[self._key(command)].popleft()
            part = slice(span.start, span.stop)
            if command.transfer.reduce:
                came = [a + b for a, b in zip(buffer[part], came, strict=True)]
            buffer[part] = came


def play(
    place: Place, length: int, chunk: int, jobs: int, chooser: random.Random, **limits: int
) -> tuple[list[Rank], list[list[Values]]]:
    """Reduce-scatter and, chained to it, all-gather ``jobs`` buffers; return ranks and buffers."""
    name, size, interfaces = place
    topology = topologies.get(name).fitted(size, interfaces)
    blocks = blocks_of(length, size)
    mail: dict[Any, deque[Values]] = defaultdict(deque)
    ranks = [Rank(rank, mail, **limits) for rank in range(size)]
    buffers = [
        [[(rank + 1) * (job + 2) + i for i in range(length)] for job in range(jobs)]
        for rank in range(size)
    ]
    todo = []
    for rank in ranks:
        halves = [
            compile_rounds(half(rank.rank, blocks), chunk)
            for half in (topology.reduce_scatter, topology.all_gather)
        ]
        scatters = [Sum(job, halves[0], buffers[rank.rank][job]) for job in range(jobs)]
        gathers = [
            Sum(jobs + job, halves[1], buffers[rank.rank][job], scatters[job])
            for job in reversed(range(jobs))
        ]
        todo.append(deque([*scatters, *gathers]))
    able = True
    while able:
        able = False
        for rank in chooser.sample(ranks, size):
            if todo[rank.rank] and chooser.random() < 0.5:
                rank.machine.submit(todo[rank.rank].popleft())
            steps = chooser.randint(1, 8)
            while steps and rank.go():
                steps -= 1
                able = True
        able = able or any(todo)
    return ranks, buffers


worlds = {
    "place": st.sampled_from([("bcube", 4, 2), ("bcube", 8, 3), ("bcube", 9, 2)])
    | st.tuples(st.sampled_from(sorted(topologies.BY_NAME)), st.integers(1, 6), st.just(1)),
    "length": st.integers(0, 40),
    "chunk": st.integers(1, 9),
    "jobs": st.integers(1, 6),
    "seed": st.integers(0, 10**6),
}


@given(**worlds)
def test_any_interleaving_of_ranks_gives_every_rank_every_sum(
    place: Place, length: int, chunk: int, jobs: int, seed: int
) -> None:
    ranks, buffers = play(place, length, chunk, jobs, random.Random(seed))
    size = place[1]
    each = size * (size + 1) // 2
    for job in range(jobs):
        wanted = [each * (job + 2) + size * i for i in range(length)]
        assert [mine[job] for mine in buffers] == [wanted] * size
    for rank in ranks:
        ended = [c.task.number for c in rank.log if isinstance(c, programs.AwaitSends)]
        assert sorted(ended) == list(range(2 * jobs)), "somebody waits for ever"
        assert rank.machine.begun() == []


@given(**worlds, ahead=st.integers(1, 4), depth=st.integers(1, 3))
def test_limits_hold_and_each_received_chunk_was_posted_before(
    place: Place, length: int, chunk: int, jobs: int, seed: int, ahead: int, depth: int
) -> None:
    ranks, _ = play(place, length, chunk, jobs, random.Random(seed), ahead=ahead, depth=depth)
    for rank in ranks:
        announced: dict[Sum, deque[Any]] = defaultdict(deque)
        active: set[Sum] = set()
        for command in rank.log:
            match command:
                case programs.Begin(task):
                    active.add(task)
                    assert len(active) <= depth
                case programs.PostReceive(task, transfer):
                    announced[task].append(transfer)
                    assert len(announced[task]) <= ahead
                case programs.AwaitChunk(task, transfer):
                    assert announced[task].popleft() is transfer
                case programs.Complete(task):
                    active.remove(task)
                    assert not announced[task]


@given(**worlds)
def test_collective_begins_when_the_previous_one_has_sent_everything(
    place: Place, length: int, chunk: int, jobs: int, seed: int
) -> None:
    ranks, _ = play(place, length, chunk, jobs, random.Random(seed))
    for rank in ranks:
        left: dict[Sum, int] = {}
        before: Sum | None = None
        for command in rank.log:
            if isinstance(command, programs.Begin):
                assert before is None or left[before] == 0
                before = command.task
                program = before.program
                left[before] = len(program.first) + sum(map(len, program.unlocks))
            if isinstance(command, programs.SendChunk):
                left[command.task] -= 1


def alone(jobs: int) -> list[str]:
    """What one of two ranks is told while its peer is always in time, in words."""
    mail: dict[Any, deque[Values]] = defaultdict(deque)
    ranks = [Rank(rank, mail) for rank in range(2)]
    for rank in ranks:
        program = compile_rounds(topologies.Ring().all_reduce(rank.rank, blocks_of(2, 2)), 1)
        for job in range(jobs):
            rank.machine.submit(Sum(job, program, [0, 0]))
    while ranks[0].go() or ranks[1].go():
        pass
    return [f"{type(c).__name__} {c.task.number}" for c in ranks[0].log if hasattr(c, "task")]


def test_result_is_complete_before_the_previous_last_chunks_are_sent() -> None:
    told = alone(2)
    assert told.index("Complete 0") < told.index("AwaitChunk 1") < told.index("AwaitSends 0"), told
    assert told[-3:] == ["Complete 1", "AwaitSends 0", "AwaitSends 1"], (
        "the last one drains at once"
    )


def test_all_gather_sends_chunks_that_its_reduce_scatter_has_finished() -> None:
    """With one chunk of many reduced, that one is sent; the links do not idle in between."""
    size, length = 2, 8
    blocks = blocks_of(length, size)
    ring = topologies.Ring()
    mail: dict[Any, deque[Values]] = defaultdict(deque)
    rank = Rank(0, mail)
    scatter = Sum(0, compile_rounds(ring.reduce_scatter(0, blocks), 1), [1] * length)
    gather = Sum(1, compile_rounds(ring.all_gather(0, blocks), 1), scatter.buffer, scatter)
    rank.machine.submit(scatter)
    rank.machine.submit(gather)
    while rank.go():
        pass
    assert not any(isinstance(c, programs.SendChunk) and c.task is gather for c in rank.log)
    mail[0, 1, 0, 0, 0].append([10])
    while rank.go():
        pass
    sent = [
        c.transfer.span for c in rank.log if isinstance(c, programs.SendChunk) and c.task is gather
    ]
    assert [(s.start, s.stop) for s in sent] == [(0, 1)]
    assert mail[1, 0, 1, 0, 0].pop() == [11]


def test_waiting_tasks_are_dropped_and_begun_ones_are_listed() -> None:
    mail: dict[Any, deque[Values]] = defaultdict(deque)
    rank = Rank(0, mail, depth=1)
    program = compile_rounds(topologies.Ring().all_reduce(0, blocks_of(4, 2)), 1)
    tasks = [Sum(number, program, [0] * 4) for number in range(3)]
    for task in tasks:
        rank.machine.submit(task)
    while rank.go():
        pass
    assert rank.machine.begun() == tasks[:1]
    assert rank.machine.drop_waiting() == tasks[1:]
    assert not rank.machine.waiting


def test_machine_is_idle_until_a_task_is_submitted() -> None:
    made: Machine[Task] = Machine()
    commands = made.commands()
    assert isinstance(next(commands), programs.Idle)
    assert isinstance(next(commands), programs.Idle)
    made.submit(Task(compile_rounds((), 1)))
    assert [type(next(commands)) for _ in range(4)] == [
        programs.Begin,
        programs.Complete,
        programs.AwaitSends,
        programs.Idle,
    ]


@pytest.mark.parametrize(
    ("limit", "constant"),
    [
        pytest.param("ahead", "RECEIVES_AHEAD", id="ahead"),
        pytest.param("depth", "DEPTH", id="depth"),
    ],
)
def test_the_defaults_are_the_constants(limit: str, constant: str) -> None:
    assert getattr(Machine(), f"_{limit}") == getattr(programs, constant)
