"""What the test of Lightning's page, and that of its older packages, run in worker processes."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from integrations.lightning_cases import Net, fitted, torchrun


class Wide(Net):
    """Has a layer of more values than 8 bits can tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(16, 256), nn.Linear(256, 4))


def hooked(example: str) -> None:
    """The page's strategy registers a hook, on the CPU too, and the hook is used."""
    names: dict[str, Any] = {}
    exec(compile(example, "page", "exec", dont_inherit=True), names)
    with torchrun():
        strategy = names["SketchedDDP"]()
        fitted(Wide(), strategy)
        residuals = strategy.hook_state.state_dict()["residuals"]
        assert any(bool(value.any()) for value in residuals.values())
        strategy.hook_state.close()


def older_packages() -> None:
    """``pytorch_lightning`` and ``lightning_fabric`` have classes of their own, and train alike."""
    import lightning_fabric
    import pytorch_lightning
    import torch

    import wingbeat
    from integrations.fabric_cases import together
    from integrations.lightning_cases import QUIET, close, loader
    from wingbeat.integrations.lightning_fabric import WingbeatStrategy as ForFabric
    from wingbeat.integrations.pytorch_lightning import WingbeatStrategy as ForTrainer

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = nn.Linear(8, 4)

        def training_step(self, batch: Any) -> Any:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def trained(strategy: Any) -> Any:
        module = Module()
        options = {**QUIET, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        pytorch_lightning.Trainer(strategy=strategy, **options).fit(module, loader())
        return module.state_dict()

    dear = functools.partial(wingbeat.DeAR, plan="fixed", mb=0.001, edge_mb=0)
    with torchrun():
        close(trained(ForTrainer(dear())), trained("ddp"))
        whole = []
        for strategy in ("ddp", ForFabric(dear())):
            fabric = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
            fabric.launch()
            whole.append(dict(together(fabric, every=2, clip={"max_norm": 0.1}).named_parameters()))
        close(*whole)
