"""Running commands: environment, output, exit codes, limits. Loopback needs no namespaces."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wingbeat.errors import LabError, UsageError
from wingbeat_lab import lab

Run = Callable[..., Any]
EVERYWHERE = ["loopback:3", pytest.param("star:3@1gbit", marks=pytest.mark.lab)]

SHOW = (
    "import os; print(' '.join(os.environ[k] for k in ('RANK WORLD_SIZE LOCAL_RANK '"
    "'LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK WINGBEAT_LAB').split()))"
)


def test_workers_of_a_run_have_one_name_of_their_job_and_runs_have_different_ones(
    run_lab: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WINGBEAT_JOB_ID", raising=False)
    command = ["sh", "-c", "echo $WINGBEAT_JOB_ID"]
    names = [
        {line for each in run_lab("loopback:2", command).lines.values() for line in each}
        for _ in range(2)
    ]
    assert [len(each) for each in names] == [1, 1]
    assert names[0] != names[1]
    named = run_lab("loopback:2", command, env={"WINGBEAT_JOB_ID": "mine"})
    assert [named.lines[rank] for rank in range(2)] == [["mine"]] * 2


@pytest.mark.parametrize("spec", EVERYWHERE)
def test_workers_have_the_environment_variables_of_torchrun(spec: str, run_python: Run) -> None:
    ran = run_python(spec, SHOW, per_host=2, env={"NODE_RANK": "9"})
    assert ran.result.exit_codes == (0,) * 6
    assert ran.result.exit_code == 0
    for rank in range(6):
        assert ran.lines[rank] == [f"{rank} 6 {rank % 2} 2 {rank // 2} {rank // 2} {spec}"]


@pytest.mark.parametrize("spec", EVERYWHERE)
def test_workers_meet_at_the_master_address(spec: str, run_python: Run) -> None:
    code = """if True:
        import os, socket, time
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if os.environ["RANK"] == "0":
            server = socket.create_server(where)
            peers = [server.accept()[0].recv(1) for _ in range(2)]
            print(sorted(peers))
        else:
            s = socket.socket()
            while s.connect_ex(where):
                s.close(); s = socket.socket(); time.sleep(0.01)
            s.sendall(os.environ["RANK"].encode())
    """
    ran = run_python(spec, code)
    assert ran.result.exit_code == 0
    assert ran.lines[0] == ["[b'1', b'2']"]


@pytest.mark.parametrize("spec", EVERYWHERE)
def test_first_failing_exit_code_is_passed_on(spec: str, run_python: Run, tmp_path: Path) -> None:
    # Ranks 0 and 2 wait until rank 1's file is there, which it makes as it fails.
    code = f"""if True:
        import os, pathlib, sys, time
        rank, mark = int(os.environ["RANK"]), pathlib.Path({str(tmp_path / "failed")!r})
        if rank == 1:
            mark.touch()
            os._exit(7)
        while not mark.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        sys.exit(9 if rank == 2 else 0)
    """
    result = run_python(spec, code).result
    assert result.exit_codes == (0, 7, 9)
    assert result.exit_code == 7
    assert result.first_failure is not None
    assert (result.first_failure.rank, result.first_failure.host) == (1, "h1")


@pytest.mark.parametrize("spec", EVERYWHERE)
def test_grace_after_a_failure_lets_others_report_then_ends_them(
    spec: str, run_python: Run, tmp_path: Path
) -> None:
    code = f"""if True:
        import fcntl, os, pathlib, sys, time
        held, lock = pathlib.Path({str(tmp_path / "held")!r}), open({str(tmp_path / "lock")!r}, "w")
        if os.environ["RANK"] == "0":
            fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends
            held.touch()
            sys.exit(5)
        if os.environ["RANK"] == "1":
            while not held.exists(): time.sleep(0.01)
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(0.3); print("h0 is gone"); sys.exit(6)
        time.sleep(600)
    """
    ran = run_python(spec, code, grace=1.0)
    assert ran.result.exit_codes == (5, 6, 128 + signal.SIGTERM)
    assert ran.result.exit_code == 5
    assert ran.lines[1] == ["h0 is gone"]


def test_a_worker_that_ignores_sigterm_is_killed(run_python: Run) -> None:
    code = """if True:
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        time.sleep(600)
    """
    ran = run_python("loopback:1", code, timeout=1.0)
    assert ran.result.timed_out
    assert ran.result.exit_codes == (128 + signal.SIGKILL,)
    assert ran.result.exit_code == 124


@pytest.mark.parametrize("spec", EVERYWHERE)
def test_run_at_the_time_limit_is_ended_with_124(spec: str, run_lab: Run) -> None:
    result = run_lab(spec, ["sleep", "600"], timeout=0.5).result
    assert result.timed_out
    assert result.exit_code == 124
    assert result.first_failure is None


@pytest.mark.parametrize("spec", EVERYWHERE)
def test_worker_ended_by_a_signal_has_exit_code_128_plus_its_number(
    spec: str, run_lab: Run
) -> None:
    result = run_lab(spec, ["sh", "-c", "kill -SEGV $$"]).result
    assert result.exit_codes == (128 + signal.SIGSEGV,) * 3


def test_output_lines_keep_their_order_and_have_a_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    result = lab.run("loopback:2", ["sh", "-c", "echo a; echo b >&2; printf c"], per_host=1)
    assert result.exit_code == 0
    lines = capfd.readouterr().out.splitlines()
    for host in ("[h0]", "[h1]"):
        assert [x for x in lines if x.startswith(host)] == [f"{host} {c}" for c in "abc"]


def test_prefix_names_local_worker(capfd: pytest.CaptureFixture[str]) -> None:
    lab.run("loopback:1", ["sh", "-c", "echo $RANK"], per_host=2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[h0.0] 0", "[h0.1] 1"]


def test_output_with_long_and_odd_lines_arrives_whole(run_python: Run) -> None:
    code = "import sys; w = sys.stdout.buffer.write; w(b'x' * 50_000 + b'\\n' + b'\\xff\\r\\nend')"
    ran = run_python("loopback:1", code)
    assert ran.lines[0] == ["x" * 50_000, "\N{REPLACEMENT CHARACTER}", "end"]


def test_many_lines_arrive_in_order(run_python: Run) -> None:
    ran = run_python("loopback:2", "for i in range(20_000): print(i)")
    assert ran.lines == {r: [str(i) for i in range(20_000)] for r in range(2)}


def test_workers_start_in_cwd_with_empty_input(run_python: Run, tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), repr(sys.stdin.read()))"
    assert run_python("loopback:1", code, cwd=tmp_path).lines[0] == [f"{tmp_path} ''"]


def test_a_module_of_the_working_folder_cannot_break_the_lab(
    run_lab: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('wrong module')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_lab("loopback:1", ["true"], cwd=tmp_path).result.exit_code == 0


def test_an_error_in_on_line_ends_the_run() -> None:
    def refuse(rank: int, line: str) -> None:
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match="hello"):
        lab.run("loopback:2", ["sh", "-c", "echo hello; sleep 600"], on_line=refuse)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"command": []}, "no command"),
        ({"command": ["/no/such/thing"]}, "'/no/such/thing'"),
        ({"per_host": 0}, "0 workers a host; allowed: 1 to 64"),
        ({"timeout": 0}, "timeout of 0"),
        ({"grace": -1}, "grace of -1"),
        ({"fail": "1s kill h9"}, "'h9'"),
        ({"spec": "star"}, "star"),
    ],
)
def test_run_with_invalid_arguments_is_refused(options: dict[str, object], part: str) -> None:
    arguments: dict[str, object] = {"spec": "loopback:2", "command": ["true"], **options}
    with pytest.raises(UsageError) as caught:
        lab.run(**arguments)  # type: ignore[arg-type]
    assert part in str(caught.value)


def test_a_lab_killed_from_outside_is_an_error(run_python: Run) -> None:
    # The worker kills the process that runs the lab: its own parent.
    code = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    with pytest.raises(LabError, match="ended from outside"):
        run_python("loopback:1", code)


def test_loopback_leaves_no_process(run_python: Run) -> None:
    """Also not one that left its worker's group, as daemons do."""
    code = """if True:
        import os, subprocess, sys
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(child.pid)
    """
    ran = run_python("loopback:2", code)
    for rank in range(2):
        assert not Path(f"/proc/{ran.lines[rank][0]}").exists()


@pytest.mark.slow
@pytest.mark.lab
def test_lab_with_as_many_hosts_as_a_rack_runs(run_lab: Run) -> None:
    ran = run_lab("fat-tree:24x2/8@1gbit+1gbit", ["hostname"])
    assert ran.lines == {rank: [f"h{rank}"] for rank in range(24)}


@pytest.mark.lab
def test_hosts_have_names_interfaces_and_a_view_of_their_own(run_python: Run) -> None:
    code = """if True:
        import os, socket
        names = sorted(n for _, n in socket.if_nameindex())
        print(socket.gethostname(), socket.gethostbyname("h1"), socket.gethostbyname("h1-eth1"))
        print(names, os.environ["GLOO_SOCKET_IFNAME"])
        print(socket.gethostbyname("localhost"), os.path.exists("/sys/class/net/eth1"))
        print(socket.getnameinfo(("::ffff:10.0.0.1", 0), socket.NI_NAMEREQD)[0])
    """
    ran = run_python("star:2x2@1gbit", code)
    assert ran.lines[1] == [
        "h1 10.0.0.2 10.1.0.2",
        "['eth0', 'eth1', 'lo'] eth0,eth1",
        "127.0.0.1 True",
        "h0.lab",
    ]


def test_available_returns_none_or_one_line() -> None:
    reason = lab.available()
    assert reason is None or (reason and "\n" not in reason)
    if not sys.platform.startswith("linux"):
        assert reason is not None


CONGESTION = """
import os, socket
neighbour = (int(os.environ["RANK"]) + 1) % int(os.environ["WORLD_SIZE"])
with socket.socket() as end:
    end.settimeout(20)
    try:
        end.connect((socket.gethostbyname(f"h{neighbour}"), 9))
    except ConnectionRefusedError:
        pass
    print(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""
"""Prints the congestion control that a connection to the next host would have used."""


@pytest.mark.lab
@pytest.mark.parametrize("spec", ["star:2@1gbit", "bcube:2x2@250mbit"])
def test_hosts_use_the_usual_congestion_control(spec: str) -> None:
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if "cubic" not in known:
        pytest.skip("this kernel has no cubic")
    lines: list[str] = []
    ask = [sys.executable, "-c", CONGESTION]
    lab.run(spec, ask, on_line=lambda _rank, line: lines.append(line))
    assert lines == ["cubic"] * len(lines)
    assert lines
