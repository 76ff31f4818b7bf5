"""The files of ``deploy/`` and the commands of ``docs/how-to/hosts.md`` run.

Stand-ins start their processes with the variables that SLURM, Docker and Kubernetes set.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from helpers.code_blocks import blocks_of
from helpers.containers import Container, Ran, run_containers
from helpers.ports import free_port

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SBATCH = DEPLOY / "slurm.sbatch"
PAGE = ROOT / "docs/how-to/hosts.md"
KEY = "0123456789abcdef0123456789abcdef"

Manifest = dict[str, Any]

TRAIN = """\
import os, signal, time
from pathlib import Path
import torch, wingbeat
from wingbeat.transport import on_terminate
from wingbeat.transport.torch_store import job_key

FILE = Path("checkpoint.pt")
world = wingbeat.init(timeout=60)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
begin = 0
if FILE.exists():
    saved = torch.load(FILE, weights_only=True)
    model.load_state_dict(saved["model"])
    begin = saved["step"]
fails = -1 if begin else int(os.environ.get("FAIL_AT", "-1"))
endless = "ENDLESS" in os.environ and not begin
print("rank", world.rank, "of", world.size, "begins at", begin,
      "with a key" if job_key(os.environ) else "without a key", flush=True)
model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.DeAR(plan="fixed"))

def save():
    state = {"model": model.state_dict(), "step": step + 1}
    if world.rank == 0:
        time.sleep(float(os.environ.get("SAVE_S", "0")))
        torch.save(state, "checkpoint.new")
        os.replace("checkpoint.new", FILE)

if "ENDLESS" in os.environ:
    on_terminate(save)
step = begin - 1
while endless or step < 19:
    step += 1
    optimizer.zero_grad()
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    if endless:
        if step == 0:
            print("rank", world.rank, "trains", flush=True)
        time.sleep(0.01)
    elif step == 9:
        save()
    if step == fails and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
print("rank", world.rank, "ends", flush=True)
"""
"""Saves after 10 of 20 steps, or at SIGTERM, and continues there. Rank 1 dies at step FAIL_AT."""


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def manifest(name: str, kind: str) -> Manifest:
    [found] = [each for each in yaml.safe_load_all(text(name)) if each["kind"] == kind]
    return dict(found)


def begins(rank: int, step: int, size: int = 2) -> str:
    return f"rank {rank} of {size} begins at {step} with a key"


# What all files name


@pytest.mark.parametrize("file", sorted(DEPLOY.iterdir()), ids=lambda file: file.name)
def test_variables_that_a_file_names_are_read_by_the_code(file: Path) -> None:
    named = file.read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for variable in set(re.findall(r"\bWINGBEAT_[A-Z_]+\b", named)):
        assert f'"{variable}"' in sources, variable
    torchruns = {f"PET_{option.dest.upper()}" for option in get_args_parser()._actions}
    assert set(re.findall(r"\bPET_[A-Z_]+\b", named)) <= torchruns


def test_readme_names_every_file() -> None:
    files = {path.name for path in DEPLOY.iterdir()} - {"README.md", "Dockerfile.dockerignore"}
    assert files == set(re.findall(r"^\| `([^`]+)`", text("README.md"), re.MULTILINE))


# The image


def stages() -> list[list[str]]:
    """The instructions of each stage of the Dockerfile; the first list has those before FROM."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", text("Dockerfile")))
    found: list[list[str]] = [[]]
    for line in filter(None, joined.splitlines()):
        if line.startswith("FROM "):
            found.append([])
        found[-1].append(line)
    return found


def copied() -> list[str]:
    """What the build takes from the checkout."""
    words = [line.split()[1:] for line in stages()[1] if line.startswith("COPY ")]
    return [source for each in words for source in each[:-1]]


def test_image_runs_as_a_numbered_user_and_has_no_compiler() -> None:
    *_, build, final = stages()
    assert "FROM ${BASE} AS build" in build
    assert any("g++" in line for line in build)
    assert not any("apt-get" in line or "g++" in line for line in final)
    [user] = [line.split()[1] for line in final if line.startswith("USER ")]
    assert int(user) > 0, "Kubernetes compares a number with runAsNonRoot"
    assert any(f"--uid {user} " in line for line in final)
    for job, kind in (("pytorchjob.yaml", "PyTorchJob"), ("jobset.yaml", "JobSet")):
        for pod in pods(manifest(job, kind)):
            assert pod["spec"]["securityContext"]["runAsUser"] == int(user)


def test_image_is_built_from_files_that_exist_and_are_not_ignored() -> None:
    kept = [line[1:] for line in text("Dockerfile.dockerignore").splitlines() if line[:1] == "!"]
    assert sorted(copied()) == sorted(kept)
    for source in copied():
        assert (ROOT / source).exists(), source
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for named in re.findall(r'^(?:readme|cmake.source-dir) = "(.*)"$', project, re.MULTILINE):
        assert named in copied()
    for folder in re.findall(r'"(src)/', project):
        assert folder in copied()


def test_arguments_of_the_image_are_used() -> None:
    lines = "\n".join(line for stage in stages() for line in stage)
    for argument in re.findall(r"^ARG (\w+)=", lines, re.MULTILINE):
        assert re.search(rf"\$\{{?{argument}\b", lines), argument
        assert f"{argument}=" in text("Dockerfile").partition("\nFROM")[0] or argument == "PACKAGES"


# Two containers


def interpolated(value: str, env: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)(?::\?[^}]*)?\}", lambda found: env[found[1]], value)


def of_compose(env: Mapping[str, str]) -> list[Container]:
    described = yaml.safe_load(text("compose.yaml"))
    found = []
    for name, service in described["services"].items():
        mounts = {}
        for volume in service["volumes"]:
            source, at, _ = volume.split(":")
            mounts[at] = (DEPLOY / source).resolve()
        variables = {k: interpolated(v, env) for k, v in service["environment"].items()}
        found.append(Container(name, shlex.split(service["command"]), variables, mounts))
    return found


def test_containers_share_a_network_that_the_file_declares_and_nothing_else() -> None:
    described = yaml.safe_load(text("compose.yaml"))
    for service in described["services"].values():
        assert set(service["networks"]) <= set(described["networks"])
        assert not {"ipc", "network_mode", "shm_size"} & set(service)
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        # The first process of a container ignores SIGTERM unless it handles it.
        assert service["init"] is True
        assert "--master-addr=node0" in service["command"]


@pytest.mark.slow
@pytest.mark.lab
def test_containers_of_compose_train_together() -> None:
    pytest.importorskip("sklearn")
    containers = of_compose({"WINGBEAT_JOB_KEY": KEY})
    for container in containers:
        container.command = [*container.command, "1"]  # epoch
    first, second = run_containers(containers)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert "on 2 workers" in first.output


# SLURM


SRUN = """\
import itertools, os, subprocess, sys
from pathlib import Path
options = list(itertools.takewhile(lambda word: word.startswith("--"), sys.argv[1:]))
command = sys.argv[1 + len(options):]
count, folder = int(os.environ["SLURM_NTASKS"]), Path(os.environ["STAND_IN"])
step = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": str(count),
    "SLURM_STEP_NODELIST": "127.0.0.[1-1]",
}
tasks = []
for rank in map(str, range(count)):
    env = {**os.environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    tasks.append(subprocess.Popen(command, env=env))
(folder / "tasks").write_text(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
# The greatest status of a task; that of one ended by a signal is 128 and the signal's number.
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
"""Starts the tasks of a step on this host, as srun does on several."""

REQUEUE = """\
import os, sys
with open(os.path.join(os.environ["STAND_IN"], "requeued"), "a") as file:
    print(*sys.argv[1:], file=file)
"""


def stand_in(folder: Path, name: str, code: str) -> None:
    """Put a program on the PATH of `commands`."""
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!{sys.executable}\n{code}", encoding="utf-8")
    file.chmod(0o755)


def commands(folder: Path) -> dict[str, str]:
    """The environment in which stand-ins are found first, then the programs of this environment."""
    path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    ours = ("SLURM", "WINGBEAT", "RANK", "WORLD", "MASTER", "LOCAL", "PET_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return {**kept, "PATH": os.pathsep.join(path), "STAND_IN": str(folder)}


def of_slurm(folder: Path, restarts: int = 0) -> dict[str, str]:
    """What a batch script of two tasks finds; the stand-ins are on its PATH."""
    stand_in(folder, "srun", SRUN)
    stand_in(folder, "scontrol", REQUEUE)
    return {
        **commands(folder),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "127.0.0.[1-1]",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_PROCID": "0",  # of the batch step
        "MASTER_PORT": str(free_port()),
        **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
    }


def batch(folder: Path, script: Sequence[str], restarts: int = 0, **env: str) -> Ran:
    done = subprocess.run(
        ["bash", str(SBATCH), *script], cwd=folder, env={**of_slurm(folder, restarts), **env},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=150,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    return tmp_path


def requeued(folder: Path) -> list[str]:
    file = folder / "requeued"
    return file.read_text().splitlines() if file.exists() else []


def test_batch_script_parses_and_needs_a_script() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    done = subprocess.run(["bash", str(SBATCH)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr


def test_options_of_sbatch_come_before_the_first_command() -> None:
    lines = text("slurm.sbatch").splitlines()
    [first] = [n for n, line in enumerate(lines) if line.startswith("set ")]
    last = max(n for n, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert last < first, "sbatch reads no option after a command"
    options = dict(
        line.split(None, 1)[1].lstrip("-").partition("=")[::2]
        for line in lines
        if line.startswith("#SBATCH")
    )
    assert "requeue" in options
    assert options["signal"].startswith("TERM@"), "to the tasks, not to the shell (B:)"


@pytest.mark.slow
def test_batch_job_is_queued_again_after_a_failure_and_continues(job: Path) -> None:
    failed = batch(job, ["train.py"], FAIL_AT="12")
    assert failed.code == 0, failed.output
    assert begins(1, 0) in failed.output
    assert "srun ended with status 137; the job is queued again" in failed.output
    assert requeued(job) == ["requeue 4711"]
    again = batch(job, ["train.py"], restarts=1, FAIL_AT="12")
    assert again.code == 0, again.output
    assert begins(0, 10) in again.output
    assert "rank 0 ends" in again.output
    assert requeued(job) == ["requeue 4711"], "not after success"
    assert not list(job.glob(".wingbeat-*.key"))


def test_batch_job_is_not_queued_again_without_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    done = batch(tmp_path, ["train.py"], restarts=3)
    assert done.code == 7
    assert "after 3 restarts the job is not queued again" in done.output
    assert not requeued(tmp_path)


def test_key_of_a_batch_job_is_its_own_and_private(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\n"
        "file = os.environ['WINGBEAT_JOB_KEY_FILE']\n"
        "print(len(open(file).read().strip()), oct(os.stat(file).st_mode), open(file).read())\n"
    )
    first, second = batch(tmp_path, ["train.py"]), batch(tmp_path, ["train.py"])
    assert f"64 {oct(stat.S_IFREG | 0o600)}" in first.output
    assert first.output != second.output


@pytest.mark.slow
def test_batch_job_saves_after_sigterm_and_is_queued_again(job: Path) -> None:
    running = subprocess.Popen(
        ["bash", str(SBATCH), "train.py"],
        cwd=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**of_slurm(job), "ENDLESS": "1", "SAVE_S": "3"},
        text=True,
    )
    assert running.stdout is not None
    lines: list[str] = []
    while not {"rank 0 trains\n", "rank 1 trains\n"} <= set(lines):
        lines.append(running.stdout.readline())
        assert lines[-1], "".join(lines)
    for pid in (job / "tasks").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 0, output
    assert (job / "checkpoint.pt").exists(), output
    assert requeued(job) == ["requeue 4711"]


# Kubernetes


def pods(found: Manifest) -> list[Manifest]:
    """The templates of a manifest's pods, each as often as it is started."""
    if found["kind"] == "JobSet":
        return [
            job["template"]["spec"]["template"]
            for job in found["spec"]["replicatedJobs"]
            for _ in range(job["replicas"] * job["template"]["spec"]["completions"])
        ]
    return [
        replica["template"]
        for replica in found["spec"]["pytorchReplicaSpecs"].values()
        for _ in range(replica["replicas"])
    ]


def labels_of_jobset(found: Manifest, index: int) -> dict[str, str]:
    """Labels that JobSet and the controller of Jobs give to a pod."""
    return {
        "jobset.sigs.k8s.io/jobset-name": found["metadata"]["name"],
        "batch.kubernetes.io/job-completion-index": str(index),
    }


def labels_of_pytorchjob(found: Manifest, index: int) -> dict[str, str]:
    return {"training.kubeflow.org/job-name": found["metadata"]["name"]}


def names_of_jobset(found: Manifest, index: int) -> list[str]:
    """Names of a pod: its host name, and that in the headless service."""
    [job] = found["spec"]["replicatedJobs"]
    name = f"{found['metadata']['name']}-{job['name']}-0-{index}"
    return [name, f"{name}.{found['spec']['network']['subdomain']}"]


def names_of_pytorchjob(found: Manifest, index: int) -> list[str]:
    """Names of a pod, which are those of its service: the master is the first."""
    role = "master-0" if index == 0 else f"worker-{index - 1}"
    return [f"{found['metadata']['name']}-{role}"]


def set_by_pytorchjob(found: Manifest, index: int) -> dict[str, str]:
    """Variables that Kubeflow's training operator 1.9 adds where a job has a master."""
    count = len(pods(found))
    ports = {
        port["name"]: port["containerPort"]
        for container in pods(found)[0]["spec"]["containers"]
        if container["name"] == "pytorch"
        for port in container["ports"]
    }
    address, port = names_of_pytorchjob(found, 0)[0], str(ports["pytorchjob-port"])
    processes = found["spec"]["nprocPerNode"]
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
        "WORLD_SIZE": str(count * int(processes)),
        "RANK": str(index),
        "PET_NODE_RANK": str(index),
        "PET_NPROC_PER_NODE": processes,
        "PET_NNODES": str(count),
    }


KINDS = {
    "PyTorchJob": (
        *("pytorchjob.yaml", labels_of_pytorchjob, names_of_pytorchjob),
        set_by_pytorchjob,
    ),
    "JobSet": ("jobset.yaml", labels_of_jobset, names_of_jobset, lambda found, index: {}),
}


def of_kubernetes(kind: str, folder: Path, env: Mapping[str, str]) -> list[Container]:
    """The containers of a manifest, with one process each in place of 8."""
    file, labels, names, set_by = KINDS[kind]
    found = manifest(file, kind)
    if kind == "PyTorchJob":
        found["spec"]["nprocPerNode"] = "1"
    volumes = {"job": folder, "job-key": folder / "key"}
    containers = []
    for index, pod in enumerate(pods(found)):
        [container] = pod["spec"]["containers"]
        own = {}
        for variable in container["env"]:
            value = variable.get("value")
            if value is None:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                value = labels(found, index)[re.fullmatch(r"metadata\.labels\['(.+)'\]", path)[1]]
            own[variable["name"]] = value
        if kind == "JobSet":
            own["PET_NPROC_PER_NODE"] = "1"
        mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]
                  if m["name"] in volumes}  # fmt: skip
        name, *aliases = names(found, index)
        containers.append(
            Container(
                name,
                container["command"],
                {**own, **set_by(found, index), **env},
                mounts,
                container["workingDir"],
                aliases,
            )
        )
    return containers


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_names_of_a_manifest_agree(kind: str) -> None:
    found = manifest(KINDS[kind][0], kind)
    for pod in pods(found):
        spec = pod["spec"]
        [container] = spec["containers"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == set(volumes)
        assert "emptyDir" in volumes[mounts["/dev/shm"]]
        key = Path(str(env["WINGBEAT_JOB_KEY_FILE"]))
        secret = volumes[mounts[str(key.parent)]]["secret"]
        assert f"secret generic {secret['secretName']} --from-file={key.name}=" in text(
            KINDS[kind][0]
        )
        # Its group reads it: fsGroup owns the file, and the user is not root.
        assert secret["defaultMode"] == 0o440
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsUser"]
        assert spec["terminationGracePeriodSeconds"] > 30, "torchrun's wait after SIGTERM"
        processes = env.get("PET_NPROC_PER_NODE") or found["spec"]["nprocPerNode"]
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == processes
        threads = int(processes) * int(str(env["OMP_NUM_THREADS"]))
        assert int(container["resources"]["requests"]["cpu"]) >= threads
        policy = manifest(KINDS[kind][0], "NetworkPolicy")["spec"]
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        [rule] = policy["ingress"]
        assert rule["from"] == [{"podSelector": policy["podSelector"]}]


def test_jobset_has_as_many_pods_as_torchrun_expects_and_restarts_all() -> None:
    found = manifest("jobset.yaml", "JobSet")
    [job] = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == int(env["PET_NNODES"])
    assert env["PET_MASTER_ADDR"] in names_of_jobset(found, 0)
    assert int(env["PET_MASTER_PORT"]) in [port["containerPort"] for port in container["ports"]]
    # A pod that fails fails its Job, whereupon JobSet starts all pods again.
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert found["spec"]["failurePolicy"]["maxRestarts"] > 0


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_pods_end_after_a_failure_and_continue_when_started_again(kind: str, job: Path) -> None:
    (job / "key").mkdir()
    (job / "key/key").write_text(KEY)
    failed = run_containers(of_kubernetes(kind, job, {"FAIL_AT": "12"}))
    assert all(ran.code for ran in failed), "each pod has to fail, or it is not started again"
    assert begins(0, 0) in failed[0].output
    again = run_containers(of_kubernetes(kind, job, {"FAIL_AT": "12"}))
    assert [ran.code for ran in again] == [0, 0], again[0].output + again[1].output
    assert [begins(rank, 10) in ran.output for rank, ran in enumerate(again)] == [True, True]


# The page's commands


def shown(program: str) -> str:
    """The block of the page that begins with, or contains a line of, a program."""
    blocks = [b for b in blocks_of(PAGE) if b.word("elsewhere") == "tests/test_deploy.py"]
    [found] = [b.code for b in blocks if re.search(rf"^{program} ", b.code, re.MULTILINE)]
    return found


def execute(code: str, folder: Path, env: Mapping[str, str]) -> Ran:
    """Run a block in a folder that has ``deploy``."""
    (folder / "deploy").symlink_to(DEPLOY)
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", code], cwd=folder, env=dict(env),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=150,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout)


@pytest.mark.slow
def test_shown_sbatch_trains(job: Path) -> None:
    stand_in(job, "sbatch", "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])\n")
    done = execute(shown("sbatch"), job, of_slurm(job))
    assert done.code == 0, done.output
    assert begins(0, 0) in done.output


def test_shown_kubectl_makes_the_secret_and_names_a_manifest(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "if sys.argv[1] == 'create':\n"
        "    [source] = [w.split('=')[2] for w in sys.argv if w.startswith('--from-file=')]\n"
        "    print('secret', sys.argv[4], len(open(source).read().strip()))\n"
        "else:\n"
        "    print(sys.argv[1], open(sys.argv[3]).read())\n"
    )
    stand_in(tmp_path, "kubectl", code)
    done = execute(shown("kubectl apply"), tmp_path, commands(tmp_path))
    assert done.code == 0, done.output
    assert done.output.startswith("secret wingbeat-job-key 64\napply ")
    assert text("pytorchjob.yaml") in done.output


def test_shown_docker_names_files_that_exist_and_sets_the_key(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "print(sys.argv[1], os.path.exists(sys.argv[sys.argv.index('-f') + 1]),"
        " len(os.environ.get('WINGBEAT_JOB_KEY', '')))\n"
    )
    stand_in(tmp_path, "docker", code)
    done = execute(shown("docker compose"), tmp_path, commands(tmp_path))
    assert (done.code, done.output) == (0, "build True 0\ncompose True 64\n")


@pytest.mark.slow
@pytest.mark.lab
def test_shown_torchrun_trains_on_two_hosts(job: Path) -> None:
    words = shlex.split(shown("torchrun").replace("--nproc-per-node=8", "--nproc-per-node=1"))
    env = {"WINGBEAT_JOB_KEY": KEY, "OMP_NUM_THREADS": "1"}
    hosts = [Container(name, words, env, {"/job": job}, "/job") for name in ("node1", "node2")]
    first, second = run_containers(hosts)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert sorted(begins(rank, 0) in first.output for rank in (0, 1)) == [False, True]
