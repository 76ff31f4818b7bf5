"""What runs on the hosts of `goodput.py`: keepers, supervisors, replicas, and the store.

A *keeper* stands for the host's service manager: it starts the supervisor again when that ends, and
ends what it left. A *supervisor* starts the replica's process again: a loop, or torchrun for
strategies that restart all. Neither of these imports torch here. The last host has no replica but
the store at which they meet, or torchft's lighthouse.

A replica records in ``record-NUMBER`` what `fault_schedule.Event` describes.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PLACE = "GOODPUT_PLACE"
"""In the environment of each process: the run and the number of the replica, or of the service."""
PORT = 29400
REST_S = 0.5
"""Seconds before a supervisor or a keeper starts a process again."""
LEFT_S = 5.0
"""Seconds that a replica's processes have to end after it."""
TIMEOUT_S = 60.0
"""Of wingbeat.init."""
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""Of the outer optimizer of torchft's DiLoCo: the defaults of wingbeat's."""
TORCHFT_S = 10.0
"""Seconds of torchft's timeouts of collectives, and for replicas to join."""
HEARTBEAT_MS = 2000
"""Milliseconds without a heartbeat after which torchft's lighthouse continues without a replica."""


def run(home: Path, role: str) -> int:
    """Run one of the roles: keep, supervise, serve or work; return the exit code."""
    settings = json.loads((home / "settings.json").read_text())
    if role == "keep":
        return keep(home, settings, int(os.environ["RANK"]))
    if role == "supervise":
        return supervise(home)
    if role == "serve":
        return serve()
    work(home, settings, int(os.environ[PLACE].rpartition("/")[2]))
    return 0


# -- keepers and supervisors -------------------------------------------------------------------


def words(home: Path, role: str) -> list[str]:
    """The command of a role."""
    return [sys.executable, str(Path(__file__).with_name("goodput.py")), f"--{role}", str(home)]


def service(home: Path, settings: dict[str, Any]) -> list[str]:
    """The command of the process that no replica has."""
    if settings["family"] == "exact":
        return words(home, "serve")  # torchrun's agents need torch's store
    if settings["family"] != "torchft":
        store = [sys.executable, "-m", "wingbeat.cli.main", "store", "--port", str(PORT)]
        return [*store, "--journal", str(home / "store.journal")]
    least = max(1, settings["replicas"] // 2)
    return [
        str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"[::]:{PORT}",
        "--min_replicas", str(least), "--heartbeat_timeout_ms", str(HEARTBEAT_MS),
        "--join_timeout_ms", str(round(1e3 * TORCHFT_S)),
    ]  # fmt: skip


def supervisor(home: Path, settings: dict[str, Any]) -> list[str]:
    """The command that starts a replica's process again when it ends."""
    if settings["family"] != "exact":
        return words(home, "supervise")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    torchrun += ["--nnodes", str(settings["replicas"]), "--max-restarts", "100000"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", settings["mark"]]
    torchrun += ["--rdzv-endpoint", f"{settings['service']}:{PORT}"]
    torchrun += ["--rdzv-conf", "is_host=false,join_timeout=600"]
    return [*torchrun, *words(home, "work")[1:]]


def environment(settings: dict[str, Any], host: int) -> dict[str, str]:
    """The variables of a host's processes."""
    env = {k: v for k, v in os.environ.items() if k not in ("GROUP_RANK", "NODE_RANK")}
    env[PLACE] = f"{settings['mark']}/{host}"
    if host == settings["replicas"]:
        return env
    here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": "29500"}  # fmt: skip
    if settings["family"] == "exact":
        # torchrun sets them. With a store that agents keep for all starts, the agent that replaces
        # a killed one waits for an address that the others do not publish again (torch 2.15).
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return {k: v for k, v in env.items() if k not in here}
    env |= here
    if settings["family"] == "torchft":
        return env | {"TORCHFT_LIGHTHOUSE": f"http://{settings['service']}:{PORT}"}
    return env | {
        "WINGBEAT_REPLICA": str(host),
        "WINGBEAT_REPLICAS": str(settings["replicas"]),
        "WINGBEAT_STORE": f"{settings['service']}:{PORT}",
    }


def keep(home: Path, settings: dict[str, Any], host: int) -> int:
    """Keep a host's supervisor, or its service, running until the end."""
    serves, over = host == settings["replicas"], home / "over"
    command = service(home, settings) if serves else supervisor(home, settings)
    env, mark = environment(settings, host), f"{settings['mark']}/{host}"
    while not over.exists():
        process = subprocess.Popen(command, env=env, start_new_session=True)
        while process.poll() is None and not over.exists():
            time.sleep(0.1)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEFT_S)
        if process.poll() == 0:
            break
        end(mark)
        process.wait()
        if not over.exists():
            print(f"keeper: exit status {process.returncode}, starting again", flush=True)
            time.sleep(REST_S)
    deadline = time.monotonic() + LEFT_S
    while left := found(mark):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    end(mark)
    report = {"left": [command for _, command in left], "sockets": sockets()}
    write(home / f"done-{host}", json.dumps(report))
    return 0


def supervise(home: Path) -> int:
    """Start the replica's process until it ends by itself, without an error."""
    while True:
        code = subprocess.call(words(home, "work"))
        if code == 0:
            return 0
        print(f"supervisor: exit status {code}, starting again", flush=True)
        time.sleep(REST_S)


def serve() -> int:
    """Serve torch's store until SIGTERM."""
    import torch.distributed as dist

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # sigwait() takes it
    _store = dist.TCPStore("127.0.0.1", PORT, is_master=True, wait_for_workers=False)
    signal.sigwait({signal.SIGTERM})
    return 0


def found(mark: str) -> list[tuple[int, str]]:
    """Return the processes of a place, or of a run, with their commands."""
    wanted, processes = f"{PLACE}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdecimal():
                continue
            values = (entry / "environ").read_bytes().split(b"\0")
            if any(v == wanted or v.startswith(wanted + b"/") for v in values):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                processes.append((int(entry.name), command.strip()))
    return [(pid, command) for pid, command in processes if command]


def end(mark: str) -> None:
    """Kill the processes of a place."""
    for pid, _ in found(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sockets() -> list[str]:
    """Return the TCP sockets of this host, except those of which the kernel awaits the end."""
    lines = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
            kept = (row.split() for row in rows)
            lines += [f"{name} {r[1]} {r[2]} {r[3]}" for r in kept if r[3] in ("01", "0A")]
    return lines


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.rename(path)


# -- replicas ----------------------------------------------------------------------------------


def nothing() -> None:
    """Do nothing between two parts of a step."""


class Replica:
    """What all strategies share: data, model, record and checkpoints.

    Args:
        home: folder of the run.
        settings: of the run.
        number: of the replica.
    """

    def __init__(self, home: Path, settings: dict[str, Any], number: int) -> None:
        import numpy as np
        import torch

        torch.set_num_threads(1)
        self.home, self.settings, self.number = home, settings, number
        self._record = os.open(home / f"record-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._stop = home / "stop"
        self.write("begin", os.getpid())
        kept = np.load(home / "digits.npz")
        self.images, self.digits, *self.held_out = (torch.from_numpy(kept[k]) for k in kept.files)
        self.full = 0

    def write(self, kind: str, number: int = 0) -> None:
        """Add an event to the record."""
        os.write(self._record, f"{kind} {time.monotonic():.4f} {number}\n".encode())

    @property
    def stop(self) -> int | None:
        """The step after which to end; None to continue."""
        return int(self._stop.read_text()) if self._stop.exists() else None

    def made(self, seed: int = 0) -> tuple[Any, Any]:
        """Return a new model and its optimizer."""
        import torch

        from wingbeat_lab.bench import models

        network = models.network(seed)
        return network, torch.optim.AdamW(network.parameters(), lr=1e-3)

    def train(
        self,
        model: Any,
        optimizer: Any,
        batch: Any,
        middle: Callable[[], Any] = nothing,
        after: Callable[[], None] = nothing,
    ) -> Any:
        """Make one step, paced; return the result of ``middle``, called before backward.

        ``after`` is called after backward.
        """
        import torch

        optimizer.zero_grad()
        time.sleep(self.settings["pace"])
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        result = middle()
        loss.backward()
        after()
        optimizer.step()
        return result

    def own_batches(self) -> Iterator[tuple[Any, Any]]:
        """Random batches of this process."""
        from wingbeat_lab.bench import models

        replicas, seed = self.settings["replicas"], os.getpid()
        return models.batches(
            self.images, self.digits, rank=self.number, workers=replicas, seed=seed
        )

    def common_batch(self, step: int, rank: int) -> tuple[Any, Any]:
        """A rank's part of a step's batch, which follows from the step."""
        import torch

        generator = torch.Generator().manual_seed(step)
        mine = torch.randperm(len(self.digits), generator=generator)[rank * 32 : (rank + 1) * 32]
        return self.images[mine], self.digits[mine]

    def save(self, state: dict[str, Any], name: str) -> None:
        """Save a checkpoint; keep the last one if the disk is full."""
        import torch

        path = Path(self.settings["disk"]) / name
        part = path.with_suffix(".new")
        try:
            torch.save(state, part)
            part.replace(path)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            self.write("full")
            print(f"checkpoint not saved: {str(error).splitlines()[0]}", flush=True)

    def due(self, step: int) -> bool:
        """Whether to save a checkpoint after a step."""
        return bool(step % self.settings["every"] == 0)

    def write_digest(self, step: int, weights: dict[str, Any]) -> None:
        """Record a digest of the weights after a step, to compare runs."""
        line = f"{step} {digest_of(weights.values())}\n"
        with (self.home / "digests").open("a") as file:
            file.write(line)

    def finish(self, model: Any) -> None:
        """Record the end, the loss on held-out images and a digest of the weights."""
        import torch

        self.write("end")
        digest = digest_of(model.parameters())
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(self.held_out[0]), self.held_out[1])
        result = {"loss": float(loss), "digest": digest}
        write(self.home / f"result-{self.number}", json.dumps(result))


def digest_of(tensors: Iterable[Any]) -> str:
    """Return a digest of the bits of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def steps_of(optimizer: Any) -> int:
    """The number of steps of the model, which AdamW counts and a returned process copies."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def work(home: Path, settings: dict[str, Any], number: int) -> None:
    """Train in the way of a family of strategies."""
    ways = {
        "averaging": average,
        "staleness": stale,
        "exact": exact,
        "elastic": elastic,
        "torchft": torchft,
    }
    ways[settings["family"]](Replica(home, settings, number))


def conclude(replica: Replica, model: Any) -> None:
    """Leave the job with equal weights, and write what is left of it."""
    import wingbeat

    wingbeat.synchronize(model)
    replica.finish(model)
    wingbeat.shutdown()


def average(replica: Replica) -> None:
    """Train with wingbeat's averages of models."""
    import wingbeat
    from wingbeat.engine.upgrade import engine_of
    from wingbeat_lab import baselines

    world = wingbeat.init(timeout=TIMEOUT_S)
    model, optimizer = replica.made(1 if world.returned else 0)
    strategy = baselines.parse(replica.settings["row"])
    model, optimizer = wingbeat.distribute(model, optimizer, strategy)
    update: Any = engine_of(model).update  # type: ignore[union-attr]
    reducer = update._averager.session.reducer
    before = steps_of(optimizer)
    for batch in replica.own_batches():
        averages = reducer.completed
        replica.train(model, optimizer, batch)
        made = steps_of(optimizer)
        replica.write("step", made)
        if made != before + 1:  # it has copied the state of another one
            replica.write("lost")
        elif reducer.completed > averages:
            replica.write("merged")
        if replica.due(made):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            replica.save(state, f"{replica.number}.pt")
        before = made
        if replica.stop is not None:
            break
    conclude(replica, model)


def stale(replica: Replica) -> None:
    """Train under wingbeat's bounded staleness."""
    import wingbeat
    from wingbeat.methods.bounded_staleness.build import bounded_exchange
    from wingbeat_lab import baselines

    world = wingbeat.init(timeout=TIMEOUT_S)
    model, optimizer = replica.made(1 if world.returned else 0)
    strategy = baselines.parse(replica.settings["row"])
    model, optimizer = wingbeat.distribute(model, optimizer, strategy)
    exchange = bounded_exchange(model)
    assert exchange is not None
    machine = exchange.machine
    for batch in replica.own_batches():
        iteration = replica.train(model, optimizer, batch, lambda: machine.iteration)
        replica.write("step", iteration)
        if replica.due(iteration):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            replica.save(state, f"{replica.number}.pt")
        if replica.stop is not None:
            break
    conclude(replica, model)


def exact(replica: Replica) -> None:
    """Train with a strategy that torchrun restarts on all hosts, from a checkpoint."""
    import torch

    import wingbeat
    from wingbeat_lab import baselines

    world = wingbeat.init(timeout=TIMEOUT_S)
    model, optimizer = replica.made()
    kept, first = Path(replica.settings["disk"]) / "all.pt", 0
    if kept.exists():
        saved = torch.load(kept, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    strategy = baselines.parse(replica.settings["row"])
    model, optimizer = wingbeat.distribute(model, optimizer, strategy)
    for step in itertools.count(first + 1):
        batch = replica.common_batch(step, world.rank)
        replica.train(model, optimizer, batch)
        replica.write("step", step)
        if replica.due(step):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if world.rank == 0:
                replica.write_digest(step, state["model"])
                replica.save(state, "all.pt")
        if step == replica.stop:
            break
    conclude(replica, model)


def elastic(replica: Replica) -> None:
    """Train with an exact strategy that continues without a replica that died."""
    import wingbeat
    from wingbeat_lab import baselines

    world = wingbeat.init(timeout=TIMEOUT_S)
    model, optimizer = replica.made(1 if world.returned else 0)
    strategy = baselines.parse(replica.settings["row"])
    model, optimizer = wingbeat.distribute(model, optimizer, strategy)
    step = steps_of(optimizer)
    while step != replica.stop:
        batch = replica.common_batch(step + 1, world.rank)
        replica.train(model, optimizer, batch)
        made = steps_of(optimizer)
        if made > step:  # otherwise it was dropped on all replicas
            replica.write("step", made)
        step = made
        if replica.due(step):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            replica.save(state, f"{replica.number}.pt")
    conclude(replica, model)


# -- torchft -----------------------------------------------------------------------------------


def torchft(replica: Replica) -> None:
    """Train with torchft's DDP, LocalSGD or DiLoCo."""
    import torch
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    kind, every = replica.settings["torchft"], replica.settings["sync_every"]
    host = socket.gethostname()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    model, inner = replica.made()
    healed = False

    def load(state: dict[str, Any]) -> None:
        nonlocal healed
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        healed = True

    seconds = datetime.timedelta(seconds=TORCHFT_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=max(1, replica.settings["replicas"] // 2),
        use_async_quorum=kind.startswith("ddp"),  # the others require it to be off
        timeout=seconds,
        connect_timeout=seconds,
        quorum_timeout=6 * seconds,
        quorum_retries=1000,  # so that replicas outlive the lighthouse
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        hostname=host,
        replica_id=f"replica_{replica.number}",
        init_sync=False,  # all begin with the same weights
    )
    with contextlib.ExitStack() as stack:
        stack.callback(manager.shutdown, wait=False)
        wrapped: Any = model
        optimizer: Any = inner if kind in ("localsgd", "diloco") else Optimizer(manager, inner)
        after: Callable[[], None] = nothing
        if kind == "ddp":
            after = functools.partial(average_gradients, manager, model)
        elif kind == "ddp-wrapper":
            wrapped = DistributedDataParallel(manager, model)
        elif kind == "localsgd":
            stack.enter_context(LocalSGD(manager, model, inner, sync_every=every))
        else:
            outer = torch.optim.SGD(
                model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True
            )
            stack.enter_context(
                DiLoCo(manager, [model], inner, outer, sync_every=every, use_bucketization=True)
            )
        for number, batch in enumerate(replica.own_batches(), start=1):
            syncs, healed = manager.current_step(), False
            replica.train(wrapped, optimizer, batch, after=after)
            committed = manager.current_step() > syncs
            made = every * manager.current_step() + number % every
            record_torchft(
                replica, made, healed=healed, committed=committed, averages=number % every == 0
            )
            if replica.due(made):
                state = {"model": model.state_dict(), "optimizer": inner.state_dict()}
                replica.save(state | {"torchft": manager.state_dict()}, f"{replica.number}.pt")
            if committed and replica.stop is not None and made >= replica.stop:
                break
        replica.finish(model)


def average_gradients(manager: Any, model: Any) -> None:
    """Average all gradients at once by torchft, which keeps an error for its `should_commit`."""
    import torch

    grads = [param.grad for param in model.parameters()]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    manager.allreduce(flat).wait()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def record_torchft(
    replica: Replica, made: int, *, healed: bool, committed: bool, averages: bool
) -> None:
    """Record a step of torchft; what it discards is lost."""
    kind = replica.settings["torchft"]
    if committed or not kind.startswith("ddp"):
        replica.write("step", made)
    if healed:  # the weights are another replica's
        replica.write("lost")
    elif committed:
        replica.write("merged")
    elif averages and kind == "diloco":  # it has reset its weights
        replica.write("lost")
