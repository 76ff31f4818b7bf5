"""``tools/install.py``: uv has the settings that pip has."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_of_pip_become_variables_of_uv(tool: ModuleType) -> None:
    lines = [
        ":env:.index-url='https://b.example/simple'",
        ":env:.find-links='/opt/wheels\\n/srv/more'",
        "global.index-url='https://a.example/simple'",
        "global.extra-index-url='https://c.example/simple https://d.example/simple'",
        "global.cert='/etc/certificates.crt'",
        "download.index-url='https://e.example/simple'",
        "global.timeout='60'",
    ]
    assert tool.variables_for_uv(lines, {"SSL_CERT_FILE": "/mine"}) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://b.example/simple",
        "UV_FIND_LINKS": "/opt/wheels,/srv/more",
        "UV_INDEX": "https://c.example/simple https://d.example/simple",
    }


def test_pip_installs_if_uv_fails(tmp_path: Path) -> None:
    """The first `uv` that Python finds fails; the package is one that pip finds installed."""
    (tmp_path / "sample.py").write_text("")
    (tmp_path / "uv.py").write_text("raise SystemExit('uv: failed on purpose')")
    run = subprocess.run(
        [sys.executable, ROOT / "tools/install.py", "--dry-run", "--no-deps", "--no-index", "pip"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "uv could not install this" in run.stderr
    assert "Requirement already satisfied: pip" in run.stdout
