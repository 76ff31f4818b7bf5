"""Commands as in containers: each has its own network, host name, processes, mounts and /dev/shm.

The lab connects them by one switch, as a bridge network does. Names resolve by ``/etc/hosts``. All
folders of this machine are there too, and others are mounted over them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wingbeat_lab import lab

_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@dataclass
class Container:
    """A command to run in a place of its own.

    Attributes:
        name: its host name, and the first of the names by which the others reach it.
        command: program and arguments.
        env: all of its variables, but PATH.
        mounts: folders of this machine by their places in the container, folders of its root.
        folder: working folder, in the container.
        aliases: further names.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    mounts: Mapping[str, Path] = field(default_factory=dict)
    folder: str = "/"
    aliases: Sequence[str] = ()


@dataclass(frozen=True)
class Ran:
    """How a container has ended: its exit code and its output."""

    code: int
    output: str


def run_containers(containers: Sequence[Container], timeout: float = 150) -> list[Ran]:
    """Run all at the same time, and return how each has ended."""
    described = [
        {**vars(each), "mounts": {at: str(path) for at, path in each.mounts.items()}}
        for each in containers
    ]
    lines: list[list[str]] = [[] for _ in containers]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "containers.json")
        file.write_text(json.dumps(described, default=list))
        result = lab.run(
            f"star:{len(containers)}@1gbit",
            [sys.executable, __file__, str(file), "unshare"],
            on_line=lambda rank, line: lines[rank].append(line),
            timeout=timeout,
        )
    assert not result.timed_out, "\n".join(map("\n".join, lines))
    return [Ran(*each) for each in zip(result.exit_codes, map("\n".join, lines), strict=True)]


def _unshare(file: str) -> None:
    words = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--"]
    os.execvp(words[0], [*words, sys.executable, __file__, file, "enter"])


def _enter(file: str) -> None:
    described = json.loads(Path(file).read_text())
    own = described[int(os.environ["GROUP_RANK"])]
    root = Path(file).parent / own["name"]
    root.mkdir()
    for path in sorted(Path("/").iterdir()):
        if path.is_symlink():
            (root / path.name).symlink_to(path.readlink())
        elif path.is_dir() and path.name != "proc":
            (root / path.name).mkdir()
            _mount("--rbind", path, root / path.name)
    (root / "proc").mkdir()
    _mount("-t", "proc", "proc", root / "proc")
    _mount("-t", "tmpfs", "none", root / "dev/shm")
    names = root.with_suffix(".hosts")
    names.write_text(
        "127.0.0.1 localhost\n"
        + "".join(
            f"10.0.0.{number} {' '.join([each['name'], *each['aliases']])}\n"
            for number, each in enumerate(described, 1)
        )
    )
    _mount("--bind", names, root / "etc/hosts")
    for at, path in own["mounts"].items():
        assert Path(at).parent == Path("/"), f"{at}: its folder would be made on this machine"
        Path(root, at[1:]).mkdir(exist_ok=True)
        _mount("--bind", path, Path(root, at[1:]))
    subprocess.run(["hostname", own["name"]], check=True)
    os.chroot(root)
    os.chdir(own["folder"])
    os.environ["PATH"] = _PATH  # where the program is searched
    os.execvpe(own["command"][0], own["command"], {**own["env"], "PATH": _PATH})


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


if __name__ == "__main__":
    {"unshare": _unshare, "enter": _enter}[sys.argv[2]](sys.argv[1])
