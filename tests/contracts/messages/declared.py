"""All messages and texts between processes that are declared as records."""

from __future__ import annotations

from typing import NamedTuple

from wingbeat.methods.bounded_staleness import messages as staleness
from wingbeat.methods.bounded_staleness.colayers import ColayerDecision
from wingbeat.methods.model_averaging import generator, pair_machine
from wingbeat.methods.model_averaging.static_client import Status
from wingbeat.methods.parameter_server import protocol
from wingbeat.methods.parameter_server.coding import SliceHeader
from wingbeat.observe.report import Job, Report
from wingbeat.schema import Messages
from wingbeat.transport.membership import LogEntry
from wingbeat_lab.bytescheduler import order


class Group(NamedTuple):
    """Messages of a mailbox with one schema."""

    title: str
    place: str
    messages: Messages


MAILBOXES = (
    Group("Parameter servers", "wingbeat/methods/parameter_server/protocol.py", protocol.MESSAGES),
    Group("Group generator", "wingbeat/methods/model_averaging/generator.py", generator.MESSAGES),
    Group("Pairs", "wingbeat/methods/model_averaging/pair_machine.py", pair_machine.MESSAGES),
    Group("Order of partitions", "wingbeat_lab/bytescheduler/order.py", order.MESSAGES),
)
HEADERS: dict[type, str] = {
    SliceHeader: "Parameter servers: the payload of an encoded slice begins with it",
    staleness.FrameHeader: "Bounded staleness: the words of a frame begin with it",
}
"""Records before other data."""

FRAMES = Group(
    "Bounded staleness", "wingbeat/methods/bounded_staleness/messages.py", staleness.MESSAGES
)

TEXTS: dict[type, str] = {
    protocol.StepSettings: "payload of `STEP`",
    protocol.DocumentSize: "payload of `LOAD` and `STATE`: a field of the document",
    Status: "store: the status of a worker without a group generator",
    LogEntry: "store: the membership log",
    ColayerDecision: "store: a decision of bounded staleness",
    Report: "a worker's report to the supervisor, a line of JSON",
    Job: "the supervisor's answer to `wingbeat top`",
}
"""Records in JSON, and where they are."""
