"""In which order parameters come back from servers, and what that does to an iteration.

The model of Geryon (Wang et al., section II-C, Eqs. 1 to 6): one worker's computation, a link that
carries its pushes and one that carries its pulls, both at once. Links are perfect and summing
costs nothing (it hides under the pushes, says the paper). Layers are in the order of execution;
the paper's layer l is number l - 1 here.

Two equations are wrong as printed, and corrected here:

- Eq. 4 lets layer L's push begin at ``t_ff^L``, when forward ends: before its gradient is there.
  It begins at ``t_b^L``, when backward has passed the layer; the rule for the other layers holds.
- Eq. 6 divides a number of parameters by a bandwidth. Here bytes are.

With as many servers as workers, one beside each, 1/n of the bytes stay on the host: a link of B
bytes/s then counts as ``B * n / (n - 1)``. Such a host's card carries its pushes and its server's
answers in the same direction. With ``at_start`` the two never meet; with ``when_ready`` they do,
which is not modelled: what it says is then too good, and ``floor_when_ready`` still a floor.

Priorities are classes as in `wingbeat.transport.messages`, 0 the most urgent.
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
    """What a worker's links carry, in bytes per second: pushes, and at the same time pulls.

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
    """When each layer's steps end, in seconds from the begin of what comes first.

    Attributes:
        pulled: its parameters are there, ``t_p``.
        forwarded: its forward has ended, ``t_ff``.
        passed: its backward has ended, ``t_b``.
        pushed: its gradient is with the servers, ``t_bf``.
        seconds: the whole iteration, ``tau_iter``.
    """

    pulled: tuple[float, ...]
    forwarded: tuple[float, ...]
    passed: tuple[float, ...]
    pushed: tuple[float, ...]
    seconds: float


# -- orders and classes ----------------------------------------------------------------------


def in_forward_order(count: int) -> list[int]:
    """Layers as forward needs them: the best order for pulls that begin together."""
    return list(range(count))


def in_reverse_order(count: int) -> list[int]:
    """Layers from the last to the first, the worst that the paper compares with."""
    return list(reversed(range(count)))


def in_random_order(count: int, seed: int) -> list[int]:
    """Layers as TensorFlow's concurrent graph pulls them: in no order. Equal for equal seeds."""
    return random.Random(seed).sample(range(count), count)


def classes_by_urgency(count: int, thresholds: Iterable[float]) -> list[int]:
    """Give each layer a class: how many thresholds its urgency, ``1 - l/L``, does not exceed.

    One threshold makes the paper's two priorities (section III-C), n of them make n + 1.

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
    """Say when what happens if all pulls begin with the iteration: Eqs. 1 to 5.

    Time 0 is the begin of the iteration, when every gradient of the one before has been pushed.
    Gradients are pushed in the order of backward: as all must be there before the iteration ends,
    no other order, and no priority among them, ends sooner. A layer without bytes waits for none.

    Args:
        layers: in the order of execution.
        rates: of the links.
        order: indices of the layers as they are pulled, each once: ``k`` in Eq. 1.
        classes: of each layer; a lower number is pulled first, and ``order`` decides within.

    Raises:
        UsageError: no layers, an order that is no permutation, classes of another number.
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
    """Seconds that no order of pulls gets under; forward order reaches it.

    For every layer l, forward cannot end before 1..l are pulled and l..L have run; nor the pushes
    before backward has reached l and what is not ready before has been sent.
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
    """Say when what happens if a slice's pull may begin when its push has ended.

    Pulls then run beside later pushes of the same backward, and the next forward waits for each
    layer. Time 0 is the begin of backward. The next one begins when forward has run, for which all
    parameters have come: no message is under way then, so all iterations are alike and one is
    enough. Each link serves the lowest class that waits, at once even amid a slice, and within a
    class what came first: pushes in the order of backward, pulls in the order of pushes' ends.

    Args:
        layers: in the order of execution.
        rates: of the links.
        classes: of each layer's pull; None for one class. A class for each layer enforces an order.
        push_classes: of each layer's push; None for one class.
        slice_bytes: layers of more bytes are cut evenly into the fewest slices not above it.

    Raises:
        UsageError: no layers, classes of another number, slices of no size.
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
    """Seconds that no order, class or slice gets under if pulls may begin when pushes end.

    For every layer l: what layers 1..l carry is not ready before backward has reached l, must pass
    both links, and l..L run after the last of it. With a class for each layer, of pushes as well,
    an iteration is above it by at most a slice's time on both links for each layer.
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
    """When each message has passed one link that serves strictly by class, lowest first.

    A more urgent one interrupts the others, which go on where they were. Within a class what was
    released first goes first; of the same moment, in the order given.
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
    """Eq. 2: a layer runs when the one before has and its parameters are there."""
    ends, now = [], begin
    for layer, there in zip(layers, pulled, strict=True):
        now = max(now, there) + layer.forward_s
        ends.append(now)
    return tuple(ends)


def _backward(layers: Sequence[LayerCosts], begin: float) -> tuple[float, ...]:
    """Eq. 3: backward waits for nothing; when it has passed each layer."""
    ends = list(accumulate((layer.backward_s for layer in reversed(layers)), initial=begin))
    return tuple(reversed(ends[1:]))


def _check(layers: Sequence[LayerCosts], classes: Sequence[int] | None) -> None:
    if not layers:
        raise UsageError("layers: there are none; allowed is at least one")
    if classes is not None and len(classes) != len(layers):
        raise UsageError(f"classes: {len(classes)} for {len(layers)} layers; allowed is one each")
