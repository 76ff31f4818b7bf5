"""An optimizer whose updates may be due: whoever looks at it gets them made first."""

from __future__ import annotations

from typing import Any

from wingbeat.engine.upgrade import DistributedOptimizer, plain_class
from wingbeat.errors import UsageError

_SUPPORTS = "_step_supports_amp_scaling"


class DeferringOptimizer(DistributedOptimizer):
    """What `distribute` adds to an optimizer's class where gradients and updates come later.

    Others keep their own attributes: each look at one would cost something, and steps look often.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups; read between backward and step, gradients are made whole first.

        Unless a GradScaler reads them, to which pending gradients suffice.
        """
        # The optimizer's own code, on some of its parameters, has gradients that are whole.
        if not self._engine.scaled and not self._engine.stepper.in_parts:
            self._engine.settle_gradients()
        groups: list[dict[str, Any]] = self._engine.optimizer.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if not self._engine.stepper.stepping:
            self._engine.flush()
        self._engine.optimizer.__dict__["param_groups"] = groups

    @property
    def state(self) -> Any:
        """What the optimizer remembers by parameter; updates that are due are applied first.

        With ``shard_optimizer`` it is on different workers, with ``update="server"`` on the
        servers, and `state_dict` gathers it. It can be set where the optimizer is not divided.

        Raises:
            UsageError: it is set where no worker has all of it.
        """
        return self._engine.visible_state()

    @state.setter
    def state(self, state: Any) -> None:
        if self._engine.update.option and not self._engine.stepper.stepping:
            raise UsageError(
                f"optimizer.state = ... with {self._engine.update.option}: no worker has all of "
                "it; call optimizer.load_state_dict() on every rank"
            )
        self._engine.visible_state()
        self._engine.optimizer.__dict__["state"] = state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by a GradScaler in each of its steps: whether ``step`` unscales gradients itself.

        If not, the scaler does, and is served by what each worker has reduced from now on.
        """
        usual = getattr(plain_class(self), _SUPPORTS, False)
        supports = bool(vars(self._engine.optimizer).get(_SUPPORTS, usual))
        self._engine.scaled, self._engine.asked = not supports, True
        return supports

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        vars(self._engine.optimizer)[_SUPPORTS] = supports

    def __setattr__(self, key: str, value: Any) -> None:
        # An update that is due must not see what is set after its step; it does not look at an
        # object of a class made from this one (Lightning), which is set something in each batch.
        if key != "__class__":
            engine = self._engine
            inner: object = engine.optimizer
            if inner is self and not engine.stepper.stepping:
                engine.flush()
        super().__setattr__(key, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        with self._engine.stepper.inside():
            super().__setstate__(state)  # type: ignore[misc]
