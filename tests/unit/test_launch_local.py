"""Starting ranks on this machine: the command line, the environment, signals, output."""

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shardwise.errors import RecipeError
from shardwise.launch import local, watch
from shardwise.launch.local import Job, cgroup_cpus, host_memory_bytes, render

# The page faults of the third of three equal steps.
STEPS = """
import resource

def step():
    made = [bytearray(2**20) for _ in range(64)]
    for one in made:
        one[::4096] = bytes(256)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

step()
before = step()
print(step() - before)
"""


def job(logs: Path, script: Path, ranks: int = 1, *arguments: str) -> Job:
    return Job(ranks=ranks, command=(str(script), *arguments), logs=str(logs), cores=2)


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_one_rank_is_plain_python() -> None:
    assert render(Job(ranks=1, command=("train.py", "--lr", "1"), logs="l")) == [
        sys.executable,
        "train.py",
        "--lr",
        "1",
    ]


def test_several_ranks_go_through_torchrun_on_loopback_without_restarts() -> None:
    line = render(Job(ranks=3, command=("-m", "my.module", "--x"), logs="l"))
    assert line[:3] == [sys.executable, "-m", "shardwise.torchrun"]
    assert line[-3:] == ["-m", "my.module", "--x"]
    assert {"--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=3", "--max-restarts=0", "--nnodes=1"} <= set(line)


@pytest.mark.parametrize("ranks", [2, 3])
def test_torchrun_waits_with_a_kill_for_as_long_as_a_stop_has(ranks: int) -> None:
    line = render(Job(ranks=ranks, command=("train.py",), logs="l", shutdown_seconds=137))
    assert [part for part in line if "shutdown" in part] == ["--shutdown-timeout=137"]


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 1), (3, 4)])
def test_nodes_number_their_ranks_through_and_meet_where_they_are_told(nodes: int, ranks: int) -> None:
    places = [local.Place(node, nodes, "10.0.0.1", 4000, "eth1") for node in range(nodes)]
    jobs = [Job(ranks=ranks, command=("a.py",), logs="l", place=place) for place in places]
    held = [rank for one in jobs for rank in range(one.first_rank, one.first_rank + one.ranks)]
    assert held == list(range(nodes * ranks)) and {one.world for one in jobs} == {nodes * ranks}
    for node, one in enumerate(jobs):
        line = set(render(one))
        assert {f"--nnodes={nodes}", f"--rdzv-conf=rank={node}", "--rdzv-endpoint=10.0.0.1:4000"} <= line
        assert "--max-restarts=0" in line
        assert local.default_variables(one)["GLOO_SOCKET_IFNAME"] == "eth1"


def test_nothing_to_start_is_an_error() -> None:
    with pytest.raises(RecipeError):
        render(Job(ranks=1, command=(), logs="l"))
    with pytest.raises(RecipeError):
        render(Job(ranks=0, command=("a.py",), logs="l"))


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, "4"), (2, 2, "1"), (2, 8, "1"), (7, 2, "3")])
def test_the_ranks_share_the_cores(cores: int, ranks: int, threads: str) -> None:
    made = local.default_variables(Job(ranks=ranks, command=("a.py",), logs="l", cores=cores))
    assert made["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("on_cpu", [True, False])
def test_ranks_that_compute_in_host_memory_keep_it_between_steps(on_cpu: bool, tmp_path: Path) -> None:
    program = script(tmp_path, STEPS)
    _, texts = run(msgspec.structs.replace(job(tmp_path / "logs", program), on_cpu=on_cpu))
    # A step writes 16,384 pages. Those of a few small objects may be new in any step.
    assert (int(texts["stdout"]) < 1_000) == on_cpu


def test_a_containers_limits_count() -> None:
    assert cgroup_cpus("max 100000") is None
    assert cgroup_cpus("250000 100000") == 2
    assert cgroup_cpus("50000 100000") == 1
    assert cgroup_cpus("") is None
    assert host_memory_bytes("MemTotal:       1024 kB\nMemFree: 1 kB\n", "max") == 2**20
    assert host_memory_bytes("MemTotal:       1024 kB\n", "4096") == 4096


def test_this_machine_is_a_cluster_with_at_least_one_device() -> None:
    cluster = local.probe_cluster()
    assert cluster.devices >= 1
    assert cluster.asked == "local"
    assert cluster.node.host_memory_bytes


def run(made: Job, on_tick: object = None) -> tuple[watch.Ended, dict[str, str]]:
    """Start a job, watch it to its end, and return what its first rank wrote."""
    process = local.start(made)
    output = watch.Output(Path(made.logs))
    texts = {"stdout": "", "stderr": ""}

    def tick() -> None:
        for stream, text in output.new():
            texts[stream] += text
        if callable(on_tick):
            on_tick(process, texts)

    ended = watch.watch(process, tick)
    texts["held"] = output.held()
    return ended, texts


def test_the_first_ranks_output_comes_whole_and_apart(tmp_path: Path) -> None:
    path = script(tmp_path, "import sys\nprint('grüße', sys.argv[1])\nprint('warn', file=sys.stderr)\n")
    ended, texts = run(job(tmp_path / "logs", path, 1, "--x"))
    assert ended == (0, None, False)
    assert (texts["stdout"], texts["stderr"]) == ("grüße --x\n", "warn\n")


def test_a_traceback_is_held_back_and_still_there_at_the_end(tmp_path: Path) -> None:
    ended, texts = run(job(tmp_path / "logs", script(tmp_path, "raise ValueError('planted')")))
    assert ended.returned == 1
    assert texts["stderr"] == ""
    assert texts["held"].endswith("ValueError: planted\n")


# A signal may come while what it waits for is still being printed: a print within a print raises, a write does not.
SLEEPER = """
import os, signal, sys
def note(number, frame):
    os.write(1, b'came %d\\n' % number)
    sys.exit(130 if number == 2 else 75)
signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, note)
os.write(1, b'ready\\n')
signal.pause()
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)])
def test_a_signal_reaches_the_rank_which_ends_by_itself(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    done: list[int] = []

    def interrupt(process: object, texts: dict[str, str]) -> None:
        if "ready" in texts["stdout"] and not done:
            done.append(1)
            os.kill(os.getpid(), sent)

    ended, texts = run(job(tmp_path / "logs", script(tmp_path, SLEEPER)), interrupt)
    assert (ended.returned, ended.interrupted, ended.killed) == (code, sent, False)
    assert "came" in texts["stdout"]


def test_the_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    stubborn = script(
        tmp_path,
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: os.write(1, b'no '))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "os.write(1, f'{child.pid} ready '.encode())\n"
        "while True: signal.pause()\n",
    )
    sent: list[int] = []

    def interrupt(process: object, texts: dict[str, str]) -> None:
        if ("ready" in texts["stdout"] and not sent) or ("no" in texts["stdout"] and len(sent) == 1):
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    ended, texts = run(job(tmp_path / "logs", stubborn), interrupt)
    assert ended.killed
    assert ended.returned == -signal.SIGKILL
    child = int(texts["stdout"].split()[0])
    assert child not in local.tree_pids(os.getpid())
    with pytest.raises(ProcessLookupError):
        _wait_until_gone(child)


def _wait_until_gone(pid: int) -> None:
    """Its descriptor is readable once the process has ended, reaped by init or not."""
    ended = os.pidfd_open(pid)
    try:
        select.select([ended], [], [])
    finally:
        os.close(ended)
    raise ProcessLookupError


def test_what_is_still_there_after_a_kill_is_told_and_what_is_gone_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = local.start(job(tmp_path / "logs", script(tmp_path, "import signal\nsignal.pause()\n")))
    # No time for a KILL to do anything: as if it did nothing.
    monkeypatch.setattr(watch, "KILLED_SECONDS", 0.0)
    watch.end_tree(process)
    assert re.search(rf"not even KILL ended these .*: {process.pid} \((sleeping|running)\)", capsys.readouterr().err)
    monkeypatch.undo()
    watch.end_tree(process)
    assert process.wait() == -signal.SIGKILL and capsys.readouterr().err == ""


def test_a_hang_up_after_a_term_lets_the_rank_finish_what_it_saves(tmp_path: Path) -> None:
    saving = script(
        tmp_path,
        "import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "print('ready', flush=True)\n"
        "signal.sigwait({signal.SIGTERM})\n"
        "print('saving', flush=True)\nsys.stdin.read()\n"
        "import time; end = time.monotonic() + 0.3\nwhile time.monotonic() < end: pass\n"
        "print('saved', flush=True)\nsys.exit(75)\n",
    )
    sent: list[signal.Signals] = []

    def hang_up(process: object, texts: dict[str, str]) -> None:
        for number, heard in ((signal.SIGTERM, "ready"), (signal.SIGHUP, "saving")):
            if heard in texts["stdout"] and number not in sent:
                sent.append(number)
                os.kill(os.getpid(), number)

    ended, texts = run(job(tmp_path / "logs", saving), hang_up)
    assert ended == (75, signal.SIGTERM, False)
    assert texts["stdout"].endswith("saved\n")


def test_ranks_end_when_the_command_that_started_them_is_killed(tmp_path: Path) -> None:
    sleeper = script(tmp_path, "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")
    program = (
        "from shardwise.launch import local\n"
        f"job = local.Job(ranks=1, command=({str(sleeper)!r},), logs={str(tmp_path / 'logs')!r})\n"
        "print(local.start(job).pid, flush=True)\ninput()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        rank = int(command.stdout.readline())
        command.kill()
        command.wait()
        with pytest.raises(ProcessLookupError):
            _wait_until_gone(rank)


def test_handlers_are_as_before_when_the_job_has_ended(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in watch.FORWARDED]
    run(job(tmp_path / "logs", script(tmp_path, "pass")))
    assert [signal.getsignal(number) for number in watch.FORWARDED] == before


def test_ctrl_c_on_the_terminal_does_not_reach_the_ranks_by_itself(tmp_path: Path) -> None:
    path = script(tmp_path, "import os\nprint(os.getsid(0))\n")
    _, texts = run(job(tmp_path / "logs", path))
    assert int(texts["stdout"]) != os.getsid(0)


def test_every_rank_of_torchrun_has_its_logs_and_the_first_to_fail_is_known(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os, signal, sys\nrank = os.environ['RANK']\nprint('rank', rank, flush=True)\n"
        "if rank == '1': sys.exit('planted')\n"
        "signal.pause()\n",
    )
    ended, texts = run(job(tmp_path / "logs", path, 2))
    exits = watch.exits(tmp_path / "logs", 2, ended, 0)
    assert texts["stdout"] in ("rank 0\n", ""), "rank 0 alone is shown, where it came so far"
    assert [(one.rank, one.code) for one in exits if not one.ended_by_launcher] == [(1, 1)]
    assert watch.rank_logs(tmp_path / "logs")[1].text == "planted\n"


def test_a_signal_reaches_the_ranks_below_torchrun_and_not_torchrun(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    pids: list[int] = []

    def interrupt(process: "subprocess.Popen[bytes]", texts: dict[str, str]) -> None:
        ready = [path for path in logs.glob("*/attempt_0/*/stdout.log") if "ready" in path.read_text()]
        if len(ready) == 2 and not pids:
            pids.extend(local.worker_pids(process.pid))
            assert process.pid not in pids
            os.kill(os.getpid(), signal.SIGINT)

    ended, _ = run(job(logs, script(tmp_path, SLEEPER), 2), interrupt)
    assert len(pids) == 2
    said = [path.read_text() for path in logs.glob("*/attempt_0/*/stdout.log")]
    assert [text.startswith("ready\ncame 2\n") for text in said] == [True, True]
    codes = {one.code for one in watch.exits(logs, 2, ended, 0) if not one.ended_by_launcher}
    assert codes == {130}


def test_a_held_traceback_is_let_go_when_the_job_lives_on() -> None:
    hold = watch.Hold()
    text = "a\nTraceback (most recent call last):\n  File\nValueError: 1\nb\n"
    assert hold.feed(text, now=0.0) == "a\n"
    assert hold.feed("c\n", now=watch.HOLD_SECONDS / 2) == ""
    released = hold.feed("d\n", now=watch.HOLD_SECONDS + 1)
    assert released == text.removeprefix("a\n") + "c\nd\n"
    assert hold.take() == ""


def test_nothing_is_lost_wherever_the_output_is_cut() -> None:
    text = "x\nprogress 1\rprogress 2\r[rank0]: Traceback (most recent call last):\n[rank0]: ValueError\n"
    for cut in range(len(text)):
        hold = watch.Hold()
        shown = hold.feed(text[:cut], 0.0) + hold.feed(text[cut:], 0.0)
        assert shown + hold.take() == text
        assert "Traceback" not in shown


def test_characters_that_are_cut_come_whole(tmp_path: Path) -> None:
    folder = tmp_path / "id" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    raw = "aé€😀z".encode()
    output, seen = watch.Output(tmp_path), ""
    for end in range(1, len(raw) + 1):
        (folder / "stdout.log").write_bytes(raw[:end])
        seen += "".join(text for _, text in output.new())
    assert seen == raw.decode()
