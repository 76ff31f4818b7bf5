"""``wingbeat plan``: ranks strategies by their predicted iteration on a cluster."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from wingbeat.cli.tables import titled
from wingbeat.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from wingbeat.parts.strategy import Strategy
    from wingbeat.prediction import Cluster, Prediction, Ranking
    from wingbeat.prediction.recommendation import Choice, Recommendation
    from wingbeat.profiling import Profile
    from wingbeat.simulator import Work

HELP = """Rank strategies by the iteration that is predicted for your model on your cluster.

\b
PROFILE is the file of `wingbeat profile`, or a known network: paced:resnet50, paced:bert_base
for a small language model, and others that docs/how-to/plan.md lists;
CLUSTER is the file of `wingbeat probe`. Equal hosts on one switch need no file.

\b
Examples:
  wingbeat plan train.json cluster.toml
  wingbeat plan paced:resnet50 --hosts 4 --rate 10gbit --speed 2.7    on faster GPUs
  wingbeat plan train.json --hosts 4 --per-host 8 --rate 25gbit --nics 2
  wingbeat plan train.json cluster.toml --what-if rate=10gbit --what-if nics=2,add-hosts=32
  wingbeat plan train.json cluster.toml --what-if slow-host=3:2
  wingbeat plan train.json cluster.toml --codec lowrank@2 --picture plan.svg
  wingbeat plan train.json cluster.toml --strategy dear:plan=fixed,mb=10 --strategy ripples
  wingbeat plan train.json cluster.toml --inside    hosts are replicas divided by FSDP2
  wingbeat plan train.json cluster.toml --inside --inside-rate 3600gbit    over NVLink

\b
DDP and its hooks are predicted as a ring over all ranks in order, as gloo's and NCCL's over
sockets are, with buckets of 25 MiB; PowerSGD in one bucket. Nothing is started on the cluster.
docs/how-to/plan.md explains the columns, and how far predictions are off.
"""

_EVERY_S = 2.0
_WIDTH = 140

_LIMIT_S = 60.0
"""Seconds after which no further candidate is begun."""

_MOST = 16
"""Most workers that are simulated one by one."""


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("plan", help=HELP)(plan)


def plan(
    profile: Annotated[
        str, typer.Argument(help="File of the model, or paced:NAME.", show_default=False)
    ],
    cluster: Annotated[
        str | None, typer.Argument(help="File of the cluster.", show_default=False)
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Hosts, without a file.")] = None,
    per_host: Annotated[
        int | None,
        typer.Option(help="Workers on each host.", show_default="the file's, or 1"),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Rate of a NIC, without a file, such as 25gbit.")
    ] = None,
    nics: Annotated[int | None, typer.Option(help="NICs of each host, without a file.")] = None,
    latency: Annotated[
        str | None, typer.Option(help="One-way time between hosts, without a file, such as 50us.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Another cluster beside this one: rate=, latency=, nics=, add-hosts=, "
            "slow-host=HOST:TIMES, separated by commas; may be repeated."
        ),
    ] = None,
    speed: Annotated[
        float,
        typer.Option(help="How many times as fast computation is as in the profile, above 0."),
    ] = 1.0,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Rank this one and not the usual ones; may be repeated."),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(help="Rank AllReduce and DeAR with it too; may be repeated."),
    ] = None,
    inside: Annotated[
        bool, typer.Option("--inside", help="Each host is one replica, divided by FSDP2.")
    ] = False,
    inside_rate: Annotated[
        str | None,
        typer.Option(
            help="Rate of each worker inside its host, as 3600gbit for NVLink of an H100.",
            show_default="40gbit, as through memory",
        ),
    ] = None,
    patient: Annotated[
        bool,
        typer.Option(
            "--patient",
            help="Predict also what takes minutes: more than 16 unlike workers, and what is left "
            f"after {_LIMIT_S:.0f} s.",
        ),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the ranking into this .svg or .png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Rank strategies on a cluster."""
    from wingbeat.prediction.baselines import baselines_for
    from wingbeat.prediction.candidates import candidates, code_of
    from wingbeat.prediction.costs import accelerated, of_replica
    from wingbeat.prediction.picture import check_picture, draw
    from wingbeat.prediction.predict import rank
    from wingbeat.prediction.what_if import changed
    from wingbeat.profiling import simulator_model

    words = {"--hosts": hosts, "--rate": rate, "--nics": nics, "--latency": latency}
    base = _cluster(cluster, per_host, {key: v for key, v in words.items() if v is not None})
    if inside_rate is not None:
        base = base.with_inside_rate(inside_rate)
    if picture is not None:
        check_picture(picture)
    found = _profile(profile)
    if not 0.001 <= speed <= 1000:
        raise UsageError(f"--speed {speed:g}: allowed are 0.001 to 1000, such as 2.7")
    scenarios = {"": base, **{text: changed(base, text) for text in what_if or ()}}
    replicas = _replicas(base) if inside else 1
    baselines = baselines_for(inside=inside)
    # Baselines are always ranked: naming one means to rank nothing else than what is named.
    own = [text for text in strategy or () if text not in baselines]
    named = {**baselines}
    if own or codec or not strategy:
        named |= candidates(own, codec or ())
    device = "cuda" if accelerated(found) else "cpu"
    named, left_out = _possible(named, device) if inside else (named, {})
    work, notes = _assumed(found, base, stated=inside_rate is not None)
    model = simulator_model(of_replica(found, replicas), 1 / speed)
    times = f"{speed:g} times as fast as" if speed != 1 else "as"
    title = [
        f"{found.name} on {base.describe()}{', each host a replica' if inside else ''}",
        f"computation {times} on {found.device}; codecs and sums between hosts as on a CPU core",
    ]
    limit_s = math.inf if patient else _LIMIT_S
    with _Progress(len(named) * len(scenarios), limit_s, frozenset(baselines)) as progress:
        rankings = {
            text: rank(
                named,
                model,
                each,
                work=work,
                inside=replicas,
                most=None if patient else _MOST,
                progress=progress,
            )
            for text, each in scenarios.items()
        }
    code = {
        name: code_of(each, replicas, device)
        for name, each in named.items()
        if name not in baselines
    }
    report = _Report(title, code, frozenset(baselines), rankings, left_out)
    if as_json:
        print(json.dumps(report.to_json(scenarios, notes), indent=2))
    else:
        report.print(notes, spread=base.spread)
    if picture is not None:
        draw(rankings[""], report.baselines, "\n".join(title), picture)
        print(f"picture: {picture}", file=sys.stderr if as_json else sys.stdout)


def _cluster(path: str | None, per_host: int | None, words: Mapping[str, Any]) -> Cluster:
    """Return the cluster of the file, or of the options."""
    from wingbeat.prediction.cluster import decode, described

    if path is None:
        if "--hosts" not in words or "--rate" not in words:
            raise UsageError(
                "which cluster? Name the file of wingbeat probe, or describe equal hosts: --hosts "
                "4 --per-host 8 --rate 25gbit"
            )
        return described(
            words["--hosts"],
            per_host or 1 if per_host != 0 else 0,
            words["--rate"],
            nics=words.get("--nics", 1),
            latency=words.get("--latency", ""),
        )
    if words:
        key, value = next(iter(words.items()))
        name = key.removeprefix("--")
        instead = f"--what-if add-hosts={value}" if name == "hosts" else f"--what-if {name}={value}"
        raise UsageError(
            f"{key} {value} beside the cluster file {path!r}: the file has it; for another value "
            f"write {instead}"
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or "it is not UTF-8 text"
        raise UsageError(
            f"cluster file {path!r}: {reason}; write one with wingbeat probe, or describe the "
            "cluster: --hosts 4 --per-host 8 --rate 25gbit"
        ) from None
    return decode(text, path, per_host=per_host)


def _profile(path: str) -> Any:
    from wingbeat.profiling.profile import decode, read_text

    for entry_point in entry_points(group="wingbeat.profiles"):
        if path.startswith(f"{entry_point.name}:"):
            return entry_point.load()(path)
    if not Path(path).is_file():
        raise UsageError(
            f"profile {path!r}: no such file; write one: wingbeat profile train.py, or name a "
            "known network: paced:resnet50"
        )
    return decode(read_text(path), where=repr(path))


def _replicas(cluster: Cluster) -> int:
    """Return the processes of each host, which are a replica."""
    counts = sorted({len(host) for host in cluster.layout.hosts})
    if len(counts) > 1 or counts[0] == 1:
        raise UsageError(
            f"--inside: hosts have {' and '.join(map(str, counts))} workers; a replica is a host, "
            "and all are divided among equally many processes, 2 or more: --per-host 8"
        )
    return counts[0]


def _possible(
    named: Mapping[str, Strategy], device: str
) -> tuple[dict[str, Strategy], dict[str, str]]:
    """Return the strategies that a mesh of the device allows, and why it refuses the others."""
    from wingbeat.engine.model_checks import refusal_in_replicas

    why = {name: refusal_in_replicas(each, device) for name, each in named.items()}
    allowed = {name: each for name, each in named.items() if not why[name]}
    return allowed, {name: reason for name, reason in why.items() if reason}


def _assumed(profile: Profile, cluster: Cluster, *, stated: bool) -> tuple[Work, list[str]]:
    """Return the costs of communication, and what is assumed in sentences.

    ``stated``: whether the user has stated the rate inside hosts.
    """
    from wingbeat.prediction.costs import accelerated, thread_bit_per_s, work_of

    work, assumed = work_of(profile)
    notes = [*assumed]
    if stated:
        work = replace(work, local_chunk_s=0.0)  # the rate is all that is known there
    elif accelerated(profile) and any(len(host) > 1 for host in cluster.layout.hosts):
        notes.append(
            "inside a host, processes are taken to exchange through its memory, as on CPUs; over "
            "NVLink that part is shorter, and a faster exchange between hosts gains more than "
            "shown: state its rate, as --inside-rate 3600gbit for an H100"
        )
    thread = thread_bit_per_s(work)
    if 8 * cluster.links.bytes_per_s > thread:
        notes.append(
            f"a process sends at most {thread / 1e9:.0f} Gbit/s over each NIC, which is what a CPU "
            "core does with TCP and sums; over RDMA exchanges are faster than shown"
        )
    return work, notes


class _Progress:
    """Shows on standard error what is simulated: in place, or a line every two seconds.

    After ``limit_s`` seconds, only ``always`` is simulated.
    """

    def __init__(self, total: int, limit_s: float, always: frozenset[str]) -> None:
        self._total, self._done = total, 0
        self._begin = self._last = time.monotonic()
        self._limit_s, self._always = limit_s, always
        self._live = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, name: str) -> str:
        self._done += 1
        if name not in self._always and time.monotonic() - self._begin > self._limit_s:
            return (
                f"the limit of {self._limit_s:.0f} s had passed: --patient predicts it, "
                f"--strategy {name} only it"
            )
        line = f"wingbeat plan: {self._done} of {self._total}, {name}"
        if self._live:
            print(f"\r\x1b[K{line[:78]}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last >= _EVERY_S:
            self._last = time.monotonic()
            print(line, file=sys.stderr, flush=True)
        return ""


class _Report(NamedTuple):
    """Rankings by their change of the cluster, the first without one.

    ``code`` is how to use each strategy, the simplest first; ``left_out`` why others are refused.
    """

    title: Sequence[str]
    code: Mapping[str, str]
    baselines: frozenset[str]
    rankings: Mapping[str, Ranking]
    left_out: Mapping[str, str]

    def print(self, notes: Sequence[str], *, spread: float) -> None:
        """Print tables, refusals, advice and assumptions."""
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        base = self.rankings[""]
        console.print(self.table())
        if len(self.rankings) > 1:
            console.print(self.beside())
        why: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            why.setdefault(reason.partition(";")[0], []).append(name)
        if why:
            shown = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in why.items())
            print(f"left out, because distribute(mesh=...) refuses them: {shown}")
        for text, ranking in self.rankings.items():
            for name, reason in ranking.refused.items():
                if text and name in base.refused:
                    continue
                where = f" with {text}" if text else ""
                print(f"not predicted{where}: {name}: {reason}")
        for text, ranking in self.rankings.items():
            print("\n".join(["", *self.advice(text)]))
            if ranking.refused:
                print(f"  not among them: what was not predicted, {len(ranking.refused)} in all")
        print()
        measured = f", and rates of equal NICs that differ by {spread:.1%}" if spread else ""
        print(f"interval: the error of predictions in the lab{measured}")
        for note in notes:
            print(f"note: {note}")

    def table(self) -> Table:
        """Return the ranking on the cluster itself."""
        plain, hook = map(self.rankings[""].predictions.get, self._rivals(""))
        columns = ["strategy", "ms", "interval", f"speed-up\nover {self._plain}"]
        columns += ["over its\nbest hook"] if hook else []
        columns += ["MB sent\nper host", "MB of\nbuffers", "convergence"]
        table = _table("\n".join(self.title), columns)
        best = self._best("")
        for name, each in self.rankings[""].predictions.items():
            cells = [
                name,
                _ms(each.iteration_s),
                f"{_ms(each.low_s)} .. {_ms(each.high_s)}",
                _times(plain, each),
                *([_times(hook, each)] if hook else []),
                f"{each.bytes_per_host / 1e6:.3g}",
                f"{each.memory_bytes / 1e6:.4g}",
                each.convergence,
            ]
            style = "bold" if name in best else "dim" if name in self.baselines else ""
            table.add_row(*cells, style=style)
        return table

    def beside(self) -> Table:
        """Return the milliseconds of all clusters beside each other."""
        columns = ["strategy, ms", *(text.replace(",", ",\n") or "now" for text in self.rankings)]
        table = _table("What if", columns)
        best = {text: self._best(text) for text in self.rankings}
        names = dict.fromkeys(n for each in self.rankings.values() for n in each.predictions)
        for name in names:
            cells = []
            for text, ranking in self.rankings.items():
                each = ranking.predictions.get(name)
                cell = _ms(each.iteration_s) if each else "-"
                cells.append(f"[bold]{cell}[/bold]" if name in best[text] else cell)
            table.add_row(name, *cells, style="dim" if name in self.baselines else "")
        return table

    def advice(self, text: str) -> list[str]:
        """Return what to use instead of PyTorch's own exchange, or that nothing is faster."""
        found, chosen = self.rankings[text].predictions, self.chosen(text)
        where = f" with {text}" if text else ""
        lines = []
        if chosen.exact is not None:
            lines += self._advised(text, f"exact{where}", chosen.exact)
        if chosen.other is not None:
            what = f" ({found[chosen.other.name].convergence})"
            lines += self._advised(text, f"not exact{where}", chosen.other, what)
        elif chosen.others:
            lines.append(
                f"not exact{where}: none is faster than {chosen.reference} beyond the error of the "
                "prediction"
            )
        return lines

    def _advised(self, text: str, which: str, choice: Choice, what: str = "") -> list[str]:
        found, name, rival = self.rankings[text].predictions, choice.name, choice.rival
        each, plain = found[name], self._rivals(text)[0]
        longer = each.iteration_s / found[rival].iteration_s if rival else 1.0
        if choice.slower or round(longer, 2) > 1.0:
            within = "" if choice.slower else ", within the error of the prediction"
            return [f"{which}: stay with {rival}: {name} takes {longer:.2f} times as long{within}"]
        stay = "" if choice.faster else f"stay with {rival}, or "
        than = [
            f"{_times(found[other], each)} times as fast as {other}"
            for other in dict.fromkeys((plain, rival))
            if other
        ]
        lines = [f"{which}: {stay}{name}{what}: {', '.join(than)}"]
        if not choice.faster:
            lines[0] += ", within the error of the prediction"
        if choice.ties:
            lines.append(f"  ties, within the error of the fastest: {', '.join(choice.ties)}")
        return lines + [f"  {line}" for line in self.code[name].splitlines()]

    def chosen(self, text: str) -> Recommendation:
        """Return what is recommended."""
        from wingbeat.prediction.recommendation import recommend

        return recommend(self.rankings[text].predictions, list(self.code), self.baselines)

    def _best(self, text: str) -> set[str]:
        chosen = self.chosen(text)
        return {each.name for each in (chosen.exact, chosen.other) if each is not None}

    def to_json(self, scenarios: Mapping[str, Cluster], notes: Sequence[str]) -> dict[str, Any]:
        """Return everything as JSON objects."""
        out = []
        for text, ranking in self.rankings.items():
            plain, hook = map(ranking.predictions.get, self._rivals(text))
            rows = [
                {
                    "strategy": name,
                    "code": self.code.get(name),
                    **asdict(each),
                    "speedup": None if plain is None else plain.iteration_s / each.iteration_s,
                    "speedup_over_best_hook": (
                        None if hook is None else hook.iteration_s / each.iteration_s
                    ),
                }
                for name, each in ranking.predictions.items()
            ]
            refused: dict[str, str] = {**ranking.refused, **self.left_out}
            out.append(
                {
                    "what_if": text,
                    "cluster": scenarios[text].describe(),
                    "ranking": rows,
                    "not_predicted": refused,
                    "recommended": self._recommended(text),
                }
            )
        return {"plan": "; ".join(self.title), "scenarios": out, "notes": list(notes)}

    def _recommended(self, text: str) -> dict[str, Any]:
        chosen = self.chosen(text)
        both = {"exact": chosen.exact, "not_exact": chosen.other}
        return {key: each and asdict(each) for key, each in both.items()}

    @property
    def _plain(self) -> str:
        from wingbeat.prediction.baselines import DDP

        return "DDP" if DDP in self.baselines else "HSDP"

    def _rivals(self, text: str) -> tuple[str, str]:
        """Return the names of PyTorch's own exchange, and of the fastest of its hooks if any."""
        own = [name for name in self.rankings[text].predictions if name in self.baselines]
        plain = next((name for name in own if "+" not in name), "")
        return plain, next((name for name in own if "+" in name), "")


def _times(rival: Prediction | None, each: Prediction) -> str:
    return "-" if rival is None else f"{rival.iteration_s / each.iteration_s:.2f}"


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = titled(title)
    for number, name in enumerate(columns):
        left = number == 0 or name == "convergence"
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    return table
