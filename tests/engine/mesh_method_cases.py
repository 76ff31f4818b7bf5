"""What workers run in `test_mesh_methods`: methods with messages between replicas."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_cases import batch, net, replicas, sharded, train, weights

import wingbeat
import wingbeat.errors
import wingbeat_lab
from wingbeat.engine.upgrade import engine_of
from wingbeat.methods.bounded_staleness.build import bounded_exchange
from wingbeat.strategies import parse


def distributed(strategy: Any, mesh: Any, seed: int = 1) -> tuple[Any, Any]:
    """A model in shards and its optimizer between replicas."""
    model = sharded(net(seed), mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return wingbeat.distribute(model, optimizer, strategy, mesh=mesh)


def full(tensor: Any) -> torch.Tensor:
    """A tensor as one process would have it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def served_states() -> list[Any]:
    """For both updates: the optimizer's state by parameter, and weights with and without a load."""
    wingbeat.init(timeout=60)
    try:
        mesh, found = replicas(), []
        for update in ("worker", "server"):
            model, optimizer = distributed(wingbeat.Geryon(update=update), mesh)
            train(model, optimizer, range(4))
            kept, saved = copy.deepcopy(optimizer.state_dict()), model.state_dict()
            states = [
                {
                    key: (type(v).__name__, full(v).flatten().tolist())
                    for key, v in sorted(state.items())
                }
                for _, state in sorted(kept["state"].items())
            ]
            other, by = distributed(wingbeat.Geryon(update=update), mesh, seed=2)
            other.load_state_dict(saved)
            by.load_state_dict(kept)
            train(other, by, range(4, 6))
            train(model, optimizer, range(4, 6))
            found.append([states, weights(model).tolist(), weights(other).tolist()])
            wingbeat.release(model, optimizer)
            found[-1].append(sorted({type(v).__name__ for s in optimizer.state.values()
                                     for v in s.values()}))  # fmt: skip
        return found
    finally:
        wingbeat.shutdown()


class Lines(logging.Handler):
    """Collects log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def warned() -> list[str]:
    """What a rank logs of an option that does nothing for the model."""
    log, lines = logging.getLogger("wingbeat"), Lines()
    wingbeat.init(timeout=60)
    log.addHandler(lines)
    try:
        made = distributed(wingbeat.Geryon(threshold="coarse"), replicas())
        wingbeat.release(*made)
        return lines.lines
    finally:
        log.removeHandler(lines)
        wingbeat.shutdown()


def stale(options: dict[str, Any], steps: int, slow: int) -> list[Any]:
    """Loss before and after training with a slow rank and unequal steps; weights; the index."""
    wingbeat.init(timeout=60)
    try:
        rank, mesh = dist.get_rank(), replicas()
        model, optimizer = distributed(wingbeat.Canary(**options), mesh, seed=1 + rank // 2)
        losses = []
        for step in range(steps - 3 * (rank // 2)):
            if rank == slow:
                time.sleep(0.02)
            x, y = batch(step, rank)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        wingbeat.synchronize(model)
        found = bounded_exchange(model)
        assert found is not None
        wingbeat.release(model, optimizer)
        return [sum(losses[:5]), sum(losses[-5:]), weights(model).tolist(), found.fired]
    finally:
        wingbeat.shutdown()


def partial(steps: int) -> list[float]:
    """Loss before and after training by partial exchange."""
    wingbeat.init(timeout=60)
    try:
        model, optimizer = distributed(wingbeat_lab.Ako(), replicas())
        losses = []
        for step in range(steps):
            x, y = batch(step, dist.get_rank())
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        wingbeat.release(model, optimizer)
        return [sum(losses[:5]), sum(losses[-5:])]
    finally:
        wingbeat.shutdown()


def killed(strategy: str, across: int, dying: int, steps: int) -> list[Any]:
    """What each rank ends with, and after how long, while one is killed in its fourth step."""
    wingbeat.init(timeout=20)
    begin = time.monotonic()
    try:
        model, optimizer = distributed(parse(strategy), replicas(across))
        for step in range(steps):
            if (step, dist.get_rank()) == (4, dying):
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, range(step, step + 1))
            time.sleep(0.02)
        wingbeat.synchronize(model)
        return ["trained", weights(model).tolist()]
    except wingbeat.errors.PeerError as error:
        found = [str(error), time.monotonic() - begin]
    finally:
        with contextlib.suppress(wingbeat.errors.WingbeatError):
            wingbeat.shutdown()
    # The process of a script would end, which closes torch's connections: once this is answered.
    threading.Timer(1.0, os._exit, (0,)).start()
    return found


def pending_reads() -> list[bool]:
    """Whether an update on servers is pending after a step, and what a gather sees of it."""
    wingbeat.init(timeout=60)
    try:
        model, optimizer = distributed(wingbeat.Geryon(update="server"), replicas())
        train(model, optimizer, range(2))
        due = any(bucket.due for bucket in engine_of(model).buckets)
        layer = model.layers[0]
        layer.unshard()
        seen = layer.weight.detach().clone()
        layer.reshard()
        wingbeat.synchronize(model)
        same = bool(torch.equal(seen, layer.weight.full_tensor().detach()))
        wingbeat.release(model, optimizer)
        return [due, same]
    finally:
        wingbeat.shutdown()
