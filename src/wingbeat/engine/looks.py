"""Who changes gradients between backward and step: a scaler, or somebody who clips.

Each worker's own blocks suffice for that where no worker has whole gradients.
"""

from __future__ import annotations

from typing import Protocol

import torch

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients import reduced
from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.gradients.complexes import norm_of_parts
from wingbeat.engine.gradients.pending import PendingGradient
from wingbeat.engine.gradients.sparse import SparseGradients
from wingbeat.engine.gradients.views import Views
from wingbeat.engine.updates.stepper import Stepper
from wingbeat.engine.updates.update import Host, Update
from wingbeat.errors import UsageError
from wingbeat.schedules.events import PartsNeeded, Phase
from wingbeat.schedules.intents import Intent

GONE = "an exception cut its backward short; call optimizer.zero_grad() and run the backward again"


class Looked(Host, Protocol):
    """An engine, as far as it is needed here."""

    collectives: Collectives
    stepper: Stepper
    update: Update
    views: Views
    sparse: SparseGradients

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the plan in force."""

    @property
    def cut_short(self) -> bool:
        """Whether an exception has ended the backward that gradients are taken from."""

    @property
    def shadowed(self) -> bool:
        """Whether a worker without batches may be repeating this one's collectives blindly."""

    def settle_gradients(self) -> None:
        """Make gradients whole between backward and step."""


def unscale(
    engine: Looked,
    grads: list[torch.Tensor],
    found_inf: torch.Tensor,
    inv_scale: torch.Tensor,
) -> None:
    """Do as a GradScaler does with ``grads``; see `Engine.unscale`.

    Raises:
        UsageError: an exception has cut their backward short, or a step has used them up.
    """
    cut_short = engine.cut_short
    engine.recover()
    if cut_short:
        raise UsageError("GradScaler.unscale_(): the gradients are gone: " + GONE)
    engine.update.refuse_lost("GradScaler.unscale_()")
    engine.tell(PartsNeeded(Intent.SCALE))
    if engine.phase is Phase.REDUCED and not engine.shadowed:
        # All of a kind, whatever this worker's user has put in their place: others count on it.
        kind = grads[0].dtype.to_real(), grads[0].device
        buckets = [b for b in engine.buckets if (b.flat.dtype, b.flat.device) == kind]
        others = [grad for grad in grads if not isinstance(grad, PendingGradient)]
        reduced.unscale(buckets, others, engine.collectives, found_inf, inv_scale)
        return
    engine.settle_gradients()
    whole = [g.whole() if isinstance(g, PendingGradient) else g for g in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(whole, found_inf, inv_scale)


def clip_grad_norm_(engine: Looked, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale the averaged gradients; see `Engine.clip_grad_norm_`.

    Raises:
        UsageError: a step has used them up.
    """
    engine.recover()
    engine.update.refuse_lost("clip_grad_norm_()")
    engine.tell(PartsNeeded(Intent.CLIP))
    in_parts = engine.phase is Phase.REDUCED and not engine.shadowed and not engine.sparse
    if in_parts and norm_of_parts(engine.buckets, norm_type):
        return reduced.clip(engine.buckets, engine.collectives, max_norm, norm_type)
    if engine.views.hidden:
        engine.settle()
    return torch.nn.utils.clip_grad_norm_(engine.stepper.params(), max_norm, norm_type)
