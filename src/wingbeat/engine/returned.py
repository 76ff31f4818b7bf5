"""What a worker may not do that was started again while the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from wingbeat.errors import UsageError

if TYPE_CHECKING:
    from wingbeat.transport.world import World


class MayHaveReturned(Protocol):
    """A model's engine on a worker.

    Attributes:
        world: all workers.
        copied: whether this one has another's model, and has made no step since.
    """

    world: World
    copied: bool


def refuse_loading(engine: MayHaveReturned, what: str) -> None:
    """Refuse to load anything over what a worker has copied and not used yet.

    Residuals, too: the others may have had what they hold back, before this worker was gone.

    Args:
        engine: the model's.
        what: is called, for the message.

    Raises:
        UsageError: it has come back, and has made no step since.
    """
    if engine.copied:
        raise UsageError(
            f"{what} on rank {engine.world.rank}, which was started again while the "
            "others go on: distribute() has given it their model, the optimizer's state and "
            "the number of steps, and an older state would undo that on this rank alone; load "
            "before distribute(), or not where wingbeat.init().returned is true"
        )
