"""One end of a flow alone: what it sends when. What two ends do together is in test_endpoint.py."""

from __future__ import annotations

from wingbeat.transport.messages.frames import (
    MAX_IN_FLIGHT,
    ConnectionId,
    Flow,
    Header,
    Posted,
    Type,
    unpack,
)

PLACE = ConnectionId(0, 0, b"peer")
MIB = 1 << 20


def flow_that_has_met() -> Flow:
    """The flow of process 0 to process 1, after its first words."""
    flow = Flow(10, 0, 20, 1, 32 * MIB, 60.0)
    flow.accept(of_peer(Type.WELCOME), 0.0)
    return flow


def of_peer(type_: Type, sequence: int = 0, arrived: int = 0) -> Header:
    return Header(type_, 20, 1, 0, sequence, arrived)


def sent(flow: Flow, now: float = 0.0) -> list[Header]:
    """What the flow sends now."""
    frames: list[Header] = []

    def send(_place: ConnectionId, parts: list[bytes | memoryview]) -> bool:
        frames.append(unpack(parts[0]))
        return True

    flow.flush(send, PLACE, now)
    return frames


def data(payload: bytes) -> Posted:
    return Posted(Type.DATA, 0, (0, 0, 0, 0), 0, (), payload)


def test_every_gap_is_reported_at_once_and_once() -> None:
    flow = flow_that_has_met()
    for gap in (0, 1):
        assert flow.accept(of_peer(Type.DATA, gap + 2), 0.0) is False
        assert flow.accept(of_peer(Type.DATA, gap + 3), 0.0) is False
        assert [each.type for each in sent(flow)] == [Type.MISSING]
        assert flow.accept(of_peer(Type.DATA, gap + 1), 0.0) is True


def test_eight_mib_are_under_way_at_a_time() -> None:
    flow = flow_that_has_met()
    for _ in range(9):
        flow.post(data(bytes(3 * MIB)), 0.0)
    assert [each.sequence for each in sent(flow)] == [1, 2, 3]
    assert not sent(flow)
    for arrived in range(1, 7):
        flow.accept(of_peer(Type.ACKNOWLEDGE, arrived=arrived), 0.0)
        assert [each.sequence for each in sent(flow)] == [arrived + 3]


def test_refused_frame_stays_queued() -> None:
    flow = flow_that_has_met()
    flow.post(data(b"1"), 0.0)
    flow.accept(of_peer(Type.ASK), 0.0)
    flow.flush(lambda _place, _parts: False, PLACE, 0.0)
    assert not flow.up
    assert not sent(flow)
    flow.accept(of_peer(Type.WELCOME), 0.0)
    assert [each.type for each in sent(flow)] == [Type.ACKNOWLEDGE, Type.DATA]


def test_arrived_payload_is_released() -> None:
    flow = flow_that_has_met()
    posted = data(b"1")
    flow.post(posted, 0.0)
    sent(flow)
    assert flow.holds(posted)
    assert not posted.done()
    flow.accept(of_peer(Type.ACKNOWLEDGE, arrived=1), 0.0)
    assert not flow.holds(posted)
    assert posted.done()


def test_a_small_payload_travels_with_its_header_and_a_large_one_as_it_is() -> None:
    flow = flow_that_has_met()
    frames: list[list[bytes | memoryview]] = []
    payloads = [b"", b"1234", memoryview(bytes(16 * 1024)), bytes(16 * 1024 + 1)]
    for payload in payloads:
        flow.post(data(payload), 0.0)
    flow.flush(lambda _place, parts: frames.append(parts) or True, PLACE, 0.0)
    for parts, payload in zip(frames[:3], payloads, strict=False):
        assert bytes(parts[0][76:]) == bytes(payload)
        assert len(parts) == 1
    assert len(frames[3][0]) == 76
    assert frames[3][1] is payloads[3]


def test_replies_to_a_peer_that_asks_endlessly_are_kept_once() -> None:
    flow = flow_that_has_met()
    for number in range(1, 1000):
        flow.accept(of_peer(Type.ASK, number), 0.0)
        flow.accept(of_peer(Type.HELLO, number), 0.0)
    assert sorted(each.type for each in sent(flow)) == [Type.WELCOME, Type.MISSING]


def test_messages_under_way_are_bounded_by_number() -> None:
    flow = flow_that_has_met()
    for _ in range(MAX_IN_FLIGHT + 5):
        flow.post(data(b"x"), 0.0)
    assert len(sent(flow)) == MAX_IN_FLIGHT
    flow.accept(of_peer(Type.ACKNOWLEDGE, arrived=3), 0.0)
    assert len(sent(flow)) == 3


def test_silence_before_resume_does_not_count() -> None:
    flow = flow_that_has_met()
    flow.post(data(b"x"), 0.0)
    assert not flow.tick(59.0)
    flow.resume(1000.0)
    assert not flow.tick(1059.0)
    assert flow.tick(1060.0)
