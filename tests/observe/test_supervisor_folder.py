"""Where jobs can be looked at, and what they are called."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from helpers import other_user
from wingbeat.errors import UsageError
from wingbeat.observe import top
from wingbeat.observe.reporter import job_name
from wingbeat.observe.supervisor import NotPrivate, make_private, socket_folder


def test_the_folder_is_the_users_own() -> None:
    assert socket_folder({}) == Path(f"/tmp/wingbeat-{os.getuid()}")
    assert socket_folder({"WINGBEAT_RUNTIME_DIR": "/run/x"}) == Path("/run/x")
    assert socket_folder({"WINGBEAT_RUNTIME_DIR": ""}) == socket_folder({})


def test_it_is_made_for_the_user_alone(tmp_path: Path) -> None:
    os.umask(os.umask(0))
    made_here = make_private(tmp_path / "a" / "b")
    assert made_here.stat().st_mode & 0o777 == 0o700
    assert make_private(made_here) == made_here


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(mode)
    with pytest.raises(NotPrivate, match="this user alone"):
        make_private(there)


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "there").symlink_to(tmp_path / "own")
    with pytest.raises(NotPrivate):
        make_private(tmp_path / "there")


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = make_private(tmp_path / "there")
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(NotPrivate):
        make_private(there)


@other_user.needs_root
@pytest.mark.parametrize("what", ["folder", "open folder", "link", "socket"])
def test_name_that_another_user_has_taken_first_is_not_used(
    shared_folder: Path, tmp_path: Path, what: str
) -> None:
    """In a folder such as /tmp, where the name of this user's folder can be guessed."""
    there, own = shared_folder / "wingbeat-0", tmp_path / "own"
    own.mkdir(mode=0o700)
    made = {
        "folder": lambda: there.mkdir(mode=0o700),
        "open folder": lambda: (there.mkdir(), there.chmod(0o777)),
        "link": lambda: there.symlink_to(own),
        "socket": lambda: socket.socket(socket.AF_UNIX).bind(str(there)),
    }
    assert other_user.run(made[what]) in ("None", "(None, None)")
    with pytest.raises(NotPrivate, match=r"of this user alone|File exists"):
        make_private(there)
    with pytest.raises(UsageError, match="jobs are not searched in"):
        top.find("", there)
    assert list(own.iterdir()) == []


@other_user.needs_root
def test_another_user_can_neither_look_into_the_folder_nor_replace_it(shared_folder: Path) -> None:
    there = make_private(shared_folder / "wingbeat-0")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(there / "train-1.sock"))
        listener.listen()

        def connect() -> None:
            with socket.socket(socket.AF_UNIX) as visitor:
                visitor.connect(str(there / "train-1.sock"))

        assert other_user.run(connect) == "PermissionError"
        assert other_user.run(lambda: os.listdir(there)) == "PermissionError"
        assert other_user.run(lambda: there.rename(shared_folder / "x")) == "PermissionError"
        assert other_user.run(there.rmdir) in ("PermissionError", "OSError")
        connect()


def test_a_file_in_its_place_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    with pytest.raises(NotPrivate, match="there"):
        make_private(tmp_path / "there")
    with pytest.raises(NotPrivate, match="there"):
        make_private(tmp_path / "there" / "below")


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("/home/me/train.py", "train"),
        ("/usr/bin/torchrun", "torchrun"),
        ("-c", "c"),
        ("-m", "m"),
        ("a b/ü;rm -rf.py", "rm--rf"),
        ("...", "job"),
        ("x" * 200 + ".py", "x" * 40),
    ],
)
def test_a_job_is_called_by_its_script(script: str, name: str) -> None:
    assert job_name(script, {}) == f"{name}-{os.getpid()}"


def test_under_torchrun_a_job_that_is_started_again_keeps_its_name() -> None:
    assert job_name("a.py", {"TORCHELASTIC_RUN_ID": "none"}) == f"a-{os.getppid()}"
