"""One thread at a time in a mailbox."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from wingbeat.errors import UsageError

Method = TypeVar("Method", bound=Callable[..., Any])


def alone(method: Method) -> Method:
    """Let one thread at a time into a mailbox, and nobody once it is closed or broken.

    What is returned raises a `UsageError` then, or says again why it broke.
    """

    @functools.wraps(method)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._closed:
                raise UsageError(
                    f"{self._routes.me}: this mailbox is closed; open another to {method.__name__}"
                )
            if self._broken is not None:
                raise self._broken
            return method(self, *args, **kwargs)

    return cast("Method", inner)
