"""A row of measured training runs (a CSV of published_runs' columns) as a Workload, a Cluster and one candidate.

What a row does not say is inferred by the rules stated here and in published_shape and published_engine, and named in
Row.unknown so that an interval can widen; what cannot be inferred is a reason to skip. No rule asks for the source.
"""

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwise.cost import published_engine as engine
from shardwise.cost.candidates import OFFLOAD, RECOMPUTE, SCHEDULES, Candidates
from shardwise.cost.published_cluster import cluster_of
from shardwise.cost.published_engine import MeasuredRank, MemoryKind
from shardwise.cost.published_shape import arch_of
from shardwise.cost.reported import Reported, Unusable
from shardwise.cost.workload import Workload
from shardwise.errors import DataError
from shardwise.inputs.hardware import Cluster

REQUIRED = ("model", "gpu", "n_gpus", "seq_len")
MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "memory_gb")
NUMBERS = (
    "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq_len", "params_b", "n_gpus", "gpus_per_node", "dp",
    "tp", "pp", "vp", "cp", "ep", "micro_batch", "global_batch", "tokens_per_s_per_gpu", "step_time_s", "memory_gb",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measured run. `line` is that of the file. unknown: what was inferred, by the name of the column or fact.

    measured_seconds: of one step. measured_bytes: of one rank, of the kind memory_kind, on the rank measured_rank.
    out_of_memory: the run did not fit. Where there is a reason_to_skip, workload, cluster and candidate are absent.
    """

    line: int
    family: str
    source: str
    model: str
    workload: Workload | None = None
    cluster: Cluster | None = None
    candidate: Candidates | None = None
    measured_seconds: float | None = None
    measured_bytes: float | None = None
    memory_kind: MemoryKind = "allocated"
    measured_rank: MeasuredRank = "fullest"
    out_of_memory: bool = False
    unknown: frozenset[str] = field(default_factory=frozenset)
    reason_to_skip: str = ""


def rows(path: str | Path) -> list[Row]:
    """All rows of the file, in its order.

    Raises: DataError where the file is missing, is not such a table, has no rows, or holds a value that is no number.
    """
    found = [_row(each) for each in reported_rows(path)]
    families = _families([(each.source, _repository(text)) for each, text in found])
    return [replace(each, family=families[each.source]) for each, _ in found]


def reported_rows(path: str | Path) -> list[Reported]:
    """The lines of the file with their numbers parsed. Raises: DataError, as `rows` does."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            _require_columns(table.fieldnames or (), path)
            lines = [(table.line_num, line) for line in table]
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.", fix="give the path of a CSV of measured runs") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read.", why=str(error), fix="give a CSV file in UTF-8") from None
    if not lines:
        raise DataError(f"{path} has no rows.", fix="add a line for each measured run below the header")
    return _with_earlier_techniques(_reported(number, line) for number, line in lines)


def _require_columns(names: Iterable[str], path: str | Path) -> None:
    present = {name.strip() for name in names if name}
    missing = [name for name in REQUIRED if name not in present]
    if missing or not present & set(MEASURED):
        lacking = ", ".join(missing) or f"one of {', '.join(MEASURED)}"
        raise DataError(
            f"{path} lacks the column{'s' if len(missing) > 1 else ''} {lacking}.",
            why=f"a table of runs has at least {', '.join(REQUIRED)} and one of {', '.join(MEASURED)}",
            fix=f"write a header line with {lacking}",
        )


def _reported(number: int, line: Mapping[str | None, object]) -> Reported:
    if None in line or None in line.values():
        fix = "give every line as many cells as the header has; quote a cell that holds a comma"
        raise DataError(f"line {number} has another number of cells than the header.", fix=fix)
    text = {str(name).strip(): str(value).strip() for name, value in line.items()}
    return Reported(number, text, {name: _number(number, name, text.get(name, "")) for name in NUMBERS})


def _number(line: int, name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        fix = f"write a number above 0 in {name}, or leave the cell empty where it is not known"
        raise DataError(f"line {line}: {name} = {text!r} is not a positive number.", fix=fix)
    return value


def _with_earlier_techniques(found: Iterable[Reported]) -> list[Reported]:
    """Where the notes say 'cumulative', a row named '+something' keeps what rows of the same shape above it added."""
    added: dict[tuple[str, ...], list[str]] = defaultdict(list)
    kept = []
    for each in found:
        if "cumulative" in each.text("notes").lower():
            key = tuple(each.text(name) for name in ("source_key", "hidden", "layers", "gpu"))
            kept.append(replace(each, earlier=tuple(added[key])))
            added[key].extend(re.findall(r"\+([^+]+)", each.text("model")))
        else:
            kept.append(each)
    return kept


def _repository(source: str) -> str:
    """The owner/name that a source begins with; empty where it begins with none."""
    match = re.match(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+(?=\s|$)", source)
    return match.group(0).lower() if match else ""


def _families(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The family of each source key: keys of one repository are one family, named by what their names begin with."""
    keys_of: dict[str, set[str]] = defaultdict(set)
    for key, repository in pairs:
        keys_of[repository or key].add(key)
    named: dict[str, str] = {}
    for keys in keys_of.values():
        common = _common_words(sorted(keys))
        named |= dict.fromkeys(keys, common or min(keys))
    return named


def _common_words(keys: list[str]) -> str:
    """'bridge' of 'bridge-25.09' and 'bridge-other'."""
    split = [key.split("-") for key in keys]
    if len(split) == 1:
        return keys[0]
    shared = [words[0] for words in zip(*split, strict=False) if len(set(words)) == 1]
    return "-".join(shared)


def _row(reported: Reported) -> tuple[Row, str]:
    """The row without its family, and its text of a source."""
    key = reported.text("source_key") or "unnamed"
    bare = Row(line=reported.line, family=key, source=key, model=reported.text("model"))
    try:
        return _usable(reported, bare), reported.text("source")
    except Unusable as why:
        return replace(bare, reason_to_skip=str(why)), reported.text("source")


def _usable(reported: Reported, bare: Row) -> Row:
    facts = engine.facts_of(reported)
    unknown = engine.doubts_of(facts)
    discounted = facts.found(r"do not score(?! time| memory)|not scoreable")
    if discounted:
        raise Unusable(f"its notes say: {discounted}")
    degrees = degrees_of(reported, unknown)
    arch = arch_of(reported, facts, unknown)
    cluster = cluster_of(reported, degrees.world, unknown)
    workload = Workload(
        arch=arch,
        sequence_length=reported.whole("seq_len") or 0,
        global_batch=degrees.global_batch,
        precision=engine.precision_of(reported, unknown),
        stack=engine.stack_of(reported, facts, unknown),
        trainable=engine.trainable_of(reported, facts, unknown),
    )
    seconds = _seconds(reported, facts, workload.tokens, degrees.world)
    _require_possible(workload, cluster, seconds)
    out_of_memory = engine.ran_out_of_memory(facts) and seconds is None
    # What a run held before it failed is a lower bound, not a peak.
    comparable = not out_of_memory and engine.memory_is_comparable(facts, workload.trainable, unknown)
    held = reported.number("memory_gb") if comparable else None
    if seconds is None and held is None and not out_of_memory:
        raise Unusable("it states neither a usable step time nor a memory")
    kind = engine.memory_kind_of(facts, unknown) if held else "allocated"
    return replace(
        bare, workload=workload, cluster=cluster, candidate=_candidate(reported, facts, degrees, unknown),
        measured_seconds=seconds, measured_bytes=held * 1e9 if held else None, memory_kind=kind,
        measured_rank=engine.measured_rank_of(facts), out_of_memory=out_of_memory, unknown=frozenset(unknown),
    )  # fmt: skip


def _seconds(reported: Reported, facts: engine.Facts, tokens: int, world: int) -> float | None:
    """Of one step: as printed, else from tokens a second; None where the notes withdraw it."""
    if facts.found(r"do not score time|real sequence length unknown"):
        return None
    printed, rate = reported.number("step_time_s"), reported.number("tokens_per_s_per_gpu")
    if printed is not None:
        return printed
    return tokens / (rate * world) if rate is not None else None


def _require_possible(workload: Workload, cluster: Cluster, seconds: float | None) -> None:
    """Raises: Unusable where the step is faster than the devices' dense peak: a figure of the row is wrong."""
    gpu = cluster.device
    peak = gpu.dense_fp8_flops_per_second or gpu.peak_flops_per_second("bf16") or gpu.peak_flops_per_second("fp16")
    # Frozen weights have no gradients of their own: two thirds of the FLOPs.
    part = 2 / 3 if workload.trainable.kind == "lora" else 1.0
    flops = part * workload.arch.flops_per_token(workload.sequence_length) * workload.tokens
    if seconds is not None and peak is not None and flops > seconds * peak * cluster.devices:
        times = flops / (seconds * peak * cluster.devices)
        raise Unusable(f"its step is {times:.1f} times faster than its GPUs' peak allows: a figure of the row is wrong")


@dataclass(frozen=True)
class Degrees:
    """How a row splits its world; `dp` are the ranks that read different samples."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    micro_batch: int
    accumulation: int

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> int:
        return self.dp * self.micro_batch * self.accumulation


def degrees_of(reported: Reported, unknown: set[str]) -> Degrees:
    """A blank tp, pp, cp or ep is 1. dp is what the other degrees leave of n_gpus, whatever the row says.

    Raises: Unusable where neither n_gpus nor dp is known or the degrees do not divide n_gpus.
    """
    tp, pp, cp, ep = (reported.whole(name) or 1 for name in ("tp", "pp", "cp", "ep"))
    world, said = reported.whole("n_gpus"), reported.whole("dp")
    if world is None and said is None:
        raise Unusable("it states neither n_gpus nor dp")
    if world is None:
        unknown.add("n_gpus")
        world = tp * pp * cp * (said or 1)
    if world % (tp * pp * cp):
        raise Unusable(f"tp {tp} x pp {pp} x cp {cp} do not divide n_gpus = {world}")
    dp = world // (tp * pp * cp)
    if said is not None and said != dp:
        unknown.add("dp")
    if (world // pp) % ep:
        raise Unusable(f"ep = {ep} does not divide the {world // pp} ranks of a pipeline stage")
    return Degrees(dp, tp, pp, cp, ep, *_batch(reported, dp, unknown))


def _batch(reported: Reported, dp: int, unknown: set[str]) -> tuple[int, int]:
    """Samples of a micro-batch, and micro-batches a step.

    Accumulation is global_batch / (dp x micro_batch), rounded up; without a global_batch, what the notes count, else 1.
    """
    micro, whole = reported.whole("micro_batch"), reported.whole("global_batch")
    counted = re.search(r"(?:grad_accum|micro_num|mbc|gradient accumulation|GAS?)\s*=\s*(\d+)", reported.text("notes"))
    if whole is None:
        unknown.update({"global_batch"} - ({"global_batch"} if counted else set()))
        unknown.update({"micro_batch"} if micro is None else set())
        return micro or 1, int(counted.group(1)) if counted else 1
    if micro is None:
        unknown.add("micro_batch")
        micro = 1
    if whole < dp * micro:
        raise Unusable(f"global_batch = {whole} is below dp x micro_batch = {dp * micro}")
    if whole % (dp * micro):
        unknown.add("accumulation")
    return micro, math.ceil(whole / (dp * micro))


def _candidate(reported: Reported, facts: engine.Facts, degrees: Degrees, unknown: set[str]) -> Candidates:
    zero, shard = engine.zero_of(reported, facts, degrees.dp, degrees.world, unknown)
    stages = engine.stages_per_rank_of(reported, facts) if degrees.pp > 1 else 1
    return Candidates.of(
        pp=degrees.pp, dp_replicate=degrees.dp // shard, dp_shard=shard, cp=degrees.cp, tp=degrees.tp, ep=degrees.ep,
        zero=zero, micro_batch=degrees.micro_batch, accumulation=degrees.accumulation,
        schedule=SCHEDULES.index(engine.schedule_of(facts, degrees.pp, stages)), stages_per_rank=stages,
        recompute=RECOMPUTE.index(engine.recompute_of(reported, facts, unknown)),
        offload=OFFLOAD.index(engine.offload_of(facts)),
        sequence_parallel=engine.sequence_parallel_of(reported, degrees.tp, unknown),
        compiled=bool(facts.found(r"(?<!w/o )(?<!no )\bcompiled?\b|torch\.compile")),
    )  # fmt: skip
