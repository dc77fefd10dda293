"""The rules that degrees obey, each as one predicate of numbers or of arrays of them. No torch.

`plan/check.py` refuses one plan by them and says what to change; `plan/space.py` enumerates by them: one truth.
"""

from typing import Any

from shardwise.inputs.arch import Arch

# Of a sequence, the fewest positions that one of a context-parallel rank's two chunks may have: below, its attention
# is smaller than one tile of a fused kernel (FlashAttention-2, arXiv 2307.08691, takes 128 rows at a time).
LEAST_CHUNK = 128

# Numbers or arrays alike go in, and a truth or an array of them comes out.
Numbers = Any
Truth = Any


def shards_match_zero(zero: Numbers, dp_shard: Numbers) -> Truth:
    """zero 0 keeps whole copies; any other shards over more than one rank."""
    return (zero == 0) == (dp_shard == 1)


def ranks_have_samples(global_batch: int, data_parallel: Numbers) -> Truth:
    """Each data-parallel rank takes at least one sample a step."""
    return data_parallel <= global_batch


def heads_divide(arch: Arch, tp: Numbers) -> Truth:
    """Tensor parallel gives each rank whole heads, and whole key-value heads."""
    return (arch.num_heads % tp == 0) & (arch.num_kv_heads % tp == 0)


def stays_in_a_node(tp: Numbers, devices_per_node: int) -> Truth:
    """Tensor parallel communicates in every layer, which only the links inside a node carry."""
    return tp <= devices_per_node


def stages_have_blocks(arch: Arch, stages: Numbers) -> Truth:
    """Each stage of a pipeline holds at least one block."""
    return stages <= arch.num_layers


def positions_divide(length: Numbers, pp: Numbers, tp: Numbers, split: Numbers) -> Truth:
    """Sequence parallel in a pipeline: a later stage knows a sequence's length by its parts alone, so all are equal."""
    return (pp == 1) | (length % tp == 0) | (split == 0)


def chunks_are_equal(length: int, cp: Numbers) -> Truth:
    """Context parallel gives each rank an early and a late chunk of the sequence, so that causal work is even.

    Source: Llama 3, arXiv 2407.21783, section 3.3.2 (2 x cp chunks).
    """
    return (cp == 1) | ((length % (2 * cp) == 0) & (length >= 2 * cp * LEAST_CHUNK))


def experts_divide(arch: Arch, ep: Numbers) -> Truth:
    """Expert parallel gives each rank whole experts; a dense model has none to give."""
    return (ep == 1) if arch.experts is None else arch.experts.count % ep == 0


def experts_share_ranks(dp_shard: Numbers, cp: Numbers, ep: Numbers) -> Truth:
    """Experts are spread over ranks that hold different samples or positions."""
    return dp_shard * cp % ep == 0
