"""Train a small GPT on bytes, with accumulated gradients, clipping and a schedule.

torchrun --nproc-per-node 2 examples/transformer.py --steps 200
torchrun --nproc-per-node 2 examples/transformer.py --strategy dear:compression=sketch --compile
wingbeat lab run star:2@100mbit -- python examples/transformer.py --strategy omgs

The text is the source code of Python's own modules; nothing is downloaded.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import wingbeat
from wingbeat.strategies import parse

LENGTH, WIDTH, HEADS, LAYERS = 128, 128, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.attend(self.first(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        return x + self.feed(self.second(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        return self.head(self.norm(self.blocks(self.words(words) + self.places(places))))


def text() -> torch.Tensor:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="auto", help="as in wingbeat bench (auto)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="windows of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    args = parser.parse_args()

    world = wingbeat.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    data = text()
    generator = torch.Generator().manual_seed(world.rank)  # every worker has its own batches

    torch.manual_seed(0)
    model = Gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = wingbeat.distribute(model, optimizer, parse(args.strategy))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    forward = torch.compile(model) if args.compile else model

    def loss_of_batch() -> torch.Tensor:
        starts = torch.randint(len(data) - LENGTH - 1, (args.batch,), generator=generator)
        windows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
        windows = windows.to(device).long()
        scores = forward(windows[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())

    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        with wingbeat.no_sync(model):  # gradients of these are exchanged with the last ones
            for _ in range(args.accumulate - 1):
                (loss_of_batch() / args.accumulate).backward()
        loss = loss_of_batch()
        (loss / args.accumulate).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        if world.rank == 0 and (step % 20 == 0 or step == args.steps):
            print(f"step {step}: loss {loss.item():.2f} nats per byte", flush=True)
    wingbeat.shutdown()


if __name__ == "__main__":
    main()
