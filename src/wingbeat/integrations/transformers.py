"""The HF Trainer with wingbeat in place of DDP; ``TrainingArguments`` stay as they are.

::

    trainer = WingbeatTrainer(model, args, train_dataset=data, strategy=wingbeat.DeAR())
    trainer.train()

Other trainers use the mixin: ``class Mine(WingbeatTrainerMixin, Seq2SeqTrainer): ...``
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from wingbeat.engine.api import release, synchronize, unwrapped
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError
from wingbeat.integrations import check_names, library
from wingbeat.integrations.accelerate import prepare, refuse_fsdp
from wingbeat.integrations.checkpoint import load_residuals, save_residuals
from wingbeat.strategies import DeAR, Strategy

__all__ = ["WingbeatTrainer", "WingbeatTrainerMixin"]

LEAST = "5.0.0"
"""The first supported version; constraints.txt has the tested one."""

PRIVATE = (
    *("_load_optimizer_and_scheduler", "_prepare_for_training", "_save_checkpoint"),
    "_save_optimizer_and_scheduler",
)
"""Private methods of a Trainer that are overridden."""

USED = ("accelerator", "evaluation_loop", "floating_point_ops", "model_wrapped", "train")
"""Public names that are used; they are checked as well."""

_transformers = library("transformers", LEAST)


class WingbeatTrainerMixin:
    """Mixin that trains with wingbeat in place of DDP.

    List it before the trainer in a class's bases. Accumulation, clipping, precision, schedulers,
    evaluation and checkpoints are the Trainer's own. Checkpoints include each worker's residuals.
    Models that differ between workers (Ripples, LocalSGD, ...) are synchronized before evaluation,
    before saving, and at the end of `train`.

    Args:
        args, kwargs: arguments of the Trainer.
        strategy: the strategy for `wingbeat.distribute`; default: ``wingbeat.DeAR()``.

    Raises:
        UsageError: the Trainer uses another parallelism, or its release lacks a name that is used.
    """

    def __init__(self, *args: Any, strategy: Strategy | None = None, **kwargs: Any) -> None:
        if not isinstance(strategy, Strategy | None):
            raise UsageError(
                f"{type(self).__name__}(strategy={strategy!r}): pass an instance, such as "
                "wingbeat.DeAR()"
            )
        super().__init__(*args, **kwargs)
        title = f"transformers {_transformers.__version__}"
        check_names(title, {_transformers.Trainer: PRIVATE, self: USED})
        _refuse_setup(self)
        self._counts: dict[Any, int] = {}
        self.strategy: Strategy = DeAR() if strategy is None else strategy

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; all workers then have the same model."""
        done = super().train(*args, **kwargs)  # type: ignore[misc]
        _synchronize(self)
        return done

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, with the same model on all workers."""
        _synchronize(self)
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):  # type: ignore[attr-defined]
            model = _distributed(self)
            if model is not None:  # it is converted, and cannot train after that
                release(model, self.optimizer)  # type: ignore[attr-defined]
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """Avoid the Trainer's count of parameters after each backward, which gathers gradients."""
        with _counted_once(self.model, self._counts):  # type: ignore[attr-defined]
            return super().floating_point_ops(inputs)  # type: ignore[misc]

    # -- private ones, listed in `PRIVATE` ------------------------------------------------

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._counts = {}
        with _preparing(self.accelerator, self.strategy):  # type: ignore[attr-defined]
            made = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        if _distributed(self) is None:
            raise UsageError(
                f"transformers {_transformers.__version__} does not prepare models in "
                "Trainer._prepare_for_training any more, which wingbeat counts on: install the "
                "version that wingbeat's constraints.txt names, and report this"
            )
        return made

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        _synchronize(self)
        return super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save:  # type: ignore[attr-defined]
            # Of a sharded optimizer all workers gather the state that one of them saves.
            self.optimizer.state_dict()  # type: ignore[attr-defined]
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        save_residuals(unwrapped(self.optimizer), output_dir)  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            load_residuals(unwrapped(self.optimizer), checkpoint)  # type: ignore[attr-defined]


class WingbeatTrainer(WingbeatTrainerMixin, _transformers.Trainer):  # type: ignore[misc,name-defined]
    """``transformers.Trainer`` with wingbeat in place of DDP; see `WingbeatTrainerMixin`."""


def _distributed(trainer: Any) -> nn.Module | None:
    """Return the distributed model, if there is one."""
    model = getattr(trainer, "model_wrapped", None)
    return model if isinstance(model, nn.Module) and engine_of(model) is not None else None


def _synchronize(trainer: Any) -> None:
    model = _distributed(trainer)
    if model is not None:
        synchronize(model)


@contextlib.contextmanager
def _preparing(accelerator: Any, strategy: Strategy) -> Iterator[None]:
    """Make ``accelerator.prepare(model, optimizer)`` prepare them with wingbeat."""

    def instead(*objects: Any, **kwargs: Any) -> Any:
        del accelerator.prepare  # restores the class's method for the optimizer
        try:
            if any(isinstance(each, nn.Module) for each in objects):
                return prepare(accelerator, *objects, strategy=strategy, **kwargs)
            return accelerator.prepare(*objects, **kwargs)
        finally:
            accelerator.prepare = instead

    accelerator.prepare = instead
    try:
        yield
    finally:
        del accelerator.prepare


@contextlib.contextmanager
def _counted_once(model: Any, counts: dict[Any, int]) -> Iterator[None]:
    """Cache ``model.num_parameters`` inside the block."""
    if engine_of(model) is None or not hasattr(model, "num_parameters"):
        yield
        return
    count = model.num_parameters

    def remembered(*args: Any, **kwargs: Any) -> int:
        key = args, *kwargs.items()
        if key not in counts:
            counts[key] = count(*args, **kwargs)
        return counts[key]

    model.num_parameters = remembered
    try:
        yield
    finally:
        del model.num_parameters


def _refuse_setup(trainer: Any) -> None:
    args, kind = trainer.args, type(trainer).__name__
    if args.n_gpu > 1:
        raise UsageError(
            f"{kind}: one process with {args.n_gpu} GPUs would train by torch.nn.DataParallel; "
            "start a process for each GPU by torchrun or accelerate launch"
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise UsageError(
            f"{kind}: TrainingArguments(...) has deepspeed set, which divides models in a way of "
            "its own; leave it out, or use transformers.Trainer"
        )
    if args.fsdp or getattr(trainer, "is_fsdp_enabled", False):
        refuse_fsdp(f"{kind}: TrainingArguments(fsdp=...)")
