"""What matrices cost that travel as sketched thin factors: by their shapes, not by their elements.

Finding factors is much more work for a byte of payload than sketching is. So each shape of matrix
that a model has is exchanged by itself, and weighs in a plan as many bytes as take the same time
otherwise (Canary, section 4.3.1, case 1, under the costs of OMGS-SGD).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wingbeat.codecs import Coding
from wingbeat.codecs.coding import Region, regions
from wingbeat.collectives import Collectives, Encoded
from wingbeat.compression import Coded, LowRank
from wingbeat.costs import Curve
from wingbeat.probe.exchange import LARGEST, Action, measure_exchange, reducing
from wingbeat.types import Span, TensorSpec

MOST = 8
"""Shapes that are measured, the largest of a model; others weigh their bytes."""

_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Matrix:
    """One shape of matrix, exchanged by itself as factors.

    Attributes:
        rows: of the matrix.
        cols: of the matrix.
        nbytes: of its payload.
        exchange_s: seconds until its sum is there, on the slowest worker.
    """

    rows: int
    cols: int
    nbytes: float
    exchange_s: float


def region_of(spec: TensorSpec, wire: Coded) -> Region | None:
    """Return how a tensor travels by itself; None where it is no matrix of factors."""
    found = regions(wire, [(spec.name, spec.shape)])
    return next((region for region in found if region.cols), None)


def payload_of(spec: TensorSpec, wire: Coded) -> float:
    """Return the bytes of a tensor's payload, travelling by itself."""
    coding = Coding(list(regions(wire, [(spec.name, spec.shape)])))
    return float(coding.room(Span(0, spec.numel))) if spec.numel else 0.0


def measure_matrices(
    collectives: Collectives,
    wire: str | Coded,
    way: str,
    specs: Sequence[TensorSpec],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Matrix, ...]:
    """Exchange a matrix of each of the model's largest shapes; all workers call it alike.

    Args:
        collectives: what training uses.
        wire: what gradients travel as; there are matrices with a `LowRank` alone, whose factors are
            sketched: those that are summed are measured as all else is, by `measure_wire`.
        way: as for `measure_wire`.
        specs: the model's tensors.
        device: where gradients are.
        dtype: what they are.

    Raises:
        PeerError: a peer failed, or sent something that is no measurement.
    """
    if not isinstance(wire, LowRank) or wire.summed:
        return ()
    found = {spec.shape: region_of(spec, wire) for spec in specs}
    known = [(shape, region) for shape, region in found.items() if region is not None]
    known = [each for each in known if len(each[1].span) <= LARGEST]
    # The largest, and these in rising order: none follows one that takes too long.
    largest = sorted(known, key=lambda each: (len(each[1].span), each[0]))[-MOST:]
    if not largest:
        return ()
    size = collectives.world.size
    room = -(-len(largest[-1][1].span) // size) * size
    generator = torch.Generator().manual_seed(0)  # the user's random state is left alone
    gradients = torch.randn(room, generator=generator).to(device, dtype)
    # All shapes share buffers: each exchange is over before the next begins.
    buffers, residuals = torch.empty_like(gradients), torch.zeros(room, device=device)

    def action(number: int) -> Action:
        region = largest[number][1]
        part = slice(0, -(-len(region.span) // size) * size)
        coding, buffer = Coding([region]), buffers[part]
        wired = Encoded(coding, residuals[part] if region.codec.feedback else None)
        start = reducing(collectives, way, buffer, wired)
        return Action(start, coding.room(region.span), lambda: buffer.copy_(gradients[part]))

    samples = measure_exchange(collectives, action, range(len(largest)), device=device)
    # What the call that starts it takes is none of the thread that runs backward's own work.
    return tuple(
        Matrix(shape[0], shape[1], nbytes, call + seconds)
        for (shape, _), (_, call), (nbytes, seconds) in zip(
            largest, samples.encode, samples.exchange, strict=False
        )
    )


def weight(shape: Sequence[int], nbytes: float, known: Sequence[Matrix], exchange: Curve) -> float:
    """Return how many bytes a tensor counts as: what takes as long as its shape did.

    Args:
        shape: the tensor's.
        nbytes: of its payload.
        known: what was measured.
        exchange: seconds by bytes of all that is no matrix.
    """
    seconds = next((m.exchange_s for m in known if (m.rows, m.cols) == tuple(shape)), None)
    if seconds is None or exchange(nbytes) >= seconds:
        return nbytes
    low, high = nbytes, max(1.0, nbytes)
    while exchange(high) < seconds:
        low, high = high, 2.0 * high
        if high > 2.0**60:  # costs do not grow with bytes
            return nbytes
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if exchange(middle) >= seconds else (middle, high)
    return high
