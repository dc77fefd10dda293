"""The shape that a row of measured runs names: its columns, its notes' words, a preset, and rules for the rest."""

import math
import re
from itertools import product
from typing import Literal

import msgspec

from shardwise.cost.published_engine import Facts
from shardwise.cost.reported import Reported, Unusable
from shardwise.inputs.arch import PRESETS, Arch, Experts, Latent, shape_problem

# Words of models that have other parts than attention and feed-forward, or another order of them.
NOT_DECODERS = (
    r"\bt5\b|^t5:|\bbert\b|encoder|mamba|hybrid[- ](model|layer|override)|nemotron[-_ ]?3|\bvit\b|multimodal|\bdit\b"
)

# What tokenizers make, by the words that name them; GPT-2's is Megatron-LM's own default.
GPT2_VOCABULARY = 50257
# A printed parameter count is rounded by up to this: '175 B' for 174.6.
ROUNDING = 0.007
VOCABULARIES = (
    (r"llama2tokenizer|mixtral|mistral", 32000),
    (r"bertwordpiece", 28996),
    (r"gpt2|tokenizer-type=gpt2", 50257),
)


def arch_of(reported: Reported, facts: Facts, unknown: set[str]) -> Arch:
    """The columns win over a preset of exactly this name, which wins over rules.

    Raises: Unusable where it is no decoder, or hidden size or layers are known from neither.
    """
    _require_decoder(facts)
    known = preset_of(reported)
    hidden = reported.whole("hidden") or (known.hidden_size if known else None)
    layers = reported.whole("layers") or (known.num_layers if known else None)
    if hidden is None or layers is None:
        raise Unusable("it states no hidden size or no layers, and no preset has exactly its model's name")
    if known is not None and known.hidden_size == hidden:
        arch = _preset_as_reported(known, reported, layers)
    else:
        arch = _ruled(reported, facts, hidden, layers, unknown)
    arch = _with_experts(arch, reported, facts)
    arch = _with_details(arch, reported, facts, unknown)
    problem = shape_problem(arch)
    if problem:
        raise Unusable(problem)
    if (reported.whole("ep") or 1) > 1 and arch.experts is None:
        raise Unusable("it splits experts (ep > 1), and does not say what they are")
    return _agreeing(arch, reported, unknown)


def _require_decoder(facts: Facts) -> None:
    other = facts.found(NOT_DECODERS)
    if other:
        raise Unusable(f"it is not a decoder of attention and feed-forward alone: {other[:60]}")


def preset_of(reported: Reported) -> Arch | None:
    """The preset whose name, letters and digits alone, is the model's, or its first word's."""
    names = {_plain(name): arch for name, arch in PRESETS.items()}
    model = reported.text("model")
    return next((names[key] for key in (_plain(model), _plain(model.split(" ")[0])) if key in names), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _preset_as_reported(known: Arch, reported: Reported, layers: int) -> Arch:
    columns = {"num_heads": "heads", "num_kv_heads": "kv_heads", "ffn_size": "ffn", "vocab_size": "vocab"}
    said = {key: value for key, name in columns.items() if (value := reported.whole(name)) is not None}
    return msgspec.structs.replace(known, num_layers=layers, **said)


def _ruled(reported: Reported, facts: Facts, hidden: int, layers: int, unknown: set[str]) -> Arch:
    """A shape without a preset: GPT's or Llama's, whichever the words and the parameter count say."""
    heads = reported.whole("heads") or _guessed_heads(hidden, reported.whole("tp") or 1, facts, unknown)
    ffn = reported.whole("ffn")
    if ffn is None:
        unknown.add("ffn")
        ffn = 4 * hidden
    bare = Arch(
        name=reported.text("model"), vocab_size=reported.whole("vocab") or _usual_vocabulary(reported, facts, unknown),
        hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=reported.whole("kv_heads") or heads,
        head_dim=facts.count(r"\bhead_dim (\d+)") or max(1, hidden // heads), ffn_size=ffn,
        max_sequence_length=reported.whole("seq_len") or 1,
    )  # fmt: skip
    styles = [_styled(bare, gated, tied) for gated, tied in product(_gated(facts, ffn, hidden), _tied(facts))]
    return _nearest(styles, reported.number("params_b"))


def _guessed_heads(hidden: int, tp: int, facts: Facts, unknown: set[str]) -> int:
    """Of the counts that the words leave open ('64 or 96') the one whose heads are nearest to 128 wide.

    Without such words, of the counts that divide the width and that tp divides.
    """
    unknown.add("heads")
    said = re.search(r"heads not stated \((\d+) or (\d+)\)", facts.lines)
    possible = [int(count) for count in said.groups()] if said else range(tp, hidden + 1, tp)
    counts = [count for count in possible if hidden % count == 0] or [1]
    return min(counts, key=lambda count: abs(math.log(hidden / count / 128)))


def _usual_vocabulary(reported: Reported, facts: Facts, unknown: set[str]) -> int:
    """By the tokenizer that the words name, else GPT-2's, padded to a multiple of 128 x tp as Megatron-LM does."""
    unknown.add("vocab")
    size = next((size for pattern, size in VOCABULARIES if facts.found(pattern)), GPT2_VOCABULARY)
    multiple = 128 * (reported.whole("tp") or 1)
    return math.ceil(size / multiple) * multiple


def _gated(facts: Facts, ffn: int, hidden: int) -> tuple[bool, ...]:
    """Whether the feed-forward is gated, in the order of belief. Four times the width is the ungated one's."""
    if facts.found(r"\bswiglu\b|\bgeglu\b|gated"):
        return (True,)
    if facts.found(r"squared-relu|\bgelu\b|transformer-impl="):  # Megatron-LM's flags say it where it is gated
        return (False,)
    return (False, True) if ffn == 4 * hidden else (True, False)


def _tied(facts: Facts) -> tuple[bool, ...]:
    if facts.found(r"untie"):
        return (False,)
    return (True,) if facts.found(r"transformer-impl=|\btied\b") else (True, False)


def _styled(bare: Arch, gated: bool, tied: bool) -> Arch:
    """Llama's style is gated, without biases, RMSNorm and rotary; GPT's is the opposite in each."""
    norm: Literal["rms", "layer"] = "rms" if gated else "layer"
    position: Literal["rope", "learned"] = "rope" if gated else "learned"
    return msgspec.structs.replace(
        bare, gated_ffn=gated, tied_embeddings=tied, norm=norm, position=position,
        attention_bias=not gated, output_bias=not gated, mlp_bias=not gated,
    )  # fmt: skip


def _nearest(styles: list[Arch], billions: float | None) -> Arch:
    """The style whose parameters are nearest to the count that the row states.

    Without one, or where several are as near as rounding: the first kind of feed-forward, and of those GPT's tied, or
    Llama's untied one.
    """
    believed = sorted(
        styles, key=lambda style: (style.gated_ffn != styles[0].gated_ffn, style.tied_embeddings == style.gated_ffn)
    )
    if billions is None:
        return believed[0]
    errors = [abs(math.log(style.parameters() / (billions * 1e9))) for style in believed]
    return next(style for style, error in zip(believed, errors, strict=True) if error <= max(min(errors), ROUNDING))


def _with_experts(arch: Arch, reported: Reported, facts: Facts) -> Arch:
    """Experts by the words '8 experts top-2', 'num-experts=8', or the name '8x7B'; as wide as moe_ffn, else ffn."""
    named = re.search(r"(?<![a-z0-9])(\d+)x\d+(?:\.\d+)?b\b", reported.text("model").lower())
    count = (
        facts.count(r"\b(\d+) experts\b") or facts.count(r"^num-experts=(\d+)") or (int(named.group(1)) if named else 0)
    )
    if not count or (arch.experts is not None and arch.experts.count == count):
        return _with_dense_layers(arch, facts)
    width = facts.count(r"\bmoe[-_]ffn(?:-hidden-size)?[ =](\d+)") or arch.ffn_size
    shared = facts.count(r"\+ shared (\d+)") or facts.count(r"shared-expert-intermediate-size=(\d+)") or 0
    shared = shared or (facts.count(r"\+ (\d+) shared") or 0) * width
    per_token = facts.count(r"\btop-(\d+)") or facts.count(r"router-topk=(\d+)") or 2
    experts = Experts(count=count, per_token=per_token, ffn_size=width, shared_ffn_size=shared)
    return _with_dense_layers(msgspec.structs.replace(arch, experts=experts), facts)


def _with_dense_layers(arch: Arch, facts: Facts) -> Arch:
    """'3 dense layers', or the pattern ([0]*3+[1]*11)."""
    dense = facts.count(r"(\d+) dense layer")
    dense = dense if dense is not None else facts.count(r"moe-layer-freq=\(\[0\]\*(\d+)")
    if arch.experts is None or dense is None:
        return arch
    return msgspec.structs.replace(arch, experts=msgspec.structs.replace(arch.experts, dense_layers=dense))


def _with_details(arch: Arch, reported: Reported, facts: Facts, unknown: set[str]) -> Arch:
    """What single words change: norms, biases, positions, latents, windows, prediction layers, dropout."""
    changed: dict[str, object] = {}
    if facts.found(r"normalization=rmsnorm"):
        changed["norm"] = "rms"
    if facts.found(r"disable-bias-linear|no bias"):
        changed |= {"attention_bias": False, "output_bias": False, "mlp_bias": False}
    position = facts.found(r"position-embedding-type=")
    if position:
        changed["position"] = position.partition("=")[2] if position.endswith(("rope", "none")) else "learned"
    elif facts.found(r"learned pos"):
        changed["position"] = "learned"
    if facts.found(r"qk-?layernorm|qk[-_ ]norm"):
        changed["qk_norm"] = True
    window = facts.count(r"sliding[- ]window (\d+)")
    if window:
        changed |= {"sliding_window": window, "full_attention_every": 2 if facts.found("every other layer") else 1}
    # Megatron-LM drops a tenth unless it is told not to.
    if facts.found(r"transformer-impl=") and not facts.found(r"hidden-dropout=0"):
        changed["dropout"] = 0.1
    changed["prediction_layers"] = 0 if facts.found(r"w/o mtp") else facts.count(r"counts (\d+) mtp") or 0
    if "latent" not in changed and arch.latent is None:
        changed["latent"] = _latent(facts, unknown)
    return msgspec.structs.replace(arch, **changed)


def _latent(facts: Facts, unknown: set[str]) -> Latent | None:
    """Multi-head latent attention by its ranks; parts that are not said are DeepSeek-V2's (arXiv 2405.04434, 3.1.2)."""
    rank = facts.count(r"\bkv[-_]lora(?:-rank)?[ =](\d+)")
    if rank is None and not facts.found(r"multi-latent-attention|\bmla\b"):
        return None
    if rank is None:
        unknown.add("latent")
    return Latent(
        key_value_rank=rank or 512, query_rank=facts.count(r"\bq[-_]lora(?:-rank)?[ =](\d+)") or 0,
        nope_head_dim=facts.count(r"\bnope (\d+)") or 128, rope_head_dim=facts.count(r"\brope (\d+)") or 64,
        value_head_dim=facts.count(r"\bv_head (\d+)") or 128,
    )  # fmt: skip


def _agreeing(arch: Arch, reported: Reported, unknown: set[str]) -> Arch:
    """Raises: Unusable where the shape has less than half or more than twice the parameters that the row states."""
    billions = reported.number("params_b")
    if billions is None:
        return arch
    ratio = arch.parameters() / (billions * 1e9)
    if not 0.5 < ratio < 2:
        counted = f"{arch.parameters() / 1e9:.3g}"
        raise Unusable(f"its shape has {counted} billion parameters, and params_b = {billions:g} says otherwise")
    if not 0.93 < ratio < 1.07:
        unknown.add("params_b")
    return arch
