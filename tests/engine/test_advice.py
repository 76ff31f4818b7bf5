"""Warnings about strategies that cannot pay on the workers of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wingbeat
from wingbeat.compression import CodecOptions, parse
from wingbeat.engine import advice
from wingbeat.engine.advice import Facts, advise, facts_of, measure_codec, tries_codec
from wingbeat.parts.strategy import Strategy
from wingbeat.strategies import PRESETS
from wingbeat.types import Layout

ALWAYS = wingbeat.Sketch(auto_disable=False)
ALONE = Facts(workers=1, hosts=1)
ONE_HOST = Facts(workers=4, hosts=1)
FOUR_HOSTS = Facts(workers=4, hosts=4, link_bytes_s=125e6, codec_bytes_s=2e9)
FAST = Facts(workers=2, hosts=2, link_bytes_s=12.5e9, codec_bytes_s=2e9)
"""Links of 100 Gbit/s: 12.5 GB of gradients between two hosts take a second."""


@pytest.mark.parametrize(
    ("strategy", "facts", "text"),
    [
        (wingbeat.DeAR(), ALONE, "the job has one worker, so nothing is exchanged: start"),
        (
            wingbeat.AllReduce(),
            Facts(workers=1, hosts=1, meshed=True),
            "the mesh has one replica, so nothing is exchanged: give its dimension across=",
        ),
        (
            wingbeat.AllReduce(compression=ALWAYS),
            ONE_HOST,
            "all 4 workers are on one host, where no network is to be relieved and "
            "Sketch(auto_disable=False) only adds work: "
            'use compression="fp32", or leave out auto_disable=False, for a trial',
        ),
        (
            wingbeat.AllReduce(compression=ALWAYS),
            FAST,
            "Sketch(auto_disable=False) encodes and decodes 2 GB of gradients a second on each "
            "host, and the links, at 100 Gbit/s, exchange 12 GB uncompressed: use",
        ),
        (
            wingbeat.Canary(),
            FAST,
            'uncompressed: use compression="fp32"',
        ),
        (
            wingbeat.Geryon(),
            ONE_HOST,
            "all 4 workers are on one host, so their servers take processor time",
        ),
        (
            wingbeat.Geryon(servers=1),
            FOUR_HOSTS,
            "with 1 server for 4 hosts, the NIC of a server's host carries 2 times the bytes of an "
            "all-reduce: leave the number of servers out, for one on each host",
        ),
        (
            wingbeat.Ripples(),
            ONE_HOST,
            "all 4 workers are on one host, where they average together in each step",
        ),
        (wingbeat.LocalSGD(every=1), FOUR_HOSTS, "every=1 averages the model after each step"),
        (wingbeat.DiLoCo(every=1), FOUR_HOSTS, "every=1 averages the model after each step"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value)[:40],
)
def test_a_strategy_that_cannot_pay_gets_one_line_with_a_remedy(
    strategy: Strategy, facts: Facts, text: str
) -> None:
    [line] = advise(strategy, facts)
    assert line.startswith(f"{strategy!r}: ")
    assert text in line
    assert "\n" not in line


@pytest.mark.parametrize("name", PRESETS)
def test_presets_with_their_defaults_are_not_reported_on_hosts_with_slow_links(name: str) -> None:
    assert advise(PRESETS[name](), FOUR_HOSTS) == []


@pytest.mark.parametrize(
    ("strategy", "facts"),
    [
        # A trial decides.
        (wingbeat.AllReduce(compression="sketch"), FAST),
        (wingbeat.AllReduce(compression="sketch"), ONE_HOST),
        (wingbeat.Auto(exact=False), FAST),
        (wingbeat.Geryon(compression="sketch"), FAST),
        # The codec may be faster, or is not measured.
        (wingbeat.AllReduce(compression=ALWAYS), FOUR_HOSTS),
        (
            wingbeat.AllReduce(compression=ALWAYS),
            Facts(workers=2, hosts=2, link_bytes_s=12.5e9),
        ),
        # Each server's host carries at most a third more.
        (wingbeat.Geryon(servers=2), FOUR_HOSTS),
        (wingbeat.Geryon(servers=1), Facts(workers=2, hosts=2, link_bytes_s=125e6)),
        # These groups are not of all workers of a host.
        (wingbeat.Ripples(policy="divided"), ONE_HOST),
        (wingbeat.ADPSGD(), ONE_HOST),
        (wingbeat.Ripples(every=1), FOUR_HOSTS),
        # The next steps hide the average.
        (wingbeat.LocalSGD(every=1, overlap=True), FOUR_HOSTS),
        (wingbeat.DeAR(), ONE_HOST),
        (wingbeat.Auto(), ONE_HOST),
    ],
    ids=repr,
)
def test_a_strategy_that_may_pay_is_not_reported(strategy: Strategy, facts: Facts) -> None:
    assert advise(strategy, facts) == []


class _World:
    """The attributes of a `World` that facts follow from."""

    def __init__(self, hosts: int, workers: int) -> None:
        self.layout, self.size = Layout.even(hosts, workers), hosts * workers
        self.links, self.speeds = (object(), object()), (1e9, 2e9)


def facts(strategy: Strategy, hosts: int = 2, device: str = "cpu") -> Facts:
    world = _World(hosts, 4)
    return facts_of(world, strategy, torch.device(device), meshed=False)  # type: ignore[arg-type]


def test_facts_have_the_hosts_and_all_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "measure_codec", lambda _options: 1e9)
    found = facts(wingbeat.AllReduce(compression=ALWAYS))
    # Four workers of a host share the work, each with a thread for either link.
    assert found == Facts(workers=8, hosts=2, link_bytes_s=3e9, codec_bytes_s=8e9)


def test_a_codec_is_measured_only_where_nothing_else_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_options: CodecOptions) -> float:
        raise AssertionError("measured")

    monkeypatch.setattr(advice, "measure_codec", refuse)
    always = wingbeat.AllReduce(compression=ALWAYS)
    assert facts(always, hosts=1).codec_bytes_s == 0.0
    assert facts(always, device="cuda").codec_bytes_s == 0.0
    assert facts(wingbeat.DeAR(compression="sketch")).codec_bytes_s == 0.0
    for other in (wingbeat.LowRank(rank=4, auto_disable=False), "fp16"):
        assert facts(wingbeat.AllReduce(compression=other)).codec_bytes_s == 0.0
    with pytest.raises(AssertionError, match="measured"):
        facts(always)


@pytest.mark.parametrize("name", ["sketch", "topk"])
def test_codecs_are_measured_in_bytes_of_float32(name: str) -> None:
    options = parse(name)
    assert isinstance(options, CodecOptions)
    assert 1e7 < measure_codec(options) < 1e12


def test_lockstep_decides_whether_there_is_a_trial() -> None:
    assert tries_codec(wingbeat.AllReduce(compression="sketch"))
    assert tries_codec(wingbeat.Auto(exact=False))
    assert not tries_codec(wingbeat.AllReduce(compression=ALWAYS))
    assert not tries_codec(wingbeat.Canary())
    assert not tries_codec(wingbeat.DiLoCo(compression="sketch"))


SCRIPT = """
import torch, wingbeat
wingbeat.init()
for strategy in (wingbeat.AllReduce(), wingbeat.AllReduce(), wingbeat.DeAR()):
    model = torch.nn.Linear(2, 1)
    wingbeat.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
"""


def test_distribute_logs_each_warning_once_in_a_job() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("wingbeat")]
    assert [line.split(" start")[0] for line in told] == [
        f"wingbeat: {strategy}: the job has one worker, so nothing is exchanged:"
        for strategy in ("AllReduce()", "DeAR()")
    ]


ON_ONE_HOST = """
import torch, wingbeat
wingbeat.init()
model = torch.nn.Linear(2, 1)
wingbeat.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), wingbeat.Ripples())
wingbeat.shutdown()
"""


def test_of_two_workers_only_rank_0_logs_warnings(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ON_ONE_HOST, encoding="utf-8")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*start, str(script)],
        env={**os.environ, "WINGBEAT_TOPP": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("wingbeat")]
    assert [line.split(":")[1] for line in told] == [" no effect", " Ripples()"], told
    assert all(line.startswith("wingbeat: ") for line in told)
