"""Every code block of the README and of the user pages runs as it stands there."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from helpers import code_blocks
from helpers.code_blocks import DIRECTIVES, LANGUAGES, PAGES, ROOT, Block, blocks_of, steps_of

ALL = [block for page in PAGES for block in blocks_of(page)]


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.name)
def test_block_has_a_known_language_and_directive(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block.name}: language {block.language!r}"
    assert set(block.run or {}) <= DIRECTIVES, block.name
    elsewhere = block.word("elsewhere")
    if elsewhere:
        text = (ROOT / elsewhere).read_text(encoding="utf-8")
        assert block.page.name in text, f"{elsewhere} does not name {block.page.name}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_page_runs(page: Path, tmp_path: Path) -> None:
    for step in steps_of(blocks_of(page)):
        code_blocks.run(step, tmp_path)


def steps(text: str) -> list[str]:
    return [
        step.language if isinstance(step, Block) else f"program of {len(step.blocks)}"
        for step in steps_of(blocks_of(ROOT / "README.md", text))
    ]


def test_python_blocks_continue_until_init_or_a_directive_or_a_command() -> None:
    python, again = "```python\na = 1\n```\n", "```python\nwingbeat.init()\n```\n"
    assert steps(python + python) == ["program of 2"]
    assert steps(python + "text\n\n" + again + python) == ["program of 1", "program of 2"]
    assert steps(python + "<!-- run workers=4 -->\n" + python) == ["program of 1", "program of 1"]
    assert steps(python + "```sh\nls\n```\n" + python) == ["program of 1", "sh", "program of 1"]
    assert steps("```text\nan error\n```\n```{toctree}\na\n```\n") == []
    assert steps("<!-- run file=train.py -->\n" + python) == ["python"]


def test_directive_gives_words_and_the_code_before() -> None:
    text = 'So:\n\n<!-- run workers=3 with="A=1 B=2"\nx = [1]\ny = 2\n-->\n```python\nx[0]\n```\n'
    (block,) = blocks_of(ROOT / "README.md", text)
    assert (block.line, block.code) == (8, "x[0]\n")
    assert block.run == {"workers": "3", "with": "A=1 B=2"}
    assert block.before == "\nx = [1]\ny = 2\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nassert wingbeat.init().size == 3\n```\n", "README.md"),
        ("```sh\nfalse\n```\n", "README.md:2"),
        ("<!-- run fails=ValueError workers=1 -->\n```python\na = 1\n```\n", "no ValueError"),
        ("<!-- run workers=1 -->\n```python\nmodel, optimizer = wingbeat.distribute(model)\n```\n",
         "distribute"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_block_that_fails_is_named(text: str, error: str, tmp_path: Path) -> None:
    (step,) = steps_of(blocks_of(ROOT / "README.md", text))
    with pytest.raises(AssertionError, match=error):
        code_blocks.run(step, tmp_path)


def test_a_command_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    text = "<!-- run timeout=1 -->\n```sh\nsleep 300 & echo $! > pid; echo begun; wait\n```\n"
    (step,) = steps_of(blocks_of(ROOT / "README.md", text))
    with pytest.raises(AssertionError, match=r"README.md:3: still running after 1.0 s: begun"):
        code_blocks.run(step, tmp_path)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_blocks_share_names_and_distributed_models_train(tmp_path: Path) -> None:
    text = (
        "```python\nseen = wingbeat.init().size\n```\n"
        "```python\nassert seen == 2\n"
        "model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.DeAR())\n```\n"
        "```python\nassert wingbeat.synchronize(model) is None and optimizer.state\n```\n"
        "```python\nstrategy = wingbeat.AllReduce()\n"
        "model, optimizer = wingbeat.distribute(model, optimizer, strategy)\n```\n"
        "<!-- run fails=ZeroDivisionError -->\n```python\n1 / 0\n```\n"
    )
    for step in steps_of(blocks_of(ROOT / "README.md", text)):
        code_blocks.run(step, tmp_path)
