"""Without a logging configuration rank 0 speaks on standard error; with one it is left to it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAY = (
    "from wingbeat.observe.log import log, log_to_stderr; log_to_stderr(); log_to_stderr(); "
    "log.info('tuned to %d', 7)"
)
CONFIGURED = "import logging, sys; logging.basicConfig(stream=sys.stdout, format='me %(message)s')"


@pytest.mark.parametrize(
    ("script", "stdout", "stderr"),
    [
        (SAY, "", "wingbeat: tuned to 7\n"),
        (f"{CONFIGURED}; {SAY}", "me tuned to 7\n", ""),
        (f"import logging; logging.getLogger('wingbeat').setLevel(30); {SAY}", "", ""),
    ],
    ids=["unconfigured", "configured", "silenced"],
)
def test_what_is_logged_is_said_once(script: str, stdout: str, stderr: str) -> None:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (stdout, stderr)
