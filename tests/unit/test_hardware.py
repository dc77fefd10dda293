"""Clusters: from names that are exact, and from a machine's own facts."""

import re

import msgspec
import pytest

from shardwise.errors import RecipeError
from shardwise.inputs.hardware import (
    Cluster,
    MachineFacts,
    catalogue,
    core_flops_per_second,
    find_gpu,
    local_cluster,
    near_names,
    parse_cluster,
)

SMI = "0, GPU-aaa, NVIDIA H100 80GB HBM3, 81559\n1, GPU-bbb, NVIDIA H100 80GB HBM3, 81559\n"
CPUINFO = """
processor\t: 0
model name\t: Intel(R) Xeon(R) CPU @ 2.50GHz
cpu MHz\t\t: 2499.998
siblings\t: 2
cpu cores\t: 1
flags\t\t: fpu sse2 fma avx2 avx512f
"""
FACTS = MachineFacts(cpus=4, host_memory_bytes=16 * 2**30, cpuinfo=CPUINFO)


def test_names_and_aliases_are_unique() -> None:
    rows = [*catalogue().gpu, *catalogue().node]
    names = [name for row in rows for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))


def test_every_row_has_a_source_and_a_positive_size() -> None:
    for row in catalogue().gpu:
        assert row.source
        assert row.hbm_bytes > 10 * 2**30
        assert row.measured_bf16_flops_per_second is None or (
            row.dense_bf16_flops_per_second is not None
            and row.measured_bf16_flops_per_second < row.dense_bf16_flops_per_second
        )


def test_every_node_names_a_known_gpu() -> None:
    for row in catalogue().node:
        assert find_gpu(row.gpu).name == row.gpu


@pytest.mark.parametrize(
    ("text", "name", "nodes", "devices"),
    [
        ("8xH100-SXM5-80GB", "8xH100-SXM5-80GB", 1, 8),
        ("8xH100", "8xH100-SXM5-80GB", 1, 8),
        ("4x8xH100", "4x8xH100-SXM5-80GB", 4, 32),
        ("H200", "1xH200-SXM5-141GB", 1, 1),
        ("4xp5.48xlarge", "4xp5.48xlarge", 4, 32),
        ("p5.48xlarge", "1xp5.48xlarge", 1, 8),
    ],
)
def test_a_cluster_is_read_from_its_name(text: str, name: str, nodes: int, devices: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.name, cluster.nodes, cluster.devices, cluster.asked) == (name, nodes, devices, text)
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


def test_the_canonical_name_means_the_same_cluster() -> None:
    for text in ("8xH100", "4x8xA100", "2xp4d.24xlarge"):
        cluster = parse_cluster(text)
        again = parse_cluster(cluster.name)
        assert msgspec.structs.replace(again, asked=text) == cluster


@pytest.mark.parametrize("text", ["8xH10", "8xh100", "8x", "", "8xH100-SXM5-80GB-x"])
def test_a_part_of_a_name_is_not_a_name(text: str) -> None:
    with pytest.raises(RecipeError, match="There is no GPU"):
        parse_cluster(text)


def test_an_unknown_name_shows_the_nearest() -> None:
    with pytest.raises(RecipeError) as raised:
        parse_cluster("8xH100-SXM4-80GB")
    assert raised.value.fix == "write H100-SXM5-80GB"


@pytest.mark.parametrize("text", ["0xH100", "0x8xH100", "4x0xH100", "-1xH100", "0xp5.48xlarge"])
def test_a_count_below_one_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="counts") as raised:
        parse_cluster(text)
    assert "at least 1" in raised.value.fix


def test_a_card_of_several_devices_says_how_to_count_them() -> None:
    with pytest.raises(RecipeError, match="2 devices") as raised:
        parse_cluster("8xMI250X")
    assert "MI250X-GCD" in raised.value.fix
    assert parse_cluster("16xMI250X-GCD").device.hbm_bytes == 64 * 2**30


def test_an_alias_in_another_case_is_near_its_name() -> None:
    assert near_names("h100")[0] == "H100-SXM5-80GB"
    assert near_names("P5.48XLARGE")[0] == "p5.48xlarge"


def test_the_traps_of_the_published_table_are_kept_apart() -> None:
    """Source: the notes of each row in the catalogue."""
    meta, usual = find_gpu("H100-SXM5-96GB"), find_gpu("H100-SXM5-80GB")
    assert meta.name != usual.name and meta.hbm_bytes_per_second < usual.hbm_bytes_per_second
    assert (meta.power_watts, usual.power_watts) == (500, 700)
    mesh = parse_cluster("8xMI300X").node.link
    assert (mesh.peer_bytes_per_second, mesh.bytes_per_second) == (64e9, 448e9)
    assert parse_cluster("Azure-ND-MI300X-v5").node.link.peer_bytes_per_second == 64e9
    assert parse_cluster("18xa4x-tray").node.link_domain == 72


def test_every_gpu_has_its_multiprocessors_and_fp8_is_above_bf16() -> None:
    for row in catalogue().gpu:
        assert row.multiprocessors and row.power_watts
        fp8, bf16 = row.dense_fp8_flops_per_second, row.dense_bf16_flops_per_second
        assert fp8 is None or (bf16 is not None and fp8 / bf16 == pytest.approx(2, rel=0.02))
        assert row.measured_fp8_flops_per_second is None or row.measured_fp8_flops_per_second < (fp8 or 0)


def test_a_node_s_cards_carry_its_network() -> None:
    """`8x400 CX-7`: eight cards of 400 Gb/s; all devices together get what the cards give."""
    for row in catalogue().node:
        said = re.match(r"(\d+)x(\d+)", row.network_kind)
        assert (row.nics is None) == (said is None)
        if said:
            assert row.nics == int(said[1])
            gigabits = int(said[1]) * int(said[2])
            assert row.network_bytes_per_second_per_device * row.devices == gigabits * 1e9 / 8


@pytest.mark.parametrize("text", ["2x4x8xH100", "2x8xp5.48xlarge"])
def test_too_many_counts_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="too many counts"):
        parse_cluster(text)


def test_local_is_the_value_of_the_probe() -> None:
    probed = local_cluster(FACTS)
    assert parse_cluster("local", probed) is probed
    with pytest.raises(RecipeError, match="look at this machine"):
        parse_cluster("local")


def test_a_machine_without_gpus_is_its_cores() -> None:
    cluster = local_cluster(FACTS)
    assert (cluster.kind, cluster.devices) == ("cpu", 4)
    assert cluster.device.hbm_bytes * 4 == FACTS.host_memory_bytes


def test_a_machine_with_gpus_is_its_gpus_with_the_memory_that_the_driver_says() -> None:
    cluster = local_cluster(msgspec.structs.replace(FACTS, nvidia_smi=SMI))
    assert (cluster.kind, cluster.devices, cluster.device.name) == ("gpu", 2, "H100-SXM5-80GB")
    assert cluster.device.hbm_bytes == 81559 * 2**20
    assert cluster.node.host_cores == 4


@pytest.mark.parametrize(
    ("visible", "devices"),
    [("0", 1), ("1,0", 2), ("GPU-bbb", 1), ("0,7,1", 1), ("", 0), ("-1", 0)],
)
def test_hidden_gpus_do_not_count(visible: str, devices: int) -> None:
    cluster = local_cluster(msgspec.structs.replace(FACTS, nvidia_smi=SMI, visible_devices=visible))
    assert (cluster.devices if cluster.kind == "gpu" else 0) == devices


def test_gpus_that_this_torch_cannot_use_do_not_count() -> None:
    assert local_cluster(msgspec.structs.replace(FACTS, nvidia_smi=SMI, torch_has_cuda=False)).kind == "cpu"


def test_a_gpu_that_is_not_in_the_catalogue_is_taken_with_unknown_peaks() -> None:
    smi = "0, GPU-ccc, NVIDIA Imaginary 9000, 12288\n"
    device = local_cluster(msgspec.structs.replace(FACTS, nvidia_smi=smi)).device
    assert device.name == "NVIDIA Imaginary 9000"
    assert device.peak_flops_per_second("bf16") is None


def test_a_cores_peak_is_its_clock_times_its_width_shared_by_its_threads() -> None:
    assert core_flops_per_second(CPUINFO) == 2.5e9 * 16 * 2 * 2 / 2
    assert core_flops_per_second("") is None


def test_the_peak_follows_the_precision() -> None:
    gpu = find_gpu("H100").value()
    bf16, fp32 = gpu.peak_flops_per_second("bf16"), gpu.peak_flops_per_second("fp32")
    assert bf16 is not None and fp32 is not None and bf16 > fp32
    core = local_cluster(FACTS).device
    assert core.peak_flops_per_second("bf16") == core.peak_flops_per_second("fp32")
