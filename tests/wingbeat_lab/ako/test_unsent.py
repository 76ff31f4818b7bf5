"""What is still to be sent, where the weights that it belongs to are exchanged for others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helpers.partial import Room, Worker, crew, iterate
from wingbeat.errors import PeerError, UsageError
from wingbeat_lab.ako.unsent import NONE, SHARE, LoadedAs, _digest, judge

SHAPES = ((4,), (2, 3))
KEEP, OWE, DROP = LoadedAs.KEEP, LoadedAs.OWE, LoadedAs.DROP


@pytest.mark.parametrize(
    ("said", "verdicts"),
    [
        ([(0, 5, 1), (1, 5, 2), (2, 5, 3)], [KEEP, KEEP, KEEP]),
        ([(0, 5, 1), (1, 5, 1), (2, 5, 2)], [KEEP, KEEP, KEEP]),
        # Each its own optimizer, and all the weights of rank 0.
        ([(0, 5, 1), (1, 5, 1), (2, 5, 1)], [DROP, OWE, OWE]),
        # All have loaded one rank's state.
        ([(0, 5, 1), (0, 5, 1), (0, 5, 1)], [DROP, DROP, DROP]),
        ([(2, 5, 1), (2, 5, 1), (2, 5, 1)], [DROP, DROP, DROP]),
        ([(NONE, 5, 1), (NONE, 5, 1), (NONE, 5, 1)], [DROP, DROP, DROP]),
        ([(SHARE, 5, 1), (SHARE, 5, 1), (SHARE, 5, 1)], [OWE, OWE, OWE]),
    ],
)
def test_loaded_gradients_are_judged_by_sources_and_weights(
    said: Any, verdicts: list[LoadedAs]
) -> None:
    assert [judge(said, rank) for rank in range(3)] == verdicts


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([(0, 5, 1), (1, 6, 2)], "different steps ([5, 6]): load the states of one moment on all"),
        ([(SHARE, 5, 1), (SHARE, 5, 2)], "weights that differ between workers: load the model of"),
        ([(SHARE, 5, 1), (1, 5, 1)], "of another number of workers"),
    ],
)
def test_inconsistent_loads_are_refused(said: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        judge(said, 0)
    assert "\n" not in str(caught.value)


def trained(size: int = 3, partitions: int = 3) -> tuple[Room, list[Worker]]:
    """Workers in the middle of a run: each has applied its own, and sent less."""
    room, workers = crew(size, partitions, shapes=SHAPES)
    for step in range(4):
        iterate(room, workers, [made(10 * step + rank) for rank in range(size)])
    return room, workers


def made(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"p{i}": torch.randint(1, 50, shape, generator=generator).float()
        for i, shape in enumerate(SHAPES)
    }


def everything(size: int = 3, steps: int = 4) -> dict[str, torch.Tensor]:
    each = [made(10 * step + rank) for step in range(steps) for rank in range(size)]
    return {name: torch.stack([g[name] for g in each]).sum(0).double() for name in each[0]}


def resumed(states: Sequence[Any], roots: Sequence[int], old: Sequence[Worker]) -> list[Worker]:
    """New workers with the weights of these ranks, who have loaded these states."""
    _, workers = crew(len(states), 3, shapes=SHAPES)
    for worker, state, root in zip(workers, states, roots, strict=True):
        worker.applied = {name: value.clone() for name, value in old[root].applied.items()}
        with torch.no_grad():
            for slot in worker.slots:
                slot.param.copy_(worker.applied[slot.name])
        if isinstance(state, list):
            worker.unsent.load_parts(state)
        else:
            worker.unsent.load_state_dict(state)
    return workers


def drained(workers: Sequence[Worker]) -> list[dict[str, torch.Tensor]]:
    """What each has applied when nothing is left."""
    room = Room()
    said = [[w.unsent._source, w.unsent._step, _digest(w.slots)] for w in workers]
    for worker in workers:
        worker.exchange._collectives._room = room  # type: ignore[attr-defined]
        worker.world.said = lambda _value: said
    for _ in range(6):
        iterate(room, workers)
    return [worker.applied for worker in workers]


def assert_all_have_all(found: Sequence[dict[str, torch.Tensor]]) -> None:
    for applied in found:
        for name, wanted in everything().items():
            assert torch.equal(applied[name], wanted), name


def test_a_drained_run_has_applied_all_gradients() -> None:
    assert_all_have_all(drained(trained()[1]))


def test_each_worker_continues_with_its_own_weights_and_state() -> None:
    _, old = trained()
    states = [worker.unsent.state_dict() for worker in old]
    new = resumed(states, [0, 1, 2], old)
    assert [w.unsent.turn for w in new] == [w.unsent.turn for w in old]
    assert_all_have_all(drained(new))


def test_own_states_with_weights_of_rank_0_apply_all_gradients_once() -> None:
    _, old = trained()
    states = [worker.unsent.state_dict() for worker in old]
    assert_all_have_all(drained(resumed(states, [0, 0, 0], old)))


@pytest.mark.parametrize("root", [0, 2])
def test_one_workers_state_on_all_applies_nothing_twice(root: int) -> None:
    """What the others had not sent is lost, and nothing is applied twice."""
    _, old = trained()
    state = old[root].unsent.state_dict()
    for found in drained(resumed([state] * 3, [root] * 3, old)):
        assert all(torch.equal(found[name], old[root].applied[name]) for name in found)


@pytest.mark.parametrize("size", [2, 4])
def test_another_number_of_workers_loads_all_parts(size: int) -> None:
    _, old = trained()
    states = [worker.unsent.state_dict() for worker in old]
    assert_all_have_all(drained(resumed([states] * size, [0] * size, old)))


def test_as_many_workers_may_load_all_parts_too() -> None:
    _, old = trained()
    states = [worker.unsent.state_dict() for worker in old]
    assert_all_have_all(drained(resumed([states] * 3, [0, 1, 2], old)))
    assert_all_have_all(drained(resumed([states] * 3, [0, 0, 0], old)))


@pytest.mark.parametrize("root", [0, 1])
def test_all_workers_copy_one_workers_weights_in_training(root: int) -> None:
    """As at the end of ``join()``; the gradients that follow count once too."""
    room, workers = trained()
    for worker in workers:
        worker.applied = {k: v.clone() for k, v in workers[root].applied.items()}
        worker.unsent.follow(root)
    for worker in workers:
        worker.plan([[1], [0]])
    more = [made(100 + rank) for rank in range(3)]
    iterate(room, workers, more)
    for _ in range(3):
        iterate(room, workers)
    for worker in workers:
        for name, wanted in everything().items():
            assert torch.equal(worker.applied[name], wanted + sum(m[name] for m in more))


def test_a_state_without_unsent_gradients_resets_them() -> None:
    _, workers = trained()
    step = workers[0].unsent._step
    for worker in workers:
        worker.unsent.load_state_dict(None)
        assert not any(kept.any() for kept in worker.kept().values())
    assert workers[0].unsent._step == step


def test_a_malformed_load_names_its_sender() -> None:
    _, workers = trained(2)
    workers[0].unsent.load_state_dict(workers[0].unsent.state_dict())
    workers[0].world.said = lambda value: [value, [1, True, "x"]]
    with pytest.raises(PeerError, match="rank 0: rank 1 sent a malformed report of a load"):
        workers[0].unsent.count_step()


def test_the_digest_sees_every_bit_of_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        _, (worker, _) = crew(2, 2, dtype=dtype, shapes=((3,), ()))
        before = _digest(worker.slots)
        with torch.no_grad():
            worker.slots[1].param.neg_()
        assert _digest(worker.slots) != before, "0 and -0 are two numbers"
