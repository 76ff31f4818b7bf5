"""The duration of a bench's rows in virtual time, on the lab's links."""

from __future__ import annotations

import math

from wingbeat import simulator
from wingbeat.errors import UsageError
from wingbeat.types import Layout
from wingbeat_lab import paced
from wingbeat_lab.bench.config import Checked
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.lab.spec import LabSpec

GOODPUT = 1448 / 1538
"""Payload share of a full frame on the wire: preamble, Ethernet, IP and TCP headers with time
stamps, checksum and the gap between frames are subtracted.
"""


def links_of(lab: LabSpec) -> simulator.Links:
    """Return the lab's links; UsageError if they cannot be simulated."""
    if lab.cross:
        raise UsageError(f"{lab}: cross-traffic cannot be simulated; leave cross out")
    rates: dict[int | tuple[int, int], float] = {}
    for override in lab.overrides:
        key = override.host if override.interface is None else (override.host, override.interface)
        rates[key] = override.rate / 8 * GOODPUT
    return simulator.Links(
        bytes_per_s=lab.rate / 8 * GOODPUT,
        count=lab.rails,
        priorities=lab.prio > 0,
        rates=rates,
        leaf=lab.leaf,
        trunk_bytes_per_s=lab.trunk / 8 * GOODPUT if lab.trunk else math.inf,
    )


def median_s(checked: Checked, row: Contender) -> float:
    """Seconds of the row's median iteration.

    Plan, schedule and machine are those of the lab, links have the same rate less headers, and
    communication has the simulator's default CPU costs.

    UsageError if the model or the strategy cannot be simulated.
    """
    if checked.model.profile is None or row.strategy is None:
        raise UsageError(
            f"{row.text} with {checked.config.model}: only wingbeat's strategies on paced models "
            "can be simulated"
        )
    links = links_of(checked.lab)
    model = paced.simulator_model(checked.model.profile, checked.model.stretch)
    # As `wingbeat_lab.bench.pace` slows codecs, but for the fixed part of each call.
    work = simulator.Work(codecs=max(1.0, checked.model.stretch / checked.model.profile.scale))
    layout = Layout.even(checked.lab.hosts, checked.config.per_host)
    return simulator.simulate(
        model, row.strategy, checked.workers, links, layout=layout, work=work
    ).median_s
