"""All-reduces between groups of processes, as `GroupAllReduce` makes them: a model of what may end.

Connections of a group are open from its first average until a member closes them. An average is
complete once all members have contributed; then it ends on each of them at another moment, and may
fail on some if a member closes the connections before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from simulation.world import Process, Wait, World
from wingbeat.methods.model_averaging.generator import Run
from wingbeat.methods.model_averaging.group_all_reduce import CHECK_S, GRACE_S, GracePeriod
from wingbeat.methods.model_averaging.static_client import ABANDONED, STATIC_CONNECTIONS, Arrival


@dataclass
class Group:
    """The open connections of a group, and the averages over them."""

    members: tuple[int, ...]
    inputs: list[dict[int, tuple[float, bool]]] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)  # averages that a member has begun
    ended: set[tuple[int, int]] = field(default_factory=set)  # (average, member): it has the result
    broken: set[tuple[int, int]] = field(default_factory=set)  # it has lost the result
    closed: dict[int, int] = field(
        default_factory=dict
    )  # members that have closed: because of whom
    causes: dict[int, int] = field(default_factory=dict)
    waiters: list[Wait] = field(default_factory=list)


class Averages:
    """All groups of a world, by column, generator, connection and members."""

    def __init__(self, world: World, timeout: float, is_cut: Callable[[int, int], float]) -> None:
        self.world, self.timeout, self.is_cut = world, timeout, is_cut
        self.chance = world.random("averages")
        self.groups: dict[tuple[int, int, int, tuple[int, ...]], Group] = {}

    def contribute(self, group: Group, me: int, value: tuple[float, bool]) -> int:
        number = group.made[me] = group.made.get(me, -1) + 1
        if number == len(group.inputs):
            group.inputs.append({})
        assert me not in group.inputs[number], "a member contributes twice to one average"
        group.inputs[number][me] = value
        if len(group.inputs[number]) == len(group.members):
            for member in group.members:
                self.world.after(self._duration(), self._end, group, number, member)
        return number

    def _duration(self) -> float:
        return self.chance.choice([0.2, 0.2, 1.0]) * self.chance.random() ** 2

    def _end(self, group: Group, number: int, member: int) -> None:
        if (number, member) in group.broken:
            return
        if late := max(self.is_cut(member, other) for other in group.members):
            self.world.after(late, self._end, group, number, member)
            return
        group.ended.add((number, member))
        self.world.wake(group.waiters)
        self.world.step()

    def close(self, group: Group, member: int, *, dead: bool) -> None:
        """Close a member's connections; it has sent what the averages it has ended need.

        A process that ends may have unread bytes, and then the others may not get its last ones.
        """
        if member in group.closed:
            return
        group.closed[member] = group.causes.get(member, member)
        for number, inputs in enumerate(group.inputs):
            if (number, member) in group.ended and not dead:
                continue
            whole = len(inputs) == len(group.members)
            for other in group.members:
                if (number, other) not in group.ended and (not whole or self.chance.random() < 0.5):
                    group.broken.add((number, other))
        self.world.wake(group.waiters)


class Column:
    """The averages of one rank: `Reducer` and `Attempts`.

    Attributes:
        value: the rank's part of the model.
        finished: whether it has made its last step, of which the others learn with its part.
        all_finished: whether the members of the last average had; None before the first.
        begun_at: when the first epoch of the last group began.
        generation: the incarnation of the generator, which counts groups and connections from 0.
        applied: (generation, connection, average) of each average that was applied.
        groups: the numbers of their groups, which followers do not know.
    """

    def __init__(self, averages: Averages, process: Process, column: int, worker: int) -> None:
        self._all, self._world = averages, averages.world
        self._process, self._column, self._me = process, column, worker
        self.value = 0.0
        self.generation = 0
        self.applied: list[tuple[int, int, int]] = []
        self.groups: set[tuple[int, bool, int]] = set()
        self.finished = False
        self.all_finished: bool | None = None
        self.begun_at = 0.0
        self._open: dict[int, Group] = {}
        self._result: tuple[int, int, int, float, float, bool] | None = None
        process.at_end.append(self.close)

    def average(self, run: Run, connection: int, arrival: Callable[[], Arrival]) -> int | None:
        lost = self.attempt(run, connection, arrival)
        if lost is None:
            self.apply()
        return lost

    def attempt(self, run: Run, connection: int, arrival: Callable[[], Arrival]) -> int | None:
        members = tuple(sorted(run.members))
        key = self._column, self.generation, connection, members
        group = self._all.groups.setdefault(key, Group(members))
        if group.closed:
            return self._lose(group, connection)
        self._open[connection] = group
        value = self.value
        number = self._all.contribute(group, self._me, (value, self.finished))
        grace, begun = self.grace_period(), self._world.now
        if run.epoch == 0:
            self.begun_at = begun
        while True:
            checks_at = self._world.now + CHECK_S
            while (number, self._me) not in group.ended | group.broken:
                if not self._world.block(group.waiters, checks_at - self._world.now):
                    break
            if (number, self._me) in group.ended:
                break
            if (number, self._me) in group.broken:
                return self._lose(group, connection)
            if not grace.lasts(arrival()):
                self.close([connection])
                return ABANDONED
            if self._world.now - begun > self._all.timeout:
                return self._lose(group, connection, self._missing(group, number))
        inputs = group.inputs[number]
        mean = sum(inputs[member][0] for member in group.members) / len(group.members)
        finished = all(inputs[member][1] for member in group.members)
        self._result = run.number, connection, number, value, mean, finished
        return None

    def apply(self) -> None:
        assert self._result is not None, "an average is applied that was not made, or twice"
        group, connection, number, value, mean, self.all_finished = self._result
        self._result = None
        assert self.value == value, "the model has changed while it was averaged"
        average = self.generation, connection, number
        assert average not in self.applied, "an average is applied twice"
        key = self.generation, connection >= STATIC_CONNECTIONS, group
        if not self._column:
            assert key not in self.groups, f"two averages of group {group} are applied"
        self.groups.add(key)
        self.applied.append(average)
        self.value = mean

    def renew(self, generation: int) -> None:
        self.close()
        self.generation = generation

    def publish_cause(self, connection: int, member: int) -> None:
        if connection in self._open:
            self._open[connection].causes[self._me] = member

    def grace_period(self) -> GracePeriod:
        return GracePeriod(GRACE_S)

    def close(self, connections: Iterable[int] | None = None) -> None:
        for connection in list(self._open if connections is None else connections):
            if (group := self._open.pop(connection, None)) is not None:
                self._all.close(group, self._me, dead=not self._process.alive)

    def _missing(self, group: Group, number: int) -> int:
        """Return the member for which the connections time out."""
        inputs = group.inputs[number]
        away = [m for m in group.members if m not in inputs or self._all.is_cut(self._me, m)]
        return (away or list(group.members))[0]

    def _lose(self, group: Group, connection: int, cause: int | None = None) -> int:
        if cause is None:
            cause = next(iter(group.closed.values()))
            seen = set()
            while cause in group.closed and group.closed[cause] != cause and cause not in seen:
                seen.add(cause)
                cause = group.closed[cause]
        group.causes.setdefault(self._me, cause)
        self._open[connection] = group
        self.close([connection])
        return cause
