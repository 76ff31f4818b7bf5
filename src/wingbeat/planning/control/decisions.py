"""What a training has found out about how to train, for a later one that is alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wingbeat.planning.probe.model import Probe


@dataclass(frozen=True, slots=True)
class Decisions:
    """What has been decided; of the same kinds on all workers.

    Attributes:
        coded: whether the codec stays on; None where that was not asked.
        bucket_bytes: the size of buckets that was found; None where none was looked for.
        topology: along which these go, that was found; None where it was not looked for.
        merged: what merged layers were planned from; None where nothing was planned.
        thresholds: between the classes of flows, that were found; None where none were looked for.
        buckets: into how many buckets layers were merged; None where nothing was planned.
        rules: names of the rules that make the plan which a trial has chosen; None without one.
    """

    coded: bool | None = None
    bucket_bytes: int | None = None
    topology: str | None = None
    merged: Probe | None = None
    buckets: int | None = None
    rules: tuple[str, ...] | None = None
    thresholds: tuple[float, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what was decided as plain values; nothing of what was not asked."""
        found = {
            "codec": None if self.coded is None else "on" if self.coded else "off",
            "bucket_bytes": self.bucket_bytes,
            "topology": self.topology,
            "buckets": self.buckets,
            "rules": None if self.rules is None else list(self.rules),
            "thresholds": None if self.thresholds is None else list(self.thresholds),
        }
        return {key: value for key, value in found.items() if value is not None}
