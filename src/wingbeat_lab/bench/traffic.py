"""Each host's traffic over time, as a share of its links: Canary (Zhou et al., 2020), Fig. 21."""

from __future__ import annotations

import bisect
import itertools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wingbeat.errors import UsageError
from wingbeat.files import replacing
from wingbeat.observe.timeline import blank
from wingbeat_lab.bench.measure import Quantiles
from wingbeat_lab.lab import counters
from wingbeat_lab.lab.cross import Sample
from wingbeat_lab.lab.spec import LabSpec, format_rate

Seen = Mapping[str, Sequence[Sample]]
"""Samples in order, by receiving host."""


@dataclass(frozen=True, slots=True)
class CrossTraffic:
    """Cross-traffic in the timed iterations of one row.

    Attributes:
        bytes: received by all hosts together.
        bit_per_s: for each iteration, the mean rate in one direction of one trunk.
        cores: CPU usage of its generators, 1 is one core.
    """

    bytes: float
    bit_per_s: list[float]
    cores: float


def during(seen: Seen, rounds: Sequence[Sequence[float]], directions: int) -> CrossTraffic:
    """Return the cross-traffic in the iterations of a row.

    Args:
        seen: all samples of the bench.
        rounds: for each round, when its iterations began and the last ended, in seconds of the
            samples' clock.
        directions: total over all trunks that carry cross-traffic to another host.
    """
    total, cores, rates = 0.0, [], []
    for stamps in rounds:
        got = [sum(_at(own, when, "bytes") for own in seen.values()) for when in stamps]
        used = [sum(_at(own, when, "cpu_s") for own in seen.values()) for when in stamps]
        total += got[-1] - got[0]
        cores.append((used[-1] - used[0]) / (stamps[-1] - stamps[0]))
        rates += [
            8 * (got[i + 1] - got[i]) / (stamps[i + 1] - stamps[i]) / directions
            for i in range(len(stamps) - 1)
        ]
    return CrossTraffic(total, rates, statistics.fmean(cores))


def _at(samples: Sequence[Sample], when: float, name: str) -> float:
    """A counter's value at a time, interpolated between two samples and clamped to the ends."""
    after = bisect.bisect_right(samples, when, key=lambda sample: sample.when)
    if not after or after == len(samples):
        return float(getattr(samples[min(after, len(samples) - 1)], name))
    before, then = samples[after - 1], samples[after]
    share = (when - before.when) / (then.when - before.when)
    first, last = getattr(before, name), getattr(then, name)
    return float(first + (last - first) * share)


def notes(lab: LabSpec, rows: Sequence[tuple[str, CrossTraffic]]) -> list[str]:
    """Describe the requested cross-traffic, and what was measured for each row."""
    if not rows:
        return []
    flows = f"{lab.cross_flows} flow{'s' * (lab.cross_flows > 1)}"
    asked = (
        f"cross-traffic of hosts that do not train, best effort: {format_rate(lab.cross)} "
        f"requested each way on trunks of {format_rate(lab.trunk)}, in {flows}; received in the "
        "timed iterations, by the kernel's counters:"
    )
    return [asked, *(f"{name}: {describe_cross(own)}" for name, own in rows)]


def describe_cross(own: CrossTraffic) -> str:
    """Format the amount.

    >>> describe_cross(CrossTraffic(3e9, [2e8] * 9 + [1e8], 0.05))
    '3000 MB; each way 200 Mbit/s (p10 .. p90 of iterations: 190 .. 200), 0.05 cores'
    """
    mbit = Quantiles.of(1e-6 * rate for rate in own.bit_per_s)
    return (
        f"{own.bytes / 1e6:.0f} MB; each way {mbit.median:.0f} Mbit/s (p10 .. p90 of iterations: "
        f"{mbit.p10:.0f} .. {mbit.p90:.0f}), {own.cores:.2f} cores"
    )


@dataclass(frozen=True)
class Sent:
    """Bytes sent by all processes of a host.

    Attributes:
        sent: by its interfaces; without a lab, over the loopback.
        classes: by priority class of the lab's links; empty without classes.
    """

    sent: float
    classes: dict[str, float]

    @classmethod
    def read(cls, lab: LabSpec, *, classes: bool = True) -> Sent:
        """Read the counters of this process's host; LabError if the system has none.

        Reading those of ``classes`` starts a process.
        """
        sent = sum(c.tx_bytes for n, c in counters.read().items() if (n != "lo") == lab.shaped)
        found: Counter[str] = Counter()
        if classes and lab.shaped and lab.prio:
            for device in counters.read_classes(lab.prio).values():
                found.update({name: each.bytes for name, each in device.items()})
        return cls(sent, dict(found))

    def and_again(self, later: Sent) -> Sent:
        """Return ``later`` plus the difference of the two."""
        twice = {name: 2 * n - self.classes[name] for name, n in later.classes.items()}
        return Sent(2 * later.sent - self.sent, twice)

    def since(self, before: Sent, iterations: float) -> Sent:
        """Return the difference to ``before``, an iteration."""
        sent = (self.sent - before.sent) / iterations
        passed = {name: n - before.classes[name] for name, n in self.classes.items()}
        return Sent(sent, {name: n / iterations for name, n in passed.items()})


WINDOW_S = 0.5
"""Seconds of the averaging window without slow motion, as in `nload`, the paper's tool."""

LOOKS = 10
"""Samples in a window."""

Samples = list[tuple[float, float]]
"""Times, in seconds of any clock, and total bytes sent; in order."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of the hosts of one row over time, as shares of their links' rates.

    Attributes:
        mean: over the whole time.
        peak: of the busiest window of any host.
        windows_s: seconds of one window, slow motion included.
        series: mean over the hosts in each window, in order, over all rounds.
    """

    mean: float
    peak: float
    windows_s: float
    series: list[float] = field(default_factory=list)


class Sampler:
    """Reads the counters of this process's host in a thread, during a ``with`` block."""

    def __init__(self, lab: LabSpec, every_s: float) -> None:
        self.samples: Samples = []
        self._lab, self._every_s = lab, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wingbeat-traffic", daemon=True)

    def __enter__(self) -> Sampler:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        self.samples.append((time.monotonic(), Sent.read(self._lab, classes=False).sent))


def traffic(
    rounds: Sequence[Sequence[Samples]], rate: Callable[[int], float], window_s: float
) -> Traffic:
    """Combine the samples of all hosts in all rounds.

    ``rounds`` has each host's samples for each round; ``rate`` is in bit/s of all links of a host.
    """
    by_host: list[list[float]] = []
    series: list[float] = []
    for hosts in rounds:
        shares = [_shares(own, rate(host), window_s) for host, own in enumerate(hosts)]
        by_host += shares
        series += [statistics.fmean(each) for each in zip(*shares, strict=False)]
    mean = statistics.fmean(
        8 * (own[-1][1] - own[0][1]) / (own[-1][0] - own[0][0]) / rate(host)
        for hosts in rounds
        for host, own in enumerate(hosts)
    )
    peak = max((max(each, default=0.0) for each in by_host), default=0.0)
    return Traffic(mean, peak, window_s, series)


def _shares(samples: Samples, rate: float, window_s: float) -> list[float]:
    """The share of the rate in each complete window, interpolated between two samples."""
    begin, end = samples[0][0], samples[-1][0]
    count = int((end - begin) / window_s)
    marks = [_sent_at(samples, begin + i * window_s) for i in range(count + 1)]
    return [8 * (b - a) / window_s / rate for a, b in itertools.pairwise(marks)]


def _sent_at(samples: Samples, when: float) -> float:
    for (t0, before), (t1, after) in itertools.pairwise(samples):
        if when <= t1:
            return before + (after - before) * (when - t0) / (t1 - t0) if t1 > t0 else after
    return samples[-1][1]


def draw_png(rows: Sequence[tuple[str, Traffic]], path: Path, *, title: str) -> None:
    """Draw each row's traffic over time, one below the other on one scale.

    UsageError if no row has any, matplotlib is missing, or the file cannot be written.
    """
    if not any(own.series for _, own in rows):
        raise UsageError(
            "no row was timed for as long as a window of traffic; take more --iterations"
        )
    figure = blank("traffic", (11, 1.3 + 1.3 * len(rows)), 130)
    axes = figure.subplots(len(rows), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for at, (name, own) in zip(axes, rows, strict=True):
        times = [i * own.windows_s for i in range(len(own.series))]
        at.fill_between(times, [100 * share for share in own.series], step="post", alpha=0.6)
        title = (
            f"{name}: mean {100 * own.mean:.0f}%, busiest window of a host {100 * own.peak:.0f}%"
        )
        at.set_title(title, loc="left", fontsize=10)
        at.set_ylim(0, 100)
        at.set_ylabel("% of links")
    axes[-1].set_xlabel("seconds of training, all rounds; mean over hosts")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, format="png")
