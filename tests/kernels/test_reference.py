"""The reference against the design written down once more, value by value, in plain Python."""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from wingbeat.kernels import layout, reference
from wingbeat.kernels.reference import KEYS, bins, codebook

N = 400


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Many small operations are slowed down by threads, not sped up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def value_of(key: int, low: int) -> float:
    """The float with these leading and trailing 16 bits; 2**128 for infinity's."""
    if key & 0x7FFF == 0x7F80:
        return math.copysign(2.0**128, 1 - (key >> 15) * 2)
    return float(struct.unpack("<f", struct.pack("<I", key << 16 | low))[0])


def key_of(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0]) >> 16


def middle(key: int) -> float:
    return 0.0 if key in (0, 0x8000) else value_of(key, 0x8000)


def ends(key: int) -> tuple[float, float]:
    near, far = value_of(key, 0), value_of(key + 1, 0)
    return (near, far) if key < 0x8000 else (far, near)


ASCENDING = [*range(0xFFFF, 0x7FFF, -1), *range(0x8000)]
ORDER = {key: place for place, key in enumerate(ASCENDING)}


def plain_sketch(xs: list[float], bits: int, split: str, level: str) -> list[float]:
    """What arrives of ``xs``."""
    counts = Counter(key_of(x) for x in xs)
    broken = {key for key in counts if key & 0x7FFF >= 0x7F80}
    zeros = {0, 0x8000}
    reserve = sum(counts[key] for key in zeros) * 2**bits >= len(xs)
    out = broken | (zeros if reserve else set())
    free = 2**bits - bool(broken) - reserve
    here = sorted((key for key in counts if key not in out), key=ORDER.__getitem__)
    if free == 0:
        arrives = dict.fromkeys(here, 0.0)
    else:
        code = split_count(counts, here, free) if split == "count" else None
        code = code or split_error(counts, here, free, reserve)
        arrives = {key: level_of(counts, here, code, code[key], level) for key in here}
    arrives |= dict.fromkeys(broken, math.nan)
    if reserve:
        arrives |= dict.fromkeys(zeros, 0.0)
    return [arrives[key_of(x)] for x in xs]


def level_of(
    counts: Counter[int], here: list[int], code: dict[int, int], which: int, level: str
) -> float:
    members = [key for key in here if code[key] == which]
    if level == "ends":
        return (ends(members[0])[0] + ends(members[-1])[1]) / 2
    total = sum(counts[key] for key in members)
    return sum(counts[key] * middle(key) for key in members) / total


def split_count(counts: Counter[int], here: list[int], free: int) -> dict[int, int]:
    total, before, code = sum(counts[key] for key in here), 0, {}
    for key in here:
        code[key] = min(free - 1, free * (2 * before + counts[key]) // (2 * total))
        before += counts[key]
    return code


def split_error(counts: Counter[int], here: list[int], free: int, reserved: bool) -> dict[int, int]:
    if len(here) <= free:
        return {key: i for i, key in enumerate(here)}
    weight = weights(counts, here, reserved)
    total, before, code = math.fsum(weight.values()), 0.0, {}
    for key in ASCENDING:
        if key in weight:
            code[key] = min(free - 1, math.floor(free * (before + weight[key] / 2) / total))
            before += weight[key]
    for _ in range(3):
        levels = [level_of(counts, here, code, c, "mean") for c in sorted({code[k] for k in here})]
        boundaries = [(a + b) / 2 for a, b in pairwise(levels)]
        code = {key: bisect_right(boundaries, middle(key)) for key in here}
    return code


def weights(counts: Counter[int], here: list[int], reserved: bool) -> dict[int, float]:
    """Of all bins in runs with something in them; the others weigh nothing."""
    weight: dict[int, float] = {}
    for run in {ORDER[key] // 16 for key in here}:
        keys = [
            key
            for key in ASCENDING[16 * run : 16 * run + 16]
            if key & 0x7FFF < 0x7F80 and not (reserved and key & 0x7FFF == 0)
        ]
        width = {key: ends(key)[1] - ends(key)[0] for key in keys}
        density = sum(counts[key] for key in keys) / sum(width.values())
        weight |= {key: math.pow(density, 1 / 3) * width[key] for key in keys}
    return weight


def sample(kind: str, n: int) -> Tensor:
    x = torch.randn(n) ** 3
    if kind == "zeros":
        x[torch.rand(n) < 0.3] = 0.0
    if kind == "broken":
        x[torch.rand(n) < 0.1] = torch.tensor(-torch.inf)
        x[torch.rand(n) < 0.1] = torch.tensor(torch.nan)
    if kind == "all":
        x[torch.rand(n) < 0.6] = -0.0
        x[torch.rand(n) < 0.1] = torch.nan
    if kind == "wide":
        x = x.sign() * 10.0 ** (76 * torch.rand(n) - 38)
    if kind == "few":
        x = torch.randint(-3, 4, (n,)) * 0.7
    return x


@pytest.mark.parametrize("split", ["count", "error"])
@pytest.mark.parametrize("level", ["mean", "ends"])
@pytest.mark.parametrize("kind", ["plain", "zeros", "broken", "all", "wide", "few"])
def test_sketch_is_the_design(kind: str, level: str, split: str) -> None:
    x = sample(kind, N)
    for bits in (1, 2, 5, 8):
        payload = torch.empty(layout.sketch_bytes(N, bits), dtype=torch.uint8)
        out = torch.empty(N)
        reference.sketch_encode(x, payload, bits=bits, split=split, level=level)
        reference.sketch_decode(payload, out, bits=bits)
        expected = torch.tensor(plain_sketch(x.tolist(), bits, split, level), dtype=torch.float64)
        scale = float(x[x.isfinite()].abs().max())
        torch.testing.assert_close(
            out, expected.float(), rtol=1e-6, atol=1e-12 * scale, equal_nan=True
        )


@pytest.mark.parametrize("zeros", [99, 100])
def test_zeros_have_a_code_from_their_share_on(zeros: int) -> None:
    """Two bits: from a quarter on."""
    x = torch.linspace(-1.0, 1.0, N)
    x[150 : 150 + zeros] = 0.0
    payload, out = torch.empty(layout.sketch_bytes(N, 2), dtype=torch.uint8), torch.empty(N)
    reference.sketch_encode(x, payload, bits=2, split="count")
    reference.sketch_decode(payload, out, bits=2)
    expected = torch.tensor(plain_sketch(x.tolist(), 2, "count", "mean"))
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-12)
    assert (float(out[150]) == 0.0) is (zeros == 100)


def test_the_bytes_of_a_sketch() -> None:
    """Two bits: the table, then four codes a byte, the first in the lowest bits."""
    x = torch.tensor([0.0, 1.0, 2.0, torch.nan] * 5 + [0.0])
    payload = torch.empty(layout.sketch_bytes(21, 2), dtype=torch.uint8)
    reference.sketch_encode(x, payload, bits=2)
    table = [1 + 2**-8, 2 + 2**-7, 0.0]
    assert struct.unpack("<4f", bytes(payload[:16].tolist()))[:3] == tuple(table)
    assert math.isnan(struct.unpack("<4f", bytes(payload[:16].tolist()))[3])
    # 1.0 is code 0, 2.0 code 1, zero 2 and NaN 3.
    assert payload[16:].tolist() == [0b11_01_00_10] * 5 + [0b10]


def test_the_bytes_of_topk() -> None:
    x = torch.zeros(70_000)
    x[[3, 65_535, 65_536, 69_999]] = torch.tensor([4.0, -1.0, 3.0, -2.0])
    payload = torch.empty(layout.topk_bytes(70_000, 3), dtype=torch.uint8)
    reference.topk_encode(x, payload, k=3)
    assert bytes(payload.tolist()) == struct.pack("<3f2I3H", 4.0, 3.0, -2.0, 1, 2, 3, 0, 4463)


@pytest.mark.parametrize("k", [1, 7, 100, 450])
def test_topk_is_the_k_largest(k: int) -> None:
    x = (torch.randn(700) * 4).round() / 4
    payload, out = torch.empty(layout.topk_bytes(700, k), dtype=torch.uint8), torch.empty(700)
    reference.topk_encode(x, payload, k=k)
    reference.topk_decode(payload, out, k=k)
    largest = sorted(range(700), key=lambda i: (-abs(float(x[i])), i))[:k]
    assert out.tolist() == [float(x[i]) if i in set(largest) else 0.0 for i in range(700)]


def test_bins_touch_and_ascend() -> None:
    b = bins(torch.device("cpu"))
    assert torch.equal(b.key, torch.tensor(ASCENDING))
    finite = b.finite.nonzero().flatten()
    assert torch.equal(b.high[finite[:-1]], b.low[finite[1:]])
    assert bool((b.low[finite] < b.high[finite]).all())
    for key in (0, 0x8000, 1, 0x8001, 0x3F80, 0xBFFF, 0x7F7F, 0xFF7F):
        i = ORDER[key]
        assert (float(b.low[i]), float(b.high[i])) == ends(key)
        assert float(b.middle[i]) == middle(key)
    assert int(b.zero.sum()) == 2


def test_unused_entries_of_the_table_are_zero() -> None:
    counts = torch.zeros(KEYS, dtype=torch.int64)
    counts[[0x3F80, 0x4000]] = 5
    for split in ("count", "error"):
        for level in ("mean", "ends"):
            _, table = codebook(counts, 8, split, level)
            assert sorted(table[table != 0].tolist()) == [1 + 2**-8, 2 + 2**-7]


def test_the_codebook_never_asks_the_device() -> None:
    """A fake tensor has no values to wait for, and says so if somebody wants them."""
    bins(torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        counts = torch.zeros(KEYS, dtype=torch.int64)
        for split in ("count", "error"):
            for level in ("mean", "ends"):
                lut, table = codebook(counts, 4, split, level)
                assert (lut.shape, lut.dtype) == ((KEYS,), torch.uint8)
                assert (table.shape, table.dtype) == ((16,), torch.float32)


@pytest.mark.parametrize("level", ["mean", "ends"])
@pytest.mark.parametrize("n", [0, 1, 5, 100, 1001])
def test_the_sorted_sketch(n: int, level: str) -> None:
    x = torch.randn(n)
    got = reference.sorted_sketch(x, 3, level)
    order = sorted(range(n), key=lambda i: float(x[i]))
    for code in range(8):
        members = [order[i] for i in range(n) if i * 8 // n == code]
        values = [float(x[i]) for i in members]
        if not values:
            continue
        expected = sum(values) / len(values) if level == "mean" else (min(values) + max(values)) / 2
        assert got[members].tolist() == pytest.approx([expected] * len(members), rel=1e-6, abs=1e-7)


def test_the_histogram_is_as_good_as_sorting() -> None:
    """Equal counts from a histogram lose next to nothing against exact quantiles."""
    x = torch.randn(100_000)

    def error(decoded: Tensor) -> float:
        return float(((decoded - x).double() ** 2).sum() / (x.double() ** 2).sum())

    for bits in (2, 4, 8):
        payload = torch.empty(layout.sketch_bytes(x.numel(), bits), dtype=torch.uint8)
        counted, least = torch.empty(2, x.numel())
        reference.sketch_encode(x, payload, bits=bits, split="count")
        reference.sketch_decode(payload, counted, bits=bits)
        reference.sketch_encode(x, payload, bits=bits)
        reference.sketch_decode(payload, least, bits=bits)
        exact = error(reference.sorted_sketch(x, bits))
        assert error(counted) <= 1.05 * exact
        assert error(least) < exact
