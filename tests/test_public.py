"""The public face is what ``__all__`` says: no less, no more, documented, and light to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import wingbeat
import wingbeat_lab

PUBLIC = [
    *("ADPSGD", "AllReduce", "Auto", "BML", "Canary", "DeAR", "DiLoCo", "Geryon", "Group"),
    *("LocalSGD", "LowRank", "OMGS", "ParameterServer", "Ripples", "Sketch", "Strategy", "TopK"),
    *(
        "clip_grad_norm_",
        "count_tokens",
        "distribute",
        "init",
        "join",
        "no_sync",
        "release",
        "shutdown",
        "steps_made",
        "synchronize",
    ),
]


def _fresh(code: str) -> str:
    """Run code in a new interpreter, where nothing has been imported yet."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_is_the_surface_agreed_on() -> None:
    assert sorted(wingbeat.__all__) == PUBLIC
    assert len(set(wingbeat.__all__)) == len(wingbeat.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_can_be_had_and_has_a_docstring(name: str) -> None:
    value = getattr(wingbeat, name)
    assert value.__name__ == name
    assert value.__doc__
    assert value.__doc__.strip()
    # A dataclass without a docstring gets its signature as one.
    assert not value.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize("name", wingbeat_lab.__all__)
def test_every_baseline_can_be_had_and_has_a_docstring(name: str) -> None:
    value = getattr(wingbeat_lab, name)
    assert value.__name__ == name
    assert not (value.__doc__ or "(").startswith((f"{name}(", "("))


def test_a_baseline_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Tictac'"):
        wingbeat_lab.Tictac  # noqa: B018


def test_dir_shows_nothing_beyond_all() -> None:
    shown = {name for name in dir(wingbeat) if not name.startswith("_")}
    assert shown == set(wingbeat.__all__)


def test_a_star_import_brings_exactly_all() -> None:
    code = "from wingbeat import *;print(sorted(n for n in globals() if not n.startswith('_')))"
    assert _fresh(code) == repr(PUBLIC)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Dear'"):
        wingbeat.Dear  # noqa: B018


def test_importing_wingbeat_does_not_import_torch() -> None:
    code = "import sys, wingbeat, wingbeat_lab; "
    code += "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert _fresh(code) == "[]"


def test_integrations_are_found_without_an_import_of_their_own() -> None:
    code = "import wingbeat; print(wingbeat.integrations.ddp.sketch_hook.__name__)"
    assert _fresh(code) == "sketch_hook"


def test_parts_are_found_without_an_import_of_their_own() -> None:
    assert _fresh("import wingbeat; print(wingbeat.parts.Merged())") == "Merged()"


def test_making_a_strategy_does_not_import_torch_or_numpy() -> None:
    code = "import sys, wingbeat; wingbeat.DeAR(mb=5), wingbeat.Canary(); "
    code += "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert _fresh(code) == "[]"


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("wingbeat")
    except PackageNotFoundError:
        pytest.skip("run from the source tree without being installed")
    assert installed == wingbeat.__version__
