"""Random numbers that are drawn and put back."""

from __future__ import annotations

import threading

import torch

from wingbeat.engine.updates.chance import kept_random_state


def test_the_state_is_put_back() -> None:
    before = torch.get_rng_state()
    with kept_random_state([]):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_thread_at_a_time() -> None:
    entered = threading.Event()

    def other() -> None:
        with kept_random_state([]):
            entered.set()

    thread = threading.Thread(target=other, daemon=True)
    with kept_random_state([]):
        thread.start()
        assert not entered.wait(0.05)
    thread.join(10.0)
    assert entered.is_set()
