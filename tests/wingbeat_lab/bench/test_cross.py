"""How much cross-traffic a row has met, from samples of the kernel's counters."""

from __future__ import annotations

import pytest

from wingbeat_lab.bench import cross
from wingbeat_lab.lab.cross import Sample
from wingbeat_lab.lab.spec import LabSpec

STEADY = [Sample(float(t), 1000 * t, 0.1 * t) for t in range(11)]
"""1000 bytes in each second, for a tenth of a core."""
FAST_LATER = [Sample(0.0, 0, 0.0), Sample(5.0, 5000, 0.5), Sample(10.0, 25_000, 1.0)]


def test_a_rate_is_that_of_each_iteration_in_one_direction() -> None:
    found = cross.during({"x0": STEADY, "x1": FAST_LATER}, [[1.0, 3.5, 5.0, 7.5]], 2)
    assert found.bytes == pytest.approx(6500 + 4000 + 10_000)
    assert found.bit_per_s == pytest.approx([8000, 8000, 8 * (2500 + 10_000) / 2.5 / 2])
    assert found.cores == pytest.approx(0.2)


def test_what_was_between_rounds_does_not_count() -> None:
    found = cross.during({"x0": STEADY}, [[0.0, 1.0], [8.0, 9.0, 10.0]], 1)
    assert found.bytes == pytest.approx(3000)
    assert len(found.bit_per_s) == 3


def test_before_the_first_sample_nothing_is_known_to_have_been_sent() -> None:
    found = cross.during({"x0": STEADY[5:]}, [[1.0, 4.0]], 1)
    assert (found.bytes, found.bit_per_s) == (0.0, [0.0])


def test_notes_name_what_was_asked_and_what_each_row_met() -> None:
    lab = LabSpec.parse("fat-tree:4/2@1gbit+500mbit,cross=400mbitx4")
    own = cross.CrossTraffic(1e9, [3e8, 4e8, 5e8], 0.05)
    asked, row = cross.notes(lab, [("geryon", own)])
    assert "400mbit asked each way on trunks of 500mbit, in 4 flows" in asked
    assert row.startswith("geryon: 1000 MB; each way 400 Mbit/s")
    assert cross.notes(lab, []) == []
