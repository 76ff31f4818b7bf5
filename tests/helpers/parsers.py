"""Every parser of files, messages and checkpoints, as a table.

A row is a parser, valid inputs, and the errors that it may raise; a parser without errors returns
something for any input. `tests/contracts/test_parsers_fuzz.py` gives them inputs that hypothesis
draws, `tools/fuzz_parsers.py` those that atheris finds by coverage.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from helpers import mutants, saved_states
from helpers.headers import Type
from helpers.hosts import facts_of
from helpers.received import Received
from helpers.reports import job, report
from helpers.server_update_simulation import DESCRIPTION, SETTINGS
from helpers.thresholds import play
from wingbeat import _native, compression
from wingbeat.compression import Half, LowRank, Sketch
from wingbeat.doctor.facts import Facts
from wingbeat.engine.updates.json_values import decode, encode
from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.exchanges import snapshot
from wingbeat.integrations import checkpoint
from wingbeat.methods.bounded_staleness import messages
from wingbeat.methods.bounded_staleness.colayers import ColayerDecision, parse_decision
from wingbeat.methods.bounded_staleness.messages import ViewProposal
from wingbeat.methods.bounded_staleness.replica import OptionsSchema
from wingbeat.methods.elastic.agreement import Decision as EpochDecision
from wingbeat.methods.elastic.agreement import Report as EpochReport
from wingbeat.methods.elastic.agreement import parse_decision as parse_epoch
from wingbeat.methods.model_averaging import followers, generator, pair_machine
from wingbeat.methods.model_averaging.static_client import StatusTable
from wingbeat.methods.parameter_server import protocol as protocol_of_servers
from wingbeat.methods.parameter_server.coding import Piece, copy_sum, pack_header, unpack_header
from wingbeat.methods.parameter_server.protocol import (
    Document,
    RequestError,
    StepSettings,
    unpack_numbers,
)
from wingbeat.methods.parameter_server.shard_optimizer import ShardOptimizer
from wingbeat.observe import reporter, top, trace
from wingbeat.observe.events import Event
from wingbeat.observe.report import Job, Report, Watch
from wingbeat.planning import files
from wingbeat.planning.bucket_size import BucketSizeResult, Sample
from wingbeat.planning.choice import StrategyResult, TimedStrategy
from wingbeat.planning.costs import Fit, Linear, Workload
from wingbeat.planning.merging import checked_plans
from wingbeat.planning.probe import Gradient, LinkFit, Probe
from wingbeat.planning.thresholds import ThresholdResult
from wingbeat.prediction import cluster
from wingbeat.schema import MalformedMessage, Messages, from_json, parse_json, to_json
from wingbeat.strategies import parse as parse_strategy
from wingbeat.topologies.bcube import parse_size
from wingbeat.transport import launchers, loopback, services, tcp
from wingbeat.transport.failures import ProcessAddress
from wingbeat.transport.hosted_services import ServiceRequest
from wingbeat.transport.interfaces import Host, Interface, choose
from wingbeat.transport.membership import LogEntry, View
from wingbeat.transport.messages.peers import PeerInfo
from wingbeat.transport.rendezvous import JobIdentity
from wingbeat_lab import audit
from wingbeat_lab.bench import contenders, protocol, slow
from wingbeat_lab.bench import models as bench_models
from wingbeat_lab.lab.counters import ClassCounters, InterfaceCounters, LabStats, PortStats
from wingbeat_lab.lab.spec import LabSpec, parse_rate, parse_time
from wingbeat_lab.paced import profile


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        name: of the row.
        inputs: makes inputs of valid ones, one of `mutants`.
        parse: the parser.
        valid: what it has to read; or a function that makes it, if that takes seconds.
        errors: what it may raise.
    """

    name: str
    inputs: Callable[[Any], st.SearchStrategy[Any]]
    parse: Callable[[Any], object]
    valid: tuple[Any, ...] | Callable[[], tuple[Any, ...]]
    errors: tuple[type[BaseException], ...] = ()

    @property
    def examples(self) -> tuple[Any, ...]:
        """What it has to read."""
        return self.valid() if callable(self.valid) else self.valid


def in_file(
    name: str,
    load: Callable[[Path], object],
    data: bytes,
) -> object:
    """Load a file of this content."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / name
        path.write_bytes(data)
        return load(path)


def written_by(save: Callable[[Path], object], name: str = "file.json") -> bytes:
    """The bytes that ``save`` writes."""
    with tempfile.TemporaryDirectory() as made:
        save(Path(made) / name)
        return (Path(made) / name).read_bytes()


class Texts:
    """A rendezvous store in which another worker has put one text under every key."""

    def __init__(self, text: str) -> None:
        self.text = text

    def set(self, key: str, value: str) -> None:
        pass

    def get(self, key: str, seconds: float) -> str:
        return self.text

    def has(self, key: str) -> bool:
        return True


# -- valid inputs ------------------------------------------------------------------------------

PAGE = "star:4@1gbit"
PLAN = BucketSizeResult(
    search="bo", low_bytes=1, high_bytes=100, steps=10,
    samples=(Sample(25, 10.0), Sample(6, 12.2)), expected=(10.0, 12.0), chosen_bytes=6,
    decision_s=(0.0011, 0.0),
)  # fmt: skip
CHOICE = StrategyResult(tried=(TimedStrategy("DeAR()", 0.1),), chosen="DeAR()", iterations=9)
INTERVALS = {"alpha": (0.0, 1.0), "beta": (0.0, None)}
LINE = Fit(Linear(1e-4, 2e-9), 0.1, 0.2, INTERVALS, ((1.0, 2.0),))
PROBE = Probe(
    workers=4, links=("eth0",), wire="sketch", collective="all-reduce",
    gradients=(Gradient(1, "b", 0.0), Gradient(0, "a", 0.1)), encode=LINE, exchange=LINE,
    interfaces=(LinkFit("eth0", LINE, LINE),), rest_s=0.1,
)  # fmt: skip
WORKLOAD = Workload((0, 1, 2), (0.0,) * 3, (1,) * 3, (4.0,) * 3, ("float32 cpu",) * 3)
PROFILE = json.dumps(
    {
        "name": "x", "device": "d", "batch_size": 2, "samples_per_second": 1000.0, "source": "s",
        "shapes_from": "s", "split": "s", "params": 15, "forward_ms": 1.0, "backward_ms": 1.0,
        "layers": [
            {"name": "a", "kind": "linear", "parameters": {"weight": [3, 4], "bias": [3]},
             "forward_ms": 1.0, "backward_ms": 1.0}
        ],
    }
)  # fmt: skip
LIKE = json.dumps(
    {"like": "resnet50", "name": "y", "device": "d", "source": "s", "samples_per_second": 100.0,
     "forward_share": 0.3}
)  # fmt: skip
HOST = Host("boot/1", (Interface("eth0", "10.0.0.1", "10.0.0.0/24"),))
CARD = PeerInfo(HOST, 7, "3", True, ((99,),), 1 << 20, 1 << 20)
ADDRESSES = ["0f" * 32, "boot/1", None, ["10.0.0.1", 4000, "wingbeat/" + "0f" * 16]]
VALUES = tuple(map(encode, (1, (0.9, [True, None]), torch.arange(6.0).reshape(2, 3), "name")))
VIEW = View((0, 1, 2))
FRAMES = tuple(
    b"".join(messages.encode_frame(message, 1))
    for message in (
        messages.Progress(3, -1, 2, False, 4, VIEW),
        messages.Piece(3, 1, 2, VIEW, b"payload"),
        messages.PieceSum(1, 2, 7, ((3, 2), (4, 0)), (-1, 3, 4), VIEW, b"sum"),
        ViewProposal(VIEW, -1, tuple(((-1, 4, 5),) * 2 for _ in range(3))),
        messages.Welcome(2, (7, 8)),
        messages.PullRequest(6, VIEW),
        messages.Drained(9, VIEW),
    )
)
LAB_TOML = 'kind = "star"\nhosts = 4\nrate = "1gbit"\nprio = 2\n[override]\nh3 = "200mbit"\n'
CLUSTER_TOML = (
    'kind = "star"\nhosts = 2\nrate = "1gbit"\n'
    '[[measured]]\nhost = "a"\nranks = 2\nnics = [{ gbit_per_s = 0.9, latency_us = 30 }]\n'
    '[[measured]]\nhost = "b"\nranks = 1\nnics = [{ gbit_per_s = 0.8, latency_us = 20 }]\n'
)
STATS = LabStats(
    PAGE,
    {"h0": {"eth0": PortStats(InterfaceCounters(1, 2, 3, 4), {"ef": ClassCounters(5, 6, 7)}, {})}},
    {"a -> b": {}},
).to_json()
JOURNAL = "\n".join(
    json.dumps(line)
    for line in (
        {"rank": 0, "incarnation": 0, "workers": 2, "colayers": 1, "s": 2, "p": 1, "mode": "BSP"},
        {"began": 0}, {"sent": [0, 0]}, {"dropped": [1, 0]}, {"pulled": 0},
        {"round": 0, "entries": [[0, 0, [[0, 1]]]]}, {"drained": 1, "digest": "ab"},
    )
) + "\n"  # fmt: skip
SPACE = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "h",
}  # fmt: skip
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "9"}
CODECS = (Sketch(bits=3), LowRank(rank=2), Half(), Sketch(groups={"a*": LowRank(rank=2)}))
OPTIONS = [{"lr": 0.1, "betas": (0.9, 0.99), "nesterov": False, "maximize": None, "name": "x"}]
TENSORS = [torch.zeros(3, 2), torch.zeros(4, dtype=torch.float64)]
PIECES = {
    "dtype": "float32", "numel": 6, "pieces": [[0, 0, 0, 4], [1, 1, 4, 2]],
    "state": [{"momentum_buffer": {"each": "float32"}, "step": {"all": VALUES[0]}}, None],
}  # fmt: skip


def a_replica() -> bytes:
    model = [torch.nn.Parameter(each.clone()) for each in TENSORS]
    optimizer = torch.optim.Adam(model)
    for each in model:
        each.grad = torch.ones_like(each)
    optimizer.step()
    return snapshot.encode_snapshot(model, model, optimizer, {"last": 1})


def some_thresholds() -> bytes:
    curve = lambda cuts, _: [1.0 + 0.01 * len(cuts)]  # noqa: E731
    found = play(curve, 8, (0.5,))[0]
    return written_by(lambda path: files.save(path, found, {"workers": 4}))


def a_part() -> bytes:
    made = [Event(0, 1, "forward", 1, 2, 8, "compute"), Event(1, -1, "group", 2, 3, 8, "e", (0, 1))]
    return written_by(lambda path: trace.save(made[:1], path))


def residual_file() -> bytes:
    made = BytesIO()
    torch.save({"rank": 0, "residuals": {"a": torch.ones(3)}}, made)
    return made.getvalue()


def saved_part() -> bytes:
    made = BytesIO()
    torch.save({"beside": {}}, made)
    return made.getvalue()


def read_frames(data: bytes) -> None:
    for frame in messages.decode_frames(data, 1 << 16):
        payload = frame.payload if frame.payload_nbytes else None
        header = messages.decode_header(frame.words)
        messages.decode_message(header, frame.words, 3, 2, payload)


def statuses(text: str) -> None:
    table = StatusTable(Texts(text), "room", 2, 0)
    table.statuses()
    table.fallbacks(range(2))


def held(words: Any) -> object:
    return ShardOptimizer(DESCRIPTION).load(words, bytearray(4 * 6 + 4 * 4))


def settled(words: Any) -> None:
    ShardOptimizer(DESCRIPTION).set_options(words, {})


def joined(data: Any) -> object:
    """The host that is read can be worked with."""
    try:
        host = from_json(Host, data)
    except MalformedMessage:
        return None
    return choose([HOST, host], 0, None)


def load_residuals(data: bytes) -> object:
    name = "wingbeat_residuals_0_0_of_1.pt"
    return in_file(name, lambda path: checkpoint.read_parts(path.parent, "residuals_0", 0, 1), data)


def loads(load: Callable[[Path], object], name: str = "file.json") -> Callable[[bytes], object]:
    return functools.partial(in_file, name, load)


def watched(text: str) -> object:
    watch = Watch("x-1", 0.0)
    for place, line in enumerate(text.split("\n")):
        for rank in range(2):
            assert watch.add_report(rank, line, 1.0 + place).isprintable()
    return Job.from_text(json.dumps(watch.job(2.0, 0.0).to_json()))


def reached(data: Any) -> object:
    """The addresses of a rank that are read can be connected to."""
    found = tcp._checked(0, 1, data, 1)
    place = found.places[0]
    socket.getaddrinfo(place.address, place.port, flags=socket.AI_NUMERICHOST)
    return found.incarnation, os.fsencode(place.name)


def epoch(text: str) -> object:
    """The source and those that copy it are members."""
    found = parse_epoch(text, 3)
    return [found.tokens[rank] for rank in (found.source, *found.copies)]


PROTOCOLS = {
    "servers": protocol_of_servers.MESSAGES,
    "the generator": generator.MESSAGES,
    "pairs": pair_machine.MESSAGES,
    "ranks of a replica": followers.MESSAGES,
}


def bytes_of(kind: int) -> bytes:
    """A message of a kind, with small numbers."""
    return struct.pack("<5I", kind, 1, 0, 1, 0) + struct.pack("<2I", 1, 0)


def message_of(made: Messages, data: bytes) -> None:
    """Parse a message: its kind, four words, and the payload."""
    kind, *ids = struct.unpack("<5I", data[:20].ljust(20, b"\0"))
    sizes = {"workers": 4, "chunks": 3}
    with contextlib.suppress(MalformedMessage):
        made.parse(Received(kind, tuple(ids), memoryview(data[20:])), **sizes)


Refusals = (RequestError,)
Usage = (UsageError,)

TEXTS, VALUES_, RAW, ENV = mutants.texts, mutants.values, mutants.raw, mutants.environments

TARGETS = [
    Target(
        "interfaces", VALUES_, lambda v: from_json(Host, v), (to_json(HOST),), (MalformedMessage,)
    ),
    Target("interfaces that join hosts", VALUES_, joined, (to_json(HOST),), Usage),
    Target("profile", TEXTS, lambda t: profile.decode(t, where="x"), (PROFILE, LIKE), Usage),
    Target(
        "profile file",
        RAW,
        loads(lambda p: profile.load_profile(str(p))),
        (PROFILE.encode(),),
        Usage,
    ),
    Target("paced model", TEXTS, profile.parse, ("paced:resnet50@0.25", "paced:vgg16"), Usage),
    Target("values", VALUES_, lambda v: decode(v, torch.device("cpu")), VALUES, (ValueError,)),
    Target("parameters on a server", VALUES_, held, (PIECES,), Refusals),
    Target(
        "settings on a server",
        VALUES_,
        settled,
        ([{k: encode(v) for k, v in SETTINGS.items()}],),
        Refusals,
    ),
    Target("places of ones", TEXTS, unpack_numbers, ("1f",), Refusals),
    Target(
        "documents", RAW, lambda b: Document(b, 1 << 16), (b'{"nbytes": 12, "x": [1]}',), Refusals
    ),
    Target("statuses", TEXTS, statuses, ("[1, false, 2, -1]", "7")),
    Target(
        "membership log",
        TEXTS,
        lambda t: parse_json(LogEntry, t, workers=3),
        (json.dumps(LogEntry(1, VIEW)),),
        (MalformedMessage,),
    ),
    Target("frames", RAW, read_frames, FRAMES, (MalformedMessage,)),
    Target(
        "headers",
        RAW,
        _native.unpack,
        (bytes(_native.Header(Type.HELLO, 1000, 0, 1, sequence=1).pack()),),
        (_native.Malformed,),
    ),
    Target(
        "options",
        RAW,
        lambda b: OptionsSchema(OPTIONS).parse(b, "rank 1"),
        (json.dumps(OPTIONS).encode(),),
        (PeerError,),
    ),
    Target(
        "replicas",
        RAW,
        lambda b: snapshot.Snapshot(b, TENSORS, TENSORS),
        (a_replica(),),
        (PeerError,),
    ),
    Target(
        "plan files",
        RAW,
        loads(lambda path: files.load(path, BucketSizeResult)),
        (written_by(lambda p: files.save(p, PLAN, {"w": 4})),),
        Usage,
    ),
    Target(
        "strategy files",
        RAW,
        loads(lambda path: files.load(path, StrategyResult)),
        (written_by(lambda p: files.save(p, CHOICE, {"w": 4})),),
        Usage,
    ),
    Target(
        "thresholds files",
        RAW,
        loads(lambda path: files.load(path, ThresholdResult)),
        (some_thresholds(),),
        Usage,
    ),
    Target(
        "probe files",
        RAW,
        loads(lambda path: files.load(path, Probe)),
        (written_by(lambda p: files.save(p, PROBE, {"w": 4})),),
        Usage,
    ),
    Target("kinds of files", RAW, loads(files.kind_of), (some_thresholds(),), Usage),
    Target(
        "probes",
        VALUES_,
        lambda v: from_json(Probe, v, "probe"),
        (to_json(PROBE),),
        (MalformedMessage,),
    ),
    Target(
        "merged plans",
        VALUES_,
        lambda v: checked_plans(v, WORKLOAD, loopback.worlds(1)[0]),
        ([[["a"], [2, 3]]],),
        (PeerError,),
    ),
    Target("traces", RAW, loads(trace.load), (a_part(),), Usage),
    Target("reports", TEXTS, Report.from_text, (report(1, 3).to_text(),), (MalformedMessage,)),
    Target(
        "snapshots", TEXTS, Job.from_text, (json.dumps(job(2, 3).to_json()),), (MalformedMessage,)
    ),
    Target(
        "what a supervisor hears",
        TEXTS,
        watched,
        (report(1, 3).to_text() + "\n" + report(0, 3).to_text(),),
    ),
    Target("metrics address", ENV, reporter.places, ({"WINGBEAT_METRICS": "[::1]:9400"},), Usage),
    Target("address of a job", TEXTS, top.job_at, ("node7:9400", "[::1]:9400"), Usage),
    Target(
        "sums",
        RAW,
        lambda b: copy_sum(torch.zeros(6), "float32", "float32", memoryview(b)),
        (bytes(24),),
        (ValueError,),
    ),
    Target(
        "labs",
        TEXTS,
        LabSpec.parse,
        (
            PAGE,
            "fat-tree:8/4@1gbit+500mbit,h3.eth0@200mbit",
            "bcube:3x2@250mbit",
            "star:4@1gbit,prio=2,ip=4",
        ),
        Usage,
    ),
    Target("lab TOML", TEXTS, LabSpec.from_toml, (LAB_TOML,), Usage),
    Target("lab files", RAW, loads(LabSpec.parse, "lab.toml"), (LAB_TOML.encode(),), Usage),
    Target("lab counters", VALUES_, LabStats.from_json, (STATS,), (ValueError,)),
    Target("rates", TEXTS, parse_rate, ("1gbit", "2.5gbit"), Usage),
    Target("times", TEXTS, parse_time, ("250ms", "10s"), Usage),
    Target(
        "strategies",
        TEXTS,
        parse_strategy,
        (
            "dear:mb=10",
            "allreduce:compression=sketch@4",
            "strategy:plan=merged,compression=topk@0.01,schedule=dear",
            "canary:s=2",
            "ripples",
        ),
        Usage,
    ),
    Target("bench rows", TEXTS, contenders.parse, ("ddp+powersgd:rank=4", "dear:mb=10"), Usage),
    Target("bench models", TEXTS, bench_models.parse, ("paced:resnet50@0.25",), Usage),
    Target(
        "slow workers",
        TEXTS,
        lambda t: slow.parse([t], workers=4, iterations=60),
        ("3=+2x@20-60", "random:+2x"),
        Usage,
    ),
    Target(
        "bench messages",
        TEXTS,
        lambda t: protocol.parse_message(protocol.MARK + t),
        ('{"kind": "x", "a": 1}',),
    ),
    Target(
        "wires",
        TEXTS,
        compression.parse,
        ("fp16", "sketch@4:groups=a.*@fp32+b@8", "lowrank@2:bits=8:split=count", "topk@0.01"),
        Usage,
    ),
    Target(
        "wires as JSON",
        VALUES_,
        compression.from_json,
        tuple(map(compression.to_json, CODECS)),
        Usage,
    ),
    Target("cube sizes", TEXTS, parse_size, ("3x2",), Usage),
    Target("launchers", ENV, launchers.from_environment, (SPACE, MPI, TORCHRUN), Usage),
    Target("first node", TEXTS, launchers.first_node, ("gpu[07-09,12],login1", "a,b")),
    Target("residual files", RAW, load_residuals, (residual_file(),), Usage),
    Target(
        "requests of services",
        TEXTS,
        lambda t: services.answer_request(t, Texts("x")),
        ('{"set": "a", "value": "b"}', '{"read": "a"}', '{"ready": true}'),
        (ValueError,),
    ),
    Target(
        "journals",
        TEXTS,
        lambda t: audit.read_journal(t.splitlines(keepends=True)),
        (JOURNAL,),
        Usage,
    ),
    *(
        Target(
            f"encoded slices, {wire}",
            RAW,
            lambda b, w=wire: unpack_header(memoryview(b), w, 1000),
            (pack_header(wire, [Piece(12), Piece(6, 0, 0)]) + b"payload",),
            (ValueError,),
        )
        for wire in CODECS
    ),
    *(
        Target(
            f"residuals, {name}",
            VALUES_,
            saved_states.reader(functools.partial(saved_states.load_residuals, name)),
            lambda name=name: (saved_states.residual_parts(name),),
            Usage,
        )
        for name in ("sketch", "lowrank", "momentum")
    ),
    Target(
        "shards",
        VALUES_,
        saved_states.reader(saved_states.load_shards),
        lambda: (saved_states.shard_parts(),),
        Usage,
    ),
    *(
        Target(
            f"extra state, {name}",
            VALUES_,
            saved_states.reader(functools.partial(saved_states.load_extra, name)),
            lambda name=name: (saved_states.extra_state(name),),
            Usage,
        )
        for name in ("sketch", "outer")
    ),
    Target(
        "parts of checkpoints",
        RAW,
        lambda b: checkpoint._unpacked(torch.frombuffer(bytearray(b or b"x"), dtype=torch.uint8)),
        (saved_part(),),
        Usage,
    ),
    Target(
        "clusters",
        TEXTS,
        lambda t: cluster.decode(t, "cluster.toml"),
        (LAB_TOML, CLUSTER_TOML),
        Usage,
    ),
    Target(
        "facts of the doctor",
        TEXTS,
        lambda t: parse_json(Facts, t, "facts"),
        (json.dumps(to_json(facts_of())),),
        (MalformedMessage,),
    ),
    Target(
        "decisions about colayers",
        TEXTS,
        lambda t: parse_decision(t, 3),
        (json.dumps(ColayerDecision(4, VIEW, ((0, 2), (1,)), "", False)),),
        (MalformedMessage,),
    ),
    Target(
        "decisions of an epoch",
        TEXTS,
        epoch,
        (json.dumps(EpochDecision(((0, "a"), (2, "c")), 5, 2, (0,))),),
        (MalformedMessage,),
    ),
    Target(
        "reports of an epoch",
        TEXTS,
        lambda t: parse_json(EpochReport, t).progress,
        (json.dumps(EpochReport("a", 4, 3, (0, 2))),),
        (MalformedMessage,),
    ),
    Target(
        "settings of a step",
        TEXTS,
        lambda t: unpack_numbers(parse_json(StepSettings, t).used),
        ('{"digest": "a", "groups": [{"lr": 1}], "used": "3", "scaler": {}}',),
        (MalformedMessage, RequestError),
    ),
    *(
        Target(
            f"messages of {name}",
            RAW,
            functools.partial(message_of, made),
            tuple(map(bytes_of, made.records)),
        )
        for name, made in PROTOCOLS.items()
    ),
    Target(
        "identity of a job",
        TEXTS,
        lambda t: parse_json(JobIdentity, t),
        (json.dumps(JobIdentity("x", False, 4)),),
        (MalformedMessage,),
    ),
    Target(
        "address of a process",
        TEXTS,
        ProcessAddress.from_text,
        (ProcessAddress("10.0.0.1", 4000, "0" * 32).to_text(),),
        (MalformedMessage,),
    ),
    Target(
        "requests of workers",
        TEXTS,
        lambda t: parse_json(ServiceRequest, t),
        (json.dumps(ServiceRequest("wingbeat.x", "{}", "a/b", "", "1")),),
        (MalformedMessage,),
    ),
    Target("addresses of a rank", VALUES_, reached, (ADDRESSES,), (RendezvousError,)),
    Target(
        "cards", TEXTS, functools.partial(parse_json, PeerInfo), (CARD.to_json(),), (ValueError,)
    ),
]


def to_bytes(target: Target, value: Any) -> bytes:
    """An input as a file; `from_bytes` undoes it."""
    if target.inputs is RAW:
        return bytes(value)
    text = value if target.inputs is TEXTS else json.dumps(value)
    return text.encode("utf-8", "surrogatepass")


def from_bytes(target: Target, data: bytes) -> Any:
    """The input of a file; a ValueError if the parser cannot be given such a thing."""
    if target.inputs is RAW:
        return data
    text = data.decode("utf-8", "surrogatepass")
    if target.inputs is TEXTS:
        return text
    value = json.loads(text)
    if target.inputs is ENV and not (
        isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    ):
        raise ValueError("not an environment")
    return value
