"""Which modules run, how often, in which order; which parameters are used, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..models import adamw, mlp, note_gradients, sgd, train
from ..registry import Grid, add, scenario
from ..sides import Side

WIDTH = 8


class Parts(nn.Module):
    """Four equal layers and a head; ``route`` says what one forward does with them."""

    def __init__(self, route: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.route = route
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.route(self, x))
        return out


def _through(*order: int) -> Callable[[Parts, Tensor], Tensor]:
    def route(self: Parts, x: Tensor) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x

    return route


def _routed(
    route_of: Callable[[Side], Callable[[Parts, Tensor], Tensor]], make: Any
) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model: Any = Parts(route_of(side))
        bare = model
        model, optimizer = side.setup(model, make(model))
        for step in range(8):
            bare.turn = step
            train(side, model, optimizer, [step])

    return play


def _fixed(*order: int) -> Callable[[Side], Callable[[Parts, Tensor], Tensor]]:
    return lambda side: _through(*order)


def _by_turn(*orders: tuple[int, ...]) -> Callable[[Side], Callable[[Parts, Tensor], Tensor]]:
    """Every rank takes the same order, another one in each iteration."""
    return lambda side: lambda self, x: _through(*orders[self.turn % len(orders)])(self, x)


def _by_rank(*orders: tuple[int, ...]) -> Callable[[Side], Callable[[Parts, Tensor], Tensor]]:
    """Each rank takes another order, always the same."""
    return lambda side: lambda self, x: _through(*orders[side.rank % len(orders)])(self, x)


def _by_both(*orders: tuple[int, ...]) -> Callable[[Side], Callable[[Parts, Tensor], Tensor]]:
    """Each rank takes another order, another one in each iteration."""

    def route_of(side: Side) -> Callable[[Parts, Tensor], Tensor]:
        def route(self: Parts, x: Tensor) -> Tensor:
            return _through(*orders[(side.rank + self.turn) % len(orders)])(self, x)

        return route

    return route_of


ROUTES: dict[str, Callable[[Side], Callable[[Parts, Tensor], Tensor]]] = {
    "reversed_order": _fixed(3, 2, 1, 0),
    "shuffled_order": _fixed(2, 0, 3, 1),
    "a_module_twice": _fixed(0, 1, 1, 2, 3),
    "a_module_twice_far_apart": _fixed(0, 1, 2, 3, 0),
    "unused_on_every_rank": _fixed(0, 2),
    "order_changes": _by_turn((0, 1, 2, 3), (3, 1, 0, 2), (1, 2, 3, 0)),
    "repeats_change": _by_turn((0, 1, 2, 3), (0, 0, 1, 2, 3, 3), (3, 2, 1, 0, 1)),
    "unused_changes_same_on_every_rank": _by_turn((0, 1), (2, 3), (0, 3), ()),
    "used_late_for_the_first_time": _by_turn((0,), (0,), (0,), (0, 1, 2, 3)),
    "unused_on_some_ranks": _by_rank((0, 1), (1, 2, 3), (0, 3)),
    "only_rank_one_uses_it": _by_rank((0,), (0, 1, 2, 3), (0,)),
    "order_differs_between_ranks": _by_rank((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)),
    "unused_and_order_change_everywhere": _by_both((0, 1, 2, 3), (3, 0), (1,), (2, 1, 0), ()),
}

for _name, _route in ROUTES.items():
    add(_routed(_route, sgd), f"route_{_name}_sgd")
    add(_routed(_route, adamw), f"route_{_name}_adamw")


@scenario(Grid(worlds=(2, 4)))
def branches_chosen_by_the_data(side: Side) -> None:
    def route(self: Parts, x: Tensor) -> Tensor:
        chosen = int(x.sum().abs() * 1000) % 4
        return torch.tanh(self.layers[chosen](x))

    model: Any = Parts(route)
    train(side, *side.setup(model, sgd(model)), range(10))


@scenario()
def child_weight_used_without_calling_the_child(side: Side) -> None:
    def route(self: Parts, x: Tensor) -> Tensor:
        child: Any = self.layers[2]
        return torch.tanh(F.linear(x, child.weight, child.bias))

    model: Any = Parts(route)
    train(side, *side.setup(model, sgd(model)))


@scenario()
def child_weight_used_before_calling_the_child(side: Side) -> None:
    def route(self: Parts, x: Tensor) -> Tensor:
        late: Any = self.layers[3]
        x = torch.tanh(F.linear(x, late.weight.t()))
        return _through(0, 1, 2, 3)(self, x)

    model: Any = Parts(route)
    train(side, *side.setup(model, adamw(model)))


@scenario()
def sibling_reads_a_later_weight(side: Side) -> None:
    class Borrower(nn.Module):
        def __init__(self, lender: nn.Linear) -> None:
            super().__init__()
            self.lender = [lender]  # hidden from the module tree, as tying code often does

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(F.linear(x, self.lender[0].weight))

    lender = nn.Linear(WIDTH, WIDTH)
    model: Any = nn.Sequential(Borrower(lender), nn.Linear(WIDTH, WIDTH), lender, nn.Linear(8, 3))
    train(side, *side.setup(model, sgd(model)))


class RootParameters(nn.Module):
    """Parameters on the root, in lists and of odd shapes, next to children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(WIDTH, 16)
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(16)) for _ in range(3)])
        self.maps = nn.ParameterDict({"a": nn.Parameter(torch.eye(16) * 0.5)})
        self.turned = nn.Parameter(torch.randn(16, 3).t())  # not contiguous

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x) * self.scale + self.shifts[0])
        x = torch.tanh(x @ self.maps["a"] + self.shifts[2] * self.one)
        return F.linear(x, self.turned)


@scenario(Grid(worlds=(2, 3, 4)))
def parameters_on_the_root(side: Side) -> None:
    model: Any = RootParameters()
    train(side, *side.setup(model, sgd(model)), range(8))


@scenario(Grid(worlds=(3,)))
def fewer_elements_than_workers(side: Side) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :3] * self.scale.sum() * self.scale[0]

    model: Any = Scale()
    train(side, *side.setup(model, sgd(model)))


@scenario()
def frozen_parameters(side: Side) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    for p in model[2].parameters():
        p.requires_grad_(False)
    train(side, *side.setup(model, sgd(model)), range(8))


@scenario()
def frozen_parameters_inside_the_optimizer(side: Side) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    train(side, *side.setup(model, optimizer), range(8))


class Tied(nn.Module):
    """A small language model whose decoder is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.middle = nn.Linear(16, 16)
        self.decoder = nn.Linear(16, 12, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.decoder(torch.tanh(self.middle(self.embedding(tokens))))
        return out


def _tokens(model: Any, x: Tensor, y: Tensor) -> Tensor:
    tokens = (x.abs() * 100).long() % 12
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


@scenario()
def tied_parameters_sgd(side: Side) -> None:
    model: Any = Tied()
    train(side, *side.setup(model, sgd(model)), range(8), _tokens)


@scenario()
def tied_parameters_adamw(side: Side) -> None:
    model: Any = Tied()
    train(side, *side.setup(model, adamw(model)), range(8), _tokens)


@scenario()
def tied_modules(side: Side) -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    model: Any = nn.Sequential(shared, nn.Tanh(), nn.Linear(WIDTH, WIDTH), shared, nn.Linear(8, 3))
    train(side, *side.setup(model, sgd(model)))


@scenario(reference="plain")
def two_forwards_one_backward(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        (x1, y1), (x2, y2) = side.batch(step), side.batch(step + 100)
        optimizer.zero_grad()
        (F.cross_entropy(model(x1), y1) + F.cross_entropy(model(x2), y2)).backward()
        optimizer.step()


@scenario(reference="plain")
def two_losses_with_retain_graph(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        x, y = side.batch(step)
        optimizer.zero_grad()
        out = model(x)
        out.pow(2).mean().backward(retain_graph=True)
        F.cross_entropy(out, y).backward()
        optimizer.step()


@scenario(reference="plain")
def forwards_of_two_steps_interleaved(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(5):
        (x1, y1), (x2, y2) = side.batch(step), side.batch(step + 100)
        optimizer.zero_grad()
        first, second = F.cross_entropy(model(x1), y1), F.cross_entropy(model(x2), y2)
        second.backward()
        first.backward()
        optimizer.step()


@scenario(find_unused=False)
def activation_checkpointing(side: Side) -> None:
    def route(self: Parts, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda v, f=layer: torch.tanh(f(v)), x, use_reentrant=False)
        return x

    model: Any = Parts(route)
    train(side, *side.setup(model, sgd(model)))


@scenario()
def inputs_that_need_gradients(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        x, y = side.batch(step)
        x.requires_grad_()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert x.grad is not None
        side.note("gradient of the input", x.grad)
        optimizer.step()


@scenario()
def gradients_as_the_user_reads_them(side: Side) -> None:
    model: Any = Parts(_by_both((0, 1), (1, 2))(side))
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(5):
        bare.turn = step
        x, y = side.batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        note_gradients(side, model, f"gradient at {step}")
        optimizer.step()
