"""The file in which rank 0 keeps what merged layers were planned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.planning.plans import planfile
from wingbeat.planning.probe import saved
from wingbeat.planning.probe.model import Probe


def keep(file: str, found: Probe, key: dict[str, Any]) -> None:
    """Write the file; if that fails, training goes on and a line says so."""
    try:
        saved.save(file, found, key)
        log.info("what was measured is kept in %s", file)
    except UsageError as err:  # a full disk, say: no reason to end the training
        log.warning("%s; this run goes on with what it has measured", err)


def read(
    file: str, key: dict[str, Any], check: Callable[[Probe], object]
) -> dict[str, Any] | str | None:
    """Return what the file holds for this key as JSON, None if nothing, or what is wrong with it.

    Args:
        file: its path.
        key: of this model and cluster.
        check: raises a `UsageError` for what cannot be planned from.
    """
    try:
        known = planfile.known(file, saved.load)
    except UsageError as err:
        return str(err)
    if known is None:
        return None
    if not planfile.same_key(known.key, key):
        log.warning("plan file %s is for another model, cluster or wire: measuring anew", file)
        return None
    try:
        check(known.probe)
    except UsageError as err:
        return f"plan_file={file!r}: {err}; {planfile.MEASURED.remedy}"
    return saved.to_json(known.probe)
