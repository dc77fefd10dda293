"""`shardwise doctor --measure`: ranks measure this machine; a cluster file with what they found is left, or none."""

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.errors import EXIT_DONE, RecipeError, TrainingFailed
from shardwise.inputs.hardware import Cluster, Measured, local_cluster, of_groups, with_measured
from shardwise.inputs.hardware import file as cluster_file
from shardwise.launch import local, watch
from shardwise.report import measured as report
from shardwise.version import VERSION

DEFAULT_FILE = "cluster.toml"
POLL_SECONDS = 0.1
# Ranks that say nothing for so long are stuck: a measurement takes seconds.
SILENT_SECONDS = 180.0
# Without a terminal a line for each tenth.
PLAIN_PARTS = 10


class Asked(NamedTuple):
    """output: where the file goes; "" is cluster.toml here, if that is nothing that a person wrote."""

    output: str = ""
    as_json: bool = False
    seconds: float = 60.0


class Progress(msgspec.Struct):
    """A line of what the first rank tells."""

    done: int
    total: int
    name: str


Show = Callable[[Progress], None]


def measure(asked: Asked) -> int:
    """Measure, write the cluster file whole, and say what was found.

    Raises: RecipeError before anything is measured where the file cannot be written; TrainingFailed where a rank fails.
    """
    path = writable(asked.output)
    cluster = local_cluster(local.probe_facts())
    if local.torch_version() is None:
        raise RecipeError("Measuring needs torch.", why="it is not installed", fix="pip install 'torch>=2.11,<2.15'")
    with interruptible(), showing() as show:
        found = by_ranks(cluster, path.parent, asked.seconds, show)
    probed = with_facts(cluster, found)
    written = cluster_file.as_json(probed) if path.suffix == ".json" else cluster_file.as_toml(probed)
    replace(path, written)
    print(report.as_json(probed, str(path)) if asked.as_json else report.text(probed, str(path)))
    return EXIT_DONE


def with_facts(cluster: Cluster, found: Measured) -> Cluster:
    """The machine as its file says it. A CPU core whose nominal peak is not known has that of its best product."""
    group = with_measured(cluster.groups[0], found)
    device = group.node.device
    if device.kind == "cpu" and device.dense_fp32_flops_per_second is None:
        device = msgspec.structs.replace(device, dense_fp32_flops_per_second=found.best_matmul("fp32"))
        group = msgspec.structs.replace(group, node=msgspec.structs.replace(group.node, device=device))
    return of_groups((group,), name=cluster.name, asked=cluster.asked)


def writable(output: str) -> Path:
    """The path of the file to write. Raises: RecipeError where there cannot be one, or a person's file is there."""
    path = Path(output or DEFAULT_FILE)
    if path.is_dir():
        raise RecipeError(f"{path} is a folder.", fix=f"-o {path / DEFAULT_FILE}")
    if path.suffix not in (".toml", ".json"):
        raise RecipeError(
            f"{path} is no name of a cluster file.", fix=f"give one that ends in .toml: -o {path.stem}.toml"
        )
    if not path.parent.is_dir():
        raise RecipeError(
            f"There is no folder {path.parent} for {path.name}.", fix=f"mkdir -p {path.parent}, or give another path"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RecipeError(f"{path} cannot be written.", why="no permission", fix="give a path that can be written")
    if not output and path.exists() and not _is_measured(path):
        raise RecipeError(
            f"{path} is there, and not from an earlier measurement.", why="it would be lost",
            fix="say where to write: -o measured.toml",
        )  # fmt: skip
    return path


def _is_measured(path: Path) -> bool:
    try:
        return cluster_file.read(path).measured is not None
    except RecipeError:
        return False


def replace(path: Path, text: str) -> None:
    """The whole file at once, or as it was. Raises: RecipeError where it cannot be written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            beside.write_text(text)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise RecipeError(f"{path} cannot be written.", why=str(error), fix="give a path that can: -o FILE") from None


# ------------------------------------------------------------------ the ranks


def by_ranks(cluster: Cluster, folder: Path, seconds: float, show: Show) -> Measured:
    """What ranks on all devices found, in about so many seconds. No rank is left when it returns or raises.

    folder: whose disk is measured. Raises: TrainingFailed where a rank fails; KeyboardInterrupt.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-measure-") as scratch:
        there = Path(scratch)
        work = {
            "budget_seconds": seconds, "folder": str(folder.absolute()), "progress": str(there / "progress"),
            "result": str(there / "result"), "by": _by(cluster), "cores": cluster.node.host_cores or 1,
        }  # fmt: skip
        (there / "work").write_bytes(msgspec.json.encode(work))
        command = ("-m", "shardwise.train.probing", str(there / "work"))
        cores, on_cpu = cluster.node.host_cores or 1, cluster.kind == "cpu"
        job = local.Job(cluster.devices, command, str(there / "logs"), cores, on_cpu=on_cpu)
        process = local.start(job)
        try:
            _stand_by(process, there / "progress", show)
        finally:
            watch.end_tree(process)
            process.wait()
            watch.end_left(job, grace_seconds=0.0)  # what was killed takes a moment to be gone
        if process.returncode or not (there / "result").exists():
            raise _failed(watch.rank_logs(there / "logs"), there / "logs" / "launcher.log")
        return msgspec.json.decode((there / "result").read_bytes(), type=Measured)


def _by(cluster: Cluster) -> str:
    now = datetime.datetime.now(datetime.UTC)
    ranks = "1 rank" if cluster.devices == 1 else f"{cluster.devices} ranks"
    return f"shardwise {VERSION} doctor --measure, {ranks}, {now:%Y-%m-%d %H:%M} UTC"


def _stand_by(process: "subprocess.Popen[bytes]", progress: Path, show: Show) -> None:
    told, since = 0, time.monotonic()
    while process.poll() is None:
        lines = progress.read_bytes().splitlines() if progress.exists() else []
        for line in lines[told:]:
            with contextlib.suppress(msgspec.DecodeError):  # half a line comes whole the next time
                show(msgspec.json.decode(line, type=Progress))
                told, since = told + 1, time.monotonic()
        if time.monotonic() - since > SILENT_SECONDS:
            raise TrainingFailed(
                f"The ranks that measure said nothing for {SILENT_SECONDS:.0f} s.",
                fix="end what else uses this machine, then try again",
            )
        time.sleep(POLL_SECONDS)


def _failed(logs: dict[int, watch.RankLog], launcher: Path) -> TrainingFailed:
    """The first rank's last lines; the launcher's where no rank said anything."""
    said = next((log.text for log in logs.values() if log.text.strip()), "")
    if not said and launcher.exists():
        said = launcher.read_text(errors="replace")
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return TrainingFailed(
        "A rank failed while it measured.", why=lines[-1].strip() if lines else "it said nothing",
        fix="look at `shardwise doctor`; end what else uses the devices, then try again",
    )  # fmt: skip


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT ends it in order in a shell's background too, where a process starts with that signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------ what a person sees


@contextlib.contextmanager
def showing() -> Iterator[Show]:
    """A bar on a terminal; elsewhere plain lines on standard error."""
    if not sys.stderr.isatty():
        yield _plain()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting ranks", total=None)
        yield lambda told: bar.update(task, completed=told.done, total=told.total, description=told.name)


def _plain() -> Show:
    shown = -1

    def show(told: Progress) -> None:
        nonlocal shown
        part = told.done * PLAIN_PARTS // told.total
        if part > shown:
            shown = part
            print(f"measuring {told.done}/{told.total}: {told.name}", file=sys.stderr, flush=True)

    return show
