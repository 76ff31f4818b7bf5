"""Train with one worker that is three times as slow: Ripples lets the others go on.

wingbeat lab run star:4@1gbit -- python examples/straggler.py
wingbeat lab run star:4@1gbit -- python examples/straggler.py --strategy allreduce

On four hosts the others make more than twice as many steps as under AllReduce, which waits for the
slow worker in each step. The workers of one host average with each other in each step of Ripples,
so on a single host they all wait for it.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import wingbeat
from wingbeat.strategies import parse

STEP_S = 0.02
"""What a step takes; the last worker's takes three times as long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="ripples", help="as in wingbeat bench (ripples)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training")
    args = parser.parse_args()

    world = wingbeat.init()
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = parse(args.strategy)
    model, optimizer = wingbeat.distribute(model, optimizer, strategy)

    slow = world.rank == world.size - 1
    generator = torch.Generator().manual_seed(world.rank)
    steps, begin = 0, time.monotonic()
    # Where all workers wait for each other, all make as many steps as the slow one.
    least = int(args.seconds / (3 * STEP_S))
    while steps < least if strategy.exchange.lockstep else time.monotonic() - begin < args.seconds:
        time.sleep(3 * STEP_S if slow else STEP_S)
        batch = torch.randint(len(images), (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        steps += 1
    rate = steps / (time.monotonic() - begin)
    wingbeat.synchronize(model)
    print(f"rank {world.rank}: {steps} steps, {rate:.1f} a second", flush=True)
    if world.rank == 0:
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).float().mean().item()
        print(f"accuracy {right:.1%}", flush=True)
    wingbeat.shutdown()


if __name__ == "__main__":
    main()
