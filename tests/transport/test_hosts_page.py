"""``docs/how-to/hosts.md``: the errors that it quotes are those that are raised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.transport.launchers import from_environment
from wingbeat.transport.rendezvous import check_job
from wingbeat.transport.torch_store import TorchStore

PAGE = " ".join((Path(__file__).parents[2] / "docs/how-to/hosts.md").read_text("utf-8").split())


def test_error_of_a_worker_of_another_job_is_the_one_shown() -> None:
    store = TorchStore(dist.HashStore())
    where = "node1:29500 (MASTER_ADDR, MASTER_PORT)"
    check_job(store, 0, 2, "slurm 4711.0", 1.0, where)
    with pytest.raises(RendezvousError) as raised:
        check_job(store, 1, 2, "slurm 4712.0", 1.0, where)
    assert f"```text {raised.value} ```" in PAGE


def test_error_of_mpirun_without_an_address_is_the_one_quoted() -> None:
    host = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    world = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "16"}
    with pytest.raises(UsageError) as raised:
        from_environment(host | world)
    quoted = str(raised.value).partition(":")[0]
    assert quoted.startswith("mpirun has started 16 workers")
    assert f"`{quoted}`" in PAGE


def test_variables_of_launchers_are_those_listed() -> None:
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"):
        assert f"`{name}`" in PAGE
        env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "node1", name: "7"}
        found = from_environment(env)
        assert found["WINGBEAT_JOB_ID"] == "mpirun 7"
        assert 15000 <= int(found["MASTER_PORT"]) < 25000, "as the page states"
