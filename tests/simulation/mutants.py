"""Mistakes in the real state machines, each of which a simulation has to find."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A function of wingbeat in which one text is replaced.

    Attributes:
        machine: the one that finds it.
        where: its module without ``wingbeat.``, a colon, and its name there.
        old: a text in its source.
        new: what replaces it.
    """

    machine: str
    where: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.machine}: {self.where.partition(':')[2]}: {self.new}"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the function for a while."""
        module_name, _, path = self.where.partition(":")
        module = importlib.import_module(f"wingbeat.{module_name}")
        holder: Any = module
        *outer, name = path.split(".")
        for each in outer:
            holder = getattr(holder, each)
        original = getattr(holder, name)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self}: {self.old!r} is not there once"
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        made: dict[str, Any] = {}
        exec(compile(code, self.where, "exec"), vars(module), made)
        setattr(holder, name, made[name])
        try:
            yield
        finally:
            setattr(holder, name, original)


_GROUPS = "methods.model_averaging"
_STALENESS = "methods.bounded_staleness"
_SERVERS = "methods.parameter_server"
_LOG = "transport.membership"

MUTANTS = [
    # Members of the next epoch wait for one that has completed the group.
    Mutant("groups", f"{_GROUPS}.generator:Generator._remove", "self._rerun(group, runs)", "pass"),
    # A dead member stays in groups, or is not removed.
    Mutant(
        "groups",
        f"{_GROUPS}.generator:Generator._leave_waiting_groups",
        "group.members.remove(worker)",
        "pass",
    ),
    # Ranks of a replica apply different averages.
    Mutant(
        "groups",
        f"{_GROUPS}.followers:Leader.average",
        "result = self._decide(SUCCESS if own is None else own, arrival)",
        "result = SUCCESS if own is None else own",
    ),
    Mutant(
        "groups",
        f"{_GROUPS}.followers:Follower._average",
        "self._agree(SUCCESS if own is None else own)",
        "(self._agree(SUCCESS if own is None else own), SUCCESS if own is None else own)[1]",
    ),
    # Losses that others have found are not read.
    Mutant(
        "groups",
        f"{_GROUPS}.static_client:StaticClient._refresh",
        "self._add_lost(self._table.lost())",
        "pass",
    ),
    # Duplicates are delivered again; what is lost is not sent again.
    Mutant(
        "staleness",
        f"{_STALENESS}.streams:Stream.receive",
        "if ahead < WINDOW:",
        "if ahead >= _HALF:\n        yield kind, payload\n    if ahead < WINDOW:",
    ),
    # The bound is off by one.
    Mutant(
        "staleness",
        f"{_STALENESS}.bound:StalenessBound.rounds_required",
        "iteration - ahead",
        "iteration - ahead - 1",
    ),
    # Contributions count twice or never after the owner of a piece has died.
    Mutant(
        "staleness",
        f"{_STALENESS}.rounds:SentContributions.release",
        "<= last_applied(colayer)",
        "<= last_applied(colayer) + 1",
    ),
    # A writer takes its own entry for the binding one, or forgets a proposal.
    Mutant(
        "membership",
        f"{_LOG}:MembershipClient._claim_entry",
        'return self._claim(f"{self._path}/{self.log.length}", entry)',
        'self._claim(f"{self._path}/{self.log.length}", entry)\n    return entry',
    ),
    # A returned process is not acknowledged, does not wait for that, or has an old incarnation.
    Mutant(
        "membership",
        f"{_LOG}:MembershipClient.acknowledge",
        "self._acknowledgements.append((worker, incarnation))",
        "pass",
    ),
    Mutant(
        "membership",
        f"{_LOG}:MembershipClient.announce",
        'if not self._store.has(f"{accepted}/{w}")',
        "if False",
    ),
    Mutant("membership", f"{_LOG}:MembershipClient.next_incarnation", "// 2 + 1", "// 2"),
    # A failure is not found or reported.
    Mutant("servers", f"{_SERVERS}.client:Client.check", "in self.gone.items():", "in ():"),
    Mutant("servers", f"{_SERVERS}.server:Server.check", "in self.gone.items():", "in ():"),
    # A sum has other gradients, another order, or is sent twice or never.
    Mutant("servers", f"{_SERVERS}.server:Server._push", "if not reply.queued:", "if True:"),
    Mutant(
        "servers",
        f"{_SERVERS}.server:Server._push",
        "self._pulls.pop(key, ())",
        "self._pulls.get(key, ())",
    ),
    Mutant(
        "servers",
        f"{_SERVERS}.server:Server._pull",
        "if total is None:",
        "if total is None and False:",
    ),
]
