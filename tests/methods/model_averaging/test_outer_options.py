"""DiLoCo's options against a simulation of all workers in one process, in double precision."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers.training import adamw, assert_same, batch, engine, net, on, sgd, state_of, weights
from wingbeat.errors import MismatchError, UsageError
from wingbeat.methods.model_averaging.rules import weight_of
from wingbeat.strategies import parse

EVERY, STEPS, EXACT = 4, 13, 1e-12
NAMED = [["head", "first"], ["second", "scale", "spare"]]
ADAM = functools.partial(torch.optim.Adam, lr=0.05)
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def diloco(**options: Any) -> wingbeat.Strategy:
    return wingbeat.DiLoCo(**{"every": EVERY, "encrypted": False, **options})


def tokens_of(step: int, rank: int) -> int:
    return 3 + (7 * step + 5 * rank) % 11


def made(world: Any, strategy: Any, make: Any = sgd) -> tuple[Any, Any]:
    model = net().double()
    return wingbeat.distribute(model, make(model.parameters()), strategy, world=world)


def train(model: Any, optimizer: Any, steps: Any, rank: int, *, tokens: bool = False) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, rank).double()).square().mean().backward()
        if tokens:
            wingbeat.count_tokens(model, tokens_of(step, rank))
        optimizer.step()


@dataclass
class Plain:
    """The models of all workers, trained one by one, with torch's optimizers as outer ones."""

    size: int
    make: Any = sgd
    fragments: list[list[str]] = field(default_factory=lambda: [[n for n, _ in named()]])
    outer: Any = NESTEROV
    delay: int = 0
    alpha: float | None = None
    weights: str = "equal"

    def __post_init__(self) -> None:
        self.models = [net().double() for _ in range(self.size)]
        self.inner = [self.make(model.parameters()) for model in self.models]
        self.shared = {n: nn.Parameter(p.detach().clone()) for n, p in named()}
        self.optimizers = [self.outer([self.shared[n] for n in names]) for names in self.fragments]
        self.counted = [[[0, 0] for _ in self.fragments] for _ in range(self.size)]
        self.sent: dict[str, list[Tensor]] = {}
        self.begun = 0

    def now(self, rank: int) -> dict[str, nn.Parameter]:
        return dict(self.models[rank].named_parameters())

    def train(self, steps: range) -> Plain:
        for step in steps:
            number = step + 1
            turns = [
                place
                for place in range(len(self.fragments))
                if place * EVERY // len(self.fragments) == number % EVERY
            ]
            for rank, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
                inner.zero_grad()
                model(batch(step, rank).double()).square().mean().backward()
                for counts in self.counted[rank]:
                    counts[0] += tokens_of(step, rank)
                    counts[1] += 1
            if turns or number - self.begun >= self.delay:
                self.adopt()
            for inner in self.inner:
                inner.step()
            for place in turns:
                self.average(place)
                self.begun = number
            if not self.delay:
                self.adopt()
        return self

    def average(self, place: int) -> None:
        shares = [1.0] * self.size
        if self.weights != "equal":
            shares = [weight_of(self.weights, *counts[place]) for counts in self.counted]
        for counts in self.counted:
            counts[place] = [0, 0]
        for name in self.fragments[place]:
            own = [self.now(rank)[name].detach().clone() for rank in range(self.size)]
            shared = self.shared[name]
            moves = torch.stack([shared.detach() - each for each in own])
            shared.grad = torch.tensordot(torch.tensor(shares).double(), moves, 1) / sum(shares)
            self.sent[name] = own
        self.optimizers[place].step()

    @torch.no_grad()
    def adopt(self) -> None:
        for name, sent in self.sent.items():
            for rank, before in enumerate(sent):
                local, shared = self.now(rank)[name], self.shared[name]
                if self.alpha is None:
                    local.add_(shared - before)
                else:
                    local.copy_((1 - self.alpha) * shared + self.alpha * local)
        self.sent.clear()

    def model(self, rank: int) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.now(rank).items()}


def named() -> list[tuple[str, nn.Parameter]]:
    return list(net().double().named_parameters())


def names_of(fragments: list[list[str]]) -> list[list[str]]:
    """The parameters of modules."""
    return [
        [name for name, _ in named() if any(name.split(".")[0] == each for each in fragment)]
        for fragment in fragments
    ]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fragments": {"fragments": NAMED},
    "fragments, delay": {"fragments": NAMED, "delay": 1},
    "adam": {"outer": ADAM},
    "adam, fragments, delay": {"outer": ADAM, "fragments": NAMED, "delay": 2},
    "nesterov, chosen": {"outer": functools.partial(NESTEROV)},
    "adagrad": {"outer": functools.partial(torch.optim.Adagrad, lr=0.1)},
    "sgd, dampened": {"outer": functools.partial(NESTEROV, nesterov=False, dampening=0.2)},
    "tokens": {"weights": "tokens"},
    "decoupled": {"weights": "decoupled", "fragments": NAMED},
    "tokens, adam, delay": {"weights": "tokens", "outer": ADAM, "delay": 3},
    **{f"alpha {a}, delay {d}": {"alpha": a, "delay": d} for a in (0.0, 0.5, 1.0) for d in (0, 2)},
    "all": {
        "weights": "tokens", "outer": ADAM, "delay": 1, "alpha": 0.25, "fragments": NAMED,
    },
}  # fmt: skip


def strategy_of(case: dict[str, Any]) -> wingbeat.Strategy:
    given = {key: value for key, value in case.items() if key != "outer"}
    chosen = {"outer_optimizer": case["outer"]} if "outer" in case else {}
    return diloco(**given, **chosen)


def plain_of(case: dict[str, Any], size: int, make: Any = sgd) -> Plain:
    whole = dict(case)
    if "fragments" in whole:
        whole["fragments"] = names_of(whole["fragments"])
    return Plain(size, make, **whole)


@pytest.mark.parametrize("case", CASES)
def test_options_equal_a_plain_simulation_in_double_precision(case: str) -> None:
    options, make = CASES[case], adamw if "adam" in case else sgd

    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world, strategy_of(options), make)
        train(model, optimizer, range(STEPS), world.rank, tokens="weights" in options)
        return weights(model)

    found = on(3, body, timeout=60)
    plain = plain_of(options, 3, make).train(range(STEPS))
    for rank, mine in enumerate(found):
        assert_same(mine, plain.model(rank), tolerance=EXACT)


def test_equal_tokens_change_no_bit() -> None:
    def body(world: Any, counts: bool) -> dict[str, Tensor]:
        options = {"weights": "tokens"} if counts else {}
        model, optimizer = made(world, diloco(**options))
        for step in range(9):
            if counts:
                wingbeat.count_tokens(model, 4096)
            train(model, optimizer, [step], world.rank)
        return weights(model)

    assert_same(on(3, lambda w: body(w, True), timeout=60), on(3, lambda w: body(w, False), 60))


@pytest.mark.parametrize("wire", ["bf16", "sketch@4", "topk@0.1", "lowrank@2", "fp16"])
def test_weights_and_chosen_optimizers_go_with_each_encoding(wire: str) -> None:
    """Nothing moves after the first step: then only what a codec has not sent is sent."""
    chosen = functools.partial(torch.optim.SGD, lr=1.0)

    def gradient(param: Tensor, rank: int) -> Tensor:
        return torch.randn(param.shape, generator=torch.Generator().manual_seed(rank))

    def body(world: Any) -> dict[str, Tensor]:
        strategy = diloco(compression=wire, every=1, weights="tokens", outer_optimizer=chosen)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        wingbeat.distribute(model, optimizer, strategy, world=world)
        for step in range(60):
            for param in model.parameters():
                param.grad = (step == 0) * gradient(param, world.rank)
            wingbeat.count_tokens(model, 1 + 2 * world.rank)
            optimizer.step()
        return weights(model)

    found = on(2, body, timeout=60)
    assert_same(found[1], found[0])
    for name, start in net().named_parameters():
        mean = (gradient(start, 0) + 3 * gradient(start, 1)) / 4
        kept = 2e-3 if wire == "bf16" else 1e-4  # which keeps no errors of differences
        torch.testing.assert_close(found[0][name], start.detach() - 0.125 * mean, rtol=0, atol=kept)


@pytest.mark.parametrize("case", ["adam", "tokens, adam, delay", "all", "adagrad", "decoupled"])
def test_resumed_run_has_the_outer_optimizer_and_unmerged_counts(case: str) -> None:
    """Bit for bit, from a checkpoint in the middle of a round."""
    options = CASES[case]
    tokens = "weights" in options

    def whole(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world, strategy_of(options))
        train(model, optimizer, range(15), world.rank, tokens=tokens)
        return weights(model)

    def first(world: Any) -> Any:
        model, optimizer = made(world, strategy_of(options))
        train(model, optimizer, range(7), world.rank, tokens=tokens)
        return copy.deepcopy(model.state_dict()), state_of(optimizer)

    saved = on(2, first, timeout=60)

    def second(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world, strategy_of(options))
        train(model, optimizer, range(5), world.rank, tokens=tokens)  # is forgotten
        model.load_state_dict(saved[world.rank][0])
        optimizer.load_state_dict(copy.deepcopy(saved[world.rank][1]))
        train(model, optimizer, range(7, 15), world.rank, tokens=tokens)
        return weights(model)

    if options.get("delay"):
        # An average that is under way when the state is saved is made at the next turn.
        assert_same(*(on(2, second, timeout=60) for _ in range(2)))
    else:
        assert_same(on(2, second, timeout=60), on(2, whole, timeout=60))


def test_run_with_other_workers_and_fragments_keeps_the_outer_optimizer() -> None:
    def first(world: Any) -> Any:
        model, optimizer = made(world, diloco(outer_optimizer=ADAM, weights="tokens"))
        train(model, optimizer, range(6), world.rank, tokens=True)
        wingbeat.synchronize(model)
        return copy.deepcopy(model.state_dict()), state_of(optimizer)

    model_state, state = on(2, first, timeout=60)[0]

    def second(world: Any) -> Any:
        options = {"outer_optimizer": ADAM, "weights": "tokens", "fragments": NAMED}
        model, optimizer = made(world, diloco(**options))
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state)
        found = state_of(optimizer)["wingbeat"]["averages"]
        train(model, optimizer, range(6, 12), world.rank, tokens=True)
        wingbeat.synchronize(model)
        return found, engine(model).update._outer.numbers(), weights(model)

    before = state["wingbeat"]["averages"]
    for found, numbers, model in (results := on(3, second, timeout=60)):
        for kind in ("shared", "outer.exp_avg", "outer.exp_avg_sq"):
            assert_same(found[kind], before[kind])
        assert found["unmerged"] == before["unmerged"] * 2
        assert before["outer.numbers"] == {"steps made": [1.0], "step": [1.0]}
        assert numbers["step"] == [2.0, 3.0] or numbers["step"] == [3.0, 2.0]
        assert_same(model, results[0][2])


def test_state_of_another_outer_optimizer_is_refused() -> None:
    def body(world: Any) -> None:
        model, optimizer = made(world, diloco())
        state = state_of(optimizer)
        wingbeat.release(model, optimizer)
        model, optimizer = made(world, diloco(outer_optimizer=ADAM))
        own = state_of(optimizer)
        with pytest.raises(UsageError, match=r"or of another outer optimizer.*same one"):
            optimizer.load_state_dict(state)
        for spoil, said in (
            (lambda kept: kept["outer.numbers"].pop("step"), "not those of this outer"),
            (lambda kept: kept["outer.numbers"].update(step=[float("nan")]), "has \\[nan\\]"),
            (lambda kept: kept.update(unmerged=[[1, -1]]), "'unmerged' is"),
        ):
            spoilt = copy.deepcopy(own)
            spoil(spoilt["wingbeat"]["averages"])
            with pytest.raises(UsageError, match=said):
                optimizer.load_state_dict(spoilt)

    on(2, body)


# -- refusals ----------------------------------------------------------------------------------


class NoStep(nn.Module):
    pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fragments": []}, "DiLoCo(fragments=[]): allowed are lists of lists of names"),
        ({"fragments": [["a"], "b"]}, "allowed are lists of lists of names"),
        ({"fragments": [["a"], []]}, "with a name in each"),
        ({"fragments": [["a"], ["a"]]}, "'a' is named twice"),
        ({"fragments": 0}, "DiLoCo(fragments=0): allowed are whole numbers"),
        ({"alpha": 1.5}, "DiLoCo(alpha=1.5): allowed are 0 to 1, and None"),
        ({"weights": "steps"}, "unknown DiLoCo weights 'steps'"),
        ({"quorum": 0}, "DiLoCo(quorum=0): allowed are whole numbers, 1 to"),
        ({"grace": 3.0}, "DiLoCo(grace=3.0): the seconds after a quorum"),
        ({"quorum": 2, "grace": -1.0}, "DiLoCo(grace=-1.0): allowed are 0 to"),
        ({"outer_optimizer": "adam"}, "pass a function of a list of parameters"),
        ({"outer_optimizer": ADAM, "outer_lr": 0.3}, "partial(Adam, lr=0.05), outer_lr=0.3): the"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        diloco(**options)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_options_have_a_spelling() -> None:
    text = "diloco:quorum=3,grace=2,alpha=0.5,weights=tokens,fragments=a+b.0/b.1"
    expected = wingbeat.DiLoCo(
        quorum=3, grace=2.0, alpha=0.5, weights="tokens", fragments=(("a", "b.0"), ("b.1",))
    )
    assert parse(text) == expected
    assert repr(parse(text)) == repr(expected)
    assert parse("diloco:fragments=4,quorum=none,alpha=none") == wingbeat.DiLoCo(fragments=4)
    with pytest.raises(UsageError, match=r"outer_optimizer=adam: a function cannot be written"):
        parse("diloco:outer_optimizer=adam")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fragments": [["first"], ["head"]]}, "the parameter 'spare.bias' is in none of the 2"),
        ({"fragments": [["first", "second", "head", "spare", "scale", "tail"]]}, "'tail' is no"),
        ({"quorum": 3}, "quorum=3: there are 2 workers; allowed are 1 to 2"),
        ({"outer_optimizer": lambda params: NoStep()}, "it returned NoStep"),
        ({"outer_optimizer": lambda p: ADAM([nn.Parameter(torch.ones(2))])}, "has 1 parameters"),
        ({"outer_optimizer": lambda p: torch.optim.LBFGS(p)}, "LBFGS cannot be divided"),
        ({"outer_optimizer": lambda p: torch.optim.Adafactor(p)}, "updates each element by its"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(options: dict[str, Any], said: str) -> None:
    def body(world: Any) -> None:
        with pytest.raises(UsageError) as raised:
            made(world, diloco(**options))
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)

    on(2, body)


def test_other_outer_optimizers_on_other_ranks_are_refused() -> None:
    def body(world: Any) -> None:
        def chosen(params: Any) -> torch.optim.Optimizer:
            return torch.optim.Adam(params, lr=0.1 * (1 + world.rank))

        with pytest.raises(MismatchError, match=r"must make equal optimizers on all ranks"):
            made(world, diloco(outer_optimizer=chosen))

    on(2, body)


def test_steps_without_counted_tokens_are_refused() -> None:
    def body(world: Any) -> None:
        model, optimizer = made(world, diloco(weights="tokens"))
        for wrong in (-1, 2.0, True):
            with pytest.raises(UsageError, match=r"count_tokens\(.*\): allowed are whole numbers"):
                wingbeat.count_tokens(model, wrong)
        with pytest.raises(UsageError, match=r"rank \d has made 4 steps .* counted no tokens"):
            train(model, optimizer, range(EVERY), world.rank)

    on(2, body)


@pytest.mark.parametrize("strategy", [diloco, wingbeat.AllReduce, wingbeat.LocalSGD])
def test_tokens_that_weigh_nothing_are_refused(strategy: Callable[..., Any]) -> None:
    def body(world: Any) -> None:
        model, _ = made(world, strategy())
        with pytest.raises(UsageError, match=r'weights workers by no tokens.*weights="tokens"'):
            wingbeat.count_tokens(model, 3)

    on(1, body)
