"""The order in which parameters are pulled from servers, and its effect on an iteration.

This is the model of Geryon (Wang et al., section II-C, Eqs. 1 to 6): the computation of one worker,
a link for its pushes and, concurrently, a link for its pulls. Links are ideal, and summing takes no
time (in the paper, the pushes hide it). Layers are in the order of execution; the paper's layer l
has index l - 1 here.

Two equations are corrected:

- Eq. 4 starts layer L's push at ``t_ff^L``, the end of forward, before its gradient exists. Here it
  starts at ``t_b^L``, when backward has passed the layer, as for the other layers.
- Eq. 6 divides a number of parameters by a bandwidth. Here it is the number of bytes.

With one server on each worker's host, 1/n of the bytes stay on the host: a link of B bytes/s counts
as ``B * n / (n - 1)``. The host's NIC then carries its pushes and its server's responses in the
same direction. With ``at_start`` they never overlap. With ``when_ready`` they do, which is not
modelled: its result is too short, and ``floor_when_ready`` remains a lower bound.

Priorities are classes as in `wingbeat.transport.messages`; 0 is the most urgent.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from wingbeat.errors import UsageError
from wingbeat_lab.layer_costs import LayerCosts, backward_floor, forward_floor


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a worker's links for pushes and, concurrently, pulls, in bytes per second.

    Raises:
        UsageError: a rate is not above 0.
    """

    push: float
    pull: float

    def __post_init__(self) -> None:
        for name, rate in (("push", self.push), ("pull", self.pull)):
            if not rate > 0:
                raise UsageError(f"{name} rate {rate!r}: allowed is more than 0 bytes/s")


@dataclass(frozen=True, slots=True)
class Iteration:
    """The end of each layer's steps, in seconds from the start of the first step.

    Attributes:
        pulled: the layer's parameters have arrived, ``t_p``.
        forwarded: its forward has ended, ``t_ff``.
        passed: its backward has ended, ``t_b``.
        pushed: its gradient has reached the servers, ``t_bf``.
        seconds: duration of the whole iteration, ``tau_iter``.
    """

    pulled: tuple[float, ...]
    forwarded: tuple[float, ...]
    passed: tuple[float, ...]
    pushed: tuple[float, ...]
    seconds: float


# -- orders and classes ----------------------------------------------------------------------


def in_forward_order(count: int) -> list[int]:
    """Return the layers in forward order, which is optimal for pulls that start together."""
    return list(range(count))


def in_reverse_order(count: int) -> list[int]:
    """Return the layers from the last to the first, the worst order in the paper's comparison."""
    return list(reversed(range(count)))


def in_random_order(count: int, seed: int) -> list[int]:
    """Return the layers in a random order, as TensorFlow pulls them; equal for equal seeds."""
    return random.Random(seed).sample(range(count), count)


def classes_by_urgency(count: int, thresholds: Iterable[float]) -> list[int]:
    """Return each layer's class: how many thresholds its urgency, ``1 - l/L``, does not exceed.

    One threshold gives the paper's two priorities (section III-C), n thresholds give n + 1.

    >>> classes_by_urgency(4, [0.5])
    [0, 1, 1, 1]
    >>> classes_by_urgency(4, [0.5, 0.25])
    [0, 1, 2, 2]
    """
    limits = list(thresholds)
    urgencies = [(count - number) / count for number in range(1, count + 1)]
    return [sum(urgency <= limit for limit in limits) for urgency in urgencies]


# -- pulls at the start of an iteration ------------------------------------------------------


def at_start(
    layers: Sequence[LayerCosts],
    rates: Rates,
    order: Sequence[int],
    classes: Sequence[int] | None = None,
) -> Iteration:
    """Return the timing of an iteration at whose start all pulls begin: Eqs. 1 to 5.

    Time 0 is the start of the iteration, when all gradients of the previous one have been pushed.
    Gradients are pushed in the order of backward. The iteration ends when all are pushed, so no
    other order or priority ends sooner. A layer without bytes waits for no pull. Layers are pulled
    by ascending class, and within a class in ``order``, which is ``k`` in Eq. 1.

    Raises:
        UsageError: no layers, ``order`` is not a permutation, or ``classes`` has another length.
    """
    _check(layers, classes)
    if sorted(order) != list(range(len(layers))):
        raise UsageError(
            f"order {list(order)}: allowed is each of the layers 0 to {len(layers) - 1} once"
        )
    if classes is not None:
        order = sorted(order, key=lambda layer: classes[layer])
    pulled = [0.0] * len(layers)
    bytes_so_far = accumulate(layers[layer].nbytes for layer in order)
    for layer, nbytes in zip(order, bytes_so_far, strict=True):  # Eq. 1
        pulled[layer] = nbytes / rates.pull if layers[layer].nbytes else 0.0
    forwarded = _forward(layers, 0.0, pulled)
    passed = _backward(layers, forwarded[-1])
    pushed = [0.0] * len(layers)
    ended = 0.0
    for layer in reversed(range(len(layers))):  # Eq. 4, from t_b for layer L too
        ended = max(ended, passed[layer]) + layers[layer].nbytes / rates.push
        pushed[layer] = ended
    return Iteration(tuple(pulled), forwarded, passed, tuple(pushed), ended)  # Eq. 5


def floor_at_start(layers: Sequence[LayerCosts], rates: Rates) -> float:
    """Return a lower bound in seconds for all orders of pulls; forward order reaches it.

    For every layer l, forward ends after 1..l are pulled and l..L have run. The pushes end after
    backward has reached l and all gradients that were not ready before are sent.
    """
    return forward_floor(layers, 1.0 / rates.pull) + backward_floor(layers, 1.0 / rates.push)


# -- pulls as soon as something is pushed ----------------------------------------------------


def when_ready(
    layers: Sequence[LayerCosts],
    rates: Rates,
    classes: Sequence[int] | None = None,
    push_classes: Sequence[int] | None = None,
    slice_bytes: float = math.inf,
) -> Iteration:
    """Return the timing of an iteration in which a slice is pulled as soon as its push has ended.

    Pulls overlap with later pushes of the same backward, and the next forward waits for each layer.
    Time 0 is the start of backward. The next backward starts after forward, when all parameters
    have arrived and no message is in flight, so all iterations are alike. Each link serves the
    lowest waiting class first, with preemption inside a slice. Within a class it serves pushes in
    the order of backward and pulls in the order of the pushes' ends. One class per layer enforces
    an order. Layers of more than ``slice_bytes`` are cut evenly into the fewest slices.

    Raises:
        UsageError: no layers, classes of another length, or ``slice_bytes`` is not above 0.
    """
    _check(layers, classes)
    _check(layers, push_classes)
    if not slice_bytes > 0:
        raise UsageError(f"slice_bytes {slice_bytes!r}: allowed is more than 0 bytes")
    passed = _backward(layers, 0.0)
    slices = [
        (layer, layers[layer].nbytes / count)
        for layer in reversed(range(len(layers)))
        for count in [math.ceil(layers[layer].nbytes / slice_bytes) or 1]
        for _ in range(count)
        if layers[layer].nbytes
    ]
    push_ends = serve(
        [passed[layer] for layer, _ in slices],
        [nbytes / rates.push for _, nbytes in slices],
        [push_classes[layer] if push_classes else 0 for layer, _ in slices],
    )
    pull_ends = serve(
        push_ends,
        [nbytes / rates.pull for _, nbytes in slices],
        [classes[layer] if classes else 0 for layer, _ in slices],
    )
    pulled, pushed = [0.0] * len(layers), list(passed)
    for (layer, _), push_end, pull_end in zip(slices, push_ends, pull_ends, strict=True):
        pushed[layer] = max(pushed[layer], push_end)
        pulled[layer] = max(pulled[layer], pull_end)
    forwarded = _forward(layers, passed[0], pulled)
    return Iteration(tuple(pulled), forwarded, passed, tuple(pushed), forwarded[-1])


def floor_when_ready(layers: Sequence[LayerCosts], rates: Rates) -> float:
    """Return a lower bound in seconds for all orders, classes and slices of `when_ready`.

    For every layer l, the bytes of layers 1..l are not ready before backward has reached l, must
    pass both links, and l..L run after the last of them. With one class per layer, also for pushes,
    an iteration exceeds the bound by at most the time of a slice on both links per layer.
    """
    slower = min(rates.push, rates.pull)
    ready = sum(layer.backward_s for layer in layers)
    left = sum(layer.forward_s for layer in layers)
    worst = nbytes = 0.0
    for layer in layers:
        nbytes += layer.nbytes
        worst = max(worst, ready + nbytes / slower + left)
        ready -= layer.backward_s
        left -= layer.forward_s
    return worst


def serve(
    released: Sequence[float], seconds: Sequence[float], classes: Sequence[int]
) -> list[float]:
    """Return when each message has passed a link with strict priority by class, lowest first.

    A more urgent message preempts others, which resume later. Within a class, messages are served
    by release time, then in the given order.
    """
    arriving = sorted(range(len(released)), key=lambda job: released[job])
    rank = {job: place for place, job in enumerate(arriving)}
    left, ended = list(seconds), [0.0] * len(released)
    waiting: list[tuple[int, int, int]] = []
    now, come = 0.0, 0
    while waiting or come < len(arriving):
        if not waiting:
            now = max(now, released[arriving[come]])
        while come < len(arriving) and released[arriving[come]] <= now:
            job = arriving[come]
            heapq.heappush(waiting, (classes[job], rank[job], job))
            come += 1
        job = waiting[0][2]
        until = released[arriving[come]] if come < len(arriving) else math.inf
        if now + left[job] <= until:
            now += left[job]
            ended[job] = now
            heapq.heappop(waiting)
        else:
            left[job] -= until - now
            now = until
    return ended


def _forward(
    layers: Sequence[LayerCosts], begin: float, pulled: Sequence[float]
) -> tuple[float, ...]:
    """Eq. 2: a layer runs after the previous one, when its parameters have arrived."""
    ends, now = [], begin
    for layer, there in zip(layers, pulled, strict=True):
        now = max(now, there) + layer.forward_s
        ends.append(now)
    return tuple(ends)


def _backward(layers: Sequence[LayerCosts], begin: float) -> tuple[float, ...]:
    """Eq. 3: the time at which backward, which never waits, has passed each layer."""
    ends = list(accumulate((layer.backward_s for layer in reversed(layers)), initial=begin))
    return tuple(reversed(ends[1:]))


def _check(layers: Sequence[LayerCosts], classes: Sequence[int] | None) -> None:
    if not layers:
        raise UsageError("layers: there are none; allowed is at least one")
    if classes is not None and len(classes) != len(layers):
        raise UsageError(f"classes: {len(classes)} for {len(layers)} layers; allowed is one each")
