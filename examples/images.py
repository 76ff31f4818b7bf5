"""Classify images with mixed precision; evaluate on rank 0, and go on from a checkpoint.

torchrun --nproc-per-node 2 examples/images.py --epochs 10
torchrun --nproc-per-node 2 examples/images.py --epochs 20      (goes on where the first one ended)
wingbeat lab run star:4@1gbit -- python examples/images.py

The images are scikit-learn's digits, 8 x 8 pixels; nothing is downloaded. Every worker keeps a
checkpoint of its own, because residuals of compressed gradients differ between workers.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import wingbeat


def load() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    data = TensorDataset(images, torch.tensor(digits.target))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return TensorDataset(*data[order[360:]]), TensorDataset(*data[order[:360]])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    model.eval()
    images, digits = (tensor.to(device) for tensor in test.tensors)
    right = (model(images).argmax(1) == digits).float().mean().item()
    model.train()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("out/images"), help="of checkpoints")
    args = parser.parse_args()

    world = wingbeat.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    train, test = load()
    sampler = DistributedSampler(train, num_replicas=world.size, rank=world.rank)
    loader = DataLoader(train, batch_size=32, sampler=sampler)

    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = wingbeat.distribute(model, optimizer)  # tries strategies, keeps the fastest

    kept, begin = args.folder / f"{world.rank}.pt", 0
    if kept.exists():
        state = torch.load(kept, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"]

    for epoch in range(begin, args.epochs):
        sampler.set_epoch(epoch)
        for images, digits in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images.to(device)), digits.to(device))
            loss.backward()
            optimizer.step()
        wingbeat.synchronize(model)  # updates that are still deferred
        args.folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1}, kept)
        if world.rank == 0:  # the others go on meanwhile
            print(f"epoch {epoch + 1}: accuracy {accuracy(model, test, device):.1%}", flush=True)
    wingbeat.shutdown()


if __name__ == "__main__":
    main()
