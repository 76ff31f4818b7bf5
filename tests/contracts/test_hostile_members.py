"""A member that has the job's key and sends anything: each part that receives its messages ends
with one line that names it, or ignores it.

`helpers.hostile` has the parts and the messages, in virtual time. `make hostile` sends hostile
frames to the ports below them.
"""

from __future__ import annotations

import pytest

from helpers import mutants
from helpers.hostile import VICTIMS, Mail, Victim, attack
from wingbeat.errors import PeerError
from wingbeat.transport.messages.frames import Reassembly

FEW, MANY = 6, 600

NAMES = [victim.name for victim in VICTIMS]


@pytest.mark.parametrize("victim", VICTIMS, ids=NAMES)
def test_part_ignores_or_names_a_member_that_sends_anything(victim: type[Victim]) -> None:
    with mutants.memory_for(1 << 30):
        ends = [attack(victim, seed) for seed in range(FEW)]
    assert any(ends) or not victim.errors, "no seed found what is refused"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", VICTIMS, ids=NAMES)
def test_part_ignores_or_names_a_member_in_hundreds_of_attacks(victim: type[Victim]) -> None:
    with mutants.memory_for(1 << 30):
        for seed in range(FEW, FEW + MANY):
            attack(victim, seed)


def test_claim_of_a_large_message_takes_no_memory_before_it_arrives() -> None:
    made = Reassembly(1 << 36)
    with mutants.memory_for(64 << 20):
        for _ in range(1000):
            made.append(b"part")
    assert len(made.data) == 4000
    assert not made.complete
    with pytest.raises(ValueError, match=f"received 0 bytes where {(1 << 36) - 4000} remain"):
        made.append(b"")


def test_attack_that_makes_a_part_blame_another_is_found() -> None:
    class Wrong(Victim):
        def valid(self) -> Mail:
            return Mail(3)

        def deliver(self, mail: Mail) -> None:
            raise PeerError("rank 0 sent a malformed message")

    with pytest.raises(AssertionError, match="rank 0 sent"):
        attack(Wrong, 0)
