"""Every exception wingbeat raises.

::

    WingbeatError
    |-- UsageError        a value the user gave cannot work (also a ValueError; exit code 2)
    |   |-- MismatchError   the ranks were given different models
    |   `-- MissingAttributeError  an attribute of DDP that a model has not (also an AttributeError)
    |-- RendezvousError   the workers did not find each other (also a ConnectionError)
    |-- PeerError         another worker failed or fell silent (also a ConnectionError)
    |-- UnevenBatchesError  a worker ran out of batches before others (also a RuntimeError)
    `-- LabError          the emulated cluster could not be made

A message is one line: what value, where, what is allowed, what to do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_WORDS = re.compile(r"[^a-z0-9]+")


class WingbeatError(Exception):
    """Base of every error that wingbeat raises on purpose."""


class UsageError(WingbeatError, ValueError):
    """A value given by the user is invalid; the message names it and what is allowed."""


class MismatchError(UsageError):
    """The ranks disagree about what they train; raised on every rank."""


class MissingAttributeError(UsageError, AttributeError):
    """A model lacks an attribute of DistributedDataParallel; the message says what to use.

    ``hasattr`` returns False for it, so that ``model.module if hasattr(model, "module") else
    model`` is the model.
    """


class RendezvousError(WingbeatError, ConnectionError):
    """The workers did not find each other; names rank, address, interface and duration."""


class PeerError(WingbeatError, ConnectionError):
    """A peer failed or was silent during a collective; names its rank and the collective."""


class UnevenBatchesError(WingbeatError, RuntimeError):
    """A worker ran out of batches while others had more, and ``join`` was to raise then."""


class LabError(WingbeatError, RuntimeError):
    """The emulated cluster could not be built on this machine; names the missing feature."""


def unknown(kind: str, value: str, allowed: Iterable[str], *, where: str = "") -> UsageError:
    """Return the error for an unknown name: the value, the nearest match, and the allowed names.

    >>> str(unknown("strategy", "deer", ["ddp", "dear"]))
    "unknown strategy 'deer' (did you mean 'dear'?); allowed: ddp, dear"
    """
    names = sorted(allowed)
    close = _nearest(value.lower(), names)
    hint = f" (did you mean {close!r}?)" if close else ""
    place = f" in {where}" if where else ""
    return UsageError(
        f"unknown {kind} {value!r}{place}{hint}; allowed: {', '.join(names) or 'none'}"
    )


def _nearest(value: str, names: list[str]) -> str:
    """Return the most similar name, or an empty text.

    >>> _nearest("bucket_cap_mb", ["edge_mb", "max_mb", "mb"])
    'mb'
    """
    typed = difflib.get_close_matches(value, names, n=1, cutoff=0.75)
    if typed:
        return typed[0]
    # By characters "bucket_mb" is closer to "edge_mb" than to "mb"; by words it is not.
    words = set(_WORDS.split(value))
    within = [name for name in names if words.issuperset(_WORDS.split(name))]
    if within:
        return max(within, key=len)
    return next(iter(difflib.get_close_matches(value, names, n=1, cutoff=0.5)), "")
