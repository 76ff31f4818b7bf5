"""Train a model that FSDP2 divides among the processes of a host, between hosts.

torchrun --nproc-per-node 4 examples/sharded.py --shards 2
torchrun --nnodes 2 --nproc-per-node 8 ... examples/sharded.py --shards 8

Each group of ``--shards`` processes is one replica, inside which PyTorch gathers parameters;
wingbeat exchanges gradients between the replicas.
"""

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wingbeat


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=2, help="processes of a replica")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    world = wingbeat.init()
    if world.size % args.shards:
        parser.error(f"--shards {args.shards} does not divide {world.size} processes")
    replicas = world.size // args.shards
    mesh = init_device_mesh("cpu", (replicas, args.shards), mesh_dim_names=("replica", "shard"))
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.DeAR(), mesh=mesh)

    generator = torch.Generator().manual_seed(world.rank)  # every process has its own batches
    for step in range(1, args.steps + 1):
        x = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :8].square().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(10.0)
        optimizer.step()
        if world.rank == 0 and (step % 20 == 0 or step == args.steps):
            print(f"step {step}: loss {loss.item():.1f}", flush=True)
    wingbeat.shutdown()


if __name__ == "__main__":
    main()
