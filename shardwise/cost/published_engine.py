"""What a row of measured runs says of its engine: sharding, precision, optimizer, recompute, what was measured."""

import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from shardwise.cost.reported import Reported, Unusable
from shardwise.cost.workload import Stack, Trainable
from shardwise.inputs.hardware import Precision

MemoryKind = Literal["allocated", "reserved", "device"]
MeasuredRank = Literal["fullest", "first", "last"]

# fp32 parameters, cast or gathered in 16 bits: FSDP's MixedPrecision and torch.autocast.
# Source: pytorch.org FSDP notes; param_dtype bf16, reduce_dtype fp32.
# torch's AdamW takes all tensors at once, with one more result a number: torch.optim's notes on foreach.
TORCH_STEP = 4
CAST = Stack("cast from fp32", weights=0, masters=4, gathered=2, gradients=4, reduced=4, states=8, stepping=TORCH_STEP)
# 16-bit weights beside fp32 masters, and fp32 gradients.
# Source: Megatron-LM docs/source/api-guide/dist_optimizer.md (bf16 parameters, fp32 gradients: 18 bytes in all).
# Its kernels fuse the gate and its product, and its selective recompute makes again the inside of attention alone.
MAIN_GRADIENTS = Stack(
    "masters, fp32 gradients", weights=2, masters=4, gathered=2, gradients=4, reduced=4, states=8, kernels="fused",
    selective="all but attention",
)  # fmt: skip
# The same with gradients in the weights' precision: ZeRO's 16 bytes. Source: Rajbhandari et al., arXiv 1910.02054, 3.1.
# Its step makes the share's gradients flat, and a copy of them in fp32 (DeepSpeed, stage_1_and_2.py).
HALF_GRADIENTS = msgspec.structs.replace(
    MAIN_GRADIENTS, name="masters, 16-bit gradients", gradients=2, reduced=2, stepping=2 + 4
)
# Everything in 16 bits, moments too.
PURE = Stack("all in 16 bits", weights=2, masters=0, gathered=2, gradients=2, reduced=2, states=4)
SINGLE = Stack("all in 32 bits", weights=0, masters=4, gathered=4, gradients=4, reduced=4, states=8)


# How a cell says that it does not say.
UNSAID = r"|-|\?|n/?a|unstated|unknown|not stated"

# Words that doubt a figure of their own row.
DOUBTS = {
    "n_gpus": r"n_gpus=\d+ assumed",
    "test_node": r"\bci node\b|deterministic-mode",
    "noise": r"p90/p10 = (1\.[2-9]|[2-9])|\bdoubtful\b|doubt tokens",
    "activation_offload": r"act(ivation)?s? offload|fine[-_]grained[-_]offload",
    "seq_len": r"seq\w* (is a cap|.*shorter)",
}


@dataclass(frozen=True)
class Facts:
    """What the words of a row say, one statement a line, in lower case."""

    lines: str

    def found(self, pattern: str) -> str:
        """The first statement that matches, ^ and $ being its ends; empty where none does."""
        match = re.search(pattern, self.lines, re.MULTILINE)
        if match is None:
            return ""
        end = self.lines.find("\n", match.end())
        return self.lines[self.lines.rfind("\n", 0, match.start() + 1) + 1 : end if end >= 0 else None]

    def count(self, pattern: str) -> int | None:
        """The number that the pattern's group catches in the first statement that matches."""
        match = re.search(pattern, self.lines, re.MULTILINE)
        return int(match.group(1)) if match else None


def facts_of(reported: Reported) -> Facts:
    """Statements of the notes and of the name."""
    cells = [*reported.earlier, reported.text("model"), *reported.text("notes").split(";")]
    return Facts("\n".join(each.strip().removeprefix("flags:").strip().lower() for each in cells if each.strip()))


def _sharding(reported: Reported) -> str:
    return reported.text("zero_stage_or_fsdp").lower()


def zero_of(reported: Reported, facts: Facts, dp: int, world: int, unknown: set[str]) -> tuple[int, int]:
    """The stage, and over how many of the dp ranks it shards.

    'dist-opt' is stage 1; any FSDP is 3 but SHARD_GRAD_OP and optim_grads (2) and optim (1). Hybrid sharding shards
    over a node. Raises: Unusable for words that none of these describes.
    """
    said = _sharding(reported)
    stage = _stage(said)
    if stage is None:
        raise Unusable(f"zero_stage_or_fsdp = {said!r} is not a sharding known here")
    if re.fullmatch(UNSAID, said) and dp > 1:
        unknown.add("zero_stage_or_fsdp")
    if stage == 0:
        return 0, 1
    group = re.search(r"(?:shard(?: group)?|group)\s*=?\s*(\d+)|hsdp\D*\d+\s*x\s*(\d+)", said)
    copies = facts.count(r"dp_?replicate\s*=\s*(\d+)")
    if group or copies:
        shard = int(group.group(1) or group.group(2)) if group else dp // max(1, copies or 1)
    elif re.search(r"hsdp|hybrid", said):
        shard = reported.whole("gpus_per_node") or 8
        unknown.add("dp_shard")
    else:
        shard = dp
    return stage, shard if 1 <= shard <= dp and dp % shard == 0 else dp


def _stage(said: str) -> int | None:
    numbered = re.search(r"(?:zero|stage)[-_ ]?([0-3])", said) or re.match(r"([0-3])\b", said)
    if numbered:
        return int(numbered.group(1))
    rules = (
        (r"^(none|no|off)\b|no_shard", 0), (f"^({UNSAID})$", 0), (r"shard_grad_op|optim_grads(?!_params)", 2),
        (r"optim_grads_params|fsdp|hsdp|full_shard|fully sharded|hybrid_shard", 3),
        (r"dist\w*[-_ ]?opt|:optim$", 1), (r"ddp|replicat", 0),
    )  # fmt: skip
    return next((stage for pattern, stage in rules if re.search(pattern, said)), None)


def precision_of(reported: Reported, unknown: set[str]) -> Precision:
    """Of the matrix products. A blank is bf16.

    Raises: Unusable for four-bit products, which the model does not have, and for unknown names.
    """
    said = reported.text("precision").lower()
    if not said:
        unknown.add("precision")
        return "bf16"
    if "fp4" in said:
        raise Unusable(f"precision = {said!r}: four-bit products are not modelled")
    rules: tuple[tuple[str, Precision], ...] = (
        (r"fp8|float8|e4m3", "fp8"), (r"bf16|bfloat16", "bf16"), (r"fp16|float16|half", "fp16"),
        (r"fp32|float32|tf32|single|^32-true", "fp32"),
    )  # fmt: skip
    for pattern, name in rules:
        if re.search(pattern, said):
            return name
    raise Unusable(f"precision = {said!r} is not known here")


def stack_of(reported: Reported, facts: Facts, unknown: set[str]) -> Stack:
    """How the engine holds what it trains, by its sharding, its precision and what the notes say of the optimizer."""
    stack = _optimizer(_bare_stack(reported, facts, unknown), facts, unknown)
    fused_attention = _fused_attention(reported, facts, unknown)
    fused_loss = bool(facts.found(r"cross-entropy(-loss)?[- ]fusion|fused (ce|loss|cross)|chunked ce|liger|cut cross"))
    overlap = _overlap(reported, facts)
    deterministic = bool(facts.found(r"^(--)?deterministic-mode|deterministic algorithms"))
    return msgspec.structs.replace(
        stack, fused_attention=fused_attention, fused_loss=fused_loss, overlap=overlap, deterministic=deterministic
    )


def _overlap(reported: Reported, facts: Facts) -> bool:
    """False where the words say so, or Megatron-LM's flags do not ask for it; and with fp16, as engines of those
    years exchanged before and after arithmetic."""
    if facts.found(r"\bno (\S+ )*\S*overlap|without overlap"):
        return False
    if facts.found(r"transformer-impl="):
        return bool(facts.found(r"overlap-grad-reduce"))
    return "fp16" not in reported.text("precision").lower()


def _half_gradients(precision: str) -> Stack:
    """fp16: engines of those years step by a fused kernel; since then by torch's own where none is named."""
    step = HALF_GRADIENTS.stepping + (0 if "fp16" in precision else TORCH_STEP)
    return msgspec.structs.replace(HALF_GRADIENTS, stepping=step)


def _bare_stack(reported: Reported, facts: Facts, unknown: set[str]) -> Stack:
    said, precision = _sharding(reported), reported.text("precision").lower()
    if re.search(r"fp32|float32|tf32|^32-true", precision) and "acc" not in precision:
        return SINGLE
    if re.search(r"true\b", precision):
        return PURE
    if re.search(r"dist\w*[-_ ]?opt|mcore|megatron", said):
        if "fp8" in precision and not facts.found("transformer-impl=|fp32 grad|grad\\S*in-fp32"):
            # Recipes in eight bits reduce in 16, unlike the command line's default: Megatron-Bridge's for performance.
            return HALF_GRADIENTS
        return MAIN_GRADIENTS if "fp16" not in precision or re.search("fp32 grad", precision) else HALF_GRADIENTS
    # Fine-tuning recipes hold the model in the precision that they name, unless they say mixed.
    if facts.found(r"\bfine-?tun|\bq?lora\b|cumulative") and not re.search("amp|mixed", precision):
        unknown.add("stack")
        return PURE
    if "deepspeed" in said or re.search(r"zero-?[12]", said):
        said_fp32 = re.search(r"fp32 grad", precision) or facts.found("fp32 grad")
        return MAIN_GRADIENTS if said_fp32 else _half_gradients(precision)
    if "fsdp" in said or "hsdp" in said or re.search("amp|mixed", precision) or said == "ddp":
        # 'PURE' of Composer: gradients are reduced in 16 bits too.
        return msgspec.structs.replace(CAST, reduced=2) if "pure" in precision else CAST
    if "fp16" in precision and not re.search(r"fp32 grad", precision):
        return HALF_GRADIENTS
    return MAIN_GRADIENTS


def _optimizer(stack: Stack, facts: Facts, unknown: set[str]) -> Stack:
    """Bytes of states by what the notes name; 'varies' and 'A/B' leave AdamW's and say that it is not known."""
    if facts.found(r"optimi[sz]er.*(vary|varies|per yaml)|lionw?/adamw?|adamw?/lion"):
        unknown.add("optimizer")
        return stack
    states = stack.states
    rules = (
        (r"paged", 0), (r"8-?bit[ -]?adam|adamw?[ -]?8-?bit", 2), (r"adafactor", 0),
        (r"\blionw?\b|\bmuon\b", states // 2), (r"\bsgd\b", 0),
    )  # fmt: skip
    states = next((size for pattern, size in rules if facts.found(pattern)), states)
    stack = msgspec.structs.replace(stack, states=states)
    # An optimizer that steps inside backward frees each gradient at once.
    inside = facts.found(r"optim(izer)?[- ]in[- ](bwd|backward)|in-backward")
    return msgspec.structs.replace(stack, gradients=0) if inside else stack


def _fused_attention(reported: Reported, facts: Facts, unknown: set[str]) -> bool:
    """False where the notes say so; and, not being said, with fp16: engines of those years kept the scores."""
    if facts.found(r"attention-backend=(unfused|local)|no flash|unfused attention|eager attention"):
        return False
    if facts.found(r"flash|sdpa|attention-backend=fused"):
        return True
    if facts.found(r"transformer-impl=local"):
        return False
    if "fp16" in reported.text("precision").lower():
        unknown.add("attention")
        return False
    return True


def trainable_of(reported: Reported, facts: Facts, unknown: set[str]) -> Trainable:
    """LoRA and QLoRA by name; a rank that is not said is 8 on queries and values, the default of PEFT and torchtune."""
    if not facts.found(r"\bq?lora\b"):
        return Trainable()
    rank = facts.count(r"\b(?:rank[ =]+|r=)(\d+)")
    if rank is None:
        unknown.add("lora_rank")
    return Trainable(kind="lora", rank=rank or 8, targets=("query", "value"), base_bytes=_base_bytes(reported, facts))


def _base_bytes(reported: Reported, facts: Facts) -> float:
    """Of a frozen weight: what it is quantised to, else 4 in fp32 or mixed precision, else 2."""
    if facts.found(r"\bqlora\b|\bnf4\b|\b4-?bit\b|\bint4\b"):
        return 0.5
    if facts.found(r"\bint8\b|8-?bit (weights|base|quanti)"):
        return 1.0
    return 4.0 if re.search(r"mixed|fp32|32-true", reported.text("precision").lower()) else 2.0


def recompute_of(reported: Reported, facts: Facts, unknown: set[str]) -> str:
    """'full(recipe default)' is full. Selective of other modules than attention is nearer to none, and not known."""
    said = reported.text("recompute").lower()
    if said.startswith("full") or said in ("yes", "true", "on", "all"):
        return "full"
    if said.startswith(("selective", "sac", "partial")):
        named = said.partition("(")[2] or facts.found(r"recompute-modules=")
        if not named or re.search(r"attn|attention|\bop\b|matmul|\bmm\b|\d", named):
            return "selective"
        unknown.add("recompute")
        return "none"
    if said not in ("none", "no", "off"):
        unknown.add("recompute")
    return "none"


def offload_of(facts: Facts) -> str:
    """Where parameters and states lie between steps."""
    if facts.found(r"nvme"):
        return "nvme"
    of_states = (
        r"(cpu|optim\w*|param\w*|states?)[- ]offload|offload\w* (to )?(cpu|host|optim|param)|zero-?offload|infinity"
    )
    return "cpu" if facts.found(of_states) else "none"


def stages_per_rank_of(reported: Reported, facts: Facts) -> int:
    """vp; else what flags say; else, where words say no more than that it is interleaved, the fewest that divide."""
    said = reported.whole("vp") or facts.count(r"num-virtual-stages-per-pipeline-rank=(\d+)")
    if said or not facts.found(r"\binterleav\w* on\b"):
        return said or 1
    layers, pp = reported.whole("layers") or 0, reported.whole("pp") or 1
    return next((count for count in range(2, layers // pp + 1) if layers % (pp * count) == 0), 1) if pp > 1 else 1


def schedule_of(facts: Facts, pp: int, stages_per_rank: int) -> str:
    """1F1B where nothing is said."""
    if pp == 1:
        return "none"
    if facts.found(r"\bzbv\b|zbvzerobubble|dualpipe"):
        return "zbv"
    if facts.found(r"zero[- ]bubble"):
        return "interleaved-zb"
    if stages_per_rank > 1:
        return "interleaved-1f1b"
    return "gpipe" if facts.found(r"\bgpipe\b|\bafab\b|all-forward-all-backward") else "1f1b"


def sequence_parallel_of(reported: Reported, tp: int, unknown: set[str]) -> bool:
    """Without tensor parallelism there is none. Not said: yes, unless the run is in fp16, which is older than it."""
    said = reported.text("seq_parallel").lower()
    if tp == 1:
        return False
    if said in ("yes", "true", "1"):
        return True
    if said in ("no", "false", "0"):
        return False
    unknown.add("seq_parallel")
    return "fp16" not in reported.text("precision").lower()


def memory_kind_of(facts: Facts, unknown: set[str]) -> MemoryKind:
    """What the memory is: the allocator's peak, what it reserved, or what nvidia-smi shows. Not said: allocated."""
    if facts.found(r"nvidia-smi"):
        return "device"
    if facts.found(r"allocated|peak active"):
        return "allocated"
    if facts.found(r"reserved"):
        return "reserved"
    unknown.add("memory_kind")
    return "allocated"


def memory_is_comparable(facts: Facts, trainable: Trainable, unknown: set[str]) -> bool:
    """Not where the notes withdraw it, or where the optimizer of all parameters, most of it, is unknown."""
    withdrawn = facts.found("do not score memory|real sequence length unknown")
    return not withdrawn and not ("optimizer" in unknown and trainable.kind == "full")


def measured_rank_of(facts: Facts) -> MeasuredRank:
    """Whose memory was measured; the fullest rank's where nothing is said."""
    if facts.found(r"\blast rank\b|last pipeline stage"):
        return "last"
    return "first" if facts.found(r"\brank[- ]?0\b.*peak|first (pipeline )?stage") else "fullest"


def ran_out_of_memory(facts: Facts) -> bool:
    """Whether the notes say that the run did not fit."""
    return bool(facts.found(r"\boom\b|\boomed\b|out[- ]of[- ]memory|did not fit"))


def doubts_of(facts: Facts) -> set[str]:
    """What the notes themselves say is assumed or unsteady."""
    found = {name for name, pattern in DOUBTS.items() if facts.found(pattern)}
    return found - ({"seq_len"} if facts.found(r"^packed$|\bpacked (seq|\d)") else set())
