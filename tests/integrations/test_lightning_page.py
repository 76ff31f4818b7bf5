"""``docs/integrations/lightning.md``: its communication hook sends less; its table is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.pool import Pool
from integrations import lightning_page_cases as cases
from wingbeat.integrations import fabric, lightning, lightning_fabric, pytorch_lightning

PAGE = Path(__file__).parents[2] / "docs/integrations/lightning.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.slow
def test_the_hook_of_the_page_sends_less(pool_of: Callable[[int], Pool]) -> None:
    pool_of(2).run(cases.hooked, EXAMPLES[3], deadline=150.0)


@pytest.mark.parametrize("module", [lightning, fabric, pytorch_lightning, lightning_fabric])
def test_the_table_has_each_module_with_its_package(module: object) -> None:
    rows = re.findall(r"^\| `(\w[\w.]*)` \| `([\w.]+)` \|$", TEXT, re.MULTILINE)
    table = {where: package for package, where in rows}
    modules = [each.__module__ for each in module.WingbeatStrategy.__mro__]  # type: ignore[attr-defined]
    base = next(each for each in modules if not each.startswith("wingbeat"))
    assert base.startswith(table[module.__name__] + ".strategies")  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_older_packages_train_alike(pool_of: Callable[[int], Pool]) -> None:
    pool_of(2).run(cases.older_packages, deadline=150.0)
