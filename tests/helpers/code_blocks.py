"""The code blocks of the user pages: read, put together to programs, and run.

``docs/developers/writing-pages.md`` has the rules for authors.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from wingbeat_lab import lab

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("block_worker.py")
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "docs/index.md",
        *(ROOT / "docs/how-to").glob("*.md"),
        *(ROOT / "docs/integrations").glob("*.md"),
    ]
)
SHELLS = {"sh", "console"}
FILES = {"bash", "toml", "yaml", "dockerfile"}
LANGUAGES = {"python", "text", *SHELLS, *FILES}
DIRECTIVES = {"workers", "file", "elsewhere", "timeout", "fails", "with"}
WORKERS = 2
TIMEOUT_S = 200.0
_END_S = 10.0

_BLOCK = re.compile(
    r"(?:^<!-- run(?P<run>[^\n]*?)(?P<before>\n(?:(?!-->).)*?)?-->\n)?"
    r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: the file.
        line: where its first line stands, from 1.
        language: what stands after the fence.
        code: the text between the fences.
        before: Python that runs before it, and is not shown.
        run: the words of its directive.
    """

    page: Path
    line: int
    language: str
    code: str
    before: str = ""
    run: dict[str, str] | None = None

    @property
    def name(self) -> str:
        """Where the block stands, as ``docs/how-to/plan.md:12``."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def word(self, key: str, default: str = "") -> str:
        """Return a word of the directive."""
        return (self.run or {}).get(key, default)


@dataclass
class Program:
    """Python blocks that run one after another in the same processes."""

    blocks: list[Block] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Where its first block stands."""
        return self.blocks[0].name


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, without those of Sphinx."""
    text = page.read_text(encoding="utf-8") if text is None else text
    found = []
    for match in _BLOCK.finditer(text):
        language = match["language"].strip()
        if language.startswith("{"):
            continue
        words = match["run"]
        run = None if words is None else dict(w.split("=", 1) for w in shlex.split(words))
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(page, line, language, match["code"], match["before"] or "", run))
    return found


def steps_of(blocks: Sequence[Block]) -> Iterator[Program | Block]:
    """Yield what a page runs, in its order: programs, commands, and files to be saved."""
    program = Program()
    for block in blocks:
        if block.language == "text" or block.word("elsewhere"):
            continue
        if block.language != "python" or block.word("file"):
            if program.blocks:
                yield program
            program = Program()
            yield block
            continue
        if program.blocks and (block.run is not None or "wingbeat.init(" in block.code):
            yield program
            program = Program()
        program.blocks.append(block)
    if program.blocks:
        yield program


def commands_of(block: Block) -> str:
    """Return the commands of a block; those of ``console`` stand after ``$``.

    >>> text = "$ wingbeat show a.json\\nplan: 25 MB\\n$ ls \\\\\\n  out\\n"
    >>> print(commands_of(Block(ROOT / "README.md", 1, "console", text)), end="")
    wingbeat show a.json
    ls \\
      out
    """
    if block.language != "console":
        return block.code
    kept, continued = [], False
    for line in block.code.splitlines():
        if continued or line.startswith("$ "):
            kept.append(line if continued else line[2:])
            continued = line.endswith("\\")
    return "".join(f"{line}\n" for line in kept)


def run_in_lab(block: Block, spec: str, folder: Path, seconds: float) -> tuple[lab.RunResult, str]:
    """Run the commands of a block on each host of a lab, where ``node1`` is the first one.

    Returns the result, and what the hosts have written.
    """
    commands = block.code.replace("node1", "h0")
    assert commands != block.code, f"{block.name} does not name the host node1"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    lines: list[str] = []
    script = f"export PATH={shlex.quote(path)}\ncd {shlex.quote(str(folder))}\n{commands}"
    words = ["bash", "-eu", "-c", script]
    done = lab.run(spec, words, timeout=seconds, on_line=lambda _, line: lines.append(line))
    return done, "\n".join(lines)


def run(step: Program | Block, folder: Path) -> None:
    """Run a program or the commands of a block in ``folder``, or save or parse a file."""
    if isinstance(step, Program):
        _run_program(step, folder)
    elif step.language in SHELLS:
        words = ["bash", "-eu", "-c", commands_of(step)]
        more = dict(word.split("=", 1) for word in shlex.split(step.word("with")))
        _execute(words, folder, step.name, float(step.word("timeout", str(TIMEOUT_S))), more)
    elif step.word("file"):
        path = folder / step.word("file")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(step.code, encoding="utf-8")
    elif step.language == "toml":
        assert tomllib.loads(step.code), step.name
    elif step.language == "yaml":
        assert list(yaml.safe_load_all(step.code)), step.name
    else:
        raise AssertionError(f"{step.name}: a {step.language} block needs file= or elsewhere=")


def _run_program(program: Program, folder: Path) -> None:
    first = program.blocks[0]
    own_init = any("wingbeat.init(" in block.code for block in program.blocks)
    description = {
        "init": not own_init,
        "pieces": [
            {
                "name": str(block.page),
                "line": block.line,
                "code": block.code,
                "before": block.before,
                "fails": block.word("fails"),
            }
            for block in program.blocks
        ],
    }
    file = folder / "program.json"
    file.write_text(json.dumps(description), encoding="utf-8")
    workers = int(first.word("workers", str(WORKERS)))
    words = [sys.executable]
    if workers > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    seconds = sum(float(block.word("timeout", "0")) for block in program.blocks) or TIMEOUT_S
    _execute([*words, str(WORKER), str(file)], folder, program.name, seconds, {})


def _execute(
    words: list[str], folder: Path, name: str, seconds: float, more: dict[str, str]
) -> None:
    examples = folder / "examples"
    if not examples.exists():
        examples.symlink_to(ROOT / "examples")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WINGBEAT_TOP": "off", **more}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            out, errors = _end(process)
            raise AssertionError(
                f"{name}: still running after {seconds} s: {out[-2000:]}\n{errors[-4000:]}"
            ) from None
    # What the worker wrote: torchrun's own report of its end follows it, and is longer.
    said = re.split(r"^[WE]\d{4} .*torch/distributed/elastic", errors, flags=re.MULTILINE)[0]
    assert process.returncode == 0, f"{name}: {out[-2000:]}\n{said[-4000:]}"


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a program and what it has started; return its output."""
    first = psutil.Process(process.pid)
    tree = [first, *first.children(recursive=True)]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(each)
        _, tree = psutil.wait_procs(tree, timeout=_END_S)
    return process.communicate()
