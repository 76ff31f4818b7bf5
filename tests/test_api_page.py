"""``docs/api.md`` says that it is complete: so it is compared with what there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import wingbeat
from wingbeat import errors, parts, testing
from wingbeat.integrations import accelerate, checkpoint, ddp
from wingbeat.sync.upgrade import DistributedModel, DistributedOptimizer

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)\n((?: +:.*\n)*)", re.MULTILINE)
SHOWN = {name: (kind, options) for kind, name, options in DIRECTIVE.findall(PAGE)}


def members(name: str) -> set[str]:
    """What the page lists of a class or module."""
    _, options = SHOWN[name]
    [listed] = re.findall(r":members:(.*)", options)
    return {member.strip() for member in listed.split(",")}


def test_every_public_name_stands_there_once() -> None:
    names = [name for _, name, _ in DIRECTIVE.findall(PAGE)]
    assert len(names) == len(set(names))
    of_wingbeat = {name.removeprefix("wingbeat.") for name in names if name.count(".") == 1}
    assert of_wingbeat - {"errors", "parts", "testing"} == set(wingbeat.__all__)


@pytest.mark.parametrize("name", wingbeat.__all__)
def test_a_class_is_shown_as_a_class(name: str) -> None:
    kind, _ = SHOWN[f"wingbeat.{name}"]
    assert kind == ("class" if inspect.isclass(getattr(wingbeat, name)) else "function")


@pytest.mark.parametrize(
    ("cls", "base"),
    [(DistributedModel, torch.nn.Module), (DistributedOptimizer, torch.optim.Optimizer)],
)
def test_every_method_that_distribute_adds_stands_there(cls: type, base: type) -> None:
    public = {name for name in vars(cls) if not name.startswith("_") and not hasattr(base, name)}
    # An optimizer has its groups since it was made, not by its class.
    public -= {"param_groups", "state"}
    assert members(f"wingbeat.sync.upgrade.{cls.__name__}") == public


def test_every_part_stands_there() -> None:
    assert members("wingbeat.parts") | set(wingbeat.__all__) >= set(parts.__all__)
    assert members("wingbeat.parts") <= set(parts.__all__)


def test_every_error_hook_and_fake_stands_there() -> None:
    raised = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.WingbeatError)
    }
    assert members("wingbeat.errors") == raised
    assert members("wingbeat.integrations.ddp") == set(ddp.__all__)
    assert members("wingbeat.integrations.checkpoint") == set(checkpoint.__all__)
    lightnings = {name for name in SHOWN if name.endswith(".WingbeatStrategy")}
    assert lightnings == {
        f"wingbeat.integrations.{x}.WingbeatStrategy" for x in ("fabric", "lightning")
    }
    assert members("wingbeat.integrations.accelerate") == set(accelerate.__all__)
    trainers = {"WingbeatTrainer", "WingbeatTrainerMixin"}  # loading them takes many seconds
    assert members("wingbeat.integrations.transformers") == trainers
    assert members("wingbeat.testing") == set(testing.__all__)
