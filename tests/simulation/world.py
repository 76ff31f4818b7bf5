"""Processes and their threads in virtual time: one event after the other, drawn from a seed.

A thread is a greenlet. `virtual` replaces `time`, `threading` and what opens connections in modules
of wingbeat, so that their own loops and waits run here, unchanged.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import random
import re
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import greenlet

from simulation.scenario import Fault, Scenario


class Killed(BaseException):
    """The process of this thread has been killed."""


class Wait:
    """A thread that waits; ``over`` once it has been woken, or the time has passed."""

    __slots__ = ("over", "thread")

    def __init__(self, thread: Thread) -> None:
        self.thread, self.over = thread, False


class Process:
    """An incarnation of a process.

    Attributes:
        state: ``"running"``, ``"stopped"`` or ``"dead"``.
        held: what arrives while it is stopped, for when it is resumed.
        at_end: called once it is dead.
    """

    def __init__(self, world: World, number: int, incarnation: int) -> None:
        self.world, self.number, self.incarnation = world, number, incarnation
        self.state = "running"
        self.held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.threads: dict[Thread, None] = {}
        self.at_end: list[Callable[[], object]] = []
        self.at_resume: list[Callable[[], object]] = []
        self.suspended_s = 0.0

    def __str__(self) -> str:
        return f"process {self.number}.{self.incarnation}"

    @property
    def alive(self) -> bool:
        return self.state != "dead"

    def when_running(self, action: Callable[..., object], *args: Any) -> None:
        """Do something now, or once it is resumed; never if it is dead."""
        if self.state == "running":
            action(*args)
        elif self.state == "stopped":
            self.held.append((action, args))


class World:
    """Virtual time, and all that happens in it.

    Attributes:
        now: seconds since the beginning.
        steps: what has happened so far: messages, faults, and threads that went on. A wait that
            ended by its timeout is not counted.
        thread: the thread that runs; None between two events.
        check: called after each step.
        killed: when processes were killed by a fault, by number and incarnation.
        faults_over: the time from which on there are no faults.
    """

    def __init__(self, scenario: Scenario, log: Callable[[str], object] = lambda _: None) -> None:
        self.scenario, self.log = scenario, log
        self.now, self.steps = 0.0, 0
        self.chance = self.random("order")
        self.processes: dict[int, Process] = {}
        self.thread: Thread | None = None
        self.check: Callable[[], object] = lambda: None
        self.killed: dict[tuple[int, int], float] = {}
        self._agenda: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = itertools.count()
        self._hub = greenlet.getcurrent()
        self._process: Process | None = None
        self._limits: dict[int, tuple[float, Process, str]] = {}
        self.on_start: Callable[[int, int], object] = lambda _number, _incarnation: None
        self.on_fault: dict[str, Callable[[Fault], object]] = {}
        self.fault_ends = max((fault.at + fault.seconds for fault in scenario.faults), default=0.0)
        for fault in scenario.faults:
            self.at(fault.at, self._inject, fault)

    def random(self, *words: object) -> random.Random:
        """Return random numbers of their own for ``words``."""
        return random.Random(" ".join(map(str, (self.scenario.seed, *words))))

    def clock(self) -> float:
        return self.now

    # -- events ---------------------------------------------------------------------------

    def at(self, when: float, action: Callable[..., object], *args: Any) -> None:
        heapq.heappush(self._agenda, (when, next(self._count), action, args))

    def after(self, seconds: float, action: Callable[..., object], *args: Any) -> None:
        self.at(self.now + seconds, action, *args)

    def run(self, done: Callable[[], bool], seconds: float) -> None:
        """Let things happen until ``done``; fail if that takes more virtual ``seconds``."""
        while not done():
            if not self._agenda:
                raise AssertionError(f"nothing is in flight, and {self._waiting()} without limit")
            self.now, _, action, args = heapq.heappop(self._agenda)
            if self.now > seconds:
                raise AssertionError(f"after {seconds:g} s of time: {self._waiting()}")
            action(*args)

    def step(self) -> None:
        """Count a step, and check the invariants."""
        self.steps += 1
        self.check()

    def _waiting(self) -> str:
        found = []
        for process in self.processes.values():
            for thread in process.threads:
                if thread.alive and (frame := thread.greenlet.gr_frame) is not None:
                    where = [
                        f"{entry.name} ({entry.filename.rpartition('/')[2]}:{entry.lineno})"
                        for entry in traceback.extract_stack(frame)
                    ][-4:]
                    found.append(f"{process} [{thread.name}] waits in {' > '.join(where)}")
        return "; ".join(found) or "nobody waits"

    # -- processes ------------------------------------------------------------------------

    def spawn(self, number: int, main: Callable[[], object], name: str = "main") -> Process:
        """Start the next incarnation of a process, which runs ``main``."""
        before = self.processes.get(number)
        assert before is None or not before.alive, f"{before} is alive"
        process = Process(self, number, 0 if before is None else before.incarnation + 1)
        self.processes[number] = process
        with self.inside(process):
            Thread(self, main, name=name).start()
        return process

    @contextlib.contextmanager
    def inside(self, process: Process) -> Iterator[None]:
        """Let threads that are made here belong to a process."""
        before, self._process = self._process, process
        try:
            yield
        finally:
            self._process = before

    def check_not_in_vain(self, error: Exception, settled_s: float) -> None:
        """No process waits all of its time if no fault has lasted into all but its beginning."""
        quiet_s = self.now - max((f.at + f.seconds for f in self.scenario.faults), default=0.0)
        waited = re.search(r"after (\d+) s", str(error))
        assert not waited or quiet_s < float(waited[1]) - settled_s, f"{self.current}: {error}"

    @property
    def current(self) -> Process:
        """The process whose code runs."""
        if self.thread is not None:
            return self.thread.process
        assert self._process is not None, "no process runs"
        return self._process

    def end(self, process: Process) -> None:
        """Kill a process."""
        if not process.alive:
            return
        process.state = "dead"
        process.held.clear()
        for thread in list(process.threads):
            thread.kill()
        for action in process.at_end:
            action()

    def _inject(self, fault: Fault) -> None:
        self.log(f"{self.now:10.3f} {fault.kind} {fault.where} {fault.seconds or ''}")
        self.steps += 1
        process = self.processes.get(fault.where[0])
        if fault.kind == "start":
            if process is None or not process.alive:
                self.on_start(fault.where[0], 0 if process is None else process.incarnation + 1)
        elif fault.kind in self.on_fault:
            self.on_fault[fault.kind](fault)
        elif process is None or not process.alive:
            pass
        elif fault.kind == "kill":
            self.killed[process.number, process.incarnation] = self.now
            self.end(process)
        elif fault.kind == "stop" and process.state == "running":
            process.state = "stopped"
            self.after(fault.seconds, self._resume, process, self.now)
        self.check()

    def _resume(self, process: Process, since: float) -> None:
        if process.state != "stopped":
            return
        self.log(f"{self.now:10.3f} {process} resumes")
        process.state = "running"
        process.suspended_s += self.now - since
        for action in process.at_resume:
            action()
        held, process.held = process.held, []
        for action, args in held:
            if process.alive:
                process.when_running(action, *args)

    # -- waits ----------------------------------------------------------------------------

    def block(self, waiters: list[Wait] | None, seconds: float) -> bool:
        """Let the running thread wait until it is woken; False if ``seconds`` pass before."""
        thread = self.thread
        assert thread is not None, "only a thread waits"
        if not thread.process.alive:
            raise Killed
        wait = Wait(thread)
        if waiters is not None:
            waiters.append(wait)
        if seconds < math.inf:
            self.after(max(0.0, seconds), self._time_out, wait)
        self.thread = None
        woken = self._hub.switch()
        self.thread = thread
        if not thread.process.alive:
            raise Killed
        return bool(woken)

    def wake(self, waiters: list[Wait]) -> None:
        """Wake all of these threads, each in a moment."""
        for wait in waiters:
            if not wait.over:
                wait.over = True
                self.after(self.chance.random() * 1e-3, self._go_on, wait, True)
        waiters.clear()

    def sleep(self, seconds: float) -> None:
        self.block(None, seconds)

    def _time_out(self, wait: Wait) -> None:
        if not wait.over:
            wait.over = True
            wait.thread.process.when_running(self.switch, wait.thread, False)

    def _go_on(self, wait: Wait, value: bool) -> None:
        wait.thread.process.when_running(self._step, wait.thread, value)

    def _step(self, thread: Thread, value: bool) -> None:
        self.switch(thread, value)
        self.step()

    def switch(self, thread: Thread, value: Any) -> None:
        """Let a thread run until it waits."""
        self.thread = thread
        try:
            thread.greenlet.switch(value)
        finally:
            self.thread = None

    @contextlib.contextmanager
    def limited(self, seconds: float, what: str) -> Iterator[None]:
        """Fail if this takes the running thread more than ``seconds``; stops do not count."""
        process, number = self.current, next(self._count)
        self._limits[number] = self.now, process, what
        self.after(seconds, self._check_limit, number, seconds, process.suspended_s)
        try:
            yield
        finally:
            del self._limits[number]

    def _check_limit(self, number: int, seconds: float, suspended_s: float) -> None:
        if number not in self._limits:
            return
        begun, process, what = self._limits[number]
        if not process.alive:
            return
        if process.state == "stopped" or process.suspended_s > suspended_s:
            self.after(seconds, self._check_limit, number, seconds, process.suspended_s)
            return
        raise AssertionError(
            f"{process}: {what} takes more than {self.now - begun:g} s: {self._waiting()}"
        )


class Thread:
    """A `threading.Thread` in virtual time, of the process whose code makes it."""

    def __init__(
        self,
        world: World,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        name: str = "thread",
        daemon: bool | None = None,
    ) -> None:
        self.world, self.process, self.name, self.daemon = world, world.current, name, daemon
        self._call = target, args, kwargs or {}
        self._ended: list[Wait] = []
        self.ident: int | None = None
        self.alive = False

    def start(self) -> None:
        self.ident, self.alive = id(self), True
        self.greenlet = greenlet.greenlet(self._main, self.world._hub)
        self.process.threads[self] = None
        self.world.after(self.world.chance.random() * 1e-3, self._begin)

    def _begin(self) -> None:
        self.process.when_running(self.world._step, self, None)

    def _main(self, _: object) -> None:
        target, args, kwargs = self._call
        try:
            target(*args, **kwargs)
        except Killed:
            pass
        finally:
            self.alive = False
            self.process.threads.pop(self, None)
            self.world.wake(self._ended)

    def kill(self) -> None:
        if self.alive and self.greenlet.gr_frame is not None:
            before, self.world.thread = self.world.thread, self
            self.greenlet.parent = greenlet.getcurrent()  # which continues when this one has ended
            try:
                self.greenlet.throw(Killed)
            finally:
                self.world.thread = before
        self.alive = False

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout: float | None = None) -> None:
        if self.alive:
            self.world.block(self._ended, math.inf if timeout is None else timeout)


class Lock:
    """`threading.Lock`, and with ``again``, so that its owner may take it again, `RLock`.

    It is its own `threading.Condition` too.
    """

    def __init__(self, world: World, *, again: bool = True) -> None:
        self._world, self._again = world, again
        self._owner: object = None
        self._depth = 0
        self._queue: list[Wait] = []
        self._waiters: list[Wait] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._world.thread or self._world
        while self._owner is not None and not (self._again and self._owner is me):
            if not blocking or not self._world.block(
                self._queue, timeout if timeout >= 0 else math.inf
            ):
                return False
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._queue:
                self._world.wake(self._queue)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth, self._depth, self._owner = self._depth, 0, None
        self._world.wake(self._queue)
        try:
            return self._world.block(self._waiters, math.inf if timeout is None else timeout)
        finally:
            if self._world.current.alive:
                self.acquire()
            self._depth = depth

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = math.inf if timeout is None else self._world.now + timeout
        while not (found := predicate()):
            left = deadline - self._world.now
            if left <= 0:
                return found
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        first, self._waiters[:] = self._waiters[:n], self._waiters[n:]
        self._world.wake(first)

    def notify_all(self) -> None:
        self._world.wake(self._waiters)


class Event:
    """A `threading.Event` in virtual time."""

    def __init__(self, world: World) -> None:
        self._world, self._flag = world, False
        self._waiters: list[Wait] = []

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        self._world.wake(self._waiters)

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._flag:
            self._world.block(self._waiters, math.inf if timeout is None else timeout)
        return self._flag


class BackgroundThread(Thread):
    """As `wingbeat.transport.services.BackgroundThread`; what it raises ends the simulation."""

    failure = ""

    def __init__(self, world: World, work: Callable[[], None], name: str, died: object) -> None:
        super().__init__(world, work, name=name)


@contextlib.contextmanager
def virtual(world: World, modules: list[ModuleType], **others: Any) -> Iterator[None]:
    """Replace time, threads, and the names ``others`` in modules that have them."""
    time_s = SimpleNamespace(
        monotonic=world.clock,
        perf_counter=world.clock,
        time=world.clock,
        monotonic_ns=lambda: int(world.now * 1e9),
        perf_counter_ns=lambda: int(world.now * 1e9),
        time_ns=lambda: int(world.now * 1e9),
        sleep=world.sleep,
    )
    threads = SimpleNamespace(
        Thread=lambda target=None, **options: Thread(world, target, **options),
        Lock=lambda: Lock(world, again=False),
        RLock=lambda: Lock(world),
        Condition=lambda lock=None: Lock(world),
        Event=lambda: Event(world),
        current_thread=lambda: world.thread,
        get_ident=lambda: id(world.thread),
    )
    names = {
        "time": time_s,
        "threading": threads,
        "BackgroundThread": lambda work, name, died=None: BackgroundThread(world, work, name, died),
        **others,
    }
    changed = [
        (module, name, getattr(module, name))
        for module in modules
        for name in names
        if hasattr(module, name)
    ]
    for module, name, _ in changed:
        setattr(module, name, names[name])
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
