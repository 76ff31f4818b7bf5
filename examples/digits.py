"""Train a small network on scikit-learn's digits with wingbeat.

torchrun --nproc-per-node 4 examples/digits.py
wingbeat lab run star:4@1gbit -- python examples/digits.py
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import wingbeat

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 12


def load() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    data = TensorDataset(images, torch.tensor(digits.target))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(*data[train]), TensorDataset(*data[test])


def network() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every worker
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def main() -> None:
    world = wingbeat.init()
    train, test = load()
    sampler = DistributedSampler(train, num_replicas=world.size, rank=world.rank)
    loader = DataLoader(train, batch_size=32, sampler=sampler)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.DeAR())

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, digits in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), digits).backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        images, digits = test.tensors
        right = (model(images).argmax(1) == digits).float().mean().item()
    if world.rank == 0:
        print(f"test accuracy after {EPOCHS} epochs on {world.size} workers: {right:.1%}")
    wingbeat.shutdown()


if __name__ == "__main__":
    main()
