"""Build the wheel, install it beside torch where there is no compiler, and train a step with it.

    python tools/wheel_test.py                                   (or: make wheel-test)
    python tools/wheel_test.py --python A/bin/python B/bin/python  (or: PYTHONS="A B")

Each interpreter must have torch; the default is the one that runs this. The wheel is built as
``pip wheel .`` builds it for anybody, from a copy of what git knows or would add: so a file that is
ignored, but needed, is missed here and not by the first user. From Python 3.12 on, all interpreters
get the same wheel.

The new environment has pip, and of the interpreter's packages only torch and what torch requires.
Its PATH has nothing else, so no compiler. ``pip install`` downloads the other dependencies; the
time that it takes is printed. What follows runs outside of the checkout, so that nothing of it can
be imported by accident. Other words are passed to ``pip wheel`` and ``pip install``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

STABLE = (3, 12)
"""The first version of Python whose stable ABI the extension is built for."""

ALLOWED = re.compile(
    r"wingbeat(_lab)?/(.*\.py|py\.typed|paced/profiles/\w+\.json|_native\.pyi|_native\.[\w.-]+\.so)"
    r"|wingbeat-[^/]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|licenses/LICENSE)"
)
"""What a wheel contains."""

DESCRIBE = """
import importlib.metadata as m, json, re, sys, sysconfig

names, wanted, seen = {}, [("torch", "")], set()
while wanted:
    name, extra = wanted.pop()
    try:
        found = names[name] = m.distribution(name)
    except m.PackageNotFoundError:
        continue
    for text in found.requires or ():
        word, its = re.match(r"([\\w.-]+)(?:\\[(.*?)\\])?", text).groups()
        of = re.search(r"extra == .([\\w-]+)", text)
        more = {(word, each.strip()) for each in ["", *(its or "").split(",")]} - seen
        if of is None or of[1] == extra:
            wanted += more
            seen |= more
files = {str(f).split("/")[0] for d in names.values() for f in d.files or () if ".." not in str(f)}
print(json.dumps({
    "version": sys.version_info[:2],
    "base": sys._base_executable,
    "folder": sysconfig.get_path("purelib"),
    "torch": names["torch"].version if "torch" in names else "",
    "files": sorted(files - {"__pycache__"}),
}))
"""


def main(argv: list[str]) -> int:
    """Build, install, train; 0 if all of it works, else the exit code of what does not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PATH")
    options, words = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory(prefix="wingbeat-wheel-") as name:
        folder = Path(name).resolve()
        copy_checkout(folder / "source")
        try:
            for number, python in enumerate(options.python):
                test(folder, folder / f"venv{number}", python, words)
        except subprocess.CalledProcessError as err:
            what = shlex.join(map(str, err.cmd)).splitlines()[0]
            print(f"wheel_test.py: failed: {what[:200]}", file=sys.stderr)
            return err.returncode if err.returncode > 0 else 1
    return 0


def test(folder: Path, home: Path, python: str, words: list[str]) -> None:
    """Test the wheel with one interpreter."""
    described = subprocess.run([python, "-c", DESCRIBE], check=True, capture_output=True, text=True)
    facts = json.loads(described.stdout)
    if not facts["torch"]:
        sys.exit(f"wheel_test.py: {python} has no torch: {python} -m pip install torch")
    wheel = wheel_for(folder, facts, words)
    bare = new_environment(home, facts)
    env = environment(home)
    before, work = time.perf_counter(), os.times()
    quiet = ["-q", "--disable-pip-version-check", "--no-cache-dir", "--only-binary", ":all:"]
    run([bare, "-m", "pip", "install", *quiet, *words, wheel], env=env)
    seconds, now = time.perf_counter() - before, os.times()
    processor = now.children_user + now.children_system - work.children_user - work.children_system
    for verb in ("show", "bench"):  # one of each package
        run([home / "bin" / "wingbeat", verb, "--help"], cwd=home, env=env, quiet=True)
    (home / "check.py").write_bytes((ROOT / "tools/wheel_check.py").read_bytes())
    run([bare, home / "check.py"], cwd=home, env=env)
    listed = subprocess.run(
        [bare, "-m", "pip", "list", "--path", site_packages(home), "--format=json"],
        env=env, check=True, capture_output=True, text=True,
    )  # fmt: skip
    added = {each["name"] for each in json.loads(listed.stdout)} - {"pip", "setuptools", "wingbeat"}
    version = ".".join(map(str, facts["version"]))
    names = ", ".join(sorted(added))
    print(
        f"{wheel.name}: Python {version}: installed beside torch {facts['torch']} in "
        f"{seconds:.1f} s ({processor:.1f} s of a processor; load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores), no compiler, no cache of pip, downloaded: {names}; imported, "
        "trained",
        flush=True,
    )


def copy_checkout(source: Path) -> None:
    """Copy what git knows or would add."""
    listed = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    for file in filter(None, names.split("\0")):
        if (ROOT / file).is_file():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_bytes((ROOT / file).read_bytes())


def wheel_for(folder: Path, facts: dict[str, object], words: list[str]) -> Path:
    """Return the wheel for an interpreter: the one of the stable ABI, or one of its own."""
    version = tuple(facts["version"])  # type: ignore[arg-type]
    stable = version >= STABLE
    tag = "cp{}{}-abi3".format(*STABLE) if stable else "cp{0}{1}-cp{0}{1}".format(*version)
    wheels = folder / "wheels"
    pattern = f"wingbeat-*-{tag}-*.whl"
    if not list(wheels.glob(pattern)):
        pip = [str(facts["base"]), "-m", "pip", "wheel", "--disable-pip-version-check", "-q"]
        run([*pip, "--no-deps", *words, "-w", wheels, folder / "source"])
    found = list(wheels.glob(pattern))
    if len(found) != 1:
        sys.exit(f"wheel_test.py: no {pattern}, but {sorted(p.name for p in wheels.iterdir())}")
    wrong = [name for name in zipfile.ZipFile(found[0]).namelist() if not ALLOWED.fullmatch(name)]
    if wrong:
        sys.exit(f"wheel_test.py: {found[0].name} contains {', '.join(wrong)}")
    return found[0]


def new_environment(home: Path, facts: dict[str, object]) -> Path:
    """Return the interpreter of a new environment that has torch, what torch requires, and pip."""
    run([str(facts["base"]), "-m", "venv", home])
    packages = site_packages(home)
    beside = home / "torch"
    beside.mkdir()
    for name in facts["files"]:  # type: ignore[attr-defined]
        if not (packages / name).exists():
            (beside / name).symlink_to(Path(str(facts["folder"])) / name)
    (packages / "zz-torch.pth").write_text(f"{beside}\n", encoding="utf-8")
    return home / "bin" / "python"


def site_packages(home: Path) -> Path:
    """Return the folder of an environment's packages."""
    [packages] = home.glob("lib/python*/site-packages")
    return packages


def environment(home: Path) -> dict[str, str]:
    """Return the variables without those that bring a compiler, the checkout or other workers."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CC", "CXX"):
        kept.pop(key, None)
    return {**kept, "PATH": str(home / "bin")}


def run(
    words: list[str | Path],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    quiet: bool = False,
) -> None:
    """Run a command and say which; raises CalledProcessError if it fails."""
    print("+", shlex.join(map(str, words))[:100].splitlines()[0], flush=True)
    out = subprocess.DEVNULL if quiet else None
    subprocess.run([str(word) for word in words], check=True, cwd=cwd, env=env, stdout=out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
