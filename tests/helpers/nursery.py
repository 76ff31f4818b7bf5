"""What the server that forks a pool's workers loads beforehand: torch, once for all of them."""

from __future__ import annotations

import gc

import torch._dynamo  # noqa: F401 - DDP's first use loads it, which takes two seconds

from helpers.worker import die_with_parent

die_with_parent()  # so that its children, who do the same, end when the test run is killed
gc.freeze()  # a full collection would go through all of torch, for each case
