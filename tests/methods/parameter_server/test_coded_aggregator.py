"""`Aggregator` with a codec: residuals are kept, and malformed payloads are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.codecs import Coding, make
from wingbeat.codecs.codec import Dense
from wingbeat.codecs.coding import Region, all_of
from wingbeat.compression import Half, LowRank, Sketch, for_parameter
from wingbeat.methods.parameter_server.aggregator import (
    CODED,
    ITEMSIZE,
    SLICE_OVERHEAD,
    Aggregator,
    SliceSum,
    narrow,
    widen,
)
from wingbeat.methods.parameter_server.coding import Piece, SliceCodec, pack_header
from wingbeat.methods.parameter_server.protocol import RequestError
from wingbeat.types import Span

GROUPED = Sketch(bits=3, groups={"a": LowRank(rank=1), "b": "fp32"})
WIRES: list[Any] = [
    Sketch(),
    Sketch(bits=2),
    Sketch(feedback=False),
    LowRank(rank=1),
    Half(),
    GROUPED,
]
KEPT = [wire for wire in WIRES if getattr(wire, "feedback", False)]
KEY = (0, 7)
ROWS, COLS = 40, 32
N = ROWS * COLS + 700 + 5
"""A matrix, other gradients, and flags."""


def coding_of(wire: Any) -> Coding:
    """The matrix is called a; what follows it b, and c the last hundred of them."""
    found = [(0, ROWS * COLS, "a"), (ROWS * COLS, N - 105, "b"), (N - 105, N - 5, "c")]
    regions = []
    for start, stop, name in found:
        cols = COLS if name == "a" and isinstance(for_parameter(wire, name), LowRank) else 0
        regions.append(Region(Span(start, stop), make(wire, 0, name), cols))
    return Coding([*regions, Region(Span(N - 5, N), Dense())])


class Pushed:
    """What a worker makes of its gradients."""

    def __init__(self, wire: Any) -> None:
        self.coding = coding_of(wire)
        known = all_of(wire)
        pieces = [Piece(len(r.span), r.cols, known.index(r.codec)) for r in self.coding.regions]
        self.head = pack_header(wire, pieces)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> bytes:
        room = torch.zeros(self.coding.room(Span(0, N)), dtype=torch.uint8)
        self.coding.encode(x, Span(0, N), room, residual)
        return self.head + room.numpy().tobytes()

    def decode(self, payload: Any) -> torch.Tensor:
        assert bytes(payload[: len(self.head)]) == self.head
        body = np.frombuffer(bytes(payload)[len(self.head) :], np.uint8).copy()
        out = torch.empty(N)
        self.coding.decode(torch.from_numpy(body), out, Span(0, N))
        return out


def grads(seed: int) -> torch.Tensor:
    out = torch.randn(N, generator=torch.Generator().manual_seed(seed)) ** 3
    out[-5:] = 1.0
    return out


def sums_of(wire: Any, workers: int = 2, most: int = 1 << 24, **more: Any) -> Aggregator:
    return Aggregator(workers, most, codec=SliceCodec(wire, 1 << 20), **more)


def push(sums: Aggregator, rank: int, payload: bytes, turn: int = 0, dtype: str = CODED) -> Any:
    return sums.push(rank, KEY, turn, dtype, memoryview(payload))


def read(made: Pushed, done: SliceSum) -> torch.Tensor:
    if done.dtype == CODED:
        return made.decode(done.result.tobytes())
    wide = widen(memoryview(done.result.tobytes()), done.dtype)
    return torch.from_numpy(wide.astype(np.float32))


@pytest.mark.parametrize("wire", WIRES, ids=repr)
def test_push_adds_in_rank_order_and_encodes_once(wire: Any) -> None:
    made, sums = Pushed(wire), sums_of(wire, 3)
    payloads = [made.encode(10.0 ** (3 * rank) * grads(rank)) for rank in range(3)]
    for rank in (2, 0):
        assert push(sums, rank, payloads[rank]) is None
    done = push(sums, 1, payloads[1])
    decoded = [made.decode(p) for p in payloads]
    wanted = (decoded[0] + decoded[1]) + decoded[2]
    assert done.dtype == CODED
    expected = made.encode(wanted, torch.zeros(N))
    if "lowrank" in repr(wire).lower():  # BLAS rounds by the alignment of its operands
        found = made.decode(done.result.tobytes())
        torch.testing.assert_close(found, made.decode(expected), rtol=1e-5, atol=1e-4)
    else:
        assert done.result.tobytes() == expected, "the bits of that order"


@pytest.mark.parametrize("wire", WIRES, ids=repr)
def test_residual_is_added_to_next_sum_or_taken_once(wire: Any) -> None:
    made, sums = Pushed(wire), sums_of(wire)
    applied, given_ = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for turn in range(5):
        for rank in range(2):
            payload = made.encode(grads(10 * turn + rank))
            given_ += made.decode(payload)
            done = push(sums, rank, payload, turn)
        applied += read(made, done)
    rest = sums.take_residual(KEY)
    assert sums.take_residual(KEY) is None
    if wire not in KEPT:
        assert rest is None
        return
    assert rest is not None
    assert rest.dtype == np.float32
    assert bool(rest.any())
    torch.testing.assert_close(applied + torch.from_numpy(rest), given_, rtol=0, atol=1e-3)
    for rank in range(2):
        done = push(sums, rank, made.encode(torch.zeros(N)), 5)
    assert float(read(made, done).abs().max()) == 0.0, "what was taken does not come twice"


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(KEPT),
    st.lists(st.sampled_from([CODED, "float32", "float16", "bfloat16", "float64"]), min_size=1),
    st.booleans(),
    st.data(),
)
def test_sums_and_residuals_with_changing_encodings_equal_all_gradients(
    wire: Any, dtypes: list[str], dense: bool, data: st.DataObject
) -> None:
    """Also if the rest is taken now and then: what was applied and all rests make up the sums."""
    made, sums, slack = Pushed(wire), sums_of(wire, dense=dense), torch.zeros(N)
    applied, given_ = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for turn, dtype in enumerate(dtypes):
        done, held = None, KEY in sums._slices and sums._slices[KEY].residual is not None
        for rank in range(2):
            x = grads(10 * turn + rank)
            if dtype == CODED:
                payload = made.encode(x)
                given_ += made.decode(payload)
            else:
                wide = x.numpy().astype("f8" if dtype == "float64" else "f4")
                payload = narrow(wide, dtype).tobytes()
                given_ += torch.from_numpy(widen(memoryview(payload), dtype).astype("f8"))
            done = push(sums, rank, payload, turn, dtype)
        assert done is not None
        assert done.dtype == ({"float64": "float64"}.get(dtype, "float32") if dense else dtype)
        applied += read(made, done)
        if ITEMSIZE.get(dtype) == 2 and not held and not dense:
            slack += read(made, done).abs() * 2.0**-8  # as without a codec
        if data.draw(st.booleans()) and (rest := sums.take_residual(KEY)) is not None:
            applied += torch.from_numpy(rest)
    if (rest := sums.take_residual(KEY)) is not None:
        assert not dense
        applied += torch.from_numpy(rest)
    assert bool(((applied - given_).abs() <= 1e-3 + slack).all())


@pytest.mark.parametrize("wire", KEPT, ids=repr)
def test_push_of_infinity_reaches_sum_and_not_residual(wire: Any) -> None:
    made, sums = Pushed(wire), sums_of(wire)
    bad = grads(0)
    bad[ROWS * COLS + 1] = torch.inf
    push(sums, 0, made.encode(bad))
    done = push(sums, 1, made.encode(grads(1)))
    assert not bool(read(made, done)[ROWS * COLS + 1].isfinite())
    rest = sums.take_residual(KEY)
    assert rest is not None
    assert bool(np.isfinite(rest).all())


def refused(sums: Aggregator, *args: Any) -> str:
    before = (
        sums.nbytes,
        {k: (t.round, t.added, sorted(t.early)) for k, t in sums._slices.items()},
    )
    with pytest.raises(RequestError) as caught:
        push(sums, *args)
    after = sums.nbytes, {k: (t.round, t.added, sorted(t.early)) for k, t in sums._slices.items()}
    assert after == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("wire", WIRES, ids=repr)
@pytest.mark.parametrize("first", [True, False])
def test_push_of_wrong_size_raises(wire: Any, first: bool) -> None:
    made, sums = Pushed(wire), sums_of(wire)
    good = made.encode(grads(0))
    if not first:
        push(sums, 1, good)
    for bad in (good[:-1], good + b"\0", good + good, good[: len(made.head)]):
        line = refused(sums, 0, bad)
        assert line == (
            f"rank 0 pushed slice 7 malformed: {len(bad)} bytes in place of {len(good)}"
        )
    push(sums, 0, good)


def test_push_with_wrong_header_raises_with_rank_and_slice() -> None:
    made, sums = Pushed(Sketch()), sums_of(Sketch())
    good = bytearray(made.encode(grads(0)))
    push(sums, 0, bytes(good))
    for place in range(8 + 12):
        bad = good[:]
        bad[place] ^= 0xFF
        assert refused(sums, 1, bytes(bad)).startswith("rank 1 pushed slice 7 malformed: ")
    assert refused(sums, 1, b"").endswith("malformed: version is missing")
    assert refused(sums, 1, bytes(good), 0, "int32").startswith("rank 1 pushed int32; allowed")
    push(sums, 1, bytes(good))


def test_push_with_other_encoding_raises() -> None:
    """The same elements in other pieces, or not encoded: they would be another codec's."""
    wire = Sketch()
    made, sums = Pushed(wire), sums_of(wire)
    push(sums, 0, made.encode(grads(0)))
    whole = Coding([Region(Span(0, N), make(wire))])
    room = torch.empty(whole.room(Span(0, N)), dtype=torch.uint8)
    whole.encode(grads(1), Span(0, N), room)
    other = pack_header(wire, [Piece(N)]) + room.numpy().tobytes()
    there = f"which has {N} encoded elements"
    assert refused(sums, 1, other) == f"rank 1 pushed {N} encoded elements of slice 7, {there}"
    plain = grads(1).numpy().tobytes()
    assert refused(sums, 1, plain, 0, "float32") == f"rank 1 pushed {N} float32 of slice 7, {there}"
    short = grads(1)[1:].numpy().tobytes()
    for rank in range(1, 2):
        push(sums, rank, made.encode(grads(1)))
    assert "pushed 1984 float32 of slice 7, which has" in refused(sums, 0, short, 1, "float32")


def test_push_of_too_many_elements_raises() -> None:
    sums = Aggregator(2, 1 << 30, codec=SliceCodec(Sketch(bits=1), 4 * (N - 1)))
    assert f"a slice of {N} elements; allowed are {N - 1}" in refused(
        sums, 0, Pushed(Sketch(bits=1)).encode(grads(0))
    )


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("wire", WIRES, ids=repr)
def test_push_counts_and_limits_memory(wire: Any, dense: bool) -> None:
    """A sum being made, two that were sent, and what they lack."""
    made = Pushed(wire)
    nbytes = 4 * N if dense else len(made.encode(grads(0)))
    # Dense sums are made in place; others beside the sum that is encoded.
    need = 2 * nbytes if dense else 4 * N + 2 * nbytes + (4 * N if wire in KEPT else 0)
    assert_turns(sums_of(wire, most=need + SLICE_OVERHEAD, dense=dense), made, need)
    with pytest.raises(RequestError, match="the server's limit is"):
        assert_turns(sums_of(wire, most=need - 1, dense=dense), made, need)


def assert_turns(sums: Aggregator, made: Pushed, need: int) -> None:
    for turn in range(6):
        for rank in range(2):
            done = push(sums, rank, made.encode(grads(turn + rank)), turn)
        done.readers.append(lambda: True)
        if turn % 2:
            sums.take_residual(KEY)
    assert sums.nbytes == need
    total = sums._slices[KEY]
    held = sum(each.result.nbytes for each in total.sums)
    held += 0 if total.spare is None else total.spare.nbytes
    assert held + 4 * N >= sums.nbytes >= held


def test_push_of_new_plan_frees_memory_unless_residual_remains() -> None:
    made = Pushed(Sketch())
    for taken in (True, False):
        sums = sums_of(Sketch())
        for rank in range(2):
            push(sums, rank, made.encode(grads(rank)))
        before = sums.nbytes
        if taken:
            sums.take_residual(KEY)
        sums.push(0, (1, 0), 0, CODED, memoryview(made.encode(grads(0))))
        last = memoryview(made.encode(grads(1)))
        if taken:
            sums.push(1, (1, 0), 0, CODED, last)
            assert sums.nbytes == before
        else:
            with pytest.raises(
                RequestError, match="no worker pulled the residual of slice 7 in time"
            ):
                sums.push(1, (1, 0), 0, CODED, last)


def test_push_with_reader_keeps_sum_unchanged() -> None:
    made, sums = Pushed(Sketch()), sums_of(Sketch())
    read_: list[tuple[SliceSum, bytes]] = []
    for turn in range(4):
        for rank in range(2):
            done = push(sums, rank, made.encode(grads(turn + rank)), turn)
        done.readers.append(lambda: False)
        read_.append((done, done.result.tobytes()))
    assert all(done.result.tobytes() == bits for done, bits in read_)
