"""What a probe measures: by real ranks, back from its file, in place of published numbers; and nothing left behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli import measure
from shardwise.cli import plan as plan_verb
from shardwise.cost.candidates import Candidates
from shardwise.cost.probed import ProductLaw, speeds
from shardwise.cost.step import Step, step
from shardwise.cost.workload import SHARDWISE_FP32, Workload
from shardwise.errors import RecipeError
from shardwise.events.values import Compared
from shardwise.inputs.arch import PRESETS, Arch
from shardwise.inputs.hardware import (
    Attention,
    Cluster,
    Collective,
    MachineFacts,
    Matmul,
    Measured,
    Threads,
    file,
    local_cluster,
    of_groups,
    parse_cluster,
    with_measured,
)
from shardwise.inputs.recipe import CheckpointPolicy, Recipe, from_keys
from shardwise.launch import local
from shardwise.models.decoder import Decoder
from shardwise.plan import automatic
from shardwise.plan.prediction import predict, why_none
from shardwise.profiling.collective_speed import group_sizes, line
from shardwise.report import summary
from shardwise.train import setup

CPUINFO = "model name : Test CPU @ 2.00GHz\nflags : fma avx512f\n"
HERE = local_cluster(MachineFacts(cpus=2, host_memory_bytes=16 * 2**30, cpuinfo=CPUINFO))
LAW = ProductLaw(start=0.0, flop=1e-11, number=1e-9)
SHAPES = ((256, 256, 256), (1024, 512, 512), (1024, 1408, 512), (2048, 768, 768), (512, 160, 160))
FACTS = Measured(
    by="a probe",
    matmuls=tuple(
        Matmul(m, n, k, "fp32", 2 * m * n * k / float(LAW.seconds(*(np.array([float(x)]) for x in (m, n, k)))[0]))
        for m, n, k in SHAPES
    ),
    collectives=tuple(
        Collective(kind, 2, 5e-4, 1e9, points=((4096, 5.1e-4),))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
    ),
    memory_bytes_per_second=2e10,
    disk_read_bytes_per_second=1e9,
    disk_write_bytes_per_second=5e8,
    attention=(Attention(256, 64, "fp32", 3e10, 2.5e10), Attention(4096, 64, "fp32", 5e10, 4e10)),
    threads=(Threads(2, products=1.8, memory=1.5),),
    pointwise_bytes_per_second=8e9,
    loss_bytes_per_second=1e10,
    optimizer_bytes_per_second=1.5e10,
    block_host_seconds=3e-3,
)
ARCH = Arch(
    name="small", hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=64, ffn_size=704,
    vocab_size=512, max_sequence_length=1024,
)  # fmt: skip
WORK = Workload(ARCH, 256, 16, "fp32", SHARDWISE_FP32)
SPLITS = Candidates.of(
    dp_replicate=[2, 1, 1, 1], dp_shard=[1, 2, 1, 1], tp=[1, 1, 2, 1], pp=[1, 1, 1, 2], zero=[0, 3, 0, 0],
    micro_batch=[8, 8, 16, 4], accumulation=[1, 1, 1, 4], schedule=[0, 0, 0, 2],
)  # fmt: skip


def probed(facts: Measured, cluster: Cluster = HERE) -> Cluster:
    return of_groups((with_measured(cluster.groups[0], facts),))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def taken(facts: Measured, plans: Candidates = SPLITS) -> Step:
    return step(WORK, probed(facts), plans)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_probed_file_comes_back_as_it_was(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cluster{suffix}"
    cluster = probed(FACTS)
    measure.replace(path, file.as_json(cluster) if suffix == ".json" else file.as_toml(cluster))
    again = parse_cluster(str(path))
    assert again.measured == FACTS
    assert msgspec.structs.replace(again, asked=cluster.asked, name=cluster.name) == cluster
    assert names(tmp_path) == [path.name]


def test_measured_values_win_over_published_ones() -> None:
    """Another nominal peak changes only what utilisation is counted by, and what was not measured."""
    device = HERE.device
    assert device.dense_fp32_flops_per_second is not None
    faster = msgspec.structs.replace(
        HERE, node=msgspec.structs.replace(
            HERE.node,
            device=msgspec.structs.replace(
                device, dense_fp32_flops_per_second=4 * device.dense_fp32_flops_per_second, hbm_bytes_per_second=1e12
            ),
        ),
    )  # fmt: skip
    np.testing.assert_allclose(step(WORK, probed(FACTS, faster), SPLITS).seconds, taken(FACTS).seconds, rtol=1e-9)
    assert not np.allclose(step(WORK, faster, SPLITS).seconds, step(WORK, HERE, SPLITS).seconds, rtol=0.1)


def test_every_measured_number_counts_and_in_its_direction() -> None:
    """A rate twice as high is never slower for any plan, and faster for one; more seconds of starting are slower."""
    rates = (
        "memory_bytes_per_second", "pointwise_bytes_per_second", "loss_bytes_per_second",
        "optimizer_bytes_per_second",
    )  # fmt: skip
    before = taken(FACTS).seconds
    changed = {name: msgspec.structs.replace(FACTS, **{name: 2 * getattr(FACTS, name)}) for name in rates[1:]}
    changed["matmuls"] = msgspec.structs.replace(
        FACTS,
        matmuls=tuple(msgspec.structs.replace(one, flops_per_second=2 * one.flops_per_second) for one in FACTS.matmuls),
    )
    changed["collectives"] = msgspec.structs.replace(
        FACTS,
        collectives=tuple(
            msgspec.structs.replace(one, bytes_per_second=2 * one.bytes_per_second) for one in FACTS.collectives
        ),
    )
    changed["starts"] = msgspec.structs.replace(
        FACTS, collectives=tuple(msgspec.structs.replace(one, latency_seconds=1e-5) for one in FACTS.collectives)
    )
    changed["host"] = msgspec.structs.replace(FACTS, block_host_seconds=1e-3)
    for name, facts in changed.items():
        after = taken(facts).seconds
        assert (after <= before * (1 + 1e-12)).all(), name
        assert (after < before).any(), name


@given(st.floats(1e6, 1e11), st.floats(1.0, 100.0), st.floats(0.0, 1e-2))
def test_a_faster_link_is_never_slower(rate: float, factor: float, start: float) -> None:
    def with_link(bytes_per_second: float) -> Measured:
        rows = tuple(
            msgspec.structs.replace(one, bytes_per_second=bytes_per_second, latency_seconds=start)
            for one in FACTS.collectives
        )
        return msgspec.structs.replace(FACTS, collectives=rows)

    slow, fast = taken(with_link(rate)).seconds, taken(with_link(rate * factor)).seconds
    assert (fast <= slow * (1 + 1e-12)).all()


def test_attention_is_taken_from_the_nearest_shape() -> None:
    """At 4,096 positions the rate measured there: a change of the other row changes nothing."""
    long = msgspec.structs.replace(
        WORK, sequence_length=4096, arch=msgspec.structs.replace(ARCH, max_sequence_length=4096)
    )
    near, far = FACTS.attention[1], msgspec.structs.replace(FACTS.attention[0], forward_flops_per_second=1e9)
    before = step(long, probed(FACTS), SPLITS).parts["attention"]
    after = step(long, probed(msgspec.structs.replace(FACTS, attention=(far, near))), SPLITS).parts["attention"]
    np.testing.assert_array_equal(before, after)


def test_the_law_of_products_is_found_again_and_needs_three_shapes() -> None:
    found = ProductLaw.through(FACTS.matmuls)
    assert found is not None
    assert found.flop == pytest.approx(LAW.flop, rel=1e-6)
    assert found.number == pytest.approx(LAW.number, rel=1e-6)
    assert ProductLaw.through(FACTS.matmuls[:2]) is None


@given(st.lists(st.tuples(*(st.integers(1, 4096) for _ in range(3)), st.floats(1e6, 1e13)), min_size=1, max_size=12))
def test_no_measured_product_makes_a_negative_law(rows: list[tuple[int, int, int, float]]) -> None:
    found = ProductLaw.through([Matmul(m, n, k, "fp32", speed) for m, n, k, speed in rows])
    if found is not None:
        assert min(found.start, found.flop, found.number) >= 0
        assert max(found.start, found.flop, found.number) > 0


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


def test_a_rank_alone_has_threads_and_too_many_ranks_take_turns() -> None:
    cluster = probed(FACTS)
    products, memory, host = speeds(cluster, np.array([1, 2, 4]))
    np.testing.assert_allclose(products, [1.8, 1.0, 0.5])
    np.testing.assert_allclose(memory, [1.5, 1.0, 0.5])
    np.testing.assert_allclose(host, [1.0, 1.0, 0.5])
    alone = Candidates.of(micro_batch=16)
    assert taken(FACTS, alone).parts["matmul"] < 2 * taken(FACTS).parts["matmul"][0]


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
        capture_output=True, text=True, timeout=100,
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


# ------------------------------------------------------------------ prediction beside measurement


def small_recipe(**train: object) -> Recipe:
    return from_keys(
        {
            "model": {"preset": "decoder-2m"},
            "data": {"text": ["stdlib:*.py"], "sequence_length": 256},
            "batch": {"global_batch": 16},
            "train": {"steps": 5, **train},
        }
    )


def test_every_plan_of_a_known_shape_has_a_prediction_whoever_decided_it() -> None:
    """What the search chose keeps its estimate; the same choice by hand is predicted the same seconds."""
    cluster = probed(FACTS)
    chosen = automatic.plan(small_recipe(), PRESETS["decoder-2m"], cluster)
    assert chosen.estimate is not None
    assert predict(chosen) == chosen.estimate
    again = predict(msgspec.structs.replace(chosen, estimate=None))
    assert again is not None
    assert again.step_seconds == pytest.approx(chosen.estimate.step_seconds, rel=1e-9)
    by_hand = automatic.plan(small_recipe(plan={"zero": 3, "dp_shard": 2}), PRESETS["decoder-2m"], cluster)
    assert by_hand.estimate is None
    assert predict(by_hand) is not None
    assert why_none(by_hand) == ""


def test_a_module_of_unknown_shape_has_a_reason_instead() -> None:
    made = automatic.plan(small_recipe(), 1_000_000, probed(FACTS))
    assert predict(made) is None
    assert "shape is not known" in why_none(made)


@pytest.mark.parametrize(("measured", "inside"), [(0.25, True), (0.5, False)])
def test_the_summary_and_its_line_set_prediction_beside_measurement(measured: float, inside: bool) -> None:
    event = Compared(
        predicted_step_seconds=0.2, step_seconds_interval=(0.15, 0.3), measured_step_seconds=measured, steps=7,
        predicted_memory_bytes=2**30, memory_bytes_interval=(2**29, 2**31), probed=True,
    )  # fmt: skip
    told = json.loads(summary.last_line([event], "runs/x", 0))["prediction"]
    assert told["step_seconds"]["ratio"] == pytest.approx(0.2 / measured)
    assert told["step_seconds"]["inside"] is inside
    assert told["memory_bytes"]["inside"] is None
    text = summary.text(automatic.plan(small_recipe(), PRESETS["decoder-2m"], probed(FACTS)), [event], "runs/x")
    assert ("inside" if inside else "outside") in text
    assert "no prediction: because" in summary.text(
        automatic.plan(small_recipe(), 10**6, probed(FACTS)), [Compared(why_none="because")], "runs/x"
    )


def test_a_trainer_s_token_data_has_a_known_length_and_is_searched() -> None:
    """What a Trainer makes of its keywords; on data of any length the rule of thumb decides, no estimate."""
    given = {
        "model": "m", "blocks": "auto", "global_batch": 16, "tokens_per_step": None, "micro_batch": "auto",
        "precision": "auto", "clip_norm": 1.0, "seed": 0, "plan": "auto", "run": "runs/x",
        "checkpoint": CheckpointPolicy(), "log": (), "fp32_modules": (), "evaluate_every_steps": 0,
        "sync_batchnorm": False, "mixes_samples": "refuse", "unused_parameters": (), "roles": {},
        "sequence_parallel": "auto", "guard_every_steps": 0,
    }  # fmt: skip
    known = setup.Settings(data="d", tokens_per_sample=128, **given).recipe()  # type: ignore[arg-type]
    unknown = setup.Settings(data="d", tokens_per_sample=None, **given).recipe()  # type: ignore[arg-type]
    assert known.data.sequence_length == 128
    with torch.device("meta"):
        decoder = Decoder(PRESETS["decoder-2m"])
    assert setup.make_plan(known, decoder).estimate is not None
    other = setup.make_plan(unknown, decoder)
    assert other.estimate is None
    assert "length of the samples" in why_none(other) or "shape" in why_none(other)


def test_a_recipe_that_names_a_measured_file_is_planned_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    here = local.probe_cluster()
    path.write_text(file.as_toml(probed(FACTS, here)))
    with torch.device("meta"):
        decoder = Decoder(PRESETS["decoder-2m"])
    made = setup.make_plan(small_recipe(cluster=str(path)), decoder)
    assert made.cluster.measured == FACTS
    assert made.estimate is not None
    assert setup.make_plan(small_recipe(), decoder).cluster.measured is None
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[model]\npreset = "decoder-2m"\n[data]\ntext = ["x"]\n[batch]\nglobal_batch = 16\n'
        f'[train]\nsteps = 5\ncluster = "{path}"\n'
    )
    plan_verb.plan(plan_verb.Asked(str(recipe), "", (), None, False))
    assert "measured values are used: a probe" in capsys.readouterr().out
