"""One flow: messages to and from one peer, over one interface, in one class. Pure; time is given.

In C++, ``native/src/flow.h``, which says what it does: every message passes through it at each end,
and in Python its arithmetic took longer than everything else that is done for a small one.
"""

from __future__ import annotations

import math

from wingbeat import _native

NEVER = math.inf

Flow = _native.Flow
Posted = _native.Posted

MOST_UNDER_WAY = _native.MOST_UNDER_WAY
"""Messages of one flow that are handed to its connection and have not arrived."""
