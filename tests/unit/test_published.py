"""A row of measured runs as a workload, a cluster and a candidate: what it says, what is inferred, what is refused."""

import csv
from pathlib import Path

import pytest

from shardwise.cost.candidates import OFFLOAD, RECOMPUTE, SCHEDULES
from shardwise.cost.published import Row, rows
from shardwise.errors import DataError

MEASURED = Path(__file__).with_name("measured_runs.csv")
PLAIN = {
    "source_key": "mine", "model": "own", "hidden": "2048", "layers": "24", "heads": "16", "vocab": "50304",
    "seq_len": "2048", "gpu": "A100-SXM4-80GB", "n_gpus": "16", "gpus_per_node": "8", "tp": "2", "pp": "2",
    "micro_batch": "2", "global_batch": "64", "precision": "bf16", "recompute": "none", "step_time_s": "1.5",
}  # fmt: skip


def written(folder: Path, *lines: dict[str, str]) -> Path:
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(dict.fromkeys(name for line in lines for name in line)))
        table.writeheader()
        table.writerows(lines)
    return path


def parsed(folder: Path, **cells: str) -> Row:
    (row,) = rows(written(folder, {**PLAIN, **cells}))
    return row


def usable(folder: Path, **cells: str) -> Row:
    row = parsed(folder, **cells)
    assert not row.reason_to_skip
    return row


def column(row: Row, name: str) -> int:
    return int(getattr(row.candidate, name)[0])


def test_every_row_has_a_workload_and_a_cluster_or_a_reason_to_skip() -> None:
    found = rows(MEASURED)
    assert len(found) == 17
    for row in found:
        complete = row.workload is not None and row.cluster is not None and row.candidate is not None
        assert complete != bool(row.reason_to_skip)
        assert row.out_of_memory or row.measured_seconds or row.measured_bytes or row.reason_to_skip


def test_the_degrees_of_every_row_multiply_to_its_gpus() -> None:
    for row in rows(MEASURED):
        if row.candidate is not None and row.cluster is not None:
            assert int(row.candidate.world[0]) == row.cluster.devices
            data, micro, steps = (
                row.candidate.data_parallel[0],
                row.candidate.micro_batch[0],
                row.candidate.accumulation[0],
            )
            assert row.workload is not None and data * micro * steps == row.workload.global_batch


def test_parameter_counts_are_those_that_the_rows_state() -> None:
    with MEASURED.open() as file:
        stated = [float(line["params_b"] or 0) for line in csv.DictReader(file)]
    for row, billions in zip(rows(MEASURED), stated, strict=True):
        if row.workload is not None and billions:
            assert row.workload.arch.parameters() / 1e9 == pytest.approx(billions, rel=0.025)


def test_a_plain_row_of_a_user_is_read_as_it_stands(tmp_path: Path) -> None:
    row = usable(tmp_path)
    assert row.family == row.source == "mine"
    assert row.measured_seconds == 1.5
    assert [column(row, name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "accumulation")] == [4, 1, 2, 2, 8]
    assert SCHEDULES[column(row, "schedule")] == "1f1b"
    assert row.cluster is not None and (row.cluster.nodes, row.cluster.node.devices) == (2, 8)
    assert "interconnect" in row.unknown and "ffn" in row.unknown


def test_tokens_a_second_give_the_step(tmp_path: Path) -> None:
    row = usable(tmp_path, step_time_s="", tokens_per_s_per_gpu="4096")
    assert row.measured_seconds == pytest.approx(64 * 2048 / (4096 * 16), rel=1e-12)


@pytest.mark.parametrize(
    ("said", "zero", "shard"),
    [
        ("0", 0, 1), ("none", 0, 1), ("ddp", 0, 1), ("zero0", 0, 1), ("zero1", 1, 4), ("ddp+dist-opt(recipe)", 1, 4),
        ("zero1(dist-optimizer)", 1, 4), ("zero1(shard group=2)", 1, 2), ("zero2", 2, 4), ("zero3(DeepSpeed)", 3, 4),
        ("fsdp2(zero3)", 3, 4), ("fsdp1_full(zero3)", 3, 4), ("SHARD_GRAD_OP", 2, 4), ("hsdp(shard=2)", 3, 2),
        ("megatron-fsdp:optim_grads_params", 3, 4), ("3", 3, 4), ("no_shard", 0, 1),
        ("hsdp(2x2)", 3, 2), ("unstated", 0, 1), ("full_shard", 3, 4),
    ],
)  # fmt: skip
def test_words_for_sharding(tmp_path: Path, said: str, zero: int, shard: int) -> None:
    row = usable(tmp_path, zero_stage_or_fsdp=said)
    assert (column(row, "zero"), column(row, "dp_shard"), column(row, "dp_replicate")) == (zero, shard, 4 // shard)


@pytest.mark.parametrize(
    ("cells", "stack_bytes"),
    [
        # weights, masters, gradients, states
        ({"zero_stage_or_fsdp": "zero1(dist-optimizer)"}, (2, 4, 4, 8)),
        ({"zero_stage_or_fsdp": "zero3(DeepSpeed)", "precision": "fp16"}, (2, 4, 2, 8)),
        ({"zero_stage_or_fsdp": "fsdp2(zero3)"}, (0, 4, 4, 8)),
        ({"precision": "bf16-true"}, (2, 0, 2, 4)),
        ({"precision": "fp32"}, (0, 4, 4, 8)),
        ({"notes": "8-bit AdamW"}, (2, 4, 4, 2)),
        ({"notes": "optimizer Adafactor"}, (2, 4, 4, 0)),
        ({"notes": "optimizer in backward"}, (2, 4, 0, 8)),
    ],
)
def test_an_engines_words_say_what_a_parameter_takes(
    tmp_path: Path, cells: dict[str, str], stack_bytes: tuple[int, int, int, int]
) -> None:
    row = usable(tmp_path, **cells)
    assert row.workload is not None
    stack = row.workload.stack
    assert (stack.weights, stack.masters, stack.gradients, stack.states) == stack_bytes


@pytest.mark.parametrize(
    ("said", "gigabits"),
    [
        ("1600Gbps/node RoCE", 1600), ("4x100Gb RoCE per node", 400), ("DGX 8x200Gbps HDR IB", 1600),
        ("3.2 Tbps EFA", 3200), ("800 Gbit/s", 800),
    ],
)  # fmt: skip
def test_words_for_a_network_give_each_devices_share(tmp_path: Path, said: str, gigabits: float) -> None:
    row = usable(tmp_path, interconnect=said)
    assert row.cluster is not None and row.cluster.node.network is not None
    assert row.cluster.node.network.bytes_per_second == pytest.approx(gigabits * 1e9 / 8 / 8, rel=1e-12)
    assert "interconnect" not in row.unknown


def test_an_nvlink_domain_is_one_node(tmp_path: Path) -> None:
    row = usable(tmp_path, gpu="GB200-NVL72", gpus_per_node="4", n_gpus="256", global_batch="256", interconnect="NVL72")
    assert row.cluster is not None and (row.cluster.nodes, row.cluster.node.devices) == (4, 64)


def test_what_is_recomputed_and_what_is_not_known(tmp_path: Path) -> None:
    for said, meant, unknown in (
        ("full", "full", False), ("full(recipe default)", "full", False), ("selective(core_attn)", "selective", False),
        ("selective(moe_act)", "none", True), ("none", "none", False), ("", "none", True),
    ):  # fmt: skip
        row = usable(tmp_path, recompute=said)
        assert (RECOMPUTE[column(row, "recompute")], "recompute" in row.unknown) == (meant, unknown)


def test_experts_and_latents_are_read_from_words(tmp_path: Path) -> None:
    notes = "MoE+MLA: 64 experts top-6 + 2 shared, moe_ffn 1408, 1 dense layer, kv_lora 512"
    row = usable(tmp_path, notes=notes, ep="4", ffn="10944")
    assert row.workload is not None and row.workload.arch.experts is not None and row.workload.arch.latent is not None
    experts = row.workload.arch.experts
    assert (experts.count, experts.per_token, experts.ffn_size) == (64, 6, 1408)
    assert (experts.shared_ffn_size, experts.dense_layers) == (2816, 1)
    assert row.workload.arch.latent.key_value_rank == 512


def test_a_name_of_experts_is_read(tmp_path: Path) -> None:
    row = usable(tmp_path, model="mixtral_8x7b", ffn="7168", ep="2")
    assert row.workload is not None and row.workload.arch.experts is not None
    assert (row.workload.arch.experts.count, row.workload.arch.experts.ffn_size) == (8, 7168)


def test_low_rank_factors_are_read_and_latent_ranks_are_not_taken_for_them(tmp_path: Path) -> None:
    lora = usable(tmp_path, model="own qlora finetune", notes="rank 16").workload
    assert lora is not None and (lora.trainable.kind, lora.trainable.rank, lora.trainable.base_bytes) == (
        "lora",
        16,
        0.5,
    )
    latent = usable(tmp_path, notes="q_lora 1536, kv_lora 512").workload
    assert latent is not None and latent.trainable.kind == "full"


def test_a_preset_is_found_by_its_exact_name_and_gives_way_to_the_columns(tmp_path: Path) -> None:
    bare = dict.fromkeys(("hidden", "layers", "heads", "vocab"), "")
    row = usable(tmp_path, model="LLaMA3_8B SFT", **bare)
    assert row.workload is not None and row.workload.arch.parameters() == pytest.approx(8.03e9, rel=1e-3)
    cut = usable(tmp_path, model="llama-3-8b", **{**bare, "layers": "4"})
    assert cut.workload is not None and (cut.workload.arch.num_layers, cut.workload.arch.num_kv_heads) == (4, 8)
    assert "no preset has exactly" in parsed(tmp_path, model="llama-3-8bn", **bare).reason_to_skip


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu": "H1000"}, "no GPU"),
        ({"tp": "3"}, "do not divide"),
        ({"n_gpus": "", "dp": ""}, "neither n_gpus nor dp"),
        ({"notes": "AUDIT: do not score"}, "do not score"),
        ({"precision": "NVFP4"}, "four-bit"),
        ({"ep": "2"}, "experts"),
        ({"model": "t5:large"}, "not a decoder"),
        ({"step_time_s": ""}, "neither a usable step time"),
        ({"global_batch": "2"}, "below dp x micro_batch"),
        ({"params_b": "70"}, "says otherwise"),
        ({"zero_stage_or_fsdp": "mystery"}, "not a sharding known"),
        ({"hidden": ""}, "no preset"),
        ({"kv_heads": "3"}, "multiple"),
        ({"step_time_s": "0.01"}, "faster than its GPUs' peak"),
    ],
)
def test_what_cannot_be_used_is_skipped_with_the_reason(tmp_path: Path, cells: dict[str, str], reason: str) -> None:
    row = parsed(tmp_path, **cells)
    assert reason in row.reason_to_skip and row.workload is None


def test_out_of_memory_has_no_peak(tmp_path: Path) -> None:
    row = usable(tmp_path, step_time_s="", memory_gb="66", notes="OOM at iteration 2")
    assert row.out_of_memory and row.measured_bytes is None
    ran = usable(tmp_path, memory_gb="66", notes="OOM with a larger batch; nvidia-smi")
    assert not ran.out_of_memory and ran.measured_bytes == 66e9 and ran.memory_kind == "device"


def test_memory_under_an_optimizer_that_is_not_known_is_not_scored(tmp_path: Path) -> None:
    notes = "optimizer tricks vary (8-bit/paged AdamW, in-backward)"
    assert usable(tmp_path, memory_gb="20", notes=notes).measured_bytes is None
    assert usable(tmp_path, memory_gb="20", model="own lora finetune", notes=notes).measured_bytes == 20e9


def test_cumulative_techniques_are_kept_by_the_rows_below(tmp_path: Path) -> None:
    line = {**PLAIN, "notes": "cumulative techniques", "tp": "1", "pp": "1", "n_gpus": "1", "global_batch": "2"}
    names = ("own Baseline", "own +compile", "own +8bit AdamW", "own +AC")
    found = rows(written(tmp_path, *({**line, "model": name} for name in names)))
    assert [column(row, "compiled") for row in found] == [0, 1, 1, 1]
    assert [row.workload.stack.states for row in found if row.workload] == [4, 4, 2, 2]


@pytest.mark.parametrize(
    ("cells", "overlap"),
    [
        ({}, True), ({"notes": "1F1B; no grad bucketing/overlap"}, False), ({"precision": "fp16"}, False),
        ({"precision": "fp16", "zero_stage_or_fsdp": "zero3(DeepSpeed)"}, False),
        ({"zero_stage_or_fsdp": "fsdp2"}, True),
        ({"notes": "transformer-impl=transformer_engine"}, False),
        ({"notes": "transformer-impl=transformer_engine; overlap-grad-reduce"}, True),
    ],
)  # fmt: skip
def test_whether_gradients_are_reduced_beside_backward(tmp_path: Path, cells: dict[str, str], overlap: bool) -> None:
    row = usable(tmp_path, ffn="8192", **cells)
    assert row.workload is not None and row.workload.stack.overlap == overlap


def test_what_the_notes_doubt_is_not_known(tmp_path: Path) -> None:
    assert "test_node" in usable(tmp_path, notes="CI node (noisy)").unknown
    assert "noise" in usable(tmp_path, notes="iteration time p90/p10 = 1.78").unknown
    assert not {"test_node", "noise"} & usable(tmp_path, notes="iteration time p90/p10 = 1.05").unknown


def test_offload_is_read_of_states_and_not_of_activations(tmp_path: Path) -> None:
    assert OFFLOAD[column(usable(tmp_path, notes="CPU offload"), "offload")] == "cpu"
    assert OFFLOAD[column(usable(tmp_path, model="own +act offload"), "offload")] == "none"


def test_keys_of_one_repository_are_one_family(tmp_path: Path) -> None:
    bridge = [
        {**PLAIN, "source_key": key, "source": "a/Bridge docs"} for key in ("bridge-1.0", "bridge-1.1", "bridge-other")
    ]
    lone = {**PLAIN, "source_key": "other", "source": "table 2 of a paper"}
    assert [row.family for row in rows(written(tmp_path, *bridge, lone))] == ["bridge"] * 3 + ["other"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lacks the columns"), ("model,gpu,n_gpus,seq_len\na,b,1,2\n", "lacks the column"),
        ("model,gpu,n_gpus,seq_len,step_time_s\n", "no rows"),
        ("model,gpu,n_gpus,seq_len,step_time_s\na,A100,8,2048,fast\n", "step_time_s = 'fast'"),
        ("model,gpu,n_gpus,seq_len,step_time_s\na,A100,8,2048,-1\n", "not a positive number"),
        ("model,gpu,n_gpus,seq_len,step_time_s\na,A100,8,2048,nan\n", "not a positive number"),
        ("model,gpu,n_gpus,seq_len,step_time_s\na,A100,8,2048,1,2\n", "another number of cells"),
        ("model,gpu,n_gpus,seq_len,step_time_s\na,A100\n", "another number of cells"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_read_is_bad_input_with_a_fix(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        rows(path)
    assert said in caught.value.what and caught.value.fix
    with pytest.raises(DataError, match="does not exist"):
        rows(tmp_path / "absent.csv")
