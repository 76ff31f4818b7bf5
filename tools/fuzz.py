"""Run the fuzzer: the targets of `native/tests/fuzz` with libFuzzer, and `parsers` with atheris.

    python tools/fuzz.py                             # all targets, a minute each
    python tools/fuzz.py connection --seconds 3600
    python tools/fuzz.py connection --record         # and add the run to tests/corpus/totals.json
    python tools/fuzz.py connection --keep           # the smallest set of inputs, into tests/corpus

`make fuzz` makes the environment first. A run begins with the corpus of the repository and of
earlier runs, in build/corpus. An input for which a target fails is written to build/corpus/failed;
copy it into tests/corpus once it is mended, where `make sanitize` and the tests run it.
tests/corpus/totals.json adds up, for each target, the CPU time, the runs and the inputs of all
recorded runs, with the date and the commit of the last one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ("headers", "endpoint", "carrier", "connection", "lane", "codecs")
PARSERS = "parsers"
BUILD, CORPUS, FAILED = ROOT / "build/fuzz", ROOT / "build/corpus", ROOT / "build/corpus/failed"
TOTALS = ROOT / "tests/corpus/totals.json"
LONGEST = {PARSERS: 40_000}
"""Bytes of an input, 4096 for the others."""

MOST_KEPT = 120
"""Files of a target in tests/corpus: the smallest ones of the smallest set."""


def main() -> int:
    """Parse the command line; 1 if a target has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {(*NATIVE, PARSERS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--record", action="store_true", help=f"in {TOTALS.relative_to(ROOT)}")
    parser.add_argument("--keep", action="store_true", help="only write tests/corpus anew")
    args = parser.parse_args()
    chosen = args.targets or [*NATIVE, PARSERS]
    for name in chosen:
        if name not in (*NATIVE, PARSERS):
            parser.error(f"target {name!r}; allowed are {', '.join((*NATIVE, PARSERS))}")
    if args.seconds < 1:
        parser.error(f"--seconds {args.seconds}; allowed are 1 and more")
    FAILED.mkdir(parents=True, exist_ok=True)
    before = set(FAILED.iterdir())
    if set(chosen) != {PARSERS}:
        build()
    codes = [keep(name) if args.keep else run(name, args.seconds, args.record) for name in chosen]
    found = sorted(set(FAILED.iterdir()) - before)
    for path in found:
        print(f"fuzz: {path.relative_to(ROOT)}: an input for which the target fails")
    return int(any(codes) or bool(found))


def build() -> None:
    """Build the native targets with Clang."""
    compiler = os.environ.get("CXX", "clang++")
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"fuzz: {compiler} is missing; libFuzzer is part of Clang: apt install clang"
        )
    cmake = Path(sys.executable).with_name("cmake")
    options = ("WINGBEAT_SANITIZE=ON", "WINGBEAT_FUZZ=ON", "WINGBEAT_EXTENSION=OFF")
    words = [str(cmake), "--log-level=WARNING", "-S", str(ROOT / "native"), "-B", str(BUILD)]
    env = {**os.environ, "CXX": compiler}
    subprocess.run([*words, *(f"-D{each}" for each in options)], check=True, env=env)
    subprocess.run(
        [str(cmake), "--build", str(BUILD), "--target", "fuzz", "--parallel", "2"], check=True
    )


def command(name: str) -> list[str]:
    """Return the program of a target, with the options that all uses share."""
    words = [str(BUILD / "fuzz"), f"--target={name}"]
    if name == PARSERS:
        words = [sys.executable, str(ROOT / "tools/fuzz_parsers.py"), "-rss_limit_mb=4096"]
    else:
        words += ["-malloc_limit_mb=256", "-timeout=20", "-len_control=0"]
    words += [f"-max_len={LONGEST.get(name, 4096)}", "-print_final_stats=1"]
    return [*words, f"-artifact_prefix={FAILED}/{name}-"]


def run(name: str, seconds: int, recorded: bool) -> int:
    """Fuzz a target; its exit code."""
    corpus = CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    print(f"fuzz: {name} for {seconds} s", flush=True)
    kept = [str(path) for path in [ROOT / "tests/corpus" / name] if path.is_dir()]
    words = [*command(name), f"-max_total_time={seconds}", str(corpus), *kept]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, errors="replace")
    inputs = edges = 0
    for line in running.stderr or ():
        sys.stderr.write(line)
        if found := re.match(r"#(\d+)\s.* cov: (\d+) ", line):
            inputs, edges = map(int, found.groups())
    code = running.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"fuzz: {name}: {inputs} inputs, {edges} edges reached, {cpu_s:.1f} s of CPU time")
    if not edges:
        print(f"fuzz: {name}: no branch is counted, so inputs are not chosen by coverage")
        return code or 1
    if recorded:
        record(name, cpu_s, inputs, edges)
    return code


def record(name: str, cpu_s: float, inputs: int, edges: int) -> None:
    """Add a run to the totals."""
    shown = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    totals = json.loads(TOTALS.read_text()) if TOTALS.exists() else {}
    old = totals.get(name, {"cpu_s": 0, "runs": 0, "inputs": 0})
    totals[name] = {
        "cpu_s": round(old["cpu_s"] + cpu_s, 1),
        "runs": old["runs"] + 1,
        "inputs": old["inputs"] + inputs,
        "edges": edges,
        "last": str(datetime.date.today()),
        "commit": shown.stdout.strip(),
    }
    TOTALS.write_text(json.dumps(dict(sorted(totals.items())), indent=2) + "\n")


def keep(name: str) -> int:
    """Write the smallest inputs that reach what all inputs reach into the repository."""
    merged, kept = CORPUS / f"{name}.merged", ROOT / "tests/corpus" / name
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    folders = [str(path) for path in (kept, CORPUS / name) if path.is_dir()]
    code = subprocess.run([*command(name), "-merge=1", str(merged), *folders], check=False)
    if code.returncode:
        return code.returncode
    if not any(merged.iterdir()):
        print(f"fuzz: {name}: no input reaches anything, so tests/corpus is not changed")
        return 1
    kept.mkdir(parents=True, exist_ok=True)
    regressions = {path.name for path in kept.glob("once-*")}
    for path in kept.iterdir():
        if path.name not in regressions:
            path.unlink()
    for path in sorted(merged.iterdir(), key=lambda each: each.stat().st_size)[:MOST_KEPT]:
        shutil.copy(path, kept / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
