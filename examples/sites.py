"""Train at two sites that a slow line connects: DiLoCo exchanges a model every 30 steps.

torchrun --nproc-per-node 2 examples/sites.py
wingbeat lab run star:2@20mbit -- python examples/sites.py --steps 300

Between two exchanges each site trains alone. An outer optimizer then applies the mean change of
all sites, in 4 bits for each number.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import wingbeat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=30, help="steps between two exchanges")
    args = parser.parse_args()

    world = wingbeat.init()
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[360:][world.rank :: world.size], order[:360]  # sites have their own data

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    strategy = wingbeat.DiLoCo(every=args.every, compression="sketch@4")
    model, optimizer = wingbeat.distribute(model, optimizer, strategy)

    generator, begin = torch.Generator().manual_seed(world.rank), time.monotonic()
    for _ in range(args.steps):
        batch = train[torch.randint(len(train), (32,), generator=generator)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    wingbeat.synchronize(model)  # now all sites have the same model
    seconds = time.monotonic() - begin
    if world.rank == 0:
        with torch.no_grad():
            right = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        each = 1e3 * seconds / args.steps
        print(f"accuracy {right:.1%} after {args.steps} steps of {each:.1f} ms")
    wingbeat.shutdown()


if __name__ == "__main__":
    main()
