"""Train with Lightning: the strategy is the only line that differs from DDP.

python examples/lightning_digits.py
torchrun --nproc-per-node 2 examples/lightning_digits.py --strategy dear:compression=sketch

The images are scikit-learn's digits; nothing is downloaded.
"""

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from wingbeat.integrations.lightning import WingbeatStrategy


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="dear", help="as in wingbeat bench (dear)")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = (TensorDataset(images[part], labels[part]) for part in (order[360:], order[:360]))
    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy=WingbeatStrategy(args.strategy),  # instead of strategy="ddp"
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices="auto" if torch.cuda.is_available() else 2,
        max_epochs=args.epochs,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
    found = trainer.validate(model, DataLoader(test, batch_size=360), verbose=False)
    if trainer.is_global_zero:
        print(f"accuracy {found[0]['accuracy']:.1%} after {args.epochs} epochs")


if __name__ == "__main__":
    main()
