"""Cluster files: a Cluster as TOML or JSON, written by hand or by a probe. Strict: an unknown key is an error."""

import json
from pathlib import Path
from typing import Literal

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs.hardware.cluster import Cluster, NodeGroup, of_groups, with_measured
from shardwise.inputs.hardware.measured import Measured
from shardwise.inputs.hardware.published import find_gpu, find_node, near_names
from shardwise.inputs.hardware.values import Count, Frozen, Link, Node


class FileGroup(Frozen, frozen=True):
    """[[group]]: equal nodes. `node` is a catalogue's node, "8xGPU", or the node's own table; the rest replaces its."""

    node: str | Node
    nodes: Count = 1
    link: Link | None = None
    network: Link | None = None
    nics: Count | None = None
    host_memory_bytes: Count | None = None
    host_cores: Count | None = None
    measured: Measured | None = None


class ClusterFile(Frozen, frozen=True):
    """What stands in a cluster file."""

    group: tuple[FileGroup, ...]
    name: str = ""
    schema_version: Literal[1] = 1


def read(path: str | Path) -> Cluster:
    """The Cluster in a file: TOML, or JSON where it ends so. What is measured there wins over what is published.

    Raises: RecipeError that names the key.
    """
    path = Path(path)
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    try:
        written = decode(path.read_bytes(), type=ClusterFile)
    except FileNotFoundError:
        raise RecipeError(f"There is no cluster file {path}.", fix="give the path of a .toml or .json file") from None
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise RecipeError(
            f"{path} is not a cluster file.", why=str(error), fix="correct this key of the file"
        ) from None
    if not written.group:
        raise RecipeError(f"{path} has no [[group]].", fix='write [[group]] with node = "8xH100-SXM5-80GB", nodes = 2')
    return of_groups(tuple(_group(one) for one in written.group), name=written.name or path.stem, asked=str(path))


def _group(written: FileGroup) -> NodeGroup:
    node = written.node if isinstance(written.node, Node) else _named(written.node)
    names = ("link", "network", "nics", "host_memory_bytes", "host_cores")
    given = {name: getattr(written, name) for name in names if getattr(written, name) is not None}
    group = NodeGroup(written.nodes, msgspec.structs.replace(node, **given))
    return with_measured(group, written.measured) if written.measured else group


def _named(text: str) -> Node:
    """A node of the catalogue, or so many of a GPU."""
    row = find_node(text)
    if row is not None:
        return row.value()
    count, times, name = text.partition("x")
    if not (times and count.isdigit() and int(count)):
        raise RecipeError(
            f"node = {text!r} is neither a node nor DEVICESxGPU.",
            why=f"near names: {', '.join(near_names(text))}",
            fix='write node = "8xH100-SXM5-80GB" or node = "p5.48xlarge"',
        )
    gpu = find_gpu(name)
    return Node(name=f"{count}x{gpu.name}", devices=int(count), device=gpu.value(), link=gpu.link())


def _file(cluster: Cluster) -> ClusterFile:
    groups = tuple(FileGroup(group.node, group.nodes, measured=group.measured) for group in cluster.groups)
    return ClusterFile(groups, cluster.name)


def as_json(cluster: Cluster) -> str:
    """The JSON file whose reading is this Cluster again (`asked` apart)."""
    return msgspec.json.format(msgspec.json.encode(_file(cluster))).decode()


def as_toml(cluster: Cluster) -> str:
    """The TOML file whose reading is this Cluster again (`asked` apart)."""
    lines = [f"schema_version = 1\nname = {json.dumps(cluster.name)}\n"]
    for group in _file(cluster).group:
        lines += ["[[group]]", *_table("group", _present(msgspec.to_builtins(group)))]
    return "\n".join(lines) + "\n"


def _present(value: object) -> object:
    """Without what is absent: TOML has no null."""
    if isinstance(value, dict):
        return {key: _present(below) for key, below in value.items() if below is not None}
    return [_present(below) for below in value] if isinstance(value, list | tuple) else value


def _table(path: str, table: object) -> list[str]:
    """Lines of a table: its values, then its tables under their full names; a list of tables has one a line."""
    if not isinstance(table, dict):
        raise TypeError(f"{path} is no table")
    lines = [f"{key} = {_inline(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, below in table.items():
        if isinstance(below, dict):
            lines += ["", f"[{path}.{key}]", *_table(f"{path}.{key}", below)]
    return lines


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(below)}" for key, below in value.items()) + " }"
    if isinstance(value, list):
        separator, end = (",\n  ", ",\n") if value and isinstance(value[0], dict) else (", ", "")
        start = "\n  " if end else ""
        return f"[{start}{separator.join(_inline(below) for below in value)}{end}]"
    # JSON's strings, numbers and booleans are TOML's.
    return json.dumps(value)
