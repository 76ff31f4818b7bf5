"""What only some ranks do, and several models at once: DDP asks for no cooperation here."""

from __future__ import annotations

import copy
import io
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wingbeat.errors import UnevenBatchesError

from ..compare import assert_same_on_every_rank
from ..models import adamw, cross_entropy, mlp, sgd, train
from ..registry import ALL, BOTH, TINY, Grid, Rig, check, scenario
from ..sides import Side, WingbeatSide


@scenario()
def rank_zero_alone_saves_the_model(side: Side) -> None:
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, adamw(model))
    for step in range(5):
        train(side, model, optimizer, [step])
        if side.rank == 0:
            side.note("saved weight", bare.state_dict()["0.weight"])


@scenario(Grid(worlds=(2, 3, 4), strategies=BOTH))
def rank_zero_alone_saves(side: Side) -> None:
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(5):
        train(side, model, optimizer, [step])
        if side.rank == 0:
            file = io.BytesIO()
            torch.save((bare.state_dict(), optimizer.state_dict()), file)
            side.note("saved weight", bare.state_dict()["0.weight"])


@scenario()
def rank_zero_alone_saves_and_copies_before_gradients_are_clipped(side: Side) -> None:
    bare: Any = mlp()
    model, optimizer = side.setup(bare, sgd(bare))
    for step in range(5):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        if side.rank == 0:
            side.note("saved weight", bare.state_dict()["0.weight"])
            side.note("copied weight", copy.deepcopy(bare)[0].weight)
        side.note("norm", side.clip(model, optimizer, 0.1))
        optimizer.step()


@scenario()
def rank_zero_alone_evaluates(side: Side) -> None:
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, adamw(model))
    for step in range(5):
        train(side, model, optimizer, [step])
        if side.rank == 0:
            bare.eval()
            with torch.no_grad():
                side.note("output", bare(side.batch(70)[0]))
            bare.train()


@scenario()
def last_rank_alone_reads_gradients(side: Side) -> None:
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(5):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        if side.rank == side.size - 1:
            grads = [p.grad for p in bare.parameters() if p.grad is not None]
            side.note("norm", torch.stack([g.norm() for g in grads]).norm())
        optimizer.step()


@scenario()
def one_rank_reads_parameters_the_others_read_later(side: Side) -> None:
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, adamw(model))
    for step in range(6):
        train(side, model, optimizer, [step])
        if step % side.size == side.rank:
            side.note("sum", sum(p.detach().sum() for p in bare.parameters()))


@scenario()
def two_models_alternating(side: Side) -> None:
    """Generator and discriminator, each with its own optimizer, as a GAN is trained."""
    generator: Any = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    critic: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    generator, generator_step = side.setup(generator, adamw(generator))
    critic, critic_step = side.setup(critic, sgd(critic, lr=0.05))
    for step in range(6):
        real, _ = side.batch(step)
        noise, _ = side.batch(200 + step, width=4)
        critic_step.zero_grad()
        with torch.no_grad():
            made = generator(noise)
        scores = critic(torch.cat([real, made]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(made), 1)])
        F.binary_cross_entropy_with_logits(scores, truth).backward()
        critic_step.step()

        generator_step.zero_grad()
        for p in side.bare(critic).parameters():
            p.requires_grad_(False)
        scores = side.bare(critic)(generator(noise))
        F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores)).backward()
        for p in side.bare(critic).parameters():
            p.requires_grad_(True)
        generator_step.step()


@scenario()
def two_models_and_gradients_thrown_away(side: Side) -> None:
    """The usual shortcut: the critic's gradients of the generator's loss are zeroed later."""
    generator: Any = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    critic: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    generator, generator_step = side.setup(generator, sgd(generator))
    critic, critic_step = side.setup(critic, adamw(critic))
    for step in range(6):
        real, _ = side.batch(step)
        noise, _ = side.batch(200 + step, width=4)
        made = generator(noise)
        generator_step.zero_grad()
        F.softplus(-critic(made)).mean().backward()
        generator_step.step()
        critic_step.zero_grad()
        scores = critic(torch.cat([real, made.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(made), 1)])
        F.binary_cross_entropy_with_logits(scores, truth).backward()
        critic_step.step()


@scenario()
def two_models_in_one_loss(side: Side) -> None:
    encoder: Any = nn.Sequential(nn.Linear(8, 12), nn.Tanh())
    decoder: Any = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))
    encoder, encoder_step = side.setup(encoder, sgd(encoder))
    decoder, decoder_step = side.setup(decoder, adamw(decoder))
    for step in range(6):
        x, y = side.batch(step)
        encoder_step.zero_grad()
        decoder_step.zero_grad()
        F.cross_entropy(decoder(encoder(x)), y).backward()
        encoder_step.step()
        decoder_step.step()


@scenario(Grid(worlds=(1,)))
def one_worker(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(0, 8, 2):
        optimizer.zero_grad()
        with side.no_sync(model):
            cross_entropy(model, *side.batch(step)).backward()
        cross_entropy(model, *side.batch(step + 1)).backward()
        side.note("total norm", side.clip(model, optimizer, 0.1))
        optimizer.step()
    with side.join(model):
        train(side, model, optimizer, range(20, 23))


@scenario(Grid(worlds=(1,)))
def one_worker_with_batch_norm(side: Side) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    train(side, *side.setup(model, sgd(model)))


@check(Grid(worlds=(2, 3), strategies=ALL, mbs=(TINY,)))
def join_raises_on_all_ranks_when_one_runs_out(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    words = "Rank 0 exhausted all inputs" if rig.rank == 0 else "one rank that exhausted inputs.*0"
    begun, said = 0, ""
    try:
        with side.join(model, throw_on_early_termination=True):
            for step in range(5 if rig.rank == 0 else 7):
                with side.no_sync(model) if step in (3, 5) else nullcontext():
                    optimizer.zero_grad()
                    cross_entropy(model, *side.batch(step)).backward()
                begun += 1
                if step not in (3, 5):
                    optimizer.step()
    except UnevenBatchesError as error:
        said = str(error)
    assert re.fullmatch(f".*{words}.*", said), f"one line with {words!r}, not {said!r}"
    assert begun == 5, "a batch under no_sync counts as one"
    values = {name: p.detach() for name, p in model.named_parameters()}
    assert_same_on_every_rank(values, "after the error")
    train(side, model, optimizer, range(20, 22))  # and they can go on
    assert_same_on_every_rank(dict(model.state_dict()), "in the next epoch")
    side.leave()


@scenario(Grid((2,), ALL, (TINY,)))
def a_thread_on_rank_zero_reads_the_model_in_training(side: Side) -> None:
    """As one that writes checkpoints or figures: under DDP it disturbs nothing."""
    bare: Any = mlp()
    model, optimizer = side.setup(bare, adamw(bare))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    done = threading.Event()

    def read() -> None:
        while not done.wait(0.0005):
            assert all(value.isfinite().all() for value in bare.state_dict().values())

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read) if side.rank == 0 and side.is_subject else None
        try:
            for step in range(60):
                train(side, model, optimizer, [step])
                schedule.step()
        finally:
            done.set()
        if reading is not None:
            reading.result()


class InThreads(nn.Module):
    """Runs its branches in threads of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(mlp(classes=8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(3) as pool:
            out: Tensor = self.head(sum(pool.map(lambda branch: branch(x), self.branches)))
        return out


@scenario(Grid((2,), ALL))
def branches_of_a_forward_in_threads(side: Side) -> None:
    model: Any = InThreads()
    train(side, *side.setup(model, adamw(model)), range(20))
