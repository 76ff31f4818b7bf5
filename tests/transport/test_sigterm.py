"""SIGTERM: all ranks stop after the same step, save, and leave with exit status 143."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import wingbeat
from helpers.waiting import PATIENCE, until
from wingbeat.errors import UsageError
from wingbeat.transport import graceful_shutdown, loopback, on_terminate
from wingbeat.transport.graceful_shutdown import SigtermHandler
from wingbeat.transport.world import World


def end(one: SigtermHandler) -> None:
    """End its thread, which would else end the tests when the grace is over."""
    one.after = None
    one.close()
    one._thread.join(PATIENCE)
    assert not one._thread.is_alive()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SigtermHandler]]:
    """Makes what a rank has, as if its process had called `on_terminate`."""
    monkeypatch.setattr(graceful_shutdown, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(graceful_shutdown, "_AGREEMENT_S", 0.5)
    monkeypatch.setattr(graceful_shutdown._ExitHandler, "terminated", False)
    kept: list[SigtermHandler] = []
    before = signal.getsignal(signal.SIGTERM)

    def make(world: World, save: Callable[[], object] = lambda: None, grace: float = 600.0) -> Any:
        one = SigtermHandler(world, save, grace)
        one._thread.start()
        kept.append(one)
        return one

    yield make
    for one in kept:
        end(one)
    signal.signal(signal.SIGTERM, before)


def step(one: SigtermHandler, *, lockstep: bool = True, together: tuple[int, ...] = ()) -> bool:
    """Make a step, and begin the next; whether this rank has left instead."""
    one.count_step()
    try:
        one.stop_if_due(lockstep=lockstep, together=together)
    except SystemExit as left:
        return bool(left.code == 143)
    return False


@pytest.mark.parametrize("signalled", [(0,), (2,), (0, 1, 2)])
def test_ranks_at_different_steps_stop_after_the_same_one(
    signalled: tuple[int, ...], made: Callable[..., SigtermHandler]
) -> None:
    saved: list[tuple[int, int]] = []
    ranks = [made(world) for world in loopback.worlds(3)]
    for rank, one in enumerate(ranks):
        one.save = lambda rank=rank, one=one: saved.append((rank, one._count))  # type: ignore[misc]
        for _ in range(10 + rank):
            assert not step(one)
    for rank in signalled:
        ranks[rank]._on_signal(signal.SIGTERM, None)
    until(lambda: all(one.after is not None for one in ranks))
    for one in ranks:
        while not step(one):
            assert one._count < 13, "nobody makes more steps than one after the most"
    assert saved == [(0, 13), (1, 13), (2, 13)]


def test_rank_without_lockstep_stops_after_its_current_step(
    made: Callable[..., SigtermHandler],
) -> None:
    first, second = (made(world) for world in loopback.worlds(2))
    for _ in range(1000):
        assert not step(first, lockstep=False)
    second._signalled.set()
    until(lambda: first.after is not None and second.after is not None)
    assert step(second, lockstep=False)
    assert (first._count, second._count) == (1000, 1)
    assert step(first, lockstep=False)


def test_ranks_of_a_replica_without_lockstep_stop_after_the_same_step(
    made: Callable[..., SigtermHandler],
) -> None:
    """One of them alone could not gather what the next step needs; other replicas are ahead."""
    ranks = [made(world) for world in loopback.worlds(3)]
    for one, count in zip(ranks, (4, 5, 90), strict=True):
        for _ in range(count):
            assert not step(one, lockstep=False)
    ranks[2]._signalled.set()
    until(lambda: all(one.after is not None for one in ranks))
    for one in ranks[:2]:
        while not step(one, lockstep=False, together=(0, 1)):
            assert one._count < 6
    assert step(ranks[2], lockstep=False, together=(2,))
    assert [one._count for one in ranks] == [6, 6, 91]


def test_rank_completes_no_step_until_all_have_published_their_counts(
    made: Callable[..., SigtermHandler],
) -> None:
    """Else it could go past the step that the others agree on, and wait for them in vain."""
    board = loopback.Switchboard()
    one = made(loopback.worlds(2, switchboard=board)[0])
    one._signalled.set()
    until(lambda: board.has("terminate/steps/0"))
    ended = threading.Event()

    def steps() -> None:
        one.count_step()
        ended.set()

    threading.Thread(target=steps, daemon=True).start()
    assert not ended.wait(0.05)
    board.set("terminate/steps/1", "7")
    assert ended.wait(PATIENCE)
    assert one.after == 8


def test_only_the_first_forward_after_a_step_stops(made: Callable[..., SigtermHandler]) -> None:
    """Forwards before a step are amid it: of several models, or in an accumulation."""
    (one,) = (made(world) for world in loopback.worlds(1))
    one.count_step()
    one.stop_if_due(lockstep=True)
    one._signalled.set()
    until(lambda: one.after is not None)
    one.stop_if_due(lockstep=False)
    assert one.after == 2
    assert step(one)


@pytest.mark.parametrize("said", ["-1", "1e3", "9" * 400, "²", "", "7\n"])
def test_malformed_step_count_is_ignored_with_a_warning(
    said: str, made: Callable[..., SigtermHandler], caplog: pytest.LogCaptureFixture
) -> None:
    board = loopback.Switchboard()
    one = made(loopback.worlds(2, switchboard=board)[0])
    board.set("terminate/steps/1", said)
    board.set("terminate/after", said)
    for _ in range(3):
        assert not step(one)
    one._signalled.set()
    until(lambda: one.after is not None)
    assert one.after == 4
    lines = [r.getMessage() for r in caplog.records if "SIGTERM" in r.getMessage()]
    assert [line.split("; it is ignored")[0] for line in lines] == [
        f"rank 0: rank 1 published an invalid step count after SIGTERM: {said[:80]!r}",
        f"rank 0: the store published an invalid step count after SIGTERM: {said[:80]!r}",
    ]


@pytest.mark.parametrize("left", [False, True])
def test_silent_rank_is_awaited_unless_it_has_exited(
    left: bool, made: Callable[..., SigtermHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graceful_shutdown, "_AGREEMENT_S", 2 * PATIENCE if left else 0.2)
    first, second = loopback.worlds(2)
    if left:
        graceful_shutdown.close_world(second)
    one = made(first)
    one._signalled.set()
    until(lambda: one.after is not None)
    assert one.after == 1


def test_rank_without_a_store_stops_after_its_next_step(
    made: Callable[..., SigtermHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = loopback.worlds(2)

    def gone(key: str, value: str) -> None:
        raise RuntimeError("connection reset by peer")

    one = made(world)
    assert not step(one)
    monkeypatch.setattr(one._store, "set", gone)
    one._signalled.set()
    until(lambda: one.after is not None)
    assert one.after == 2


@pytest.mark.parametrize(
    ("amid", "doing"),
    [
        ("step", "it was completing a step; nothing was saved"),
        ("save", "save() was running"),
        ("leaving", "it was leaving; save() had returned"),
    ],
)
def test_process_ends_after_the_grace_period_and_reports_its_state(
    amid: str,
    doing: str,
    made: Callable[..., SigtermHandler],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    (world,) = loopback.worlds(1)
    one = made(
        world, (lambda: until(lambda: bool(ended))) if amid == "save" else (lambda: None), 0.3
    )
    one._signalled.set()
    until(lambda: one.after is not None)
    if amid != "step":
        assert step(one)
    until(lambda: bool(ended))
    assert ended == [143]
    assert f"wingbeat: rank 0 ends 0.3 s after SIGTERM, while {doing}\n" in capfd.readouterr().err


def test_exception_of_save_is_raised_by_the_forward(made: Callable[..., SigtermHandler]) -> None:
    def full() -> None:
        raise OSError("no space left on device")

    (world,) = loopback.worlds(1)
    one = made(world, full)
    one._signalled.set()
    until(lambda: one.after is not None)
    with pytest.raises(OSError, match="no space"):
        step(one)
    assert not graceful_shutdown._ExitHandler.terminated


def test_a_terminated_rank_has_not_finished(made: Callable[..., SigtermHandler]) -> None:
    """Others that wait for it are not to hear that it had fewer batches."""
    board = loopback.Switchboard()
    world, _ = loopback.worlds(2, switchboard=board)
    one = made(world)
    board.set("terminate/steps/1", "0")
    one._signalled.set()
    until(lambda: one.after is not None)
    assert step(one)
    graceful_shutdown.close_world(world)
    assert board.get("left/0", 1.0) == "failed"


def test_status_143_is_no_failure() -> None:
    """It would end this rank's servers at once, from which others still save."""
    for code, failing in ((143, False), (0, False), (1, True)):
        try:
            raise SystemExit(code)
        except SystemExit:
            assert graceful_shutdown.is_failing() is failing


# -- the signal -----------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(graceful_shutdown, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(graceful_shutdown._ExitHandler, "terminated", False)
    before = signal.getsignal(signal.SIGTERM)
    yield wingbeat.init()
    installed = graceful_shutdown._installed
    if installed is not None:
        end(installed)
    wingbeat.shutdown()
    signal.signal(signal.SIGTERM, before)
    monkeypatch.setattr(graceful_shutdown, "_installed", None)


def test_a_worker_alone_saves_between_two_steps_and_exits_with_143(alone: World) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wingbeat.distribute(model, optimizer, wingbeat.AllReduce())
    former: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: former.append(number))
    saved: list[int] = []
    made = 0
    on_terminate(lambda: saved.append(made))
    installed = graceful_shutdown._installed
    assert installed is not None

    def train() -> None:
        nonlocal made
        for made in range(1000):
            if made == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                until(lambda: installed.after is not None)
            with torch.no_grad():
                model(torch.ones(1, 4))  # no step's
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 143
    assert saved == [4], "batch 3 was trained, batch 4 was not"
    assert former == [signal.SIGTERM], "the script's own handler is called too"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "a second one changes no status"


def test_forward_of_a_closure_does_not_stop(alone: World) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    wingbeat.distribute(model, optimizer, wingbeat.AllReduce())
    evaluated: list[int] = []
    on_terminate(lambda: evaluated.append(-1))
    installed = graceful_shutdown._installed
    assert installed is not None

    def closure() -> torch.Tensor:
        evaluated.append(len(evaluated))
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 4)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    installed._signalled.set()
    until(lambda: installed.after is not None)
    optimizer.step(closure)
    steps = len(evaluated)
    with pytest.raises(SystemExit):
        optimizer.step(closure)
    assert evaluated[steps:] == [-1], "saved before the loss is evaluated"


def test_shutdown_restores_the_signal_handler(alone: World) -> None:
    def mine(*_: object) -> None:
        pass

    signal.signal(signal.SIGTERM, mine)
    on_terminate(lambda: None)
    assert signal.getsignal(signal.SIGTERM) != mine
    wingbeat.shutdown()
    assert signal.getsignal(signal.SIGTERM) == mine


def test_a_second_call_replaces_what_is_saved(alone: World) -> None:
    on_terminate(lambda: None)
    first = graceful_shutdown._installed

    def save() -> None:
        pass

    on_terminate(save, grace=7.0)
    assert graceful_shutdown._installed is first is not None
    assert (first.save, first.grace) == (save, 7.0)


@pytest.mark.parametrize(
    ("save", "grace", "said"),
    [
        (None, 25.0, r"on_terminate\(save=None\): pass a function without arguments"),
        (print, 0, "grace=0: allowed are seconds above 0"),
        (print, float("inf"), "grace=inf"),
        (print, "5", "grace='5'"),
    ],
)
def test_invalid_arguments_are_refused(save: Any, grace: Any, said: str, alone: World) -> None:
    with pytest.raises(UsageError, match=said):
        on_terminate(save, grace=grace)


def test_another_thread_than_the_main_one_is_refused(alone: World) -> None:
    said: list[str] = []

    def call() -> None:
        try:
            on_terminate(lambda: None)
        except UsageError as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "outside of the main thread" in said[0]


def test_a_forked_child_ends_by_the_signal(alone: World) -> None:
    """As one of multiprocessing, which its parent terminates."""
    on_terminate(lambda: None)
    hears, says = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(says, b"!")
        time.sleep(PATIENCE)
        os._exit(0)
    os.read(hears, 1)  # Python forgets what comes before it has forked
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
