"""Models under bounded staleness, on machines whose words travel as JSON, in virtual time."""

from __future__ import annotations

import functools
import json
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.pieces import cut
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.bounded_staleness.letters import message_of, numbers_of
from wingbeat.methods.bounded_staleness.messages import Round
from wingbeat.methods.bounded_staleness.pace import Pace
from wingbeat.methods.bounded_staleness.pieces import Pieces
from wingbeat.methods.bounded_staleness.replica import Sums, TorchReplica, counted, pace_of
from wingbeat.methods.bounded_staleness.view import whole
from wingbeat.methods.bounded_staleness.worker import Worker

K = 2
SHAPES = ((3, 2), (2,)), ((5,),)
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def momentum(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def rate(worker: int, iteration: int) -> float:
    """Each worker's schedule goes by its own iterations."""
    return 0.1 / (1 + iteration)


def drawn(worker: int, iteration: int, z: int, i: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * worker + 100 * iteration + 10 * z + i)
    exponent = torch.randint(-4, 4, SHAPES[z][i], generator=chance).float()
    return torch.randn(SHAPES[z][i], generator=chance) * 10**exponent


class Trainee:
    """One worker: a replica of three parameters, its machine, and gradients drawn from a seed."""

    def __init__(self, rank: int, n: int, pace: Pace, make: Make = momentum) -> None:
        self.rank, self.n = rank, n
        self.params = [[torch.zeros(shape) for shape in shapes] for shapes in SHAPES]
        self.optimizer = make([param for params in self.params for param in params])
        named = [{f"{z}.{i}": p for i, p in enumerate(ps)} for z, ps in enumerate(self.params)]
        self.pieces, self.rates = Pieces(named, n), list[float]()
        self.others = [torch.zeros(3)]
        self.replica = TorchReplica(
            self.params, self.pieces, self.optimizer, self._step, n, others=self.others
        )
        self.machine = Worker(rank, n, pace, self.replica.sums.combine)
        self.place: int | None = None

    def _step(self) -> None:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()

    def apply(self) -> None:
        while (parts := self.machine.take()) is not None:
            self.replica.step(parts)

    def act(self, iterations: int) -> None:
        """Do the next thing that training does."""
        machine, z = self.machine, self.place
        if z is None:
            self.apply()
            if machine.wanted >= iterations:
                machine.end()
            elif machine.ready():
                machine.begin()
                self.place = 0
            return
        if z < K:
            grads = [drawn(self.rank, machine.at, z, i) for i in range(len(SHAPES[z]))]
            sent = machine.computed(z, cut(self.pieces, z, grads, self.params[z], 1 / self.n))
        else:
            self.optimizer.param_groups[0]["lr"] = rate(self.rank, machine.at)
            sent = machine.computed(z, self.replica.options())
        self.place = z + 1
        if z == K or not sent:
            machine.finish()
            self.place = None

    def bits(self) -> list[bytes]:
        tensors = [param for params in self.params for param in params]
        state = [self.optimizer.state[param] for param in tensors]
        kept = [v for one in state for v in one.values() if isinstance(v, torch.Tensor)]
        return [tensor.numpy().tobytes() for tensor in [*tensors, *kept]]


def play(
    seed: int, n: int, pace: Pace, make: Make = momentum, iterations: int = 5
) -> list[Trainee]:
    """Let whatever may happen next happen, as drawn from a seed, until all have settled."""
    chance = random.Random(seed)
    crew = [Trainee(rank, n, pace, make) for rank in range(n)]
    mail: dict[tuple[int, int], deque[tuple[list[int], Any]]] = {}
    speed = [chance.choice((1, 1, 4)) for _ in crew]
    for _ in range(20_000):
        if all(one.machine.settled for one in crew):
            break
        one = chance.choices(crew, speed)[0]
        if chance.random() < 0.4:
            one.act(iterations)
        for each in crew:
            while each.machine.posts:
                post = each.machine.posts.popleft()
                numbers = numbers_of(post.message, 0)
                payload = getattr(post.message, "payload", None)
                for to in post.to:
                    mail.setdefault((each.rank, to), deque()).append((numbers, payload))
        ways = [way for way, letters in mail.items() if letters]
        if ways:
            way = chance.choice(ways)
            numbers, payload = mail[way].popleft()
            life, said = message_of(numbers, n, pace.colayers, payload)
            crew[way[1]].machine.receive(way[0], life, said)
    assert all(one.machine.settled for one in crew), [one.machine.at for one in crew]
    for one in crew:
        one.apply()
    return crew


@pytest.mark.parametrize("make", [momentum, adam])
def test_bsp_is_training_in_step_bit_for_bit(make: Make) -> None:
    for seed in range(3):
        crew = play(seed, 3, pace_of(0, K, K), make, iterations=4)
        plain = Trainee(0, 3, pace_of(0, K, K), make)
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
def test_replicas_end_equal_and_have_used_the_same_rates(s: int | None, p: int) -> None:
    dropped = 0
    for seed in range(8):
        crew = play(seed, 3, pace_of(s, p, K))
        assert all(one.bits() == crew[0].bits() for one in crew)
        assert all(one.rates == crew[0].rates for one in crew)
        assert len(crew[0].rates) >= 5
        dropped += sum(len(one.machine.dropped) for one in crew)
    assert (dropped > 0) == (p < K)


def test_the_thresholds_count_colayers_with_gradients() -> None:
    assert pace_of(0, 10, 10).mode == "BSP"
    assert pace_of(2, 10, 10).mode == "SSP"
    assert pace_of(2, 6, 10) == Pace(2, 6, 11)
    assert pace_of(None, 10, 10).mode == "ASP"
    with pytest.raises(UsageError, match="p=11 of 10 colayers; allowed: 1 to 10"):
        pace_of(2, 11, 10)


def a_round(one: Trainee, colayer: int) -> list[Round]:
    """What comes of one worker's gradients of a colayer, without options."""
    grads = [torch.ones(shape) for shape in SHAPES[colayer]]
    sent = cut(one.pieces, colayer, grads, one.params[colayer])
    return [Round(colayer, q, 0, ((0, 0),), (), whole(one.n), each) for q, each in enumerate(sent)]


def test_parameters_without_a_gradient_are_left_alone() -> None:
    one = Trainee(0, 2, pace_of(1, 1, K))
    one.params[1][0].fill_(1.0)  # weights decay, where there is a gradient
    one.replica.step(a_round(one, 0))
    assert one.rates == [0.1]
    assert torch.equal(one.params[1][0], torch.ones(5))
    assert not torch.equal(one.params[0][0], torch.zeros(3, 2))
    assert all(param.grad is None for params in one.params for param in params)


def test_gradients_of_the_next_iteration_are_left_alone() -> None:
    """As zeros are, which zero_grad(set_to_none=False) has left before a flush."""
    one = Trainee(0, 2, pace_of(1, 1, K))
    zeros = one.params[0][0].grad = torch.zeros(3, 2)
    one.replica.step(a_round(one, 0))
    assert one.params[0][0].grad is zeros
    assert not torch.equal(one.params[0][0], torch.zeros(3, 2)), "it has used the round's"
    assert one.params[0][1].grad is None


def test_a_round_of_nothing_is_no_step() -> None:
    one = Trainee(0, 2, pace_of(1, 1, K))
    one.replica.step([Round(z, q, 0, (), (), whole(2)) for z in range(K + 1) for q in range(2)])
    assert one.rates == []


def test_a_round_without_options_has_those_before_and_the_users_stay() -> None:
    one, other = Trainee(0, 2, pace_of(1, 1, K)), Trainee(1, 2, pace_of(1, 1, K))
    other.optimizer.param_groups[0]["lr"] = 0.5
    payload = other.replica.options()[0]
    one.replica.step([*a_round(one, 0), Round(K, 0, 0, ((0, 1),), (), whole(2), payload)])
    one.replica.step(a_round(one, 1))
    assert one.rates == [0.5, 0.5]
    assert one.optimizer.param_groups[0]["lr"] == 0.1


def test_the_latest_entrys_options_count() -> None:
    one = Trainee(0, 2, pace_of(1, 1, K))
    payloads = []
    for lr in (0.5, 0.25):
        one.optimizer.param_groups[0]["lr"] = lr
        payloads.append(one.replica.options()[0])
    found = one.replica.sums.combine(K, 0, {(0, 1): payloads[0], (1, 0): payloads[1]})
    assert found == payloads[1]
    assert one.replica.sums.combine(K, 1, {(0, 1): None}) is None
    assert one.replica.sums.combine(K, 0, {}) is None


def test_who_sends_no_options_is_named() -> None:
    one = Trainee(0, 2, pace_of(1, 1, K))
    with pytest.raises(PeerError, match="rank 1 sent no 1 groups"):
        one.replica.sums.combine(K, 0, {(0, 1): None})


def test_an_optimizer_with_closures_is_refused() -> None:
    with pytest.raises(UsageError, match="LBFGS evaluates the loss in its step"):
        Trainee(0, 2, pace_of(1, 1, K), torch.optim.LBFGS)


def rounds(one: Trainee, seed: int) -> list[Round]:
    """A round of gradients, and of options."""
    out: list[Round] = []
    for z, shapes in enumerate(SHAPES):
        grads = [drawn(0, seed, z, i) for i in range(len(shapes))]
        parts = cut(one.pieces, z, grads, one.params[z])
        out += [Round(z, q, 0, ((0, 0),), (), whole(one.n), each) for q, each in enumerate(parts)]
    one.optimizer.param_groups[0]["lr"] = rate(0, seed)
    return [*out, Round(K, 0, 0, ((0, 0),), (), whole(one.n), one.replica.options()[0])]


@pytest.mark.parametrize("make", [momentum, adam])
def test_whoever_pulls_goes_on_with_the_same_bits(make: Make) -> None:
    fast, back = (Trainee(rank, 2, pace_of(1, 1, K), make) for rank in range(2))
    fast.others[0].fill_(7.0)
    for seed in range(3):
        fast.replica.step(rounds(fast, seed))
    back.replica.step(rounds(back, 9))
    back.replica.put(fast.replica.copied())
    assert back.bits() == fast.bits()
    assert torch.equal(back.others[0], fast.others[0])
    following = rounds(fast, 4)[:-1]  # with the options of the round before, which were pulled too
    for one in (fast, back):
        one.replica.step(following)
    assert back.bits() == fast.bits()
    assert back.rates[-1] == fast.rates[-1] == rate(0, 2)


def test_whoever_pulls_from_one_that_has_not_stepped_has_no_state() -> None:
    fast, back = (Trainee(rank, 2, pace_of(1, 1, K)) for rank in range(2))
    back.replica.step(rounds(back, 9))
    back.replica.put(fast.replica.copied())
    assert back.bits() == fast.bits()
    assert not any(back.optimizer.state.values())


def test_what_is_pulled_from_another_model_is_refused_and_nothing_changes() -> None:
    fast, back = (Trainee(rank, 2, pace_of(1, 1, K), adam) for rank in range(2))
    for one in (fast, back):
        one.replica.step(rounds(one, one.rank))
    good, before = fast.replica.copied(), back.bits()
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
            back.replica.put(bad)
        assert back.bits() == before
    back.replica.put(good)
    assert back.bits() == fast.bits()


def test_state_that_cannot_be_sent_is_named() -> None:
    one = Trainee(0, 2, pace_of(1, 1, K))
    one.optimizer.state[one.params[0][0]]["history"] = [1, 2]
    with pytest.raises(PeerError, match="SGD: 'history', 0: \\[1, 2\\] cannot be sent"):
        one.replica.copied()


def test_numbers_of_steps_are_passed_on_with_their_workers_and_checked() -> None:
    pieces = Pieces([{"a": torch.zeros(2)}], 2)
    sums = Sums(pieces, functools.partial(counted, "worker {}".format))
    assert sums.combine(1, 0, {(0, 0): b"7", (0, 1): b"7"}) == b"0:7 1:7"
    assert sums.combine(1, 0, {(0, 1): b"12", (0, 0): b"7"}) == b"0:7 1:12"
    assert sums.combine(1, 1, {(0, 0): None}) is None
    for payload in (None, b"", b"-1", b"x", b"1" * 21):
        with pytest.raises(PeerError, match=r"^worker 1 sent b'.*', as the number of steps"):
            sums.combine(1, 0, {(0, 0): b"7", (0, 1): payload})
