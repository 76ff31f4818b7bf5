"""Switches a codec off where iterations are not shorter with it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from wingbeat.control.trial import Trial
from wingbeat.engine.gradients.compression import Compression
from wingbeat.observe.log import log


class CodecTrial:
    """Runs a `Trial` on a `Compression`; all workers conclude the same."""

    def __init__(self, compression: Compression, rank: int, size: int) -> None:
        self._compression = compression
        self._trial = Trial(rank, size)
        self._seconds = 0.0

    def active(self) -> bool:
        """Whether it is still being measured if the codec makes iterations shorter."""
        return not self._trial.done

    @property
    def coded(self) -> bool:
        """Whether the codec is used now."""
        return self._trial.coded

    def decide(self, coded: bool) -> None:
        """End the trial with what is known already; the same on every worker, before training."""
        self._trial.coded, self._trial.done = coded, True
        self._compression.on = coded

    def boundary(self, seconds: float, rows: Sequence[Sequence[float]] | None) -> bool:
        """Hear what all have measured.

        Raises:
            PeerError: a worker sent something that is no part of a trial.
        """
        self._seconds = seconds
        if rows is None or not self._trial.take(rows):
            return False
        self._seconds = 0.0
        self._compression.on = self._trial.coded
        if self._trial.done:
            self._say()
        return True

    def row(self) -> list[float]:
        """Return what the last iteration took, and in which block of the trial it was."""
        return self._trial.report(self._seconds)

    def _say(self) -> None:
        trial = self._trial
        verdict = "it stays on" if trial.coded else "it is not faster here and is switched off"
        log.info(
            "wire %s: %.4g s an iteration with it, %.4g s with fp32: %s",
            self._compression.coded,
            statistics.median(trial.with_codec),
            statistics.median(trial.without),
            verdict,
        )
