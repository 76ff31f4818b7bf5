"""What the server that forks a pool's workers loads beforehand, once for all of them."""

from __future__ import annotations

import gc

import torch._dynamo  # DDP's first use loads it, which takes two seconds
import torch.distributed.checkpoint.state_dict  # noqa: F401

import wingbeat.engine.upgrade  # noqa: F401 - half a second of CPU time in each worker otherwise
from helpers.worker import die_with_parent

die_with_parent()  # so that its children, who do the same, end when the test run is killed
gc.freeze()  # a full collection would go through all of torch, for each case
