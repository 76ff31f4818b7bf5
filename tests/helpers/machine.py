"""When a test gives up on a machine whose host gives its processors to others."""

from __future__ import annotations

TRIES = 5
"""Of what needs a quiet machine, before it is given up."""

DENIED = f"others had this machine's processors in each of {TRIES} tries"
