"""Accelerate with wingbeat in place of DDP: one call of `prepare` changes, the loop does not.

::

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = prepare(
        accelerator, model, optimizer, loader, scheduler, strategy=wingbeat.DeAR()
    )
"""

from wingbeat.integrations.accelerate.comm_hooks import register_comm_hook
from wingbeat.integrations.accelerate.preparing import prepare

__all__ = ["prepare", "register_comm_hook"]
