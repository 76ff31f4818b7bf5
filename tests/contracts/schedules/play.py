"""Workers that follow a schedule: their histories, and what may be said at which moment."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator, Sequence

from wingbeat.schedules.events import (
    Announce,
    Await,
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Command,
    Defer,
    Event,
    Forget,
    GradientsDropped,
    GradientsNeeded,
    Hand,
    Operation,
    OthersStep,
    ParametersNeeded,
    PartsNeeded,
    Phase,
    Place,
    Planned,
    Schedule,
    Share,
    Start,
    Step,
    StepCalled,
    Update,
    UpdateOwn,
    UpdateServers,
    Wait,
)
from wingbeat.schedules.intents import Answer, Intent

RS, AG = Operation.REDUCE_SCATTER, Operation.ALL_GATHER
AR, AP = Operation.ALL_REDUCE, Operation.ALL_GATHER_PARAMETERS
PUSH, PULL = Operation.PUSH, Operation.PULL
GIVE = Operation.CONTRIBUTE
NEW = frozenset({Operation.FETCH, Operation.EXPECT})
"""Of parameters that servers update."""
Said = tuple[Intent, frozenset[int]]


class Worker:
    """Performs commands, checks that each makes sense, and pauses where it hears the others.

    Attributes:
        started: the operations on buckets that all workers start, in order.
        told: all commands.
        updated: what this worker has updated of each bucket since the last backward.
        shared: how often settings were shared, which takes all workers.
        due: buckets whose update is due, and the parameters, where only some are.
    """

    def __init__(self, schedule: Schedule, planned: Planned) -> None:
        self.schedule = schedule
        self.members = planned.members
        self.started: list[tuple[Operation, int]] = []
        self.told: list[Command] = []
        self.updated: list[tuple[int, frozenset[int]]] = []
        self.due: dict[int, frozenset[int] | None] = {}
        self.shared = 0
        self._last: dict[int, Operation] = {}
        self._waited: set[int] = set()
        self._placed: set[int] = set()
        self._handed = False
        assert not list(schedule.react(planned)), "a plan alone sets nothing going"

    def run(self, events: Iterable[Event]) -> Generator[Said, Answer, None]:
        """Live through ``events``; yields what is said, and wants the answer."""
        for event in events:
            dialogue, answer = self.schedule.react(event), None
            while True:
                try:
                    command = dialogue.send(answer)
                except StopIteration:
                    break
                self.told.append(command)
                answer = (yield self._said) if isinstance(command, Await) else None
                self._perform(command)
            self._check_after(event)

    def _check_after(self, event: Event) -> None:
        match event:
            case ParametersNeeded(buckets):
                assert self.due.keys().isdisjoint(buckets), "read before its update"
            case BackwardBegins():
                assert not self.due, "an update would come after this backward"
                self.updated.clear()

    def _perform(self, command: Command) -> None:
        match command:
            case Announce(intent, used):
                self._said = intent, used
            case Start(operation, bucket, chained):
                self._check_start(operation, bucket, chained)
                self._last[bucket] = operation
                self._waited.discard(bucket)
                if operation is not PULL:  # which each worker does for itself
                    self.started.append((operation, bucket))
            case Wait(bucket, whole):
                last = self._last.get(bucket)
                assert not whole or last in (None, AG, AR, PULL), "others lack parts of it"
                self._waited.add(bucket)
            case _:
                self._update(command)

    def _check_start(self, operation: Operation, bucket: int, chained: bool) -> None:
        assert bucket not in self.due, "its buffer holds what is due"
        assert chained == (operation is AG)
        if operation is PULL:
            assert self._last[bucket] is PUSH, "there is nothing to pull"
        elif operation in NEW:
            assert self._handed, "the servers lack what they are to update with"
        elif operation in (RS, AR, PUSH, GIVE):
            assert self._last.get(bucket) is not PUSH, "others may still push for the sum before"
            self._placed.discard(bucket)
        elif operation is AG:
            assert self._last[bucket] is RS, "there is nothing to gather"
            assert bucket not in self._placed, "parameters would be gathered as gradients"
        else:
            assert bucket in self._placed, "gradients would be gathered as parameters"

    def _update(self, command: Command) -> None:
        match command:
            case Hand() | UpdateServers():
                self._update_servers(command)
            case Share():
                self.shared += 1
            case UpdateOwn(bucket, used):
                assert bucket in self._waited, "the own block's gradient is not there yet"
                by_hand = self.schedule.phase is Phase.IDLE  # gradients are not in the buffer
                assert by_hand or bucket not in self._placed
                self.updated.append((bucket, used & self.members[bucket]))
            case Place(bucket):
                assert any(number == bucket for number, _ in self.updated), "not updated yet"
                self._placed.add(bucket)
            case Defer(bucket, used):
                assert self._last[bucket] in (AG, AP, AR, PULL, *NEW)
                assert bucket not in self.due
                self.due[bucket] = used
            case Update(bucket):
                assert bucket in self._waited, "what it needs of other workers is missing"
                del self.due[bucket]
            case Forget(spent):
                assert spent is not None or self.schedule.phase is not Phase.IDLE
            case Step():
                assert not self.due, "an older update would come after this one"
                assert all(last in (AG, AR, PULL, GIVE) for last in self._last.values())

    def _update_servers(self, command: Hand | UpdateServers) -> None:
        assert self._handed is isinstance(command, UpdateServers)
        self._handed = isinstance(command, Hand)
        if isinstance(command, Hand):
            assert not self.due, "what is changed here is not known before it is here"
            return
        assert set(self._last.values()) <= NEW, "nobody waits for some"
        assert command.unasked == (Operation.EXPECT in self._last.values())
        for bucket, members in enumerate(self.members):
            self.updated.append((bucket, command.answer.used & members))


def together(workers: Sequence[Worker], histories: Sequence[Iterable[Event]]) -> list[Answer]:
    """Run all; whoever hears waits until all have said something. Return what they heard."""
    runs = [worker.run(events) for worker, events in zip(workers, histories, strict=True)]
    said = [next(run, None) for run in runs]
    heard = []
    while any(said):
        assert all(said), f"one waits for ever: {said}"
        used = frozenset[int]().union(*(each[1] for each in said if each))
        heard.append(Answer(tuple(each[0] for each in said if each), used))
        said = [_send(run, heard[-1]) for run in runs]
    return heard


def _send(run: Generator[Said, Answer, None], answer: Answer) -> Said | None:
    try:
        return run.send(answer)
    except StopIteration:
        return None


def planned(chooser: random.Random) -> Planned:
    """Up to four buckets of up to three parameters; some may belong to another optimizer."""
    buckets = chooser.randint(1, 4)
    numbers = iter(range(100))
    members = tuple(
        frozenset(next(numbers) for _ in range(chooser.randint(0, 3))) for _ in range(buckets)
    )
    return Planned(tuple(chooser.sample(range(buckets), buckets)), members)


def backward(buckets: int) -> Iterator[Event]:
    """One backward in which nobody looks."""
    yield BackwardBegins()
    yield from (BucketReady(bucket) for bucket in range(buckets))
    yield BackwardEnds()


def iteration(
    plan: Planned,
    common: random.Random,
    own: random.Random,
    *,
    alike: bool,
    follower: bool = False,
    accumulates: bool = True,
) -> Iterator[Event]:
    """One iteration of a worker.

    Args:
        plan: the buckets.
        common: chooses what all workers do alike.
        own: chooses what this one does: where it looks at gradients and parameters.
        alike: whether all have to do the same with their gradients.
        follower: whether it has run out of batches, and does as the others.
        accumulates: whether there may be two backwards.
    """
    uses = common if alike else own

    def looks() -> Iterator[Event]:
        if not follower and own.random() < 0.3:
            yield GradientsNeeded()

    buckets = len(plan.members)
    every = frozenset[int]().union(*plan.members)
    for _ in range(2 if accumulates and common.random() < 0.3 else 1):
        for bucket in own.sample(range(buckets), own.randint(0, buckets)):
            yield ParametersNeeded((bucket,))
        yield from backward(buckets)
        yield from looks()
    if uses.random() < 0.5 and not follower:
        yield PartsNeeded(uses.choice([Intent.CLIP, Intent.SCALE]))
    yield from looks()
    steps = uses.random() < 0.8
    if follower:
        yield OthersStep()
    elif steps:
        for _ in range(2 if accumulates and common.random() < 0.1 else 1):
            used = frozenset(i for i in every if own.random() < 0.7)
            yield StepCalled(in_parts=own.random() < 0.7, used=used)
    else:
        yield GradientsDropped()
    yield from looks()
