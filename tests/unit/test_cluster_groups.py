"""Clusters whose groups differ, cluster files, and what is measured on machines."""

from pathlib import Path

import msgspec
import pytest

from shardwise.errors import RecipeError
from shardwise.inputs.hardware import (
    Cluster,
    Collective,
    MachineFacts,
    Matmul,
    Measured,
    file,
    local_cluster,
    of_groups,
    parse_cluster,
    with_measured,
)

MIXED = "1x8xA100-SXM-80GB+1x8xL4"
MEASURED = Measured(
    by="a probe",
    matmuls=(Matmul(1024, 1024, 1024, "fp32", 4e10), Matmul(64, 64, 64, "fp32", 1e10), Matmul(8, 8, 8, "bf16", 1e9)),
    collectives=(Collective("all_reduce", 2, 1e-4, 1e9, points=((1024, 1e-4), (2**20, 1.1e-3))),),
    memory_bytes_per_second=8e9,
    disk_write_bytes_per_second=5e8,
)
CPU = local_cluster(MachineFacts(cpus=4, host_memory_bytes=64 * 2**30))


def test_groups_that_differ_are_one_cluster() -> None:
    cluster = parse_cluster(MIXED)
    assert cluster.name == "8xA100-SXM4-80GB+8xL4-24GB"
    assert cluster.devices == 16 == sum(group.devices for group in cluster.groups)
    assert [group.node.device.name for group in cluster.groups] == ["A100-SXM4-80GB", "L4-24GB"]
    assert cluster.smallest_device.name == "L4-24GB"
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


def test_a_mixed_cluster_s_canonical_name_means_the_same() -> None:
    for text in (MIXED, "2x8xH100 + 4xp4d.24xlarge", "8xL4+8xH100+8xL4"):
        cluster = parse_cluster(text)
        assert msgspec.structs.replace(parse_cluster(cluster.name), asked=text) == cluster


def test_equal_groups_are_one_group() -> None:
    assert msgspec.structs.replace(parse_cluster("8xH100+2x8xH100"), asked="") == msgspec.structs.replace(
        parse_cluster("3x8xH100"), asked=""
    )


@pytest.mark.parametrize("text", ["8xH100+", "+8xH100", "8xH100+8xH1O0"])
def test_each_group_is_read_strictly(text: str) -> None:
    with pytest.raises(RecipeError) as raised:
        parse_cluster(text)
    assert raised.value.fix


def test_an_old_cluster_without_groups_is_read() -> None:
    known = msgspec.to_builtins(parse_cluster("4x8xH100"))
    old = {key: value for key, value in known.items() if key not in ("others", "measured")}
    for key in ("nics", "link_domain"):
        old["node"].pop(key)
    for key in ("multiprocessors", "power_watts", "measured_fp8_flops_per_second", "measured_fp32_flops_per_second"):
        old["node"]["device"].pop(key)
    cluster = msgspec.convert(old, Cluster)
    assert (cluster.devices, cluster.groups[0].node, cluster.others) == (32, cluster.node, ())


@pytest.mark.parametrize("text", ["8xH100", "4xp5.48xlarge", "8xMI300X", MIXED])
@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_cluster_comes_back_from_its_file(text: str, suffix: str, tmp_path: Path) -> None:
    cluster, path = parse_cluster(text), tmp_path / f"mine{suffix}"
    path.write_text(file.as_toml(cluster) if suffix == ".toml" else file.as_json(cluster))
    assert parse_cluster(str(path)) == msgspec.structs.replace(cluster, asked=str(path))


def test_what_was_measured_comes_back_and_wins(tmp_path: Path) -> None:
    probed = of_groups((with_measured(CPU.groups[0], MEASURED),), name="mine")
    path = tmp_path / "mine.toml"
    path.write_text(file.as_toml(probed))
    again = parse_cluster(str(path))
    assert again == msgspec.structs.replace(probed, asked=str(path))
    assert again.measured == MEASURED
    assert again.device.hbm_bytes_per_second == 8e9
    assert again.device.measured_fp32_flops_per_second == 4e10
    assert again.device.dense_fp32_flops_per_second == CPU.device.dense_fp32_flops_per_second
    assert MEASURED.collective("all_reduce", 2) is MEASURED.collectives[0]
    assert MEASURED.collective("all_reduce", 4) is None
    assert MEASURED.best_matmul("fp16") is None


def test_a_file_written_by_hand_names_nodes_and_replaces_their_links(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text("""
[[group]]
node = "8xA100"
nodes = 2
network = { kind = "2x100 RoCE", bytes_per_second = 3.125e9 }
nics = 2
[group.measured]
by = "nccl-tests"
memory_bytes_per_second = 1.7e12
[[group]]
node = "p4d.24xlarge"
""")
    cluster = parse_cluster(str(path))
    assert (cluster.name, cluster.devices) == ("lab", 24)
    assert cluster.node.network is not None and cluster.node.network.bytes_per_second == 3.125e9
    assert cluster.device.hbm_bytes_per_second == 1.7e12
    assert cluster.others[0].node.name == "p4d.24xlarge"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "group"),
        ("group = []", "no \\[\\[group"),
        ('[[group]]\nnode = "8xH100"\ncolour = "red"', "colour"),
        ('[[group]]\nnode = "8xH100"\nnodes = 0', "nodes"),
        ('[[group]]\nnode = "H100"', "neither"),
        ('[[group]]\nnode = "0xH100"', "neither"),
        ('[[group]]\nnode = "8xH1"', "There is no GPU"),
        ('[[group]]\nnode = "8xH100"\nlink = { kind = "x", bytes_per_second = -1.0 }', "link"),
        ("[[group", "not a cluster file"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_key(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=said) as raised:
        parse_cluster(str(path))
    assert raised.value.fix


def test_a_missing_file_is_named() -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.toml"):
        parse_cluster("nowhere.toml")
