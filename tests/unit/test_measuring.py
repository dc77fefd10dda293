"""What a probe measures: by real ranks, back from its file, and nothing left behind."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli import measure
from shardwise.errors import RecipeError
from shardwise.inputs.hardware import file, parse_cluster
from shardwise.launch import local
from shardwise.profiling.collective_speed import group_sizes, line
from tests.unit.measured_machine import FACTS, probed


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_probed_file_comes_back_as_it_was(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cluster{suffix}"
    cluster = probed(FACTS)
    measure.replace(path, file.as_json(cluster) if suffix == ".json" else file.as_toml(cluster))
    again = parse_cluster(str(path))
    assert again.measured == FACTS
    assert msgspec.structs.replace(again, asked=cluster.asked, name=cluster.name) == cluster
    assert names(tmp_path) == [path.name]


@given(st.floats(0.0, 1e-2), st.floats(1e5, 1e12))
def test_a_line_through_exact_points_is_that_line(start: float, rate: float) -> None:
    points = [(size, start + size / rate) for size in (4096, 2**17, 2**20, 2**24)]
    found_start, found_rate = line(points)
    for size, seconds in points:
        assert found_start + size / found_rate == pytest.approx(seconds, rel=1e-5)


@given(st.lists(st.tuples(st.integers(1, 2**30), st.floats(1e-7, 10.0)), min_size=1, max_size=6))
def test_no_line_has_a_negative_start_or_speed(points: list[tuple[int, float]]) -> None:
    start, rate = line(points)
    assert start >= 0
    assert rate > 0


@given(st.integers(1, 600))
def test_groups_are_powers_of_two_and_the_world(world: int) -> None:
    found = group_sizes(world)
    assert found == tuple(sorted(set(found)))
    assert found[-1] == world if world > 1 else not found
    assert all(size & (size - 1) == 0 for size in found[:-1])


@pytest.mark.parametrize(
    ("output", "said"), [("here", "no name"), ("no/where.toml", "no folder"), (".", "is a folder")]
)
def test_a_wrong_path_is_an_error_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=said) as raised:
        measure.writable(output)
    fix = raised.value.fix
    if fix.startswith("mkdir"):
        Path("no").mkdir()
        assert measure.writable(output) == Path(output)
    else:
        assert measure.writable(fix.rpartition("-o ")[2])


def test_a_file_that_a_person_wrote_is_not_replaced_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text('[[group]]\nnode = "8xH100"\n')
    with pytest.raises(RecipeError, match="not from an earlier measurement") as raised:
        measure.writable("")
    assert measure.writable(raised.value.fix.rpartition("-o ")[2]) == Path("measured.toml")
    assert measure.writable("cluster.toml") == Path("cluster.toml")
    measure.replace(Path("cluster.toml"), file.as_toml(probed(FACTS)))
    assert measure.writable("") == Path("cluster.toml")


def test_a_file_of_another_machine_is_refused_and_the_fix_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text('[[group]]\nnode = "8xH100-SXM5-80GB"\n')
    with pytest.raises(RecipeError, match="here are") as raised:
        local.cluster_here(str(path))
    assert 'train.cluster = "local"' in raised.value.fix
    assert local.cluster_here("local") == local.probe_cluster()


def test_real_ranks_measure_this_machine_and_the_plan_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, "doctor", "--measure", "-o", str(path), "--seconds", "2", "--json"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "measuring 0/" in done.stderr
    assert names(tmp_path) == ["mine.toml"]
    cluster = local.cluster_here(str(path))
    found = cluster.measured
    assert found is not None
    kinds = {one.kind for one in found.collectives}
    assert len(kinds) == (6 if cluster.devices > 1 else 0)
    assert found.matmuls and found.attention and found.block_host_seconds and found.optimizer_bytes_per_second
    assert found.disk_write_bytes_per_second and found.disk_read_bytes_per_second
    told = subprocess.run(
        [sys.executable, "-c", _MAIN, "plan", "decoder-2m", "--cluster", str(path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert f"measured values are used: {found.by}" in told.stdout


_MAIN = "from shardwise.cli.main import main; main()"


@pytest.mark.parametrize(
    "ignored",
    [pytest.param(False, id="in front", marks=pytest.mark.nightly), pytest.param(True, id="in a shell's background")],
)
def test_ctrl_c_leaves_no_half_file_and_no_rank(tmp_path: Path, ignored: bool) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, "doctor", "--measure", "-o", str(tmp_path / "c.toml"), "--seconds", "60"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    try:
        assert process.stderr is not None
        assert "measuring 0/" in process.stderr.readline()
        below = [pid for pid in local.tree_pids(process.pid) if pid != process.pid]
        assert below
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert names(tmp_path) == []
    assert [pid for pid in below if _lives(pid)] == []


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
