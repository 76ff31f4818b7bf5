"""What a launcher's environment says, and that nothing is guessed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.ports import free_port
from wingbeat.errors import UsageError
from wingbeat.transport.launchers import first_node, from_environment, job_name, launcher_process

SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_NODELIST": "gpu[01-20]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def test_srun_provides_all_variables() -> None:
    assert from_environment(SRUN) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "15487",
        "WINGBEAT_JOB_ID": "slurm 4711.2",
    }


def test_two_steps_of_a_job_use_different_ports() -> None:
    other = from_environment(SRUN | {"SLURM_STEP_ID": "3"})
    assert other["MASTER_PORT"] != from_environment(SRUN)["MASTER_PORT"]


def test_job_name_that_is_no_utf8_gives_a_port() -> None:
    assert 1 <= int(from_environment({**SRUN, "SLURM_STEP_ID": "2\udcff"})["MASTER_PORT"]) < 1 << 16


def test_address_exported_by_the_batch_script_takes_precedence() -> None:
    found = from_environment(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert found == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "WINGBEAT_JOB_ID": "slurm 4711.2",
    }


def test_torchrun_inside_srun_or_mpirun_takes_precedence() -> None:
    assert from_environment(SRUN | OPEN_MPI | TORCHRUN) == {}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a,b"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a,b"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
    ids=["alone", "salloc's shell", "a batch script", "a step of one task"],
)
def test_a_process_that_was_started_alone_is_a_world_of_one(env: dict[str, str]) -> None:
    assert from_environment(env) == {}


def mpirun(env: dict[str, str], by: str = "") -> dict[str, str]:
    """What is found where the process that started the ranks has that name."""
    return from_environment(env, lambda variable: by if variable == "OMPI_COMM_WORLD_RANK" else "")


ONE_HOST = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


def test_mpirun_on_one_host_needs_no_address() -> None:
    found = mpirun(ONE_HOST, "host-77-4000")
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": found["MASTER_PORT"],
        "WINGBEAT_JOB_ID": "mpirun host-77-4000",
    }
    assert 15000 <= int(found["MASTER_PORT"]) < 25000


def test_two_mpiruns_on_one_host_have_different_names_and_ports() -> None:
    first, second = mpirun(ONE_HOST, "host-77-4000"), mpirun(ONE_HOST, "host-78-4000")
    assert first["WINGBEAT_JOB_ID"] != second["WINGBEAT_JOB_ID"]
    assert first["MASTER_PORT"] != second["MASTER_PORT"]


@pytest.mark.parametrize("name", ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"])
def test_mpirun_job_name_is_equal_on_all_hosts(name: str) -> None:
    found = mpirun(OPEN_MPI | {name: "prterun-node1-99@1", "MASTER_ADDR": "node1"}, "another")
    assert found["WINGBEAT_JOB_ID"] == "mpirun prterun-node1-99@1"
    assert found["MASTER_PORT"] == mpirun(ONE_HOST | {name: "prterun-node1-99@1"})["MASTER_PORT"]


def test_the_users_name_of_the_job_wins_and_chooses_the_port() -> None:
    named = {"WINGBEAT_JOB_ID": "mine"}
    found = mpirun(ONE_HOST | named, "host-77-4000")
    assert "WINGBEAT_JOB_ID" not in found
    assert found["MASTER_PORT"] == mpirun(ONE_HOST | named, "host-78-4000")["MASTER_PORT"]
    assert job_name(TORCHRUN | {"TORCHELASTIC_RUN_ID": "run"} | named) == "mine"


def test_torchruns_run_is_the_jobs_name_unless_it_has_none() -> None:
    assert job_name(TORCHRUN | {"TORCHELASTIC_RUN_ID": "run"}) == "run"
    assert job_name(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}) == ""
    assert job_name(TORCHRUN) == ""


def test_mpirun_on_several_hosts_without_address_and_port_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mpirun has started 4 workers .*-x MASTER_ADDR=node1"):
        mpirun(OPEN_MPI)
    with pytest.raises(UsageError, match="MASTER_PORT not set in the environment"):
        mpirun(OPEN_MPI | {"MASTER_ADDR": "node1"}, "not shared by the hosts")
    found = mpirun(OPEN_MPI | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert found == {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


def test_a_port_that_nothing_names_is_not_guessed() -> None:
    with pytest.raises(UsageError, match="MASTER_PORT not set in the environment"):
        mpirun(ONE_HOST)
    with pytest.raises(UsageError, match="MASTER_PORT not set in the environment"):
        from_environment({k: v for k, v in SRUN.items() if k != "SLURM_JOB_ID"})


def test_ranks_behind_shells_find_the_process_that_started_them() -> None:
    """The nearest ancestor without a rank: here this test, and not each rank's own shell."""
    script = "from wingbeat.transport import launchers as l; print(l.launcher_process('RANK_HERE'))"
    # The shell stays, as it has something to do afterwards.
    shell = ["sh", "-c", '"$0" -c "$1"; exit 0', sys.executable, script]
    names = [
        subprocess.check_output(command, env=_bare() | {"RANK_HERE": rank}, text=True).strip()
        for rank, command in (("0", shell), ("1", [sys.executable, "-c", script]))
    ]
    assert f"-{os.getpid()}-" in names[0]
    assert names[0] == names[1]
    assert launcher_process("RANK_HERE") != names[0], "those that this process's parent started"


def test_intel_mpi_and_mpich_variables_are_read() -> None:
    env = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
    found = from_environment(env, lambda variable: f"by {variable}")
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("2", "3", "2")
    assert found["WINGBEAT_JOB_ID"] == "mpirun by PMI_RANK"


@pytest.mark.parametrize("left", sorted(TORCHRUN))
def test_a_part_of_torchruns_variables_is_refused(left: str) -> None:
    env = {k: v for k, v in TORCHRUN.items() if k != left}
    with pytest.raises(UsageError, match=f"{left} not set in the environment: .* torchrun"):
        from_environment(env)


def test_srun_without_a_list_of_nodes_is_refused() -> None:
    env = {k: v for k, v in SRUN.items() if not k.endswith("NODELIST")}
    with pytest.raises(UsageError, match="MASTER_ADDR, MASTER_PORT not set"):
        from_environment(env)


def test_malformed_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match=r"SLURM_PROCID='x' in the environment"):
        from_environment(SRUN | {"SLURM_PROCID": "x"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("rack[1-2]n[03-04].example.org", "rack1n03.example.org"),
        ("a[5,1]-ib,b", "a5-ib"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.slow
def test_workers_started_by_srun_connect() -> None:
    """Four processes with nothing but what srun sets; they sum their ranks."""
    script = (
        "import os, torch, wingbeat, torch.distributed as dist\n"
        "world = wingbeat.init(timeout=60)\n"
        "sum = torch.tensor([world.rank + 1])\n"
        "dist.all_reduce(sum)\n"
        "print(world.size, int(sum), os.environ['LOCAL_RANK'])\n"
    )
    known = {"SLURM_STEP_NODELIST": "127.0.0.[1-1]", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**_bare(), **SRUN, **known, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(4)
    ]
    said = [process.communicate(timeout=120)[0].split() for process in started]
    assert said == [["4", "10", str(rank)] for rank in range(4)]


def _bare() -> dict[str, str]:
    ours = ("RANK", "WORLD", "MASTER", "LOCAL", "SLURM", "OMPI", "PMI", "WINGBEAT_JOB")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)}
