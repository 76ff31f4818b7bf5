"""Top-k: the same bytes from all kernels, and no bytes that do harm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.amounts import examples
from wingbeat.kernels import layout

from . import data
from .rig import Kernels, same_bits, same_values

SIZES = (0, 1, 2, 3, 1001, 65535, 65536, 65537, 131073)
DENSITIES = (0.001, 0.01, 0.3, 0.6)


def integers(*numbers: int, width: int) -> Tensor:
    """Numbers as little-endian bytes."""
    return torch.tensor(
        [byte for number in numbers for byte in number.to_bytes(width, "little")],
        dtype=torch.uint8,
    )


@pytest.mark.parametrize("name", data.ALL)
def test_same_bytes_as_the_reference(fast: Kernels, reference: Kernels, name: str) -> None:
    n = 1001
    x = data.values(name, n)
    for density in DENSITIES:
        k = layout.count_of(n, density)
        payload = fast.topk(x, k)
        assert torch.equal(payload, reference.topk(x, k))
        ours, theirs = fast.topk_decode(payload, n, k), reference.topk_decode(payload, n, k)
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("name", ["student", "ties", "constant", "nan"])
@pytest.mark.parametrize("n", SIZES)
def test_sizes(fast: Kernels, reference: Kernels, n: int, name: str) -> None:
    x = data.values(name, n)
    for k in sorted({layout.count_of(n, density) for density in (0.0, 0.01, 0.5, 1.0)}):
        residual, theirs = torch.zeros(n), torch.zeros(n)
        payload = fast.topk(x, k, residual=residual)
        assert torch.equal(payload, reference.topk(x, k, residual=theirs))
        assert same_bits(residual, theirs)
        assert same_values(fast.topk_decode(payload, n, k), reference.topk_decode(payload, n, k))


@pytest.mark.parametrize("k", [1, 2, 15, 500, 660, 999])
def test_of_equal_magnitudes_the_first_are_sent(kernels: Kernels, k: int) -> None:
    """+v and -v are equal, and so are all zeros: places decide."""
    n = 1001
    x = torch.where(torch.arange(n) % 2 == 0, 0.5, -0.5)
    x[:7] = 0.25
    if layout.topk_is_raw(n, k):
        assert same_bits(kernels.topk_decode(kernels.topk(x, k), n, k), x)
        return
    expected = torch.zeros(n)
    first = [*range(7, n), *range(7)][:k]
    expected[first] = x[first]
    assert same_values(kernels.topk_decode(kernels.topk(x, k), n, k), expected)


def test_order_is_nan_infinite_finite(kernels: Kernels) -> None:
    x = data.values("student", 1001)
    x[[900, 40]] = torch.tensor([torch.nan, -torch.nan])
    x[[800, 20]] = torch.tensor([-torch.inf, torch.inf])
    x[700] = 3e38
    for k, sent in ((2, {40, 900}), (4, {20, 40, 800, 900}), (5, {20, 40, 700, 800, 900})):
        decoded = kernels.topk_decode(kernels.topk(x, k), 1001, k)
        assert set(decoded.nonzero().flatten().tolist()) == sent
        assert same_bits(decoded[list(sent)], x[list(sent)])


def test_the_last_bit_decides(kernels: Kernels) -> None:
    """Denormals too: what compares is bits, not values."""
    x = torch.zeros(1001)
    for base in (1.0, 3e38, 1e-45):
        x[10] = base
        x[20] = -torch.nextafter(x[10], torch.tensor(torch.inf))
        decoded = kernels.topk_decode(kernels.topk(x, 1), 1001, 1)
        assert decoded.nonzero().flatten().tolist() == [20]
        assert same_bits(decoded[20:21], x[20:21])


@pytest.mark.parametrize("name", data.ALL)
def test_residual_is_what_was_not_sent(kernels: Kernels, name: str) -> None:
    n = 1001
    x, residual = data.values(name, n), 0.1 * data.values("student", n, seed=2)
    for k in (1, 50, 400, 900):
        acc = x + residual
        payload = kernels.topk(x, k, residual=residual)
        decoded = kernels.topk_decode(payload, n, k)
        left = acc - decoded
        assert same_values(residual, torch.where(left.isfinite(), left, 0.0))
        assert int((decoded != 0).sum()) <= (n if layout.topk_is_raw(n, k) else k)


def test_nothing_is_lost_over_many_rounds(kernels: Kernels) -> None:
    n, k, rounds = 1001, 20, 40
    residual = torch.zeros(n)
    sent, wanted = torch.zeros(2, n, dtype=torch.float64)
    for seed in range(rounds):
        x = data.values("student", n, seed=seed + 10)
        sent += kernels.topk_decode(kernels.topk(x, k, residual=residual), n, k)
        wanted += x
    assert float(residual.abs().max()) > 0.0
    allowed = rounds * 2**-24 * float(wanted.abs().max() + residual.abs().max())
    assert float((sent + residual - wanted).abs().max()) <= allowed


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.7])
@pytest.mark.parametrize("k", [13, 900])
def test_velocity(kernels: Kernels, reference: Kernels, momentum: float, k: int) -> None:
    """Bit for bit over some rounds, one of them broken; and as the two lines of the paper say."""
    n = 1001
    ours = {"residual": torch.zeros(n), "velocity": torch.zeros(n)}
    theirs = {name: t.clone() for name, t in ours.items()}
    for seed, name in enumerate(("student", "laplace", "everything", "normal", "ties")):
        x = data.values(name, n, seed=seed)
        velocity = (ours["velocity"].double() * momentum + x.double()).float()
        acc = velocity + ours["residual"]
        payload = kernels.topk(x, k, momentum=momentum, **ours)
        assert torch.equal(payload, reference.topk(x, k, momentum=momentum, **theirs))
        assert all(same_bits(ours[which], theirs[which]) for which in ours)
        assert all(bool(t.isfinite().all()) for t in ours.values())
        decoded = kernels.topk_decode(payload, n, k)
        kept = (decoded == 0) & acc.isfinite()
        if layout.topk_is_raw(n, k):
            assert not ours["velocity"].any()
            continue
        torch.testing.assert_close(ours["residual"][kept], acc[kept], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours["velocity"][kept], velocity[kept], rtol=1e-5, atol=1e-6)
        assert not ours["velocity"][~kept].any()


@pytest.mark.parametrize(("n", "k"), [(3, 3), (1001, 40), (65537, 100)])
def test_adding(kernels: Kernels, n: int, k: int) -> None:
    x, onto = data.values("normal", n), data.values("normal", n, seed=3)
    payload = kernels.topk(x, k)
    decoded = kernels.topk_decode(payload, n, k)
    assert same_bits(kernels.topk_decode(payload, n, k, onto=onto), onto + decoded)


MALFORMED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "fewer than k": ((2, 0, 0), (0, 7, 2)),
    "more than k": ((2, 1, 1), (0, 7, 2)),
    "sums to k in 32 bits only": ((2**32 - 1, 2, 2), (0, 7, 2)),
    "a block with more than it can hold": ((65537, 2**32 - 65537, 3), (0, 7, 2)),
    "equal indices": ((2, 0, 1), (7, 7, 2)),
    "descending within a block": ((2, 1, 0), (7, 0, 2)),
    "the last one beyond n": ((2, 0, 1), (0, 7, 3)),
    "far beyond n": ((0, 0, 3), (0, 1, 65535)),
}


@pytest.mark.parametrize("which", MALFORMED)
def test_malformed_payloads_are_refused(kernels: Kernels, which: str) -> None:
    """Two whole blocks and one of three values, of which three are sent."""
    n, k = 2 * 65536 + 3, 3
    counts, offsets = MALFORMED[which]
    payload = torch.cat(
        [
            torch.ones(k).view(torch.uint8),
            integers(*counts, width=4),
            integers(*offsets, width=2),
        ]
    )
    for onto in (None, data.values("normal", n)):
        with pytest.raises(ValueError, match="payload"):
            kernels.topk_decode(payload, n, k, onto=onto)


def test_the_well_formed_neighbour_is_not_refused(kernels: Kernels) -> None:
    n, k = 2 * 65536 + 3, 3
    payload = torch.cat(
        [
            torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8),
            integers(2, 0, 1, width=4),
            integers(0, 7, 2, width=2),
        ]
    )
    decoded = kernels.topk_decode(payload, n, k)
    assert decoded.nonzero().flatten().tolist() == [0, 7, n - 1]
    assert decoded[[0, 7, n - 1]].tolist() == [1.0, 2.0, 3.0]


def outcome(kernels: Kernels, payload: Tensor, n: int, k: int) -> Tensor | None:
    """What is read, or None if the payload is refused."""
    try:
        return kernels.topk_decode(payload, n, k)
    except ValueError:
        return None


@settings(deadline=None, max_examples=examples(80))
@given(
    n=st.sampled_from([2, 10, 300, 65536, 65537, 131080]),
    fraction=st.floats(0.0, 0.002),
    changes=st.lists(
        st.tuples(st.integers(0, 2**16), st.integers(0, 255), st.booleans()), max_size=4
    ),
)
def test_any_bytes_are_read_or_refused(
    kernels: Kernels,
    reference: Kernels,
    n: int,
    fraction: float,
    changes: list[tuple[int, int, bool]],
) -> None:
    """A payload with some bytes changed, most in counts and offsets: both agree what it is."""
    k = layout.count_of(n, fraction)
    payload = reference.topk(data.values("student", n), k)
    for place, byte, anywhere in changes:
        begin = 0 if anywhere or layout.topk_is_raw(n, k) else 4 * k
        payload[begin + place % (payload.numel() - begin)] = byte
    ours, theirs = outcome(kernels, payload, n, k), outcome(reference, payload, n, k)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert same_bits(ours, theirs)


@settings(deadline=None, max_examples=examples(60))
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 300), k=st.integers(1, 100))
def test_noise_is_read_or_refused(
    kernels: Kernels, reference: Kernels, seed: int, n: int, k: int
) -> None:
    k = min(n, k)
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(256, (layout.topk_bytes(n, k),), dtype=torch.uint8, generator=generator)
    ours, theirs = outcome(kernels, payload, n, k), outcome(reference, payload, n, k)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert same_bits(ours, theirs)


@settings(deadline=None, max_examples=examples(60))
@given(
    numbers=st.lists(st.floats(width=32), min_size=1, max_size=60),
    share=st.floats(0.0, 1.0),
    feedback=st.booleans(),
)
def test_any_values(
    kernels: Kernels, reference: Kernels, numbers: list[float], share: float, feedback: bool
) -> None:
    x = torch.tensor(numbers)
    n = x.numel()
    k = layout.count_of(n, share)
    ours = torch.ones(n) if feedback else None
    theirs = torch.ones(n) if feedback else None
    payload = kernels.topk(x, k, residual=ours)
    assert torch.equal(payload, reference.topk(x, k, residual=theirs))
    if ours is not None and theirs is not None:
        assert same_bits(ours, theirs)
        assert bool(ours.isfinite().all())
    assert same_bits(kernels.topk_decode(payload, n, k), reference.topk_decode(payload, n, k))
