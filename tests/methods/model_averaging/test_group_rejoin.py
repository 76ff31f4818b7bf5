"""A process that is killed while it averages with groups, and restarted alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.ports import free_port
from helpers.returning import lines, made, start

SCRIPT = """if True:
    import os, sys, time, torch, wingbeat
    from wingbeat.methods.model_averaging.group_averager import GroupSession
    from wingbeat.methods.model_averaging.rules import Rules
    torch.set_num_threads(1)
    world = wingbeat.init(timeout=60)
    buffer = torch.full((1000,), float(world.rank))
    rules = Rules.all_workers() if sys.argv[1] == "everyone" else Rules()
    session = GroupSession(world, buffer, rules)
    made = 0
    session.snapshot = lambda: buffer.numpy().tobytes() + made.to_bytes(4, "little")
    if world.returned:
        state = session.fetch_state()
        buffer.copy_(torch.frombuffer(state[:4000], dtype=torch.float32))
        made = int.from_bytes(state[4000:], "little")
        assert (buffer == buffer[0]).all()
    print("begun", made, float(buffer[0]), flush=True)
    while not os.path.exists(sys.argv[2]):
        buffer += 1
        made += 1
        session.step()
        print("made", made, flush=True)
        time.sleep(0.002)
    session.synchronize()
    client = session.client
    print("ended", float(buffer[0]), sorted(client.lost_peers), client.fallback, flush=True)
    session.close()
    wingbeat.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rules", ["smart", "everyone"])
def test_killed_worker_rejoins_twice_and_all_end_equal(rules: str, tmp_path: Path) -> None:
    port, stop = free_port(), tmp_path / "stop"
    workers = [start(SCRIPT, rank, port, rules, stop) for rank in range(3)]
    try:
        said = [lines(worker) for worker in workers]
        now = made(said[0], 20)
        for lost in (2, 1):
            workers[lost].kill()
            workers[lost].wait(10)
            # The others go on without it, once it is missed.
            now = made(said[0], now + 100)
            workers[lost] = start(SCRIPT, lost, port, rules, stop)
            said[lost] = lines(workers[lost])
            what, state = next(said[lost])
            assert what == "begun"
            assert int(state.split()[0]) >= 100, "it goes on from where the others are"
            made(said[lost], int(state.split()[0]) + 20)
        stop.touch()
        ended = [next(text for what, text in own if what == "ended") for own in said]
        assert ended[0] == ended[1] == ended[2]
        assert ended[0].endswith("[] None\n"), "nobody is absent, and the generator lives"
        assert [worker.wait(30) for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
