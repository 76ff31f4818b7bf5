"""Replicas on simulated workers whose messages are encoded and delivered in random order."""

from __future__ import annotations

import functools
import json
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.pieces import split
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.messages import (
    PieceSum,
    decode_header,
    decode_message,
    encode_words,
)
from wingbeat.methods.bounded_staleness.replica import (
    AsynchronousReplica,
    Pieces,
    bound_with_control,
    join_step_counts,
    sum_piece,
)
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.transport.membership import initial_view

K = 2
SHAPES = ((3, 2), (2,)), ((5,),)
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def momentum(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def rate(worker: int, iteration: int) -> float:
    """Return the learning rate of a worker's schedule, which follows its own iterations."""
    return 0.1 / (1 + iteration)


def drawn(worker: int, iteration: int, z: int, i: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * worker + 100 * iteration + 10 * z + i)
    exponent = torch.randint(-4, 4, SHAPES[z][i], generator=chance).float()
    return torch.randn(SHAPES[z][i], generator=chance) * 10**exponent


class Trainee:
    """One worker: a replica of three parameters, its machine, and random gradients."""

    def __init__(self, rank: int, n: int, bound: StalenessBound, make: Make = momentum) -> None:
        self.rank, self.n = rank, n
        self.params = [[torch.zeros(shape) for shape in shapes] for shapes in SHAPES]
        self.optimizer = make([param for params in self.params for param in params])
        named = [{f"{z}.{i}": p for i, p in enumerate(ps)} for z, ps in enumerate(self.params)]
        self.pieces, self.rates = Pieces(named, n), list[float]()
        self.others = [torch.zeros(3)]
        self.replica = AsynchronousReplica(
            self.params, self.pieces, self.optimizer, self._step, self.others
        )
        self.machine = Worker(rank, n, bound, self.replica.combine)
        self.place: int | None = None

    def _step(self) -> None:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()

    def apply(self) -> None:
        while (parts := self.machine.take_round()) is not None:
            self.replica.apply_round(parts)

    def act(self, iterations: int) -> None:
        """Do the next action of training."""
        machine, z = self.machine, self.place
        if z is None:
            self.apply()
            if machine.next_iteration >= iterations:
                machine.finish()
            elif machine.can_begin():
                machine.begin_iteration()
                self.place = 0
            return
        if z < K:
            grads = [drawn(self.rank, machine.iteration, z, i) for i in range(len(SHAPES[z]))]
            sent = machine.send_colayer(z, split(self.pieces, z, grads, self.params[z], 1 / self.n))
        else:
            self.optimizer.param_groups[0]["lr"] = rate(self.rank, machine.iteration)
            sent = machine.send_colayer(z, self.replica.control_payloads())
        self.place = z + 1
        if z == K or not sent:
            machine.end_iteration()
            self.place = None

    def bits(self) -> list[bytes]:
        tensors = [param for params in self.params for param in params]
        state = [self.optimizer.state[param] for param in tensors]
        kept = [v for one in state for v in one.values() if isinstance(v, torch.Tensor)]
        return [tensor.numpy().tobytes() for tensor in [*tensors, *kept]]


def play(
    seed: int, n: int, bound: StalenessBound, make: Make = momentum, iterations: int = 5
) -> list[Trainee]:
    """Draw actions from a seed until all workers have drained."""
    chance = random.Random(seed)
    crew = [Trainee(rank, n, bound, make) for rank in range(n)]
    network: dict[tuple[int, int], deque[tuple[list[int], Any]]] = {}
    speed = [chance.choice((1, 1, 4)) for _ in crew]
    for _ in range(20_000):
        if all(one.machine.drained for one in crew):
            break
        one = chance.choices(crew, speed)[0]
        if chance.random() < 0.4:
            one.act(iterations)
        for each in crew:
            while each.machine.outbox:
                post = each.machine.outbox.popleft()
                words = encode_words(post.message, 0)
                payload = getattr(post.message, "payload", None)
                for to in post.to:
                    network.setdefault((each.rank, to), deque()).append((words, payload))
        ways = [way for way, queue in network.items() if queue]
        if ways:
            way = chance.choice(ways)
            words, payload = network[way].popleft()
            header = decode_header(words)
            message = decode_message(header, words, n, bound.colayers, payload)
            crew[way[1]].machine.receive(way[0], header.incarnation, message)
    assert all(one.machine.drained for one in crew), [one.machine.iteration for one in crew]
    for one in crew:
        one.apply()
    return crew


@pytest.mark.parametrize("make", [momentum, adam])
def test_bsp_equals_synchronous_training_bitwise(make: Make) -> None:
    for seed in range(3):
        crew = play(seed, 3, bound_with_control(0, K, K), make, iterations=4)
        plain = Trainee(0, 3, bound_with_control(0, K, K), make)
        for t in range(4):
            for z, params in enumerate(plain.params):
                for i, param in enumerate(params):
                    a, b, c = (drawn(worker, t, z, i) * (1 / 3) for worker in range(3))
                    param.grad = (a + b) + c
            plain.optimizer.param_groups[0]["lr"] = rate(0, t)
            plain.optimizer.step()
        assert all(one.bits() == plain.bits() for one in crew)


@pytest.mark.parametrize(
    ("s", "p"), [(2, 2), (1, 1), (0, 1), (None, 2)], ids=["SSP", "PGE", "PGE0", "ASP"]
)
def test_replicas_after_training_have_equal_bits_and_rates(s: int | None, p: int) -> None:
    dropped = 0
    for seed in range(8):
        crew = play(seed, 3, bound_with_control(s, p, K))
        assert all(one.bits() == crew[0].bits() for one in crew)
        assert all(one.rates == crew[0].rates for one in crew)
        assert len(crew[0].rates) >= 5
        dropped += sum(one.machine.dropped for one in crew)
    assert (dropped > 0) == (p < K)


def test_bound_with_control_counts_colayers_with_gradients() -> None:
    assert bound_with_control(0, 10, 10).mode == "BSP"
    assert bound_with_control(2, 10, 10).mode == "SSP"
    assert bound_with_control(2, 6, 10) == StalenessBound(2, 6, 11)
    assert bound_with_control(None, 10, 10).mode == "ASP"
    with pytest.raises(UsageError, match="p=11 of 10 colayers; allowed: 1 to 10"):
        bound_with_control(2, 11, 10)


def a_round(one: Trainee, colayer: int) -> list[PieceSum]:
    """Return a round with one worker's gradients of a colayer, without options."""
    grads = [torch.ones(shape) for shape in SHAPES[colayer]]
    sent = split(one.pieces, colayer, grads, one.params[colayer])
    return [
        PieceSum(colayer, q, 0, ((0, 0),), (), initial_view(one.n), each)
        for q, each in enumerate(sent)
    ]


def test_parameters_without_gradient_are_not_updated() -> None:
    one = Trainee(0, 2, bound_with_control(1, 1, K))
    one.params[1][0].fill_(1.0)  # weight decay applies to parameters with a gradient
    one.replica.apply_round(a_round(one, 0))
    assert one.rates == [0.1]
    assert torch.equal(one.params[1][0], torch.ones(5))
    assert not torch.equal(one.params[0][0], torch.zeros(3, 2))
    assert all(param.grad is None for params in one.params for param in params)


def test_apply_round_restores_gradients() -> None:
    """Such as zeros that zero_grad(set_to_none=False) has left before synchronize()."""
    one = Trainee(0, 2, bound_with_control(1, 1, K))
    zeros = one.params[0][0].grad = torch.zeros(3, 2)
    one.replica.apply_round(a_round(one, 0))
    assert one.params[0][0].grad is zeros
    assert not torch.equal(one.params[0][0], torch.zeros(3, 2)), "it has used the round's"
    assert one.params[0][1].grad is None


def test_apply_round_that_fails_restores_gradients_and_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Trainee(0, 2, bound_with_control(1, 1, K))
    zeros = one.params[0][0].grad = torch.zeros(3, 2)
    one.optimizer.param_groups[0]["lr"] = 0.7

    def fail() -> None:
        raise ArithmeticError("a hook of the optimizer")

    monkeypatch.setattr(one.optimizer, "step", fail)
    with pytest.raises(ArithmeticError):
        one.replica.apply_round(a_round(one, 0))
    assert one.params[0][0].grad is zeros
    assert one.params[0][1].grad is None
    assert one.optimizer.param_groups[0]["lr"] == 0.7
    assert one.rates == [0.1]


def test_empty_round_makes_no_step() -> None:
    one = Trainee(0, 2, bound_with_control(1, 1, K))
    one.replica.apply_round(
        [PieceSum(z, q, 0, (), (), initial_view(2)) for z in range(K + 1) for q in range(2)]
    )
    assert one.rates == []


def test_round_without_options_uses_previous_ones() -> None:
    one, other = (
        Trainee(0, 2, bound_with_control(1, 1, K)),
        Trainee(1, 2, bound_with_control(1, 1, K)),
    )
    other.optimizer.param_groups[0]["lr"] = 0.5
    payload = other.replica.control_payloads()[0]
    one.replica.apply_round(
        [*a_round(one, 0), PieceSum(K, 0, 0, ((0, 1),), (), initial_view(2), payload)]
    )
    one.replica.apply_round(a_round(one, 1))
    assert one.rates == [0.5, 0.5]
    assert one.optimizer.param_groups[0]["lr"] == 0.1


def test_options_of_latest_contribution_are_used() -> None:
    one = Trainee(0, 2, bound_with_control(1, 1, K))
    payloads = []
    for lr in (0.5, 0.25):
        one.optimizer.param_groups[0]["lr"] = lr
        payloads.append(one.replica.control_payloads()[0])
    found = one.replica.combine(K, 0, {(0, 1): payloads[0], (1, 0): payloads[1]})
    assert found == payloads[1]
    assert one.replica.combine(K, 1, {(0, 1): None}) is None
    assert one.replica.combine(K, 0, {}) is None


def test_missing_options_name_sender() -> None:
    one = Trainee(0, 2, bound_with_control(1, 1, K))
    with pytest.raises(PeerError, match="rank 1 sent optimizer options with other than 1 groups"):
        one.replica.combine(K, 0, {(0, 1): None})


def test_optimizer_with_closure_is_rejected() -> None:
    with pytest.raises(UsageError, match="LBFGS evaluates the loss in its step"):
        Trainee(0, 2, bound_with_control(1, 1, K), torch.optim.LBFGS)


def rounds(one: Trainee, seed: int) -> list[PieceSum]:
    """Return a round of gradients and options."""
    out: list[PieceSum] = []
    for z, shapes in enumerate(SHAPES):
        grads = [drawn(0, seed, z, i) for i in range(len(shapes))]
        parts = split(one.pieces, z, grads, one.params[z])
        out += [
            PieceSum(z, q, 0, ((0, 0),), (), initial_view(one.n), each)
            for q, each in enumerate(parts)
        ]
    one.optimizer.param_groups[0]["lr"] = rate(0, seed)
    return [
        *out,
        PieceSum(K, 0, 0, ((0, 0),), (), initial_view(one.n), one.replica.control_payloads()[0]),
    ]


@pytest.mark.parametrize("make", [momentum, adam])
def test_loaded_state_continues_with_same_bits(make: Make) -> None:
    fast, back = (Trainee(rank, 2, bound_with_control(1, 1, K), make) for rank in range(2))
    fast.others[0].fill_(7.0)
    for seed in range(3):
        fast.replica.apply_round(rounds(fast, seed))
    back.replica.apply_round(rounds(back, 9))
    back.replica.load_state(fast.replica.state_bytes())
    assert back.bits() == fast.bits()
    assert torch.equal(back.others[0], fast.others[0])
    following = rounds(fast, 4)[:-1]  # uses the options of the round before, which were pulled
    for one in (fast, back):
        one.replica.apply_round(following)
    assert back.bits() == fast.bits()
    assert back.rates[-1] == fast.rates[-1] == rate(0, 2)


def test_loaded_state_before_first_step_is_empty() -> None:
    fast, back = (Trainee(rank, 2, bound_with_control(1, 1, K)) for rank in range(2))
    back.replica.apply_round(rounds(back, 9))
    back.replica.load_state(fast.replica.state_bytes())
    assert back.bits() == fast.bits()
    assert not any(back.optimizer.state.values())


def test_malformed_state_is_rejected_without_changes() -> None:
    fast, back = (Trainee(rank, 2, bound_with_control(1, 1, K), adam) for rank in range(2))
    for one in (fast, back):
        one.replica.apply_round(rounds(one, one.rank))
    good, before = fast.replica.state_bytes(), back.bits()
    length = 8 + int.from_bytes(good[:8], "little")
    words = json.loads(good[8:length])

    def changed(path: str, value: object) -> bytes:
        mine = json.loads(json.dumps(words))
        place, keys = mine, path.split("/")
        for key in keys[:-1]:
            place = place[int(key) if key.isdecimal() else key]
        place[int(keys[-1]) if keys[-1].isdecimal() else keys[-1]] = value
        text = json.dumps(mine).encode()
        return len(text).to_bytes(8, "little") + text + good[length:]

    for bad in (
        b"", b"abc", good[:-1], good + b"x", good[:100], b"\xff" * 40, good[:8] + b"x" * 500,
        changed("tensors/0/shape", [2, 3]), changed("tensors/0/dtype", "torch.int32"),
        changed("tensors", words["tensors"][1:]), changed("states", []),
        changed("tensors/0/dtype", "torch.qint8"), changed("tensors/0/shape", [-1, 6]),
        changed("tensors/0/shape", "ab"), changed("states/0/step", {"value": [1]}),
        changed("states/0/step", {}), changed("states/0/step/shape", [10**9]),
        changed("states/0/exp_avg/shape", [24]), changed("tensors/0", 3), changed("last", {}),
    ):  # fmt: skip
        with pytest.raises(PeerError, match="check that"):
            back.replica.load_state(bad)
        assert back.bits() == before
    back.replica.load_state(good)
    assert back.bits() == fast.bits()


def test_unsupported_optimizer_state_is_named() -> None:
    one = Trainee(0, 2, bound_with_control(1, 1, K))
    one.optimizer.state[one.params[0][0]]["history"] = [1, 2]
    with pytest.raises(PeerError, match="SGD: 'history', 0: \\[1, 2\\] cannot be sent"):
        one.replica.state_bytes()


def test_step_counts_are_joined_and_checked() -> None:
    pieces = Pieces([{"a": torch.zeros(2)}], 2)
    combine = functools.partial(sum_piece, pieces, functools.partial(join_step_counts, pieces.name))
    assert combine(1, 0, {(0, 0): b"7", (0, 1): b"7"}) == b"0:7 1:7"
    assert combine(1, 0, {(0, 1): b"12", (0, 0): b"7"}) == b"0:7 1:12"
    assert combine(1, 1, {(0, 0): None}) is None
    for payload in (None, b"", b"-1", b"x", b"1" * 21):
        with pytest.raises(PeerError, match=r"^rank 1 sent b'.*' as its number of steps"):
            combine(1, 0, {(0, 0): b"7", (0, 1): payload})
