"""Accelerate with wingbeat in place of DDP: `prepare` replaces ``accelerator.prepare``.

::

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = prepare(
        accelerator, model, optimizer, loader, scheduler, strategy=wingbeat.DeAR()
    )

The training loop stays as it is.
"""

from wingbeat.integrations.accelerate.comm_hooks import register_comm_hook
from wingbeat.integrations.accelerate.preparing import prepare

__all__ = ["prepare", "register_comm_hook"]
