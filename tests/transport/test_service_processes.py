"""A service's process finds the modules that the worker finds, and no others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from wingbeat.transport.services import ProcessService


class Told:
    module, uses_store_later, me = "told_service", False, "the service"

    def __init__(self, out: Path) -> None:
        self.out = out

    def to_json(self) -> str:
        return str(self.out)


def test_service_imports_the_same_modules_as_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules beside the script, and not a file of the working directory that is called alike."""
    beside, here, out = tmp_path / "beside", tmp_path / "here", tmp_path / "out"
    beside.mkdir()
    here.mkdir()
    (beside / "told_service.py").write_text(
        "import sys, queue\nopen(sys.argv[1], 'w').write(queue.__file__)\n"
    )
    (here / "queue.py").write_text("")
    monkeypatch.syspath_prepend(beside)
    monkeypatch.chdir(here)
    config: Any = Told(out)
    store: Any = None
    service = ProcessService(config, store)
    service.close(60.0)
    assert service.ended() == "the service has ended with exit status 0"
    found = Path(out.read_text()).parent
    assert found != here or sys.version_info < (3, 11)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_service_whose_store_fails_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise wait on its pipe until it is killed."""
    (tmp_path / "told_service.py").write_text(
        "import json, sys\n"
        "print(json.dumps(['has', 'key']), flush=True)\n"
        "sys.exit(3 if sys.stdin.readline() == '' else 4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    class Torn:
        def has(self, key: str) -> bool:
            raise KeyError(key)

    config: Any = Told(tmp_path)
    store: Any = Torn()
    service = ProcessService(config, store)
    service.close(60.0)
    assert service.ended() == "the service has ended with exit status 3"
