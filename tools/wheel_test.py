"""Build the wheel, install it into an environment of its own, and train a step with it there.

    python tools/wheel_test.py            (or: make wheel-test)

The wheel is built as ``pip wheel .`` builds it for anybody, from a copy of what git knows or would
add: so a file that is ignored, but needed, is missed here and not by the first user. The new
environment has nothing but the wheel. Its dependencies, which are large, are those of the
environment that runs this, found through a ``.pth`` file. What follows runs outside of the
checkout, so that nothing of it can be imported by accident. Words after the name are passed to
``pip wheel``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CHECK = """
import pathlib, sys, torch, wingbeat, wingbeat_lab
import wingbeat
from wingbeat import _native, compression, kernels
from wingbeat import testing
from wingbeat_lab import paced

here = pathlib.Path(sys.prefix).resolve()
for module in (wingbeat, wingbeat_lab, _native):
    assert here in pathlib.Path(module.__file__).resolve().parents, module.__file__
for package in (wingbeat, wingbeat_lab):
    assert pathlib.Path(package.__file__).with_name("py.typed").exists(), package
assert kernels.of(torch.device("cpu")).__name__.endswith(".native")
assert paced.load_profile("resnet50").params

def train(model, world=None, strategy=None):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
    model(torch.ones(4, 300)).square().sum().backward()
    optimizer.step()
    model.synchronize()
    after = [p.detach().clone() for p in model.parameters()]
    assert all(not torch.equal(a, b) and b.isfinite().all() for a, b in zip(before, after))
    return after

wingbeat.init()  # one process, as a script without torchrun
train(torch.nn.Linear(300, 400), strategy=wingbeat.DeAR())
wingbeat.shutdown()
torch.manual_seed(0)
twins = [torch.nn.Linear(300, 400) for _ in range(2)]
codec = wingbeat.AllReduce(compression=compression.Sketch(bits=8, auto_disable=False))
first, second = testing.run(
    testing.worlds(2), lambda world: train(twins[world.rank], world, codec)
)
assert all(torch.equal(a, b) for a, b in zip(first, second))
print("trained a step with", kernels.of(torch.device("cpu")).__name__)
"""


def main(words: list[str]) -> int:
    """Build, install, try; 0 if all of it works, else the exit code of what does not."""
    with tempfile.TemporaryDirectory(prefix="wingbeat-wheel-") as name:
        folder = Path(name).resolve()
        try:
            wheel = build(folder, words)
            python = install(folder, wheel)
            for verb in ("show", "bench"):  # one of each package
                run([python.with_name("wingbeat"), verb, "--help"], cwd=folder, quiet=True)
            run([python, "-c", CHECK], cwd=folder, env=environment())
        except subprocess.CalledProcessError as err:
            what = shlex.join(map(str, err.cmd)).splitlines()[0]
            print(f"wheel_test.py: failed: {what[:200]}", file=sys.stderr)
            return err.returncode if err.returncode > 0 else 1
    print(f"{wheel.name}: built, installed, imported, trained")
    return 0


def build(folder: Path, words: list[str]) -> Path:
    """Return the wheel of a copy of the checkout."""
    source = folder / "source"
    listed = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    for file in filter(None, names.split("\0")):
        if (ROOT / file).is_file():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_bytes((ROOT / file).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "-q", "--no-deps"]
    run([*pip, *words, "-w", folder / "wheels", source])
    [wheel] = (folder / "wheels").glob("wingbeat-*.whl")
    return wheel


def install(folder: Path, wheel: Path) -> Path:
    """Return the interpreter of a new environment that has the wheel."""
    home = folder / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    # Before the dependencies can be seen: among them is a wingbeat, for which pip would take this.
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel])
    [packages] = home.glob("lib/python*/site-packages")
    # A .pth file adds the folder, and runs none of the .pth files in it: no editable install.
    text = sysconfig.get_path("purelib") + "\n"
    (packages / "zz-dependencies.pth").write_text(text, encoding="utf-8")
    return python


def environment() -> dict[str, str]:
    """Return the variables without those that could bring the checkout or other workers in."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(key, None)
    return kept


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
