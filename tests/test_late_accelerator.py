"""The accelerator of tests itself."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from helpers import accelerator, waiting

pytestmark = pytest.mark.skipif(bool(accelerator.why_not()), reason=accelerator.why_not())


def is_asleep(thread: threading.Thread) -> bool:
    status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="ascii")
    return status.rpartition(")")[2].split()[0] == "S"


def test_seed_that_is_set_while_another_thread_submits_discards_nothing() -> None:
    late, device = accelerator.load(), torch.device(accelerator.NAME, 0)
    first, second = torch.accelerator.current_stream(device), torch.Stream(device)
    first.synchronize()
    gates = [late.late_gate(), late.late_gate()]
    late.late_gate_wait(gates[1], 0, second.stream_id)
    seeding = threading.Thread(target=late.late_seed, args=(7,))
    seeding.start()
    waiting.until(lambda: is_asleep(seeding))  # it waits for the second stream
    late.late_gate_wait(gates[0], 0, first.stream_id)
    event = first.record_event()
    late.late_gate_open(gates[1])
    second.synchronize()
    late.late_gate_open(gates[0])
    waiting.until(event.query)
    seeding.join(waiting.PATIENCE)
    assert not seeding.is_alive()
