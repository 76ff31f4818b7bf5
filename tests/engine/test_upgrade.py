"""Classes of models and optimizers with other bases, slots or metaclasses can be upgraded."""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch

import wingbeat
from helpers.training import TINY_MB, Net, assert_same, net, on, sgd, train, weights
from wingbeat.engine.upgrade import engine_of

STRATEGIES: dict[str, Any] = {
    "allreduce": wingbeat.AllReduce(mb=TINY_MB),
    "dear": wingbeat.DeAR(plan="fixed", mb=TINY_MB),
    "local": wingbeat.LocalSGD(every=2),
}

T = TypeVar("T")


class Interface(ABC):
    """Without a ``__dict__`` of its own, as ABC itself is."""

    __slots__ = ()

    @abstractmethod
    def forward(self, x: Any) -> Any:
        """The same as the module's."""


class Mixin:
    """With attributes, and a method that both have."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.zeroed = getattr(self, "zeroed", 0) + 1
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]


class Registering:
    """Keeps a list of its subclasses, which have to give a name."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, label: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registering.known.append(label)


class AbstractFirst(ABC, Net):
    """As pytorch-optimizer's ``class BaseOptimizer(ABC, Optimizer)``."""


class AbstractLast(Net, ABC):
    """The usual order."""


class Implements(Interface, Net):
    """An interface of the user's own before the module."""

    def forward(self, x: Any) -> Any:
        return Net.forward(self, x)


class OfKind(Generic[T], Net):
    """A generic class before the module."""


class Slotted(Net):
    """Memory of its own beside ``__dict__``."""

    __slots__ = ("beside",)

    def __init__(self) -> None:
        super().__init__()
        self.beside = [1, 2]


class Mixed(Mixin, Net):
    """A class with attributes before the module."""


class Both(Mixin, AbstractFirst, Generic[T]):
    """Several at once."""


class Registered(Registering, Net, label="registered"):
    """Whose subclasses must be given a name."""


class SGDAbstractFirst(ABC, torch.optim.SGD):
    """As the classes of pytorch-optimizer."""


class SGDSlotted(torch.optim.SGD):
    """Memory of its own beside ``__dict__``."""

    __slots__ = ("beside",)


class SGDMixed(Mixin, torch.optim.SGD):
    """A class with attributes before the optimizer."""


class SGDRegistered(Registering, torch.optim.SGD, label="sgd"):
    """Whose subclasses must be given a name."""


MODELS = [
    AbstractFirst,
    AbstractLast,
    Implements,
    OfKind,
    Slotted,
    Mixed,
    Both,
    Registered,
]
OPTIMIZERS = [SGDAbstractFirst, SGDSlotted, SGDMixed, SGDRegistered]


def _made(kind: type[Any]) -> Any:
    model = kind()
    model.load_state_dict(net().state_dict())
    return model


def _trained(world: Any, name: str, model: Any, optimizer: Any) -> Any:
    wingbeat.distribute(model, optimizer, STRATEGIES[name], world=world)
    train(model, optimizer, range(4))
    wingbeat.synchronize(model)
    return weights(model)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_any_class_trains_as_a_plain_one(kind: type[Any], name: str) -> None:
    def body(world: Any) -> None:
        plain = net()
        wanted = _trained(world, name, plain, sgd(plain.parameters()))
        model = _made(kind)
        optimizer = sgd(model.parameters())
        assert_same(_trained(world, name, model, optimizer), wanted)
        assert isinstance(model, kind)
        assert getattr(model, "zeroed", 0) == 0  # the optimizer's zero_grad was called
        model.zero_grad()
        assert hasattr(model, "zeroed") == issubclass(kind, Mixin)
        wingbeat.release(model, optimizer)
        assert type(model) is kind

    on(2, body)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_of_any_class_trains_as_a_plain_one(kind: type[Any], name: str) -> None:
    def body(world: Any) -> None:
        plain, model = net(), net()
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
        wanted = _trained(world, name, plain, sgd(plain.parameters()))
        optimizer = kind(model.parameters(), **options)
        assert_same(_trained(world, name, model, optimizer), wanted)
        assert isinstance(optimizer, kind)
        assert getattr(optimizer, "zeroed", 4) == 4
        wingbeat.release(model, optimizer)
        assert type(optimizer) is kind

    on(2, body)


@pytest.mark.parametrize("kind", [AbstractFirst, Slotted, Both])
def test_copies_of_such_a_model_are_plain(kind: type[Any]) -> None:
    def body(world: Any) -> None:
        model = _made(kind)
        _trained(world, "dear", model, sgd(model.parameters()))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin) is kind
            assert engine_of(twin) is None
            assert getattr(twin, "beside", [1, 2]) == [1, 2]
            assert_same(weights(twin), weights(model))
        assert type(type(model)()) is kind

    on(2, body)


def test_a_class_made_from_an_upgraded_one_has_its_methods() -> None:
    """As Lightning makes one from an optimizer's."""

    def body(world: Any) -> None:
        model = _made(AbstractFirst)
        optimizer = SGDAbstractFirst(model.parameters(), lr=0.1)
        wingbeat.distribute(model, optimizer, STRATEGIES["dear"], world=world)
        kind: Any = type("Wrapper", (Mixin, type(optimizer)), {})
        assert kind.zero_grad is Mixin.zero_grad
        assert kind.step is type(optimizer).step
        assert kind.step is not SGDAbstractFirst.step

    on(2, body)


def test_init_subclass_of_the_user_is_not_called_for_upgraded_classes() -> None:
    known = list(Registering.known)

    def body(world: Any) -> None:
        model = _made(Registered)
        _trained(world, "dear", model, SGDRegistered(model.parameters(), lr=0.1))

    on(2, body)
    assert Registering.known == known
