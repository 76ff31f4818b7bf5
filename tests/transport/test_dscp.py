"""Classes of traffic, by the byte of the IP header."""

from __future__ import annotations

from wingbeat.transport.messages.frames import TOS, tos_of
from wingbeat_lab.lab.plan import CLASSES


def test_the_lab_honours_the_same_classes() -> None:
    assert [tos for _, tos in CLASSES] == list(TOS)


def test_the_last_class_is_best_effort() -> None:
    assert [[tos_of(u, n) for u in range(n)] for n in (1, 2, 3, 4)] == [
        [0],
        [0xB8, 0],
        [0xB8, 0x88, 0],
        [0xB8, 0x88, 0x48, 0],
    ]
