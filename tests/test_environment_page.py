"""The page of environment variables, the code, and the warning about unknown ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from wingbeat.environment import VARIABLES, warning_of_unknown
from wingbeat.transport import launchers

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "environment.md").read_text(encoding="utf-8")
TABLE = re.findall(r"^\| `(WINGBEAT_[A-Z_]+)` \|", PAGE, re.M)


def test_the_pages_table_has_the_variables_of_the_code_and_no_others() -> None:
    read = {
        name
        for file in (ROOT / "src").rglob("*.py")
        if file.name != "environment.py"
        for name in re.findall(r"WINGBEAT_[A-Z_]+", file.read_text(encoding="utf-8"))
    }
    assert sorted(TABLE) == sorted(read) == sorted(VARIABLES)


def test_the_page_names_the_variables_of_launchers() -> None:
    ours = {
        name
        for each in launchers._LAUNCHERS
        for name in (each.rank, each.size, each.local_rank, each.local_size)
        if name
    }
    for name in (*launchers.VARIABLES, *ours):
        assert f"`{name}`" in PAGE, name


def test_every_variable_is_known() -> None:
    assert warning_of_unknown(dict.fromkeys(VARIABLES, "1") | {"RANK": "0", "WING": "1"}) == ""


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("WINGBEAT_METRIC", "did you mean WINGBEAT_METRICS?"),
        ("WINGBEAT_LOG_LEVEL", "did you mean WINGBEAT_LOG?"),
        ("WINGBEAT_JOBID", "did you mean WINGBEAT_JOB_ID?"),
        ("WINGBEAT_COLOUR", "unset it"),
    ],
)
def test_an_unknown_variable_is_reported_with_the_nearest_name(name: str, hint: str) -> None:
    assert warning_of_unknown({name: "1"}) == f"no effect: {name} in the environment ({hint})"


def test_several_warning_of_unknown_are_one_warning() -> None:
    text = warning_of_unknown({"WINGBEAT_TOPP": "1", "WINGBEAT_COLOUR": "1"})
    assert text == (
        "no effect: WINGBEAT_COLOUR in the environment (unset it), "
        "WINGBEAT_TOPP in the environment (did you mean WINGBEAT_TOP?)"
    )


@pytest.mark.parametrize(
    "name",
    [
        "WINGBEAT_SERVICE_HOST",
        "WINGBEAT_STORE_SERVICE_PORT_HTTP",
        "WINGBEAT_PORT",
        "WINGBEAT_STORE_PORT_29400_TCP_ADDR",
        "WINGBEAT_TEST_ALL_EXAMPLES",
    ],
)
def test_variables_of_kubernetes_and_of_tests_are_not_reported(name: str) -> None:
    assert warning_of_unknown({name: "1"}) == ""


SCRIPT = """
import os, wingbeat
try:
    wingbeat.init()
except ValueError as error:
    print(error)
os.environ["WINGBEAT_LOG"] = "warning"
wingbeat.init()
wingbeat.shutdown()
"""


def test_init_refuses_an_unknown_level_and_reports_an_unknown_variable_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "WINGBEAT_LOG": "loud", "WINGBEAT_TOPP": "off"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("unknown level 'loud' in WINGBEAT_LOG; allowed: debug, error")
    assert [line for line in done.stderr.splitlines() if line.startswith("wingbeat")] == [
        "wingbeat (rank 0): no effect: WINGBEAT_TOPP in the environment "
        "(did you mean WINGBEAT_TOP?)"
    ]
