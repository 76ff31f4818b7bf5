"""Bytes sent by a worker's host, from the kernel's counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from wingbeat_lab.lab import counters
from wingbeat_lab.lab.spec import LabSpec


@dataclass(frozen=True)
class Sent:
    """Bytes sent by all processes of a host.

    Attributes:
        sent: by its interfaces; without a lab, over the loopback.
        classes: by priority class of the lab's links; empty without classes.
    """

    sent: float
    classes: dict[str, float]

    @classmethod
    def read(cls, lab: LabSpec, *, classes: bool = True) -> Sent:
        """Read the counters of this process's host; LabError if the system has none.

        Reading those of ``classes`` starts a process.
        """
        sent = sum(c.tx_bytes for n, c in counters.read().items() if (n != "lo") == lab.shaped)
        found: Counter[str] = Counter()
        if classes and lab.shaped and lab.prio:
            for device in counters.read_classes(lab.prio).values():
                found.update({name: each.bytes for name, each in device.items()})
        return cls(sent, dict(found))

    def and_again(self, later: Sent) -> Sent:
        """Return ``later`` plus the difference of the two."""
        twice = {name: 2 * n - self.classes[name] for name, n in later.classes.items()}
        return Sent(2 * later.sent - self.sent, twice)

    def since(self, before: Sent, iterations: float) -> Sent:
        """Return the difference to ``before``, an iteration."""
        sent = (self.sent - before.sent) / iterations
        passed = {name: n - before.classes[name] for name, n in self.classes.items()}
        return Sent(sent, {name: n / iterations for name, n in passed.items()})
