"""Messages in words: what JSON can say, and what is checked before anything of it is used. Pure.

Payloads (gradients, sums, parameters) travel behind the words, as bytes, and are checked by whoever
knows how large they must be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from wingbeat.stale.gei import Gei
from wingbeat.stale.messages import (
    Here,
    Message,
    Parameters,
    Piece,
    Pull,
    Report,
    Round,
    Settled,
    Welcome,
)
from wingbeat.stale.view import View

MOST = 1 << 48
"""Iterations, rounds and lives are below this."""


class Malformed(Exception):
    """Words that no worker of this job has sent; says what is wrong with them."""


_KINDS: Mapping[str, type] = {
    kind.__name__.lower(): kind
    for kind in (Here, Piece, Round, Report, Welcome, Pull, Parameters, Settled)
}


def words_of(message: Message, life: int) -> dict[str, Any]:
    """Say what a message says, its payload apart.

    Args:
        message: of this worker.
        life: in which of its lives it sends it.
    """
    out: dict[str, Any] = {"kind": type(message).__name__.lower(), "life": life}
    for each in dataclasses.fields(message):
        value = getattr(message, each.name)
        if each.name != "payload":
            out[each.name] = value.to_plain() if isinstance(value, Gei) else value
    return out


def message_of(words: Any, workers: int, colayers: int, payload: Any) -> tuple[int, Message]:
    """Return the sender's life, and the message that ``words`` and ``payload`` are.

    Args:
        words: as JSON has brought them.
        workers: how many there may be.
        colayers: k.
        payload: what has come behind the words.

    Raises:
        Malformed: a worker of this job would not say so.
    """
    read = _Reader(words, workers, colayers)
    kind = _KINDS.get(read.of("kind", str))
    if kind is None:
        raise Malformed(f"kind is {words['kind']!r}")
    fields = {
        each.name: _READ[each.name](read, each.name)
        for each in dataclasses.fields(kind)
        if each.name != "payload"
    }
    if len(words) != len(fields) + 2:
        raise Malformed(f"{words['kind']} has {sorted(map(str, words))}")
    if kind in (Piece, Round, Parameters):
        fields["payload"] = payload
    return read.number("life"), kind(**fields)


class _Reader:
    def __init__(self, words: Any, workers: int, colayers: int) -> None:
        if type(words) is not dict:
            raise Malformed(f"{type(words).__name__} in place of words")
        self._words, self.workers, self.colayers = words, workers, colayers

    def of(self, name: str, kind: type) -> Any:
        value = self._words.get(name)
        if type(value) is not kind:
            raise Malformed(f"{name} is {value!r:.40}")
        return value

    def number(self, name: str, least: int = 0, end: int = MOST) -> int:
        return _number(name, self._words.get(name), least, end)

    def worker(self, name: str) -> int:
        return self.number(name, end=self.workers)

    def colayer(self, name: str) -> int:
        return self.number(name, end=self.colayers)

    def may_lack(self, name: str) -> int:
        return self.number(name, least=-1)

    def flag(self, name: str) -> bool:
        return bool(self.of(name, bool))

    def view(self, name: str) -> View:
        return View(_numbers(name, self._words.get(name), self.workers, 0))

    def numbers(self, name: str) -> tuple[int, ...]:
        return _numbers(name, self._words.get(name), self.colayers, 0)

    def places(self, name: str) -> tuple[int, ...]:
        return _numbers(name, self._words.get(name), self.workers, -1)

    def entries(self, name: str) -> tuple[tuple[int, int], ...]:
        out = []
        for pair in self.of(name, list):
            iteration, worker = _numbers(name, pair, 2, 0)
            out.append((iteration, _number(name, worker, 0, self.workers)))
        if out != sorted(set(out)):
            raise Malformed(f"{name} are not in order, or not all different")
        return tuple(out)

    def marks(self, name: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(
                _numbers(name, row, self.workers, -1) for row in _list(name, piece, self.colayers)
            )
            for piece in _list(name, self._words.get(name), self.workers)
        )

    def gei(self, name: str) -> Gei:
        read = _Reader(self._words.get(name), self.workers, self.colayers)
        retired, zeta = read.number("retired"), read.number("zeta", -1)
        counted, rows = read.number("counted"), {}
        for key, row in read.of("rows", dict).items():
            if not key.isdecimal() or not retired <= int(key) <= zeta:
                raise Malformed(f"{name} has a row {key!r:.40}")
            rows[int(key)] = [
                [self._mask(name, mask) for mask in _list(name, pieces, self.workers)]
                for pieces in _list(name, row, self.colayers)
            ]
        return Gei.of(self.workers, self.colayers, retired, zeta, counted, rows)

    def _mask(self, name: str, mask: Any) -> int:
        # Hexadecimal: JSON's numbers are not as long everywhere as 1,000 workers need.
        try:
            out = int(mask, 16)
        except (TypeError, ValueError):
            out = -1
        if not 0 <= out < 1 << self.workers:
            raise Malformed(f"{name} has a mask {mask!r:.40}")
        return out


def _number(name: str, value: Any, least: int, end: int) -> int:
    if type(value) is not int or not least <= value < end:
        raise Malformed(f"{name} is {value!r:.40}")
    return value


def _list(name: str, value: Any, length: int) -> list[Any]:
    if type(value) is not list or len(value) != length:
        raise Malformed(f"{name} is {value!r:.40}")
    return value


def _numbers(name: str, value: Any, length: int, least: int) -> tuple[int, ...]:
    return tuple(_number(name, item, least, MOST) for item in _list(name, value, length))


_READ: Mapping[str, Callable[[_Reader, str], Any]] = {
    "view": _Reader.view,
    "at": _Reader.number,
    "first": _Reader.places,
    "said": _Reader.may_lack,
    "applied": _Reader.may_lack,
    "complete": _Reader.may_lack,
    "ended": _Reader.flag,
    "zeta": _Reader.number,
    "iteration": _Reader.number,
    "number": _Reader.number,
    "rounds": _Reader.number,
    "colayer": _Reader.colayer,
    "piece": _Reader.worker,
    "entries": _Reader.entries,
    "marks": _Reader.marks,
    "numbers": _Reader.numbers,
    "gei": _Reader.gei,
}
"""How each field is read, whatever message it is in."""
