"""Predict an iteration of a strategy on a cluster, and rank strategies by it.

Each method's own simulation is used: the state machines of a run in virtual time. There is no clock
and no I/O, and equal arguments give equal predictions, so rank 0 may predict during a run and all
ranks may predict the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from wingbeat.compression import options_of
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.options import Bounded
from wingbeat.methods.bounded_staleness.simulated import simulate_bounded
from wingbeat.methods.model_averaging.options import Groups, Local, Outer, Pairs
from wingbeat.methods.model_averaging.simulated import simulate_groups
from wingbeat.methods.model_averaging.simulated_pairs import simulate_pairs
from wingbeat.parts.strategy import Strategy
from wingbeat.prediction.baselines import FlatRing
from wingbeat.prediction.cluster import Cluster
from wingbeat.simulator.cluster import Traffic, Work, coding_of
from wingbeat.simulator.model import ITEMSIZE, Model
from wingbeat.simulator.run import simulate
from wingbeat.topologies import Mesh, Ring
from wingbeat.types import Layout

ERROR = (0.97, 1.06)
"""Measured by predicted time, least and largest, of strategies that sum dense or cast gradients.

The rows of ``hosts-2x4``, ``hosts-4x2`` and ``best`` in ``docs/results``, except those that were
limited by the processors of the machine, are within it: ``tests/prediction/test_measured_rows.py``.
"""

ERROR_OF_OTHERS = (0.95, 1.35)
"""The same with codecs, whose work shared two cores there. No rows of servers and of workers that
are not in lockstep were measured beside a prediction; the same interval is given for them.
"""

EXACT = "exact"
FEEDBACK = "lossy, with error feedback"
LOSSY = "lossy"
LOCAL_STEPS = "local steps"
ASYNCHRONOUS = "asynchronous"
"""What a strategy does to convergence."""

_ITERATIONS = {True: 2, False: 3}
"""Iterations in lockstep, of which the last counts: of equal hosts, and of others."""

_FEW, _FEWEST, _FEW_WORKERS = 4, 2, 128
"""Workers of a host that represent more of them, up to so many workers in all and beyond."""

_FEW_UNLIKE = 4
"""The same number of hosts where these differ, so that all of them are simulated."""

_STEPS = 8
"""Least number of iterations of workers that are not in lockstep, and of averaged models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What an iteration takes; where workers are not in lockstep, the mean over all of them.

    Attributes:
        iteration_s: seconds of an iteration.
        low_s: lower end of its interval: the simulator's error (`ERROR`, `ERROR_OF_OTHERS`), and
            the spread of measured rates of NICs.
        high_s: upper end of it.
        exposed_s: seconds of it that are no forward, backward or other time of the profile.
        bytes_per_host: bytes that a host sends to others, the mean over the hosts, without headers.
        memory_bytes: bytes of a worker's buckets, other flat buffers and residuals: an estimate.
        convergence: `EXACT`, `FEEDBACK`, `LOSSY`, `LOCAL_STEPS` or `ASYNCHRONOUS`.
    """

    iteration_s: float
    low_s: float
    high_s: float
    exposed_s: float
    bytes_per_host: float
    memory_bytes: int
    convergence: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """Predictions by name, the fastest first, and why the others could not be predicted."""

    predictions: Mapping[str, Prediction]
    refused: Mapping[str, str]

    def fastest(self, *, exact: bool = False) -> str:
        """Return the name of the fastest candidate, or of the fastest that is exact.

        Raises:
            UsageError: there is none.
        """
        for name, each in self.predictions.items():
            if not exact or each.convergence == EXACT:
                return name
        which = "exact candidate" if exact else "candidate"
        raise UsageError(f"no {which} can be predicted; rank others, such as AllReduce()")


def rank(
    candidates: Mapping[str, Strategy],
    model: Model,
    cluster: Cluster,
    *,
    work: Work | None = None,
    inside: int = 1,
    most: int | None = None,
    progress: Callable[[str], str] | None = None,
) -> Ranking:
    """Predict all candidates and sort them by their iteration time; ties keep their order.

    Args:
        candidates: strategies by name.
        model: layers and their times.
        cluster: hosts, workers and links.
        work: cost of communication in processor time.
        inside: as in `predict`.
        most: largest number of workers that are simulated one by one, which takes long; candidates
            for which there would be more are refused. None: any number.
        progress: called with the name of each candidate before it is predicted, one of each kind
            of convergence first; returns why it is not to be predicted, or an empty text.
    """
    found: dict[str, Prediction] = {}
    refused: dict[str, str] = {}
    for name in _one_of_each_kind_first(candidates):
        strategy = candidates[name]
        stop = "" if progress is None else progress(name)
        if stop:
            refused[name] = stop
            continue
        alone = simulated_alone(strategy, cluster, inside)
        limit = math.inf if most is None else most
        if isinstance(strategy.exchange, FlatRing):
            limit *= _RING  # a ranking needs its baselines
        if alone > limit:
            refused[name] = (
                f"its {alone} workers would be simulated one by one, and more than {limit} take "
                "minutes: --patient does it"
            )
            continue
        try:
            found[name] = predict(strategy, model, cluster, work=work, inside=inside)
        except UsageError as error:
            refused[name] = str(error)
    order = sorted(
        (name for name in candidates if name in found), key=lambda name: found[name].iteration_s
    )
    return Ranking(
        {name: found[name] for name in order},
        {name: refused[name] for name in candidates if name in refused},
    )


def _one_of_each_kind_first(candidates: Mapping[str, Strategy]) -> list[str]:
    """Return the names so that a prefix has all kinds of convergence, baselines before all."""
    places: Counter[str] = Counter()
    keys = {}
    for place, (name, strategy) in enumerate(candidates.items()):
        kind = convergence_of(strategy)
        baseline = isinstance(strategy.exchange, FlatRing)
        keys[name] = (-1 if baseline else places[kind], place)
        places[kind] += not baseline
    return sorted(candidates, key=keys.__getitem__)


def predict(
    strategy: Strategy,
    model: Model,
    cluster: Cluster,
    *,
    work: Work | None = None,
    inside: int = 1,
) -> Prediction:
    """Predict an iteration of ``strategy``.

    Args:
        strategy: the strategy. Bucket sizes that are tuned in training are the initial ones.
        model: layers and their times.
        cluster: hosts, workers and links.
        work: cost of communication in processor time.
        inside: processes of each replica, which FSDP2 divides; 1: each worker has a whole model.
            A replica has a host, and each host so many workers.

    Raises:
        UsageError: the strategy cannot be simulated on this cluster.
    """
    if inside > 1 and any(len(host) != inside for host in cluster.layout.hosts):
        raise UsageError(
            f"predict(inside={inside}): a replica has a host, and hosts have "
            f"{sorted({len(host) for host in cluster.layout.hosts})} processes; give as many"
        )
    job = _Job(strategy, model, cluster, work or Work(), inside)
    exchange = strategy.exchange
    if isinstance(exchange, Groups):
        seconds, exposed_s, sent = job.groups(exchange)
    elif isinstance(exchange, Pairs):
        seconds, exposed_s, sent = job.pairs(exchange)
    elif isinstance(exchange, Bounded):
        seconds, exposed_s, sent = job.bounded(exchange)
    else:
        seconds, exposed_s, sent = job.lockstep()
    low, high = error_of(strategy)
    return Prediction(
        iteration_s=seconds,
        low_s=seconds * low / (1 + cluster.spread),
        high_s=seconds * high * (1 + cluster.spread),
        exposed_s=max(0.0, exposed_s),
        bytes_per_host=sent,
        memory_bytes=memory_bytes(strategy, model, inside),
        convergence=convergence_of(strategy),
    )


def simulated_alone(strategy: Strategy, cluster: Cluster, inside: int = 1) -> int:
    """Return how many workers are simulated one by one; 0 if those of one host represent all.

    A slow host delays averages of all workers, but does not change them.
    """
    exchange = strategy.exchange
    whole = isinstance(exchange, Groups) and exchange.everyone
    alike = _even(cluster) and cluster.links.alike and (whole or not cluster.slow)
    if alike and (whole or exchange.collective):
        return 0
    few = 0 if inside > 1 else _few(strategy, cluster)
    return few * cluster.hosts or cluster.workers


def _few(strategy: Strategy, cluster: Cluster) -> int:
    """Return how many workers of each host represent all of it; 0: all are simulated."""
    exchange, options = strategy.exchange, options_of(strategy.wire)
    blocks = isinstance(exchange, Ring | Mesh) and not (options.gathers or options.rank)
    if not _even(cluster) or not blocks:
        return 0
    alike = cluster.links.alike and not cluster.slow
    many = cluster.workers > _FEW_WORKERS if alike else cluster.hosts > _FEW_UNLIKE
    few = _FEWEST if many else _FEW
    return few if len(cluster.layout.hosts[0]) > few else 0


def _even(cluster: Cluster) -> bool:
    return len({len(host) for host in cluster.layout.hosts}) == 1


def error_of(strategy: Strategy) -> tuple[float, float]:
    """Return the range of measured by predicted times."""
    summed = strategy.exchange.collective and strategy.exchange.lockstep
    return ERROR if summed and strategy.codec is None else ERROR_OF_OTHERS


def convergence_of(strategy: Strategy) -> str:
    """Return what a strategy does to convergence."""
    traits, exchange = strategy.traits, strategy.exchange
    if traits.exact:
        return EXACT
    if isinstance(exchange, Groups) and exchange.everyone:
        return LOCAL_STEPS
    if not traits.synchronous:
        return ASYNCHRONOUS
    return FEEDBACK if options_of(strategy.wire).keeps else LOSSY


def memory_bytes(strategy: Strategy, model: Model, inside: int = 1) -> int:
    """Return the bytes of a worker's buffers and residuals; inside a replica, of each process.

    Buckets hold the gradients. Averaged models have a flat copy and one of the sum, and an outer
    optimizer the last average and a velocity. Residuals are as large, and averages keep the next
    ones beside them. Chunks in transit, and what is late under bounded staleness, are left out.
    """
    whole = ITEMSIZE * sum(tensor.numel for tensor in model.tensors) // inside
    averaged = isinstance(strategy.exchange, Groups | Pairs)
    copies = 2 if averaged else 1
    if isinstance(strategy.update_part, Outer):
        copies += 2
    if options_of(strategy.wire).keeps:
        copies += 2 if averaged else 1
    return copies * whole


_RING = 4
"""How many times as many workers are simulated one by one in DDP's ring as with others."""

_Result = tuple[float, float, float]
"""Seconds of an iteration, those that are exposed, and bytes of a host."""


@dataclass(frozen=True)
class _Job:
    strategy: Strategy
    model: Model
    cluster: Cluster
    work: Work
    inside: int

    @property
    def compute_s(self) -> float:
        """Seconds of computation of a worker that is not slow."""
        return sum(layer.forward_s + layer.backward_s for layer in self.model.layers)

    def lockstep(self) -> _Result:
        """Predict an iteration of workers that all make the same ones."""
        divided = self.inside > 1
        cluster, work = (self.cluster, self.work) if divided else self._represented()
        run = simulate(
            self.model,
            self.strategy,
            cluster.hosts if divided else cluster.workers,
            cluster.links,
            work=work,
            local=cluster.local,
            slow=cluster.slow_workers,
            iterations=_ITERATIONS[cluster.links.alike and not cluster.slow],
            layout=None if divided else cluster.layout,
            inside=self.inside,
        )
        longest = self.compute_s * max((1.0, *cluster.slow.values()))
        seconds = run.iterations_s[-1]
        return seconds, seconds - longest, run.bytes_per_host

    def _represented(self) -> tuple[Cluster, Work]:
        """Return a smaller cluster whose iteration takes as long, with its costs, if there is one.

        Few workers of each host represent all. Where hosts sum inside first, a worker then has a
        larger share of its host's NICs, and its thread takes less time for each byte; inside, it
        exchanges a smaller part of its gradients, more slowly; and each of its fewer chunks takes
        longer. Where hosts are alike, each worker of DDP's ring gets a host, since each host sends
        and receives one stream in either case.
        """
        cluster, work, local = self.cluster, self.work, self.cluster.local
        each, hosts = len(cluster.layout.hosts[0]), cluster.hosts
        flat = isinstance(self.strategy.exchange, FlatRing)
        if flat and each > 1 and not simulated_alone(self.strategy, cluster):
            far_s, near_s = cluster.links.latency_s, local.latency_s
            links = replace(
                cluster.links,
                bytes_per_s=min(cluster.links.bytes_per_s, local.bytes_per_s / cluster.links.count),
                latency_s=(far_s + (each - 1) * near_s) / each,
            )
            layout = Layout.even(cluster.workers, 1)
            return replace(cluster, links=links, layout=layout), work
        few = _few(self.strategy, cluster)
        if not few:
            return cluster, work
        local = replace(local, bytes_per_s=local.bytes_per_s * (1 - 1 / few) / (1 - 1 / each))
        cluster = replace(cluster, layout=Layout.even(hosts, few), local=local)
        work = replace(
            work,
            chunk_s=work.chunk_s * (each * hosts - 1) / (few * hosts - 1),
            wire_s_per_byte=work.wire_s_per_byte * few / each,
            add_s_per_byte=work.add_s_per_byte * few / each,
            codecs=work.codecs * few / each,
        )
        return cluster, work

    def groups(self, exchange: Groups) -> _Result:
        """Predict the mean iteration of workers that average their models in groups."""
        schedule = self.strategy.schedule
        assert isinstance(schedule, Local), "averages need local steps"
        if self.strategy.plan.fusion().kind != "one" or schedule.delay > 1:
            raise UsageError(
                f"{self.strategy!r}: averages of fragments, or with a delay of more than a step, "
                "are not simulated; simulate DiLoCo(every=30)"
            )
        cluster = self._replicas()
        steps = -(-_STEPS // schedule.every) * schedule.every
        traffic = Traffic()
        run = simulate_groups(
            self.model,
            exchange.rules,
            cluster.layout,
            cluster.links,
            work=self.work,
            local=cluster.local,
            slow=cluster.slow_workers,
            overlap=schedule.delay > 0,
            every=schedule.every,
            iterations=steps,
            warmup=schedule.every,
            seed=exchange.seed,
            compression=self.strategy.compression,
            inside=self.inside,
            traffic=traffic,
            represented=True,
        )
        return run.iteration_s, run.waited * run.iteration_s, self._each(traffic, run.steps)

    def pairs(self, exchange: Pairs) -> _Result:
        """Predict the mean iteration of workers that average with one other."""
        self._whole_models()
        schedule = self.strategy.schedule
        assert isinstance(schedule, Local), "averages need local steps"
        if schedule.every != 1 or schedule.delay != 1 or self.strategy.compression != "fp32":
            raise UsageError(
                f"{self.strategy!r}: pairs are simulated as ADPSGD() only, with an average in each "
                "step beside the next one, in float32; simulate that"
            )
        traffic = Traffic()
        run = simulate_pairs(
            self.model,
            self.cluster.layout,
            self.cluster.links,
            work=self.work,
            slow=self.cluster.slow_workers,
            iterations=_STEPS,
            warmup=2,
            seed=exchange.seed,
            encrypted=exchange.encrypted,
            traffic=traffic,
        )
        return run.iteration_s, run.waited * run.iteration_s, self._each(traffic, run.steps)

    def bounded(self, exchange: Bounded) -> _Result:
        """Predict the mean time of a gradient of each worker under bounded staleness."""
        self._whole_models()
        cluster = self.cluster
        if cluster.workers > cluster.hosts:
            raise UsageError(
                f"{self.strategy!r}: hosts with several workers are not simulated under bounded "
                "staleness; give one worker per host"
            )
        fusion = self.strategy.plan.fusion()
        layers = sum(bool(layer.tensors) for layer in self.model.layers)
        slow = cluster.slow_workers
        traffic = Traffic()
        run = simulate_bounded(
            self.model,
            exchange.thresholds(min(fusion.layers, layers)),
            cluster.workers,
            cluster.links,
            gradients=float(_STEPS * cluster.workers),
            coding=coding_of(self.strategy.wire),
            work=self.work,
            sleeps=lambda rank, _iteration: (slow.get(rank, 1.0) - 1) * self.compute_s,
            traffic=traffic,
            encrypted=exchange.encrypted,
        )
        waited = sum(run.waited_s) / max(1, sum(run.iterations))
        return run.seconds / _STEPS, waited, self._each(traffic, run.iterations)

    def _each(self, traffic: Traffic, steps: Sequence[int]) -> float:
        """Return the bytes of a host in an iteration, for the steps of all workers."""
        hosts, workers = self.cluster.hosts, len(steps)
        return sum(traffic.sent.values()) / hosts / (sum(steps) / workers)

    def _whole_models(self) -> None:
        if self.inside > 1:
            raise UsageError(
                f"{self.strategy!r}: replicas that are divided inside are not simulated with it; "
                "simulate AllReduce(), or leave inside out"
            )

    def _replicas(self) -> Cluster:
        """Return the cluster with a worker for each replica."""
        if self.inside == 1:
            return self.cluster
        return replace(self.cluster, layout=Layout.even(self.cluster.hosts, 1))
