"""Lower bounds of the iteration time, one for each kind of schedule.

Links are assumed perfect (no latency, no headers, the full line rate) and messages fluid (divisible
anywhere, sent in the best order). A real run exceeds the bound by the cost of headers and latency.
Shards are assumed equal: every worker reduces 1/P of the gradients.

Layers are in the order of execution. The bounds are layer by layer: a gradient cannot be sent
before backward has computed it, and a layer cannot run before its parameters have arrived. Without
this constraint the result is the formula of DeAR (Zhang et al., 2023), the denominator of Eq. 6:
``simple``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wingbeat.errors import UsageError
from wingbeat_lab.layer_costs import LayerCosts, backward_floor, forward_floor


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound of one kind of exchange.

    Attributes:
        formula: as text for the report.
        floor: seconds of the shortest iteration, layer by layer.
        simple: the same from the sums over layers only.
    """

    formula: str
    floor: Callable[[Sequence[LayerCosts], float], float]
    simple: Callable[[Sequence[LayerCosts], float], float]


TERMS = (
    "t_ff, t_bp: forward and backward time; t_rs = t_ag = t_ar/2 = (H-1)/H * bytes / rate of the"
    " slowest of the H hosts (all its rails together), or of a trunk where that takes longer"
)
"""The symbols in a formula."""


def seconds_per_byte(
    host_rates: Sequence[float], trunks: Sequence[tuple[int, float]] = ()
) -> float:
    """Seconds of a perfect reduce-scatter (or all-gather) for each byte of its input.

    With H hosts, whatever the number of workers on each, a host sends its sums for all shards on
    other hosts: (H-1)/H of the bytes. A group of h hosts behind a trunk sends the (H-h)/H outside
    of the group and receives the h/H inside.

    Args:
        host_rates: each host's rate over all its interfaces, bytes per second, each direction.
        trunks: for each leaf switch, its number of hosts and its trunk's rate in bytes per second.

    Raises:
        UsageError: there is no host, or one has no rate.

    >>> seconds_per_byte([125e6] * 4) * 100e6
    0.6
    """
    hosts = len(host_rates)
    if not hosts or min(host_rates) <= 0:
        raise UsageError(f"host rates {list(host_rates)}: need at least one, all above 0 bytes/s")
    slowest = (hosts - 1) / hosts / min(host_rates)
    crossing = [
        max(inside, hosts - inside) / hosts / rate for inside, rate in trunks if inside < hosts
    ]
    return max([slowest, *crossing])


def floor(kind: str, layers: Sequence[LayerCosts], per_byte: float) -> float | None:
    """Shortest iteration in seconds with a bound of this kind; None if the kind has no bound.

    ``layers`` are in forward order; ``per_byte`` is from ``seconds_per_byte``.
    """
    return BOUNDS[kind].floor(layers, per_byte) if kind in BOUNDS else None


def simple(kind: str, layers: Sequence[LayerCosts], per_byte: float) -> float | None:
    """The bound from sums only: DeAR's Eq. 6, and its form for whole all-reduces."""
    return BOUNDS[kind].simple(layers, per_byte) if kind in BOUNDS else None


def three_cases(forward_s: float, gather_s: float) -> tuple[int, float]:
    """What DeAR saves of an iteration over whole all-reduces: Eq. 9 (section VI-I).

    This is ``simple`` of "whole" (Eq. 8) minus that of "halves" (Eq. 7), under the paper's
    assumptions t_rs = t_ag and t_bp = 2 t_ff. The paper's "can always outperform" contradicts its
    formula: in the first case both hide everything. The formula is correct. With other ratios of
    backward to forward DeAR may be slower, which ``simple`` accounts for.

    Args:
        forward_s: t_ff in seconds.
        gather_s: t_ag in seconds.

    Returns:
        Which case holds, from 1 (t_ag <= t_ff) to 3 (t_ag > 2 t_ff), and the seconds saved: none,
        t_ag - t_ff, or t_ff, the maximum.

    Raises:
        UsageError: a time is negative or not a number.

    >>> three_cases(2.0, 1.0), three_cases(2.0, 3.0), three_cases(2.0, 5.0)
    ((1, 0.0), (2, 1.0), (3, 2.0))
    """
    if not (forward_s >= 0 and gather_s >= 0):
        raise UsageError(
            f"t_ff = {forward_s} s, t_ag = {gather_s} s: allowed are numbers of seconds from 0 on"
        )
    if gather_s <= forward_s:
        return 1, 0.0
    if gather_s <= 2 * forward_s:
        return 2, gather_s - forward_s
    return 3, forward_s


def _compute(layers: Sequence[LayerCosts], _per_byte: float) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def _whole(layers: Sequence[LayerCosts], per_byte: float) -> float:
    return sum(layer.forward_s for layer in layers) + backward_floor(layers, 2 * per_byte)


def _halves(layers: Sequence[LayerCosts], per_byte: float) -> float:
    return backward_floor(layers, per_byte) + forward_floor(layers, per_byte)


def _late(layers: Sequence[LayerCosts], per_byte: float) -> float:
    """Pushes start when backward has computed them, sums must arrive before forward needs them.

    A host's interface carries its worker's pushes and its server's sums in the same direction.
    """
    worst = max(_compute(layers, per_byte), 2 * per_byte * sum(layer.nbytes for layer in layers))
    behind = 0.0
    below = sum(layer.nbytes for layer in layers)
    for layer in reversed(layers):
        behind += layer.backward_s + layer.forward_s
        worst = max(worst, behind + 2 * per_byte * below)
        below -= layer.nbytes
    return worst


def _simple_late(layers: Sequence[LayerCosts], per_byte: float) -> float:
    forward, backward, half = _sums(layers, per_byte)
    return max(forward + backward, 2 * half)


def _simple_whole(layers: Sequence[LayerCosts], per_byte: float) -> float:
    forward, backward, half = _sums(layers, per_byte)
    return forward + max(backward, 2 * half)


def _simple_halves(layers: Sequence[LayerCosts], per_byte: float) -> float:
    forward, backward, half = _sums(layers, per_byte)
    return max(forward, half) + max(backward, half)


def _sums(layers: Sequence[LayerCosts], per_byte: float) -> tuple[float, float, float]:
    forward = sum(layer.forward_s for layer in layers)
    backward = sum(layer.backward_s for layer in layers)
    return forward, backward, per_byte * sum(layer.nbytes for layer in layers)


BOUNDS = {
    "single": Bound("t_ff + t_bp (no communication)", _compute, _compute),
    "whole": Bound(
        "t_ff + max over layers l of (time backward needs to reach the end of l"
        " + t_ar of the gradients that are not ready before), at least t_ff + t_bp",
        _whole,
        _simple_whole,
    ),
    "halves": Bound(
        "max over l of (time backward needs to reach the end of l + t_rs of the gradients that are"
        " not ready before), at least t_bp; plus max over l of (t_ag of layers 1..l + forward of"
        " layers l..L), at least t_ff; never less than Eq. 6's max(t_bp, t_rs) + max(t_ff, t_ag)",
        _halves,
        _simple_halves,
    ),
    "late": Bound(
        "max over layers l of (backward and forward of layers l..L + t_ar of layers 1..l), at least"
        " t_ff + t_bp, and at least t_ar of all",
        _late,
        _simple_late,
    ),
    "stale": Bound(
        "t_ff + t_bp: for a while a worker may be ahead of the others, and wait for nothing",
        _compute,
        _compute,
    ),
    "local": Bound(
        "t_ff + t_bp: models may be averaged under computation, in a group or periodically",
        _compute,
        _compute,
    ),
    "fsdp": Bound(
        "max(t_ff, t_ag) + max(t_bp, t_rs): parameters gathered once in forward",
        _simple_halves,
        _simple_halves,
    ),
}
"""The bound of each value of `wingbeat.traits.Traits.bound`."""


def low_rank_bytes(shape: Sequence[int], rank: int, itemsize: int = 4) -> int:
    """Bytes of one tensor under PyTorch's PowerSGD hook: two factors, if those halve it.

    The hook views a tensor as a matrix of ``shape[0]`` rows and never compresses vectors
    (``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook._should_compress``).
    """
    numel = 1
    for size in shape:
        numel *= size
    if len(shape) <= 1 or not numel:
        return numel * itemsize
    rows, columns = shape[0], numel // shape[0]
    factors = (rows + columns) * rank
    return (factors if factors * 2 < numel else numel) * itemsize
