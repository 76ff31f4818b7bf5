"""``docs/how-to/quick-start.md``: its command trains the script on two hosts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.code_blocks import ROOT, blocks_of
from helpers.ports import free_port

PAGE = ROOT / "docs/how-to/quick-start.md"
BLOCKS = blocks_of(PAGE)


def test_script_is_short() -> None:
    (script,) = (block.code for block in BLOCKS if block.word("file") == "train.py")
    assert len([line for line in script.splitlines() if line.strip()]) <= 30


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_command_for_two_hosts_trains_two_workers(tmp_path: Path) -> None:
    """The command runs twice, as on two hosts, with a port of this host for ``node1``."""
    (script,) = (block.code for block in BLOCKS if block.word("file") == "train.py")
    (command,) = (block.code for block in BLOCKS if block.word("elsewhere"))
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    words = shlex.split(command.replace("node1:29500", f"127.0.0.1:{free_port()}"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hosts = [
        subprocess.Popen(
            words, cwd=tmp_path, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        said = [host.communicate(timeout=300)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    assert "2 workers: test accuracy 9" in "".join(said)
