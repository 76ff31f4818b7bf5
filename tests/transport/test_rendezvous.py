"""What `init` says when the workers do not find each other, and that it leaves nothing open."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

import wingbeat
from helpers.ports import free_port
from wingbeat.errors import RendezvousError, UsageError
from wingbeat.transport import loopback
from wingbeat.transport.speed import measure_weights
from wingbeat.transport.world import World

SCRIPT = """
import sys, time, wingbeat
begin = time.monotonic()
try:
    wingbeat.init(timeout=float(sys.argv[1]), interfaces=sys.argv[2:] or None)
except wingbeat.errors.WingbeatError as err:
    print(f"{type(err).__name__}|{time.monotonic() - begin:.1f}|{err}")
"""


def say(env: dict[str, str], *args: str) -> tuple[str, float, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "MASTER"))}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT.replace("import sys", "import wingbeat.errors, sys", 1),
            *args,
        ],
        env={**clean, **env, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    kind, seconds, message = done.stdout.strip().rpartition("\n")[2].split("|", 2)
    assert "\n" not in message
    return kind, float(seconds), message


def test_a_missing_worker_is_named_with_the_wait() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    kind, seconds, message = say({**env, "MASTER_PORT": str(free_port())}, "2")
    assert kind == "RendezvousError"
    assert message.startswith("rank 0")
    assert seconds < 30


def test_a_store_that_nobody_serves_is_named() -> None:
    port = str(free_port())
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    kind, _, message = say(env, "2")
    assert kind == "RendezvousError"
    assert f"rank 1 did not reach the store at 127.0.0.1:{port}" in message


def test_half_of_torchruns_environment_is_refused() -> None:
    kind, _, message = say({"RANK": "0"}, "2")
    assert kind == "UsageError"
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set" in message
    assert "torchrun" in message


def test_a_timeout_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"timeout=0: allowed are seconds above 0"):
        wingbeat.init(timeout=0)


def test_a_rank_that_publishes_nothing_is_named() -> None:
    world = loopback.worlds(2, timeout=0.2)[0]
    with pytest.raises(RendezvousError, match=r"rank 0: rank 1 sent no answer for 'model' within"):
        world.exchange("model", {})


@pytest.mark.parametrize("text", ["__import__('os')", "[" * 100_000], ids=["code", "deep"])
def test_what_is_not_json_is_refused(text: str) -> None:
    world = loopback.worlds(2, timeout=0.2)[0]
    world.store.set("1/model/1", text)
    with pytest.raises(RendezvousError, match="rank 1 sent no valid JSON"):
        world.exchange("model", {})


def test_links_share_a_tensor_by_their_speed() -> None:
    class Slow(loopback.LoopbackLink):
        """Delivers a fifth as fast as its time says, by waiting on a real clock."""

        def recv(self, tensor, peer, tag):
            pending = super().recv(tensor, peer, tag)
            delay = threading.Event()

            class Late:
                def wait(self, seconds: float) -> None:
                    pending.wait(seconds)
                    delay.wait(tensor.numel() / 2e6)

            return Late()

    board = loopback.Switchboard()
    members = loopback.worlds_on(board, 2, interfaces=2)
    for world in members:
        fast, _ = world.links
        world.links = (fast, Slow(board, world.rank, "slow"))

    def body(world: World) -> tuple[float, ...]:
        return measure_weights(world)

    first, second = loopback.run(members, body)
    assert first == second
    assert sum(first) == pytest.approx(1)
    assert first[1] < 0.2 * first[0]
