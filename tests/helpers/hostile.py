"""Members of a job that send anything, to each part that receives messages, in virtual time.

A `Victim` is one part with its peers' mailboxes. Peer 1 is hostile: it has passed the handshake, so
its messages arrive. They are valid ones, in any order, of which some have other words, lengths,
kinds or contents. The others behave.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import torch

from helpers import mutants, pair_simulation
from helpers.communication import NumericReplica, combine
from helpers.mail import Clock
from helpers.received import Received
from helpers.server_simulation import LARGEST, FakeMailbox, FakeNetwork
from helpers.server_update_simulation import DESCRIPTION, SETTINGS
from wingbeat.compression import Coded, Half, LowRank, Sketch
from wingbeat.engine.updates.json_values import encode
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness import messages as staleness
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.communication import CommunicationThread
from wingbeat.methods.bounded_staleness.streams import BEGIN, HEARTBEAT, MORE
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.methods.model_averaging import followers, generator, pair_machine
from wingbeat.methods.model_averaging.client import Client as GroupClient
from wingbeat.methods.model_averaging.client import StatusTable
from wingbeat.methods.model_averaging.generator import Generator
from wingbeat.methods.model_averaging.pair_averager import PairBuffer, PairExchange
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.methods.model_averaging.service import GroupService
from wingbeat.methods.parameter_server.aggregator import Aggregator
from wingbeat.methods.parameter_server.client import Client, Transfer
from wingbeat.methods.parameter_server.coding import Piece, SliceCodec, pack_header
from wingbeat.methods.parameter_server.protocol import Ids, Kind, pack_numbers, pack_route
from wingbeat.methods.parameter_server.server import Server
from wingbeat.methods.parameter_server.shard_optimizer import ShardOptimizer
from wingbeat.methods.parameter_server.shard_updates import ShardUpdates
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.membership import View
from wingbeat.types import Layout

HOSTILE = 1
"""Number of the hostile peer."""


class Mail(NamedTuple):
    """A message of the hostile peer."""

    kind: int
    ids: tuple[int, ...] = (0, 0, 0, 0)
    payload: bytes = b""
    dtype: str = ""


def word(chance: random.Random) -> int:
    """Return a number of 32 bits that is likely to matter."""
    ends = (0, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
    return chance.choice((chance.choice(ends), chance.randrange(6), chance.getrandbits(32)))


def spoil(mail: Mail, chance: random.Random, most: int = LARGEST) -> Mail:
    """Change one to three things in a message."""
    kind, ids, payload, dtype = mail
    for _ in range(chance.choice((1, 1, 2, 3))):
        match chance.randrange(6):
            case 0:
                kind = chance.choice((chance.randrange(20), word(chance)))
            case 1 | 2:
                place = chance.randrange(4)
                ids = (*ids[:place], word(chance), *ids[place + 1 :])
            case 3:
                payload = bytes(mutants.spoil_bytes([payload], chance))
            case 4:
                payload = payload[: chance.randrange(len(payload) + 1)]
            case 5:
                dtype = chance.choice(("", "float32", "float16", "bfloat16", "float64", "uint8"))
    return Mail(kind, ids, payload[:most], dtype)


class Victim:
    """A part of a job, and how messages reach it. The constructor draws from a seed.

    Attributes:
        name: how it is called in tests.
        errors: what it may raise; each text has one of ``blamed``.
        blamed: names of the hostile peer.
    """

    name = ""
    errors: tuple[type[Exception], ...] = (PeerError,)
    blamed: tuple[str, ...] = (f"rank {HOSTILE}",)

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def valid(self) -> Mail:
        """Return a message that the peer might send."""
        raise NotImplementedError

    def deliver(self, mail: Mail) -> None:
        """Let the part receive a message, and do what it can."""
        raise NotImplementedError

    def end(self) -> None:
        """Let all deadlines pass; fail if anything still waits."""


def attack(make: Callable[[random.Random], Victim], seed: int, count: int = 40) -> str:
    """Send messages from a seed; return the error that ended the part, or nothing."""
    chance = random.Random(seed)
    victim = make(chance)
    share = chance.choice((0.0, 0.1, 0.3, 1.0))
    last = None
    try:
        for _ in range(count):
            mail = last if last and chance.random() < 0.1 else victim.valid()
            last = mail = spoil(mail, chance) if chance.random() < share else mail
            victim.deliver(mail)
        victim.end()
    except victim.errors as error:
        text = str(error)
        assert any(name in text for name in victim.blamed), text
        assert len(text.splitlines()) == 1, text
        return text
    return ""


# -- parameter servers -------------------------------------------------------------------------

ONES = np.ones(6, "f4")
WIRES: tuple[Coded | None, ...] = (None, Sketch(bits=3), Half(), LowRank(rank=2))
PIECES = {"dtype": "float32", "numel": 6, "pieces": [[0, 0, 0, 4], [1, 1, 4, 2]], "state": []}


class OfServer(Victim):
    """A server of three workers, with or without a codec and an optimizer."""

    name = "server"
    updates: ShardUpdates | None = None
    wires = WIRES

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.network, self.clock = FakeNetwork(chance, 3), Clock()
        self.workers = [self.network.box(rank) for rank in range(3)]
        self.box = self.network.box(3)
        self.wire = chance.choice(self.wires)
        codec = None if self.wire is None else SliceCodec(self.wire, LARGEST)
        self.aggregator = Aggregator(3, 1 << 16, codec=codec)
        if self.name == "updating server":
            self.updates = ShardUpdates(
                3, lambda: ShardOptimizer(DESCRIPTION), self.aggregator.completed_sum, 1 << 16
            )
        self.server = Server(
            self.box, 3, self.aggregator, self.updates, timeout=5.0, clock=self.clock
        )  # type: ignore[arg-type]
        self.asked = [0, 0, 0]
        self.answered = [0, 0, 0]
        self.reasons: list[str] = []

    def valid(self) -> Mail:
        chance = self.chance
        kinds = [Kind.PUSH_PULL, Kind.PUSH_PULL, Kind.PUSH, Kind.PULL, Kind.PULL_RESIDUAL]
        if self.updates is not None:
            kinds += [
                *(Kind.LOAD, Kind.LOAD, Kind.CONTINUATION, Kind.BARRIER, Kind.GRADIENTS),
                *(Kind.STEP, Kind.FETCH, Kind.STATE, Kind.PING),
            ]
        kind = chance.choice(kinds)
        route = pack_route(chance.randrange(2), chance.randrange(4))
        ids = (0, chance.randrange(2), chance.randrange(2), route)
        if kind in (Kind.PUSH, Kind.PUSH_PULL):
            return Mail(kind, ids, self.gradients(), "float32" if self.wire is None else "uint8")
        if kind == Kind.GRADIENTS:
            return Mail(kind, ids, ONES.tobytes(), "float32")
        if kind == Kind.LOAD:
            fields = chance.choice((PIECES, {"round": 1, "values": [encode(3)]}))
            nbytes = chance.choice((24, 48, 1 << 15))
            return Mail(kind, ids, json.dumps({**fields, "nbytes": nbytes}).encode())
        if kind == Kind.CONTINUATION:
            return Mail(kind, ids, bytes(chance.choice((12, 24, 48))))
        if kind == Kind.STEP:
            return Mail(kind, (0, 0, 1, chance.randrange(2)), self.settings())
        return Mail(kind, ids)

    def settings(self) -> bytes:
        """The settings of a step."""
        groups = [{key: encode(value) for key, value in SETTINGS.items()}]
        return json.dumps({"digest": "a", "groups": groups, "used": pack_numbers({0, 1})}).encode()

    def gradients(self) -> bytes:
        """Gradients of a slice."""
        if self.wire is None:
            return ONES.tobytes()
        return pack_header(self.wire, [Piece(6, 0, 0)]) + bytes(self.chance.choice((12, 24, 30)))

    def deliver(self, mail: Mail) -> None:
        self.post(HOSTILE, mail)
        if self.chance.random() < 0.3:
            honest = self.chance.choice((0, 2))
            ids = (0, self.chance.randrange(2), self.asked[honest], 0)
            if self.wire is None and not self.reasons:
                self.post(honest, Mail(Kind.PUSH_PULL, ids, ONES.tobytes(), "float32"))
        self.run(12)

    def post(self, rank: int, mail: Mail) -> None:
        """Send a message of a worker, for which its window has room."""
        if self.workers[rank].room(3, urgency=0) < 2 * LARGEST:
            return
        self.workers[rank].post(
            3, mail.kind, mail.payload, ids=mail.ids, dtype=mail.dtype, urgency=0
        )

    def run(self, rounds: int) -> None:
        """Move messages, and let the server work."""
        for _ in range(rounds):
            for _ in range(4):
                self.network.move()
            self.server.step(self.box.poll(keep=True))
        assert self.aggregator.nbytes <= self.aggregator.max_nbytes
        for rank in (0, 2):
            for message in iter(self.workers[rank].poll, None):
                if message.kind == Kind.FAILED:
                    self.reasons.append(bytes(message.payload).decode())

    def end(self) -> None:
        for _ in range(60):
            self.clock.now += 1.0
            self.run(10)
        assert self.aggregator.find_incomplete(self.clock.now - 51.0) is None or self.reasons
        if self.reasons:
            assert len(self.reasons) == 2, "both honest workers learn the reason once"
            late = ("no gradients from", "no settings", "no update", "rank 0", "rank 2", "no ")
            if not self.reasons[0].startswith(late):
                raise PeerError(self.reasons[0])


class OfUpdatingServer(OfServer):
    """A server that runs the optimizer."""

    name = "updating server"
    wires = (None,)


class OfServerClient(Victim):
    """A worker whose servers, 1 and 2, send anything."""

    name = "client of servers"
    blamed = ("server 1",)

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.network, self.clock = FakeNetwork(chance, 1), Clock()
        self.box, *self.servers = (self.network.box(number) for number in range(3))
        self.client = Client(
            self.box, [1, 2], me="rank 0", name="server {}".format, timeout=5.0, clock=self.clock
        )  # type: ignore[arg-type]
        self.memory = np.zeros(64, "f4")
        self.round = 0
        self.requests: list[Future[None]] = []
        self.request()

    def request(self) -> None:
        """Ask both servers for something."""
        kind = self.chance.choice((Kind.PUSH_PULL, Kind.PULL, Kind.FETCH, Kind.STATE))
        view = memoryview(self.memory).cast("B")
        parts = [
            Transfer(1 + n, Ids(0, n, self.round, pack_route(0, n)), view[24 * n :][:24], 1, n)
            for n in range(2)
        ]
        self.requests.append(self.client.request(kind, "float32", parts, "bucket 7"))
        self.round += 1

    def valid(self) -> Mail:
        chance = self.chance
        kinds = (Kind.SUM, Kind.PARAMETERS, Kind.STATE, Kind.CONTINUATION, Kind.PING, Kind.RESIDUAL)
        kind = chance.choice(kinds)
        ids = (0, chance.randrange(2), chance.randrange(self.round), 0)
        if kind == Kind.STATE:
            return Mail(kind, ids, json.dumps({"nbytes": chance.choice((0, 24, 1 << 30))}).encode())
        return Mail(kind, ids, ONES.tobytes() if kind != Kind.PING else b"", "float32")

    def deliver(self, mail: Mail) -> None:
        self.servers[0].post(0, mail.kind, mail.payload, ids=mail.ids, dtype=mail.dtype)
        for _ in range(12):
            self.network.move()
            self.client.step(self.box.poll())
        if self.requests[-1].done() and len(self.requests) < 4:
            self.request()

    def end(self) -> None:
        for _ in range(60):
            self.clock.now += 1.0
            with contextlib.suppress(PeerError):  # no answer within 50 s
                self.client.step(self.box.poll())
                continue
            return
        assert all(each.done() for each in self.requests), "a request waits for ever"


# -- group generator ---------------------------------------------------------------------------


class QueueMailbox:
    """A mailbox whose messages a test puts into it, and which counts what is sent."""

    def __init__(self, peers: Sequence[int]) -> None:
        self.peers = tuple(peers)
        self.inbox: deque[Received] = deque()
        self.sent: list[tuple[int, int]] = []
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}
        self.cut: dict[int, float] = {}
        self.refused: Any = Counter()

    def interrupter(self) -> Callable[[], None]:
        return lambda: None

    def unconnected(self) -> dict[int, float]:
        return self.cut

    def poll(self, *, keep: bool = False) -> Received | None:
        return self.inbox.popleft() if self.inbox else None

    def next(self, seconds: float, *, keep: bool = False) -> Received | None:
        return self.poll(keep=keep)

    def post(self, peer: int, kind: int, payload: Any = b"", **_: Any) -> None:
        if peer in self.lost or peer in self.left:
            raise PeerError(f"rank {peer} is gone")
        self.sent.append((peer, kind))

    def close(self, seconds: float) -> None:
        pass


class OfGenerator(Victim):
    """The group generator of four workers, of which the others request groups."""

    name = "group generator"
    errors = ()

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.clock, self.box = Clock(), QueueMailbox(range(4))
        rules = chance.choice(
            (Rules(), Rules.all_workers(), Rules.random(2), Rules(size=4, inter_intra=False))
        )
        self.generator = Generator(Layout.even(2, 2), rules)
        self.service = GroupService(self.box, self.generator, 4, 100.0, clock=self.clock)  # type: ignore[arg-type]
        self.runs: dict[int, Any] = {}

    def valid(self) -> Mail:
        chance, made = self.chance, generator
        number, epoch, other = chance.randrange(4), chance.randrange(2), chance.randrange(4)
        message: Any = chance.choice(
            (
                made.Request(),
                made.Request(True),
                made.Synchronize(),
                made.Done(number, epoch),
                made.Lost(number, epoch, other),
                made.FetchState(-1, False),
                made.FetchState(other, True),
                made.Fetched(),
                made.Keepalive(),
                made.Added(other),
            )
        )
        return Mail(*made.MESSAGES.pack(message))

    def deliver(self, mail: Mail) -> None:
        self.receive(HOSTILE, mail)
        worker = self.chance.choice((0, 2, 3))
        if not self.generator.is_waiting(worker):
            self.receive(worker, Mail(*generator.MESSAGES.pack(generator.Request())))
        else:
            own = self.generator._buffers[worker]
            if own and own[0].running:
                done = generator.Done(own[0].number, own[0].epoch)
                self.receive(worker, Mail(*generator.MESSAGES.pack(done)))
        self.clock.now += 0.1

    def receive(self, worker: int, mail: Mail) -> None:
        """Let the service receive a message of a worker."""
        self.box.inbox.append(Received(mail.kind, mail.ids, mail.payload, worker))
        self.service.step(self.box.poll())

    def end(self) -> None:
        """The hostile worker is gone, and the others still make groups."""
        self.box.lost[HOSTILE] = "has exited"
        for _ in range(130):
            self.clock.now += 1.0
            self.service.step(None)
            for worker in (0, 2, 3):
                own = self.generator._buffers[worker]
                if own and own[0].running:
                    done = generator.Done(own[0].number, own[0].epoch)
                    self.receive(worker, Mail(*generator.MESSAGES.pack(done)))
                elif not self.generator.is_waiting(worker):
                    self.receive(worker, Mail(*generator.MESSAGES.pack(generator.Request())))
        gone = [w for w in (0, 2, 3) if self.service._workers[w].gone]
        assert not gone, "an honest worker was removed"


class OfGroupClient(Victim):
    """A worker whose group generator sends anything."""

    name = "client of the generator"
    blamed = ("the group generator",)

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.box = QueueMailbox([4])
        table = StatusTable(Switchboard(), "groups/", 4, 0)
        layout = Layout.even(2, 2)
        rules = chance.choice((Rules(), Rules.all_workers()))
        self.client = GroupClient(self.box, 0, 4, layout, rules, 5.0, table)  # type: ignore[arg-type]
        self.client.copies_state = chance.random() < 0.3
        self.mails: list[Mail] = []

    def valid(self) -> Mail:
        chance, made = self.chance, generator
        reason = chance.choice(list(made.Reason))
        run = made.RunMessage(chance.randrange(3), chance.randrange(2), 0, 5, (0, 1), ())
        message: Any = chance.choice(
            (
                run,
                run,
                made.Added(chance.randrange(4)),
                made.Removed(chance.randrange(4), chance.randrange(2), reason, False),
                made.SendState(0, chance.randrange(4), 7),
                made.Keepalive(chance.randrange(4)),
                made.Refused(b"kind is 99"),
            )
        )
        return Mail(*made.MESSAGES.pack(message))

    def deliver(self, mail: Mail) -> None:
        self.mails.append(mail)

    def end(self) -> None:
        for mail in self.mails:
            self.box.inbox.append(Received(mail.kind, mail.ids, mail.payload, 4))
        reducer = Mock()
        reducer.average.side_effect = lambda *_: self.chance.choice((None, None, 1))
        for _ in range(len(self.mails)):
            if not self.box.inbox:
                break
            self.box.next = self.next  # type: ignore[method-assign]
            self.client.step(reducer)
            for call in reducer.average.call_args_list:
                members = call.args[0].members
                assert 0 in members, "an average without this worker"
                assert len(set(members)) == len(members), "a member twice"

    def next(self, seconds: float, *, keep: bool = False) -> Received | None:
        """Return the next message; after the last one the generator is gone."""
        if not self.box.inbox:
            self.box.lost[4] = "has been silent"
        return self.box.poll(keep=keep)


# -- pairs, followers --------------------------------------------------------------------------


class OfPairs(Victim):
    """A passive worker, 1 of 2, whose partner 0 sends anything; or the active one."""

    name = "pairs"
    numel = 40

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.clock, self.network = Clock(), pair_simulation.FakeNetwork(4)
        self.me = chance.choice((0, 2, 3))
        # The partner of an active worker is passive; 1 is the partner of 0 and 2.
        self.peer = HOSTILE if self.me != 3 else 0
        self.blamed = (f"rank {self.peer}",)
        self.model = torch.zeros(self.numel)
        buffer = PairBuffer(self.model, chance.choice((None, torch.bfloat16)), chunk_bytes=64)
        machine = pair_machine.PairMachine(self.me, 4, len(buffer.spans), 0)
        self.exchange = PairExchange(
            machine, self.network.boxes[self.me], buffer, timeout=5.0, clock=self.clock
        )  # type: ignore[arg-type]
        self.exchange.begin()

    def valid(self) -> Mail:
        chance, made = self.chance, pair_machine
        kind = chance.choice(list(made.Kind))
        number = chance.randrange(3)
        if kind not in (made.Kind.CHUNK, made.Kind.AVERAGE):
            return Mail(*made.MESSAGES.pack(made.Numbered(number), kind))
        payload = bytes(chance.choice((64, 32, 16)))
        return Mail(*made.MESSAGES.pack(made.Chunk(number, chance.randrange(3), payload), kind))

    def deliver(self, mail: Mail) -> None:
        message = Mock(
            peer=self.peer, kind=mail.kind, ids=mail.ids, payload=memoryview(mail.payload),
            interface=0,
        )  # fmt: skip
        self.exchange.step(message)
        if self.chance.random() < 0.1:
            self.clock.now += 1.0

    def end(self) -> None:
        ended = self.exchange.end()
        for _ in range(120):
            self.clock.now += 1.0
            self.exchange.step(None)
        assert ended.done(), "the training thread waits for ever"
        if (error := ended.exception()) is not None:
            assert isinstance(error, PeerError), error


class OfFollowers(Victim):
    """The parser of messages inside of a replica."""

    name = "ranks of a replica"
    errors = ()

    def valid(self) -> Mail:
        chance, made = self.chance, followers
        message: Any = chance.choice(
            (
                made.Begin(made.Call.STEP),
                made.Average(3, (0, 1)),
                made.Receive(1, 4),
                made.Send(1, 4),
                made.Stop(5),
                made.Result(made.SUCCESS),
            )
        )
        return Mail(*made.MESSAGES.pack(message))

    def deliver(self, mail: Mail) -> None:
        try:
            followers.MESSAGES.parse(Received(mail.kind, mail.ids, mail.payload), workers=3)
        except followers.MalformedMessage:
            pass


# -- bounded staleness -------------------------------------------------------------------------


class OfStaleness(Victim):
    """The communication thread of worker 0 of three."""

    name = "bounded staleness"

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.clock, self.network = Clock(), FakeNetwork(chance, 0)
        self.boxes: list[FakeMailbox] = [self.network.box(rank) for rank in range(3)]
        self.bound = chance.choice((StalenessBound(0, 2, 2), StalenessBound(2, 2, 2)))
        self.replica = NumericReplica(3, self.bound.colayers)
        self.thread = CommunicationThread(
            Worker(0, 3, self.bound, combine), self.boxes[0], self.replica, clock=self.clock
        )  # type: ignore[arg-type]
        self.number = 0

    def valid(self) -> Mail:
        chance, view = self.chance, View((0, 0, 0))
        counts = tuple(chance.randrange(-1, 4) for _ in range(3))
        small, piece = chance.randrange(4), chance.randrange(3)
        message: Any = chance.choice(
            (
                staleness.Progress(small, -1, 2, False, 4, view),
                staleness.Piece(small, chance.randrange(2), piece, view, bytes(40)),
                staleness.PieceSum(1, piece, small, ((0, 1),), counts, view, bytes(40)),
                staleness.ViewProposal(view, -1, tuple(((-1, 4, 5),) * 2 for _ in range(3))),
                staleness.PullRequest(small, view),
                staleness.Drained(small, view),
                staleness.Welcome(2, (7, 8)),
            )
        )
        frame = b"".join(staleness.encode_frame(message, 0))
        kind = chance.choice((BEGIN, BEGIN, BEGIN, MORE, HEARTBEAT))
        if chance.random() < 0.2:  # a claim of a large payload
            frame = bytearray(frame)
            struct.pack_into("<Q", frame, 8, chance.choice((1 << 20, 1 << 34, 1 << 36)))
        if chance.random() < 0.3:
            frame = mutants.spoil_bytes([bytes(frame)], chance)
        ids = (self.number, chance.choice((0, 0, 0, 1)), HOSTILE, chance.choice((0, 0, 0, 2)))
        return Mail(kind, ids, bytes(frame)[:LARGEST])

    def deliver(self, mail: Mail) -> None:
        self.number += 1
        if self.boxes[1].room(0, urgency=0) < 2 * LARGEST:
            return
        self.boxes[1].post(0, mail.kind, mail.payload, ids=mail.ids)
        for _ in range(6):
            self.network.move()
            self.thread.process(self.boxes[0].poll())
            for rank in (1, 2):
                while self.boxes[rank].poll() is not None:
                    pass
        self.clock.now += 0.02
        if self.chance.random() < 0.3:
            self.thread._apply_rounds()


VICTIMS: tuple[type[Victim], ...] = (
    *(OfServer, OfUpdatingServer, OfServerClient, OfGenerator, OfGroupClient, OfPairs),
    *(OfFollowers, OfStaleness),
)
