"""Servers over two network cards: both carry their part, and one that dies is named."""

from __future__ import annotations

import sys

import pytest

from wingbeat_lab import lab

TRAIN = """if True:
    import gc, subprocess, sys, time, torch, wingbeat, wingbeat_lab
    from wingbeat_lab.lab import counters
    torch.set_num_threads(1)
    world = wingbeat.init(timeout=float(sys.argv[1]))
    rank, cards = world.rank, ("eth0", "eth1")

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)])
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def backward(model, turn, who):
        x = torch.randn(4, 300, generator=torch.Generator().manual_seed(10 * turn + who))
        model(x).square().mean().backward()

    def read():
        torch.distributed.barrier()
        now = counters.read()
        return [now[card].tx_bytes for card in cards]

    plain, reference = made()
    for turn in range(6):
        reference.zero_grad()
        for who in range(2):
            backward(plain, turn, who)
        for p in plain.parameters():
            p.grad /= 2
        reference.step()
    for strategy in [] if len(sys.argv) > 2 else (
        wingbeat.Geryon(), wingbeat_lab.TicTac(), wingbeat.Geryon(update="server", pull="start"),
    ):
        model, optimizer = wingbeat.distribute(*made(), strategy)
        for turn in range(6):
            if turn == 2:  # buckets are made, and servers have parameters
                model.synchronize()
                before = read()
            optimizer.zero_grad()
            backward(model, turn, rank)
            optimizer.step()
        model.synchronize()
        after = read()
        with torch.no_grad():
            far = max(
                float((a - b).abs().max() / b.abs().max())
                for a, b in zip(model.parameters(), plain.parameters())
            )
        sent = [b - a for a, b in zip(before, after)]
        print(far < 1e-5, *(s / sum(sent) - w for s, w in zip(sent, world.weights)), flush=True)
        wingbeat.release(model, optimizer)
    if len(sys.argv) > 2:
        from wingbeat.methods.parameter_server.client import Client
        model, optimizer = wingbeat.distribute(*made(), wingbeat.Geryon())
        [client] = [each for each in gc.get_objects() if type(each) is Client]
        box, posted = client.mailbox, []
        post = box.post
        box.post = lambda *a, **k: posted.append(post(*a, **k)) or posted[-1]
        victim, cut = int(sys.argv[2]), float("inf")
        try:
            for turn in range(1_000_000):
                if turn == 3 and rank != victim:
                    time.sleep(world.timeout * float(sys.argv[3]))
                optimizer.zero_grad()
                backward(model, turn, rank)
                if turn == 3 and rank == victim:  # when all that it has pushed has arrived
                    own = client._calls, client._queue.queued
                    while any(own) or not all(each.done() for each in posted):
                        own = client._calls, client._queue.queued
                        time.sleep(0.01)
                    subprocess.run(["ip", "link", "set", "eth1", "down"], check=True)
                    cut = time.monotonic()
                optimizer.step()
        except wingbeat.errors.PeerError as error:
            print("late" * (time.monotonic() - cut > world.timeout), error, flush=True)
"""


def run(*arguments: str) -> dict[int, list[str]]:
    lines: dict[int, list[str]] = {}
    result = lab.run(
        "star:2x2@200mbit",
        [sys.executable, "-c", TRAIN, *arguments],
        on_line=lambda rank, line: lines.setdefault(rank, []).append(line),
        timeout=150,
    )
    assert result.exit_code == 0, lines
    return lines


def check(lines: list[str]) -> None:
    """DDP's weights, and on each card its part of the bytes, by the kernel's counters."""
    assert len(lines) == 3, lines
    for line in lines:
        exact, *off = line.split()
        assert exact == "True", lines
        assert all(abs(float(part)) < 0.03 for part in off), lines


@pytest.mark.lab
@pytest.mark.slow
def test_two_interfaces_share_traffic_and_weights_equal_ddp() -> None:
    for lines in run("60").values():
        check(lines)


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.parametrize(("victim", "late"), [("1", "0"), ("0", "0.35")])
def test_failed_interface_is_named_on_all_workers(victim: str, late: str) -> None:
    """Also where the other has nothing to say for a while, by who has sent all it has to send."""
    found = run("25", victim, late)
    assert sorted(found) == [0, 1], found
    for lines in found.values():
        (line,) = (each for each in lines if "Warning" not in each)
        assert "has been silent over interface eth1 (10.1.0." in line, found
        assert not line.startswith("late"), found
