"""What a process tells its peers of itself through the rendezvous store, and the checks of it."""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass
from typing import Any

from wingbeat.transport.interfaces import Host, Interface

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A public key in Z85."""

_ENDPOINT = re.compile(r"tcp://([0-9.]{7,15}|\[[0-9a-f:.]{2,45}\]):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Card:
    """Where a process is and how to speak to it.

    Attributes:
        host: its host and that host's interfaces.
        uses: the addresses that it listens on, in the order of the interfaces' numbers.
        session: the random number in each of its headers.
        key: its public key in Z85; empty if it sends in the clear.
        listens: TCP endpoints by interface and class.
        message: bytes that a payload may have.
        window: bytes that a flow may hold.
    """

    host: Host
    uses: tuple[str, ...]
    session: int
    key: str
    listens: tuple[tuple[str, ...], ...]
    message: int
    window: int

    @property
    def interfaces(self) -> list[Interface]:
        """The interfaces that it listens on."""
        by_address = {i.address: i for i in self.host.interfaces}
        return [by_address[address] for address in self.uses]

    def to_json(self) -> str:
        """Return it as text for the store."""
        return json.dumps(
            {
                "host": self.host.to_json(),
                "uses": self.uses,
                "session": self.session,
                "key": self.key,
                "listens": self.listens,
                "message": self.message,
                "window": self.window,
            }
        )

    @staticmethod
    def from_json(text: str) -> Card:
        """Check and rebuild what a peer has published.

        Raises:
            ValueError: it is not what `to_json` makes.
        """
        try:
            data = json.loads(text)
            card = Card(
                Host.from_json(data["host"]),
                tuple(_text(address) for address in _list(data["uses"])),
                _number(data["session"]),
                _text(data["key"]),
                tuple(tuple(map(_endpoint, _list(of))) for of in _list(data["listens"])),
                _number(data["message"]),
                _number(data["window"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as err:
            raise ValueError(f"malformed card: {err!r:.80}") from None
        _check(card, text)
        return card


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(f"{value!r:.40} in place of a number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} in place of a text")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{value!r:.40} in place of a list")
    return value


def _check(card: Card, text: str) -> None:
    addresses = {i.address for i in card.host.interfaces}
    fine = (
        (not card.key or _KEY.fullmatch(card.key))
        and addresses.issuperset(card.uses)
        and len(card.listens) == len(card.uses) > 0
        and len({len(of) for of in card.listens}) == 1
    )
    if not fine:
        raise ValueError(f"malformed card: {text:.80}")


def _endpoint(text: Any) -> str:
    match = _ENDPOINT.fullmatch(_text(text))
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ValueError(f"malformed endpoint: {text!r:.80}")
    address = ipaddress.ip_address(match[1].strip("[]"))
    return f"tcp://{in_brackets(str(address))}:{int(match[2])}"


def in_brackets(address: str) -> str:
    """Return an address as an endpoint has it: IPv6's in brackets, which tell it from the port."""
    return f"[{address}]" if ":" in address else address
