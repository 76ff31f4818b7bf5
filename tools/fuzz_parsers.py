"""Find inputs for the parsers of `tests/helpers/parsers.py` by coverage, with atheris.

    python tools/fuzz_parsers.py [options of libFuzzer] [corpus]
    python tools/fuzz_parsers.py --only=residuals ...    # parsers whose name contains this

`make fuzz TARGET=parsers` starts it. An input is the name of a parser, a line feed, and what the
parser is given. For an error that the parser does not document the input is written to a file, and
the run continues; the same place in the code is reported once.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import logging
import pkgutil
import random
import shlex
import sys
import traceback
import types
from pathlib import Path
from typing import Any

try:
    import atheris
except ModuleNotFoundError:
    sys.exit("fuzz_parsers.py: atheris is missing; install it with: pip install -e '.[fuzz]'")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import wingbeat
import wingbeat_lab
from helpers import mutants
from helpers.parsers import TARGETS, Target, from_bytes, to_bytes

ONLY = next((word[7:] for word in sys.argv if word.startswith("--only=")), "")
PREFIX = next((word[17:] for word in sys.argv if word.startswith("-artifact_prefix=")), "crash-")
CHOSEN = {target.name.encode(): target for target in TARGETS if ONLY in target.name}


def run(data: bytes) -> int | None:
    """Give a parser an input; those that no parser can be given are not kept."""
    name, _, body = data.partition(b"\n")
    target = CHOSEN.get(name)
    if target is None:
        return -1
    try:
        value = from_bytes(target, body)
    except (ValueError, RecursionError):
        return -1
    try:
        target.parse(value)
    except target.errors:
        pass
    except BaseException as error:
        report(data, error)
    return None


def report(data: bytes, error: BaseException) -> None:
    """Write an input to a file, unless one with the same error at the same place was written."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/src/wingbeat" in frame.filename] or frames
    place = type(error).__name__, ours[-1].filename, ours[-1].lineno
    if place in reported:
        return
    reported.add(place)
    path = Path(f"{PREFIX}{hashlib.sha1(data).hexdigest()}")
    path.write_bytes(data)
    print(f"fuzz: {path}:", file=sys.stderr)
    traceback.print_exception(error)


reported: set[tuple[str, str, int | None]] = set()


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """Change an input: as bytes, or in its own form; or begin with a valid one of a parser."""
    chance = random.Random(seed)
    name, _, body = data.partition(b"\n")
    if name not in CHOSEN or chance.random() < 0.05:
        name = chance.choice(list(CHOSEN))
        body = to_bytes(CHOSEN[name], chance.choice(CHOSEN[name].examples))
    if chance.random() < 0.4:
        changed = atheris.Mutate(body, max(1, most - len(name) - 1))
    else:
        changed = _spoil(CHOSEN[name], body, chance)
    return (name + b"\n" + changed)[:most]


def _spoil(target: Target, body: bytes, chance: random.Random) -> bytes:
    try:
        value = from_bytes(target, body)
    except (ValueError, RecursionError):
        value = chance.choice(target.examples)
    spoilt: Any
    if isinstance(value, bytes):
        spoilt = mutants.spoil_bytes([value], chance)
    elif isinstance(value, str):
        spoilt = mutants.spoil_text([value], chance)
    else:
        spoilt = mutants.spoil_value([value], chance)
    try:
        return to_bytes(target, spoilt)
    except (ValueError, RecursionError):
        return body


def instrument() -> int:
    """Have atheris count the branches of all functions of the packages; return their number.

    `atheris.instrument_imports` changes no module of an editable installation.
    """
    for package in (wingbeat, wingbeat_lab):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.count("integrations.") and not found.name.endswith(".checkpoint"):
                continue  # other libraries
            if found.name.endswith("__main__") or "gpu" in found.name:
                continue
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)
    functions = [
        each
        for each in gc.get_objects()
        if isinstance(each, types.FunctionType)
        and str(each.__module__).partition(".")[0] in ("wingbeat", "wingbeat_lab")
    ]
    for each in functions:
        atheris.instrument_func(each)
    return len(functions)


def main() -> None:
    """Run atheris."""
    logging.disable(logging.CRITICAL)
    print(f"fuzz: {instrument()} functions are instrumented", flush=True)
    # libFuzzer starts this program again, through a shell, when it merges a corpus.
    program = shlex.join([sys.executable, __file__])
    atheris.Setup(
        [program, *(word for word in sys.argv[1:] if not word.startswith("--only="))],
        run,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
