"""What the tests of DDP's hooks run in worker processes."""

from __future__ import annotations

import gc
import io
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from integrations.totals import SHAPES, Chosen, Totals, gradient, make_state
from wingbeat.errors import PeerError, UsageError
from wingbeat.integrations import ddp
from wingbeat.integrations.ddp import HookExchange

STEPS = range(6)


def conserved(kind: str, options: dict[str, Any]) -> None:
    """What is delivered and what is missing is what was put in, with DDP's usual options."""
    backwards = options.pop("backwards", 1)
    totals = Totals(kind, **options)
    totals.train(STEPS, backwards=backwards)
    missing = totals.check()
    assert missing["long"].abs().max() > 0.1, "a lossless hook would not test the residual"
    totals.same_everywhere()
    totals.close()


def share_ends(find_unused: bool) -> None:
    """Two of five iterations are sketched; then what is left goes along, once, and all is exact."""
    wire = "sketch@2:share=0.4:total=5:auto_disable=false"
    totals = Totals("sketch", state={"wire": wire}, find_unused_parameters=find_unused)
    totals.train(range(2), backwards=2)
    assert not totals.state.coding
    assert totals.missing()["long"].abs().max() > 0.1
    totals.check()
    totals.train(range(2, 3))
    assert not any(bool(each.any()) for each in totals.missing().values())
    totals.check()
    for step in range(3, 5):
        totals.train(range(step, step + 1))
        for name, param in totals.model.module.named_parameters():
            mean = sum(gradient(step, rank, name) for rank in range(totals.size)) / totals.size
            torch.testing.assert_close(param.grad, mean, rtol=1e-6, atol=1e-6)
    totals.same_everywhere()
    totals.close()


def buckets_are_rebuilt(kind: str) -> None:
    """The case above is about several buckets, and other ones after the first iteration."""
    totals = Totals(kind)
    seen: list[list[int]] = []
    submit = totals.state.submit

    def noting(bucket: Any) -> Any:
        seen[-1].append(sum(p.numel() for p in bucket.parameters()))
        return submit(bucket)

    totals.state.submit = noting
    for step in range(3):
        seen.append([])
        totals.train(range(step, step + 1))
    assert len(seen[1]) > 2, f"few buckets: {seen}"
    assert seen[1] != seen[0], f"not rebuilt: {seen}"
    assert seen[2] == seen[1]
    totals.check()
    totals.close()


def unused(kind: str, bare: bool) -> None:
    """Parameters that nobody, or only some workers, use in an iteration lose nothing."""

    def used(step: int, rank: int, name: str) -> bool:
        if name == "long":
            return step % 3 == 0
        if name == "square":
            return rank == 1
        return name != "tiny" or step == 1

    totals = Totals(kind, find_unused_parameters=True, bare=bare)
    totals.train(range(7), used)
    # Zeros share a code with small values where they are few, which is then dropped by DDP: the
    # three elements of `tiny` can be off by what 2 bits cannot tell from zero.
    totals.put_in.pop("tiny")
    tiny = totals.delivered.pop("tiny")
    totals.put_in["tiny"] = tiny + totals.missing()["tiny"]
    totals.delivered["tiny"] = tiny
    totals.check()
    totals.same_everywhere()
    totals.close()


def narrow(kind: str, dtype_name: str) -> None:
    """Half precision: the delivered average is rounded, which no residual has."""
    totals = Totals(kind, dtype=getattr(torch, dtype_name))
    totals.train(STEPS)
    totals.check(0.2 if dtype_name == "bfloat16" else 0.03)
    assert totals.model.module.wide.grad.dtype == getattr(torch, dtype_name)
    totals.same_everywhere()
    totals.close()


def lossless(dtype_name: str) -> None:
    """With density 1 the hook is an average in float32, whatever the dtype."""
    dtype = getattr(torch, dtype_name)
    totals = Totals("topk", dtype=dtype, state={"density": 1.0})
    totals.train(range(2))
    for name, value in totals.delivered.items():
        want = torch.as_tensor(totals.put_in[name])
        torch.testing.assert_close(value, want.expand(value.shape), rtol=1e-6, atol=1e-6)
    assert not any(value.any() for value in totals.missing().values())
    totals.close()


def not_finite(kind: str) -> None:
    """A NaN or an infinity arrives as NaN on every worker, in its place, and is soon gone."""
    rank = dist.get_rank()
    totals = Totals(kind, bucket_cap_mb=25)
    bad = (kind == "sketch", 2500)  # top-k sends the largest only, and these are the largest
    wanted = {name: gradient(0, rank, name) for name in SHAPES}
    if rank == 1:
        wanted["long"][7] = float("nan")
        wanted["long"][bad[1]] = float("inf")
    totals.model(wanted).backward()
    grads = {name: p.grad.clone() for name, p in totals.model.module.named_parameters()}
    broken = (~torch.isfinite(grads["long"])).nonzero().flatten().tolist()
    assert broken == [7, bad[1]], broken
    assert all(torch.isfinite(grad).all() for name, grad in grads.items() if name != "long")
    totals.state.load_state_dict(totals.state.state_dict())  # refuses what is not finite
    totals.model.zero_grad()
    totals.train(range(1, 2))
    assert all(torch.isfinite(value).all() for value in totals.delivered.values())
    totals.same_everywhere()
    totals.close()


def many_buckets(kind: str) -> None:
    """Workers at different paces, many buckets in flight: nobody waits for ever."""
    rank = dist.get_rank()
    layers = [nn.Linear(40, 40) for _ in range(12)]
    model = nn.Sequential(*layers)
    for number, layer in enumerate(layers):
        if (number + rank) % 3 == 0:
            layer.weight.register_hook(lambda grad: time.sleep(0.002) or grad)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.006)
    state, hook = make_state(kind, wrapped)
    wrapped.register_comm_hook(state, hook)
    for step in range(4):
        wrapped.zero_grad()
        torch.manual_seed(step + rank)
        wrapped(torch.randn(2, 40)).square().sum().backward()
    mine = layers[0].weight.grad
    assert mine is not None
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    assert all(torch.equal(mine, other) for other in others)
    state.close()


def correction(momentum: float, steps: int) -> None:
    """Momentum correction and warm-up are those of the paper, counted on one parameter."""
    rank, size = dist.get_rank(), dist.get_world_size()
    density, warmup, numel = 0.01, 3, 3001
    model = nn.Module()
    model.long = nn.Parameter(torch.zeros(numel))
    model.forward = lambda want: (model.long * want).sum()  # type: ignore[method-assign]
    wrapped = DistributedDataParallel(model)
    state = ddp.TopKState(wrapped, density, warmup=warmup, momentum=momentum)
    wrapped.register_comm_hook(state, ddp.topk_hook)
    velocity, residual = torch.zeros(size, numel), torch.zeros(size, numel)
    for step in range(steps):
        now = 0.25 * (density / 0.25) ** min(1.0, step / warmup)
        k = round(numel * now)
        want = torch.zeros(numel)
        for peer in range(size):
            velocity[peer] = momentum * velocity[peer] + gradient(step, peer, "long") / size
            residual[peer] += velocity[peer]
            chosen = residual[peer].abs().argsort(descending=True, stable=True)[:k]
            want[chosen] += residual[peer, chosen]
            residual[peer, chosen] = velocity[peer, chosen] = 0
        wrapped.zero_grad()
        wrapped(gradient(step, rank, "long")).backward()
        torch.testing.assert_close(model.long.grad, want)
    saved = state.state_dict()
    torch.testing.assert_close(saved["residuals"]["long"], residual[rank])
    assert saved["step"] == steps
    if momentum:
        torch.testing.assert_close(saved["velocity"]["long"], velocity[rank])
    state.close()


def first_half(kind: str) -> bytes:
    """Some iterations, and the totals and states to go on with elsewhere, as a file's bytes."""
    totals = Totals(kind)
    totals.train(range(3))
    totals.check()
    state = totals.state.state_dict()
    totals.close()
    file = io.BytesIO()
    sums = {"put_in": dict(totals.put_in), "delivered": dict(totals.delivered)}
    torch.save({"state": state, **sums}, file)
    return file.getvalue()


def second_half(kind: str, files: list[bytes]) -> None:
    """Go on from another number of workers: nothing is lost."""
    halves = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    totals = Totals(kind)
    totals.put_in.update(halves[0]["put_in"])
    totals.delivered.update(halves[0]["delivered"])
    totals.state.load_state_dicts([half["state"] for half in halves])
    totals.check()
    totals.train(range(3, 6))
    totals.check()
    assert totals.state.state_dict()["step"] == 6
    totals.close()


def two_halves(kind: str, halves: list[list[int]]) -> None:
    """DDP on two disjoint halves of the workers, each with a state of its own."""
    groups = [dist.new_group(ranks) for ranks in halves]
    half = 0 if dist.get_rank() in halves[0] else 1
    totals = Totals(kind, process_group=groups[half])
    totals.train(STEPS)
    totals.check()
    totals.same_everywhere()
    saved = totals.state.state_dict()
    assert (saved["rank"], saved["world_size"]) == (dist.get_rank(groups[half]), 2)
    totals.close()


def _refused(wrapped: Any, state: Any, hook: Any) -> str:
    wrapped.register_comm_hook(state, hook)
    try:
        wrapped({name: gradient(0, 0, name) for name in SHAPES}).backward()
    except UsageError as err:
        return str(err)
    raise AssertionError("nothing was raised")


def misuse() -> list[str]:
    """What the hooks say to wrong use; each on a DDP of its own, as none can be used again."""
    said = []
    mine, other = Chosen(), nn.Linear(5, 2)
    sketch, topk = ddp.SketchState(mine), ddp.TopKState(mine)
    foreign = ddp.SketchState(other)
    for state, hook in ((sketch, ddp.topk_hook), (topk, ddp.sketch_hook), (None, ddp.topk_hook)):
        said.append(_refused(DistributedDataParallel(mine), state, hook))
    said.append(_refused(DistributedDataParallel(mine), foreign, ddp.sketch_hook))
    sketch.close()
    said.append(_refused(DistributedDataParallel(mine), sketch, ddp.sketch_hook))
    table = nn.Embedding(10, 3, sparse=True)
    wrapped = DistributedDataParallel(table)
    sparse = ddp.TopKState(wrapped)
    wrapped.register_comm_hook(sparse, ddp.topk_hook)
    try:
        wrapped(torch.tensor([1, 2])).sum().backward()
    except UsageError as err:
        said.append(str(err))
    totals = Totals("sketch")
    try:
        with totals.model.join():
            totals.train(range(1))
    except UsageError as err:
        said.append(str(err))
    for state in (topk, foreign, sparse, totals.state):
        state.close()
    return said


def thread_ends() -> None:
    """With the state's last reference, or at `close`, which may be called again."""
    totals = Totals("sketch")
    totals.train(range(1))
    executor = totals.state._executor
    assert executor.alive
    del totals
    gc.collect()
    assert not executor.alive
    state = ddp.TopKState(Chosen())
    state.close()
    state.close()
    assert not state._executor.alive


def victim(kind: str) -> tuple[str, str]:
    """Rank 1 dies in a backward; what the others are told, then and afterwards."""
    totals = Totals(kind)
    totals.train(range(2))
    if dist.get_rank() == 1:
        totals.model.module.scalar.register_hook(lambda grad: os._exit(3))
    return _failing(totals)


def malformed() -> tuple[str, str]:
    """Rank 1 sends nonsense."""
    totals = Totals("topk")
    totals.train(range(2))
    usual = HookExchange.prepare

    def nonsense(self: HookExchange) -> None:
        usual(self)
        self._sum.rows.fill_(255)

    if dist.get_rank() == 1:
        HookExchange.prepare = nonsense  # type: ignore[method-assign]
    try:
        return _failing(totals)
    finally:
        HookExchange.prepare = usual  # type: ignore[method-assign]
        totals.close()


def _failing(totals: Totals) -> tuple[str, str]:
    """What DDP raises at the failure, and in an iteration after it."""
    told = []
    for _ in range(2):
        try:
            totals.train(range(2, 3))
        except RuntimeError as err:
            told.append(str(err))
    first, then = told
    assert isinstance(totals.state.error, PeerError)
    assert str(totals.state.error) in first
    return first, then


class DigitsNet(nn.Module):
    """Two convolutions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).flatten(1))
        return out


def digits(kind: str, options: dict[str, Any], steps: int, seed: int = 5) -> tuple[float, float]:
    """Train on scikit-learn's digits; loss and accuracy on images that were not trained on."""
    from wingbeat_lab.bench.models import accuracy, batches, data

    torch.manual_seed(seed)
    images, labels, test_images, test_labels = data()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = batches(images, labels, rank=rank, workers=size, seed=1)
    wrapped = DistributedDataParallel(DigitsNet(), bucket_cap_mb=0.01)
    state = None
    if kind != "dense":
        state, hook = make_state(kind, wrapped, **options)
        wrapped.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        x, y = next(mine)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    if state is not None:
        state.close()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(wrapped.module(test_images), test_labels)
    return float(loss), accuracy(wrapped.module, test_images, test_labels)
