"""Which worker is on which host."""

from __future__ import annotations

import pytest

from wingbeat.errors import UsageError
from wingbeat.types import Layout


def test_even_fills_hosts_one_after_the_other() -> None:
    assert Layout.even(2, 3).hosts == ((0, 1, 2), (3, 4, 5))
    assert Layout.even(2, 3).host_of == (0, 0, 0, 1, 1, 1)
    assert Layout.even(2, 3).workers == 6


def test_by_name_numbers_hosts_in_order_of_appearance() -> None:
    layout = Layout.by_name(["b", "a", "b", "c"])
    assert layout.hosts == ((0, 2), (1,), (3,))
    assert layout == Layout([0, 1, 0, 2])


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: Layout([]), "no workers"),
        (lambda: Layout([0, 2]), "host 1 has no worker"),
        (lambda: Layout([0, -1]), "worker 1 is on host -1"),
        (lambda: Layout.even(0, 4), r"hosts=0, workers=4"),
        (lambda: Layout.even(4, 0), r"hosts=4, workers=0"),
    ],
)
def test_invalid_layout_is_refused(made, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        made()
