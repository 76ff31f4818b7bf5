"""What is counted on in Lightning, which options are accepted, and how others are refused."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

import wingbeat
from wingbeat.errors import UsageError
from wingbeat.integrations import fabric, lightning
from wingbeat.integrations import lightning_family as names
from wingbeat.strategies import PRESETS

BOTH = [
    (lightning, "lightning", names.trainer_of, ("strategies.DDPStrategy", names.TRAINER)),
    (lightning, "lightning", names.trainer_of, ("plugins.precision.Precision", names.PRECISION)),
    (fabric, "lightning", names.fabric_of, ("strategies.DDPStrategy", names.FABRIC)),
    (
        fabric,
        "lightning",
        names.fabric_of,
        ("plugins.precision.Precision", names.FABRIC_PRECISION),
    ),
]
EACH = [(*row[:3], row[3][0], name) for row in BOTH for name in row[3][1]]


@pytest.mark.parametrize(("_module", "package", "of", "owner", "name"), EACH)
def test_a_name_that_a_release_has_moved_is_named(
    _module: Any, package: str, of: Any, owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = of(package)
    for part in owner.split("."):
        found = getattr(found, part)
    for each in found.__mro__:
        if name in vars(each):
            monkeypatch.delattr(each, name)
    with pytest.raises(UsageError, match=rf"^lightning 2\.\S+ has no {found.__name__}.{name} any"):
        of(package)


@pytest.mark.parametrize("attribute", names.TRAINER_OBJECT)
def test_an_attribute_that_a_release_has_moved_is_named(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "TRAINER_OBJECT", (attribute + "_moved",))
    with pytest.raises(UsageError, match=f"has no WingbeatStrategy.{attribute}_moved any more"):
        lightning.WingbeatStrategy()


def overridden(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if inspect.isfunction(value)}


@pytest.mark.parametrize(
    ("cls", "made", "listed"),
    [
        (lightning.TrainerStrategy, lightning.WingbeatStrategy, names.TRAINER),
        (fabric.FabricStrategy, fabric.WingbeatStrategy, names.FABRIC),
    ],
)
def test_everything_that_is_overridden_is_listed(
    cls: type, made: type, listed: tuple[str, ...]
) -> None:
    assert made.__mro__[1:3] == (cls, names.WingbeatMixin)
    base = made.__mro__[3]
    assert base.__name__ == "DDPStrategy"
    found = overridden(cls) | overridden(names.WingbeatMixin)
    assert {n for n in found if hasattr(base, n)} <= {*listed, "__init__"}


def test_private_names_of_lightning_are_all_listed() -> None:
    listed = {*names.TRAINER_OBJECT, *names.FABRIC_OBJECT, *names.PRECISION}
    text = Path(names.__file__).read_text()
    used = re.findall(r"(?:plugin|self\.precision_plugin)\.(_\w+)", text)
    assert used
    assert set(used) <= listed


def test_every_preset_has_a_name() -> None:
    for registry in (
        names.trainer_of("lightning").strategies.StrategyRegistry,
        names.fabric_of("lightning").strategies.STRATEGY_REGISTRY,
    ):
        for name, preset in PRESETS.items():
            made = registry.get(f"wingbeat_{name}")
            assert made.wingbeat_strategy == preset()


def test_a_strategy_is_given_as_a_value_or_as_text() -> None:
    made = lightning.WingbeatStrategy
    assert made().wingbeat_strategy == wingbeat.DeAR()
    assert made("allreduce:mb=3").wingbeat_strategy == wingbeat.AllReduce(mb=3)
    assert made(wingbeat.LocalSGD()).wingbeat_strategy == wingbeat.LocalSGD()
    assert isinstance(made(), pl.strategies.DDPStrategy)
    again = pickle.loads(pickle.dumps(made(wingbeat.DeAR(mb=3))))
    assert again.wingbeat_strategy == wingbeat.DeAR(mb=3)


def test_ddps_options_that_are_not_needed_are_accepted() -> None:
    made = lightning.WingbeatStrategy(
        find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True,
        broadcast_buffers=True, process_group_backend="gloo", ddp_comm_hook=None,
        timeout=timedelta(seconds=7),
    )  # fmt: skip
    assert made.process_group_backend == "gloo"
    assert names.seconds({"timeout": timedelta(seconds=7)}) == 7
    assert names.seconds({}) == names.seconds({"timeout": None}) == 1800


@pytest.mark.parametrize("made", [lightning.WingbeatStrategy, fabric.WingbeatStrategy])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": 3}, r"WingbeatStrategy\(3\): pass one of wingbeat's strategies"),
        ({"strategy": wingbeat.DeAR}, "pass one of wingbeat's strategies, such as wingbeat.DeAR()"),
        ({"strategy": "deer"}, "unknown strategy 'deer' .did you mean 'dear'"),
        ({"bucket_cap_mb": 3}, r"bucket_cap_mb=...\): there is no DDP here; give the size to"),
        ({"ddp_comm_hook": print}, "keep DDPStrategy with wingbeat.integrations.ddp's hooks"),
        ({"model_averaging_period": 4}, r"wingbeat.LocalSGD\(every=...\)"),
        ({"broadcast_buffers": False}, "_set_params_and_buffers_to_ignore_for_model"),
        ({"find_unused": True}, "unknown option of WingbeatStrategy 'find_unused'"),
    ],
)
def test_what_cannot_be_followed_is_refused(made: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        made(**given)
    assert "\n" not in str(raised.value)


def test_a_package_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning as package

    monkeypatch.setattr(package, "__version__", "2.4.9")
    with pytest.raises(UsageError, match=r"needs lightning 2.5 or newer, and 2.4.9 is installed"):
        names.trainer_of("lightning")


def test_a_package_that_is_missing_is_named() -> None:
    """In a process of its own, where it cannot be found."""
    code = (
        "import sys\n"
        "for name in ('lightning', 'pytorch_lightning'):\n"
        "    sys.modules[name] = None\n"
        "    try:\n"
        "        __import__('wingbeat.integrations.' + name)\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == (
        "wingbeat.integrations.lightning needs lightning: pip install 'wingbeat[lightning]'"
    )
    assert second.startswith(
        "wingbeat.integrations.pytorch_lightning needs pytorch_lightning: pip install pytorch-light"
    )
