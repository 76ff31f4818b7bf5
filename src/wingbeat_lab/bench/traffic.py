"""Each host's traffic over time, as a share of its links: Canary (Zhou et al., 2020), Fig. 21."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wingbeat.errors import UsageError
from wingbeat.files import replacing
from wingbeat.observe.timeline import blank
from wingbeat_lab.bench.sent import Sent
from wingbeat_lab.lab.spec import LabSpec

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
        said = f"{name}: mean {100 * own.mean:.0f}%, busiest window of a host {100 * own.peak:.0f}%"
        at.set_title(said, loc="left", fontsize=10)
        at.set_ylim(0, 100)
        at.set_ylabel("% of links")
    axes[-1].set_xlabel("seconds of training, all rounds; mean over hosts")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.tight_layout()
    with replacing(path) as file:
        figure.savefig(file, format="png")
