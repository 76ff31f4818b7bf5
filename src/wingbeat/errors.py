"""All exceptions that wingbeat raises.

::

    WingbeatError
    |-- UsageError        an invalid value given by the user (also a ValueError; exit code 2)
    |   |-- MismatchError   the ranks were given different models
    |   `-- MissingAttributeError  a model lacks an attribute of DDP (also an AttributeError)
    |-- RendezvousError   the workers could not connect to each other (also a ConnectionError)
    |-- PeerError         another worker failed or did not respond (also a ConnectionError)
    |-- UnevenBatchesError  a worker ran out of batches before others (also a RuntimeError)
    `-- LabError          the emulated cluster could not be created

A message is one line: the value, its place, what is allowed, and what to do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_WORDS = re.compile(r"[^a-z0-9]+")


class WingbeatError(Exception):
    """Base class of all errors that wingbeat raises deliberately."""


class UsageError(WingbeatError, ValueError):
    """A value given by the user is invalid; the message contains it and what is allowed."""


class MismatchError(UsageError):
    """The ranks use different models, optimizers or strategies; raised on every rank."""


class MissingAttributeError(UsageError, AttributeError):
    """A model lacks an attribute of DistributedDataParallel; the message names a replacement.

    ``hasattr`` returns False for it, so that
    ``model.module if hasattr(model, "module") else model`` is the model.
    """


class RendezvousError(WingbeatError, ConnectionError):
    """The workers could not connect; the message names rank, address, interface and duration."""


class PeerError(WingbeatError, ConnectionError):
    """A peer failed or did not respond; the message names its rank and the collective."""


class UnevenBatchesError(WingbeatError, RuntimeError):
    """A worker ran out of batches before others, and ``join`` was configured to raise."""


class LabError(WingbeatError, RuntimeError):
    """The emulated cluster could not be created on this machine; names the missing feature."""


def unknown(
    kind: str, value: str, allowed: Iterable[str], *, where: str = "", instead: str = ""
) -> UsageError:
    """Return the error for an unknown name: the value, the nearest match, and the allowed names.

    ``instead``, what to write, replaces the nearest match.

    >>> str(unknown("strategy", "deer", ["ddp", "dear"]))
    "unknown strategy 'deer' (did you mean 'dear'?); allowed: ddp, dear"
    """
    names = sorted(allowed)
    close = "" if instead else nearest(value.lower(), names)
    hint = f" (did you mean {close!r}?)" if close else f" ({instead})" if instead else ""
    place = f" in {where}" if where else ""
    return UsageError(
        f"unknown {kind} {value!r}{place}{hint}; allowed: {', '.join(names) or 'none'}"
    )


def nearest(value: str, names: list[str]) -> str:
    """Return the most similar name, or an empty text.

    >>> nearest("bucket_cap_mb", ["edge_mb", "max_mb", "mb"])
    'mb'
    """
    typed = difflib.get_close_matches(value, names, n=1, cutoff=0.75)
    if typed:
        return typed[0]
    # By characters, "bucket_mb" is closer to "edge_mb" than to "mb".
    words = set(_WORDS.split(value))
    within = [name for name in names if words.issuperset(_WORDS.split(name))]
    if within:
        return max(within, key=len)
    return next(iter(difflib.get_close_matches(value, names, n=1, cutoff=0.5)), "")
