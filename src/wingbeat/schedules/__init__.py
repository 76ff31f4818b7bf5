"""Schedules: state machines that order communication and updates, without torch or a clock."""

from __future__ import annotations

from wingbeat.schedules.dear import Dear
from wingbeat.schedules.events import Schedule
from wingbeat.schedules.local import Local
from wingbeat.schedules.served import Served, ServedAtStart
from wingbeat.schedules.served_updates import ServedUpdates, ServedUpdatesAtStart
from wingbeat.schedules.sharded import ShardedDear
from wingbeat.schedules.stale import Stale
from wingbeat.schedules.wfbp import Wfbp

__all__ = [
    "BY_NAME",
    "Dear",
    "Local",
    "Served",
    "ServedAtStart",
    "ServedUpdates",
    "ServedUpdatesAtStart",
    "ShardedDear",
    "Stale",
    "Wfbp",
]

BY_NAME: dict[str, type[Schedule]] = {
    "wfbp": Wfbp,
    "dear": Dear,
    "sharded": ShardedDear,
    "served": Served,
    "served_at_start": ServedAtStart,
    "served_updates": ServedUpdates,
    "served_updates_at_start": ServedUpdatesAtStart,
    "stale": Stale,
    "local": Local,
}
"""Factories by name; each run makes one instance."""
