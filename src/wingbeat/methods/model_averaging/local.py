"""Steps on a worker's own gradients, with averages of models in between (Ripples, section 3.2)."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from wingbeat.engine.gradients.bucket import check_kind
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.placed import local
from wingbeat.engine.updates.update import Closure, Host, Training, WholeUpdate, evaluated
from wingbeat.errors import PeerError, UsageError
from wingbeat.exchanges.snapshot import Snapshot, encode_snapshot
from wingbeat.methods.model_averaging.flat import FlatModel
from wingbeat.observe.events import stream
from wingbeat.observe.log import log
from wingbeat.schedules.events import Adopt, Average, Step, UpdateCommand
from wingbeat.schedules.local import Local
from wingbeat.transport.text import first_line

if TYPE_CHECKING:
    from wingbeat.observe.meter import Section
    from wingbeat.types import Span

Tensors = dict[str, torch.Tensor]

_FORWARDS, _CHANGES = 3, 3
"""Forwards without a step before weights are sampled; changes before a warning."""

_SAMPLE = 8
"""Elements of each parameter that are sampled."""


class Averager(Protocol):
    """Averages one flat buffer with other workers', in the background or between steps.

    Attributes:
        buffer: all parameters, flat, contiguous, on the CPU.
    """

    buffer: torch.Tensor

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the last average, including this worker."""

    @property
    def left_out(self) -> bool:
        """Whether no average was made: groups continue without this worker."""

    def begin(self, part: Span, weight: float | None = None) -> None:
        """Begin to average a span of the buffer, which must not be used until `end`.

        ``weight`` is that of this worker; None if all have the same. All workers give one or none.
        """

    def end(self) -> None:
        """Wait until the span holds the average; raise a `PeerError` if a worker failed."""

    def commit(self) -> None:
        """Record that the average was adopted: the next one sends the codec's residuals."""

    def synchronize(self, part: Span) -> None:
        """Average a span over all workers, which must all call this; bitwise equal on all."""

    def sections(self) -> Sequence[Section]:
        """Return its sections of `wingbeat top`; called by other threads."""

    def close(self) -> None:
        """Leave; other workers no longer wait for this one."""


class LocalUpdate(WholeUpdate):
    """Runs the optimizer's own step, and averages parameters with other workers.

    Only the training thread changes parameters, in ``step``. An average made in the background is
    added as a difference from what was sent, which keeps changes made meanwhile; without such
    changes the average itself is adopted, bitwise equal on all its workers.

    Attributes:
        waited: called with the nanoseconds spent waiting for other workers.
        left: whether it has been detached.
        renew: called after each average, and instead of one if this worker was left out; then it
            copies another worker's state.
    """

    averaging = True

    def __init__(
        self, training: Training, model: FlatModel, averager: Averager, schedule: Local
    ) -> None:
        super().__init__(training)
        self._model, self._averager, self._schedule = model, averager, schedule
        self._world = training.collectives.world
        self.waited: Callable[[int], None] = lambda _: None
        self.renew: Callable[[], None] = lambda: None
        self._under_way: tuple[int, int] | None = None
        self._begun = 0  # number of steps when it was begun
        self._sent: torch.Tensor | None = None
        self._keeps_sent = schedule.beside
        self._moved = self.left = self._cut = self._stepping = False
        self._forwards: int | None = 0  # None after the first step
        self._changes = 0
        self._sample: tuple[tuple[float, ...], ...] = ()
        self._hooks = self._watch_inside()
        self._evaluates_once = _evaluates_once(training.optimizer)
        named = [*((s.name, s.param) for s in training.bucketing.slots), *training.bucketing.frozen]
        parts = [(name, param, local(param).detach()) for name, param in named]
        self._like = [(name, p, part.new_empty(()).expand(part.shape)) for name, p, part in parts]

    def step(self, host: Host, closure: Closure) -> Any:
        """Run the optimizer's own step, and the schedule's averages."""
        self._check_kinds()
        self._moved, self._forwards = True, None
        self._wait_again()
        early = closure
        if closure is not None and self._evaluates_once:
            # Evaluated before waiting for an average: the closure may wait for peers too.
            first = [evaluated(closure)]
            early = lambda: first.pop() if first else closure()  # noqa: E731
        self._stepping = True
        try:
            return super().step(host, early)
        finally:
            self._stepping = False

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:
        """Perform a command of the schedule; return the result of a whole step."""
        if isinstance(command, Average):
            self._begin(command.first, command.last)
        elif isinstance(command, Adopt):
            self._adopt()
        else:
            assert isinstance(command, Step), command
            result = super().perform(command, closure)
            self._made_step()
            return result
        return None

    def _made_step(self) -> None:
        """Called after each of the optimizer's steps."""

    def level(self, *, always: bool) -> bool:
        """Set models, buffers and the number of steps to their means, bitwise equal."""
        if self._moved or always:
            self._check_kinds()
            self._wait_again()
            self._adopt()
            self._level()
            self._moved = False
        return False  # buffers have been averaged too

    def detach(self) -> None:
        """Stop averaging."""
        for hook in self._hooks:
            hook.remove()
        self.left = True
        self._averager.close()

    # -- state --------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether a checkpoint needs the number of steps and `tensors`."""
        return self._schedule.every > 1

    def averages(self) -> dict[str, Any] | None:
        """Return the number of steps, and `tensors`; None if a checkpoint needs neither."""
        return {"steps": self.steps, **self.tensors()} if self.keeps else None

    @property
    def differs(self) -> bool:
        """Whether this worker's model may differ from the others'."""
        return self._moved

    @property
    def is_own(self) -> bool:
        """Whether a state dict contains state of this worker only."""
        return self._moved or not self._model.with_state

    def log_lost(self, saver: int, size: int, differed: bool) -> None:
        """Log once, on one rank, what a state lacks that rank ``saver`` of ``size`` has saved."""
        world = self._world
        leads = world.inside is None or world.ranks[world.rank] == world.inside.leader
        if world.size == 1 or world.rank != (saver + 1) % size or not leads:
            return
        moved = " and what its model had moved since wingbeat.synchronize() are"
        own = "its optimizer's own state" + (moved if differed else " is")
        log.warning(
            "load_state_dict(): %s loads what %s has saved: %s lost; to continue as "
            "without a stop, save and load model and optimizer on every rank",
            world.name_of(world.rank),
            world.name_of(saver) if saver < world.size else f"rank {saver}",
            own,
        )  # fmt: skip

    @property
    def steps(self) -> int:
        """The number of this worker's steps, on which its averages depend."""
        return self._schedule.made

    def tensors(self) -> dict[str, Any]:
        """Return further training state, by kind."""
        return {}

    def resume(self, averages: Mapping[str, Any]) -> None:
        """Continue after the steps of a checkpoint, from 0 if it has none."""
        self._schedule.resume(averages.get("steps", 0))

    def handed(self) -> tuple[list[torch.Tensor], list[int]]:
        """Return tensors, not copied, and the numbers for a restarted worker's `take_over`.

        Called by another thread, while the training thread waits for an average or makes none.
        """
        # Of an average under way its beginning: ranks of a replica may be at different steps.
        made = self._schedule.made if self._under_way is None else self._begun
        return [], [made]

    def moves(self) -> torch.Tensor | None:
        """Return the steps of this worker that others have not merged, if they can be later."""
        return None

    def take_over(self, numbers: Sequence[int], moved: torch.Tensor | None = None) -> None:  # noqa: ARG002
        """Continue from a peer's numbers and tensors; raise a `ValueError` for invalid numbers.

        ``moved`` is a result of `moves`, which is kept.
        """
        (steps,) = numbers
        if steps < 0:
            raise ValueError(f"{steps} steps")
        self._schedule.resume(steps)

    # -- updates without a step ---------------------------------------------------------------

    def before_forward(self) -> None:
        """Log once if weights change between forwards without a step, which averages nothing."""
        if self._forwards is None:
            return
        self._forwards += 1
        if self._forwards < _FORWARDS:
            return
        slots = self._training.bucketing.slots
        parts = [local(slot.param).detach() for slot in slots]
        now = tuple(tuple(part.reshape(-1)[:_SAMPLE].tolist()) for part in parts)
        self._changes += self._sample not in ((), now)
        self._sample = now
        if self._changes == _CHANGES:
            self._forwards = None
            if self._world.leads:
                log.warning(
                    "weights have changed in %d forwards, and optimizer.step() was never called, "
                    "in which models are averaged: call it in place of updates made manually, or "
                    "wingbeat.synchronize(model) on all ranks every so many of them",
                    _CHANGES,
                )

    # -- averages -----------------------------------------------------------------------------

    def _watch_inside(self) -> list[RemovableHandle]:
        """Refuse steps of optimizers that the user's optimizer has in an attribute."""
        trained = {slot.param for slot in self._training.bucketing.slots}
        outer, here = self._training.optimizer, weakref.ref(self)
        kind, hooks = type(outer).__name__, []

        def refuse(name: str, inner: torch.optim.Optimizer, *_: Any) -> None:
            update = here()
            if update is None or update._stepping:
                return
            if any(param in trained for group in inner.param_groups for param in group["params"]):
                raise UsageError(
                    f"{kind}.{name} was to make a step outside of optimizer.step(), at which "
                    "models are averaged (SAM's second_step() does so): call wingbeat."
                    f"distribute(model, optimizer.{name}, ...) and keep {kind} around it"
                )

        for name, inner in vars(outer).items():
            if isinstance(inner, torch.optim.Optimizer):
                hooks.append(inner.register_step_pre_hook(functools.partial(refuse, name)))
        return hooks

    def _check_kinds(self) -> None:
        for name, param, like in self._like:
            check_kind(name, local(param), like)

    def _level(self) -> None:
        self._model.number.fill_(self._schedule.made)
        self._model.read()
        self._model.read_checksum()
        try:
            self._wait(functools.partial(self._averager.synchronize, self._model.shared))
        except Exception:
            # Peers may have adopted an average with this worker meanwhile.
            with contextlib.suppress(PeerError):
                self._averager.end()
                self._model.write(0, len(self._model.spans))
                self._model.write_state()
            raise
        self._average_buffers_inside()
        self._model.write()
        self._model.write_state()
        self._schedule.resume(round(float(self._model.number)))
        if self._any(self._model.frozen_differ):
            self._model.read_frozen()
            self._wait(functools.partial(self._averager.synchronize, self._model.frozen))
            self._model.write_frozen()

    def _average_buffers_inside(self) -> None:
        """Average the model's buffers over the replica too: its ranks may have other batches."""
        replica, span = self._world.replica, self._model.buffers
        if replica is not None and len(span):
            part = self._model.flat[span.start : span.stop]
            part.copy_(replica.sum(part).div_(replica.size))

    def _any(self, found: bool) -> bool:
        """Whether it is true on any rank of the replica; all of them must call this."""
        inside = self._world.inside
        return (
            found
            if inside is None
            else bool(inside.max(torch.tensor(float(found), device="cpu")) > 0)
        )

    def _begin(self, first: int, last: int) -> None:
        self._offer(first, last)
        # First, because a worker that rejoins meanwhile needs it.
        self._under_way, self._begun = (first, last), self._schedule.made
        try:
            self._averager.begin(self._model.part(first, last), self._weight(first, last))
        except BaseException:
            self._under_way = None
            raise

    def _adopt(self) -> None:
        if self._under_way is None:
            return
        try:
            self._wait(self._averager.end)
        except Exception:  # the average has ended, and must not be awaited again
            self._under_way = None
            raise
        under_way, self._under_way = self._under_way, None
        begin = time.monotonic_ns()
        if self._averager.left_out:
            self._sent = None
        else:
            self._take(*under_way)
            stream.record("take_over", begin, time.monotonic_ns(), group=self._averager.members)
            self._averager.commit()
        self.renew()

    def _weight(self, first: int, last: int) -> float | None:  # noqa: ARG002
        """Return this worker's weight in an average of some fragments; None: that of all."""
        return None

    def _wait_again(self) -> None:
        """Complete a wait that Ctrl-C has interrupted: the flat model is in use until then."""
        if not self._cut:
            return
        if self._under_way is None:  # the mean of all models, which this worker does not adopt
            self._wait(self._averager.end)
        self._adopt()
        self._cut = False

    def _wait(self, wait: Callable[[], None]) -> None:
        begin = time.monotonic_ns()
        try:
            wait()
        except KeyboardInterrupt:
            self._cut = True
            raise
        finally:
            end = time.monotonic_ns()
            self.waited(end - begin)
            stream.record("wait", begin, end)

    def _offer(self, first: int, last: int) -> None:
        self._model.read(first, last)
        part = self._model.part(first, last)
        if self._keeps_sent:
            self._sent = self._model.flat[part.start : part.stop].clone()

    def _take(self, first: int, last: int) -> None:
        sent, self._sent = self._sent, None
        self._model.write_state(first, last, sent)
        # Another optimizer, or the user, may have changed the parameters too.
        if sent is None or self._model.holds(sent, first, last):
            self._model.write(first, last)
            return
        part = self._model.part(first, last)
        self._model.flat[part.start : part.stop].sub_(sent)
        self._model.add(first, last)


def _evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    # As torch's optimizers do, except LBFGS, which compares losses at the same weights; others
    # (SAM) may move weights before they evaluate.
    step = next(vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind))
    own = step.__module__.startswith("torch.optim.")
    return own and not isinstance(optimizer, torch.optim.LBFGS)


# -- the state of a restarted worker -------------------------------------------------------


class LiveState:
    """What a restarted worker copies from a peer: model, optimizer state and progress, held weakly.

    With averages in the background, some parameters may be a step ahead of others.
    """

    def __init__(self, training: Training, update: LocalUpdate) -> None:
        self._bucketing = weakref.ref(training.bucketing)
        self._optimizer = weakref.ref(training.optimizer)
        self._update = weakref.ref(update)

    def written(self) -> bytes | None:
        """Serialise the state; None if the model no longer exists, or cannot be serialised."""
        bucketing, optimizer, update = self._bucketing(), self._optimizer(), self._update()
        if bucketing is None or optimizer is None or update is None:
            return None
        params = [slot.param for slot in bucketing.slots]
        kept, numbers = update.handed()
        try:
            return encode_snapshot([*_tensors(bucketing), *kept], params, optimizer, numbers)
        except (PeerError, RuntimeError) as error:
            # This affects the requester only, even if the state changes meanwhile.
            log.warning("%s", first_line(error))
            return None

    def put(self, payload: Any, *, keep: bool = False) -> None:
        """Continue from a peer's `written` state; raise a `PeerError` if it does not fit.

        With ``keep``, the model and the optimizer remain this worker's own, as far as its steps
        since its last average can still be merged.
        """
        bucketing, optimizer, update = self._bucketing(), self._optimizer(), self._update()
        assert bucketing is not None
        assert optimizer is not None
        assert update is not None
        kept, _ = update.handed()
        params, own = [slot.param for slot in bucketing.slots], _tensors(bucketing)
        snapshot = Snapshot(payload, [*own, *kept], params)
        moved = update.moves() if keep else None
        numbers = snapshot.extra
        try:
            if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
                raise ValueError("no list of numbers")
            if moved is None:
                snapshot.load_into(optimizer)
            else:
                snapshot.load_tensors(len(own))
            update.take_over(numbers, moved)
        except ValueError as error:
            raise PeerError(
                f"a state has come with {numbers!r:.40} for the steps that were made ({error}); "
                "check that all workers run the same script"
            ) from None


def _tensors(bucketing: Bucketing) -> list[torch.Tensor]:
    return [*(local(slot.param).detach() for slot in bucketing.slots), *bucketing.others]
