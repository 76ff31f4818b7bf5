"""Many uses that are refused, each in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from wingbeat.errors import UsageError


def said_by(
    cases: Iterable[Callable[[], object]], after: Callable[[], object] = lambda: None
) -> list[str]:
    """Return what each case is refused with, ``"nothing"`` if it is not.

    Args:
        cases: are called one after the other.
        after: is called after each.
    """
    said = []
    for case in cases:
        try:
            case()
        except UsageError as error:
            said.append(str(error))
        else:
            said.append("nothing")
        after()
    return said


def assert_said(said: Sequence[str], wanted: Sequence[str]) -> None:
    """Each is one line with its part in it."""
    assert len(said) == len(wanted), said
    for line, part in zip(said, wanted, strict=True):
        assert part in line, (part, line)
        assert "\n" not in line
