"""The parameters of a shape by name, as our decoder calls them, and the share of them that patterns leave to train."""

import difflib
import fnmatch
from collections.abc import Iterator, Sequence

from shardwise.errors import RecipeError
from shardwise.inputs.arch.shape import Arch, Experts


def named_sizes(arch: Arch) -> dict[str, int]:
    """How many numbers stand under each name; together they are `arch.parameters()`.

    What our decoder has not (latents, biases, other norms) stands under the name of its part of a block.
    """
    sizes = {"embed_tokens.weight": arch.embedding_parameters()}
    for layer in range(arch.num_layers):
        sizes |= {f"blocks.{layer}.{name}": size for name, size in _block(arch, layer >= arch.dense_layers)}
    if arch.prediction_layers:
        sizes["prediction"] = arch.prediction_parameters()
    sizes["norm.weight"] = arch.hidden_size * (2 if arch.norm == "layer" else 1)
    if not arch.tied_embeddings:
        sizes["lm_head.weight"] = arch.vocab_size * arch.hidden_size
    return sizes


def _block(arch: Arch, sparse: bool) -> Iterator[tuple[str, int]]:
    hidden = arch.hidden_size
    if arch.latent is None and not (arch.attention_bias or arch.output_bias):
        query, key = arch.num_heads * arch.head_dim * hidden, arch.num_kv_heads * arch.head_dim * hidden
        projections = {"q": query, "k": key, "v": key, "o": query}
        yield from ((f"attention.{name}_proj.weight", size) for name, size in projections.items())
    else:
        yield "attention", arch.attention_parameters()
    if sparse and arch.experts is not None:
        yield from _experts(arch, arch.experts)
    elif arch.mlp_bias:
        yield "ffn", arch.ffn_parameters()
    else:
        yield from _projections(arch, "ffn", hidden * arch.ffn_size)
    if arch.norm == "rms" and arch.norms_per_block == 2 and arch.latent is None and arch.qk_norm_over == "head":
        yield from (("attention_norm.weight", hidden), ("ffn_norm.weight", hidden))
        if arch.qk_norm:
            yield from (("attention.q_norm.weight", arch.head_dim), ("attention.k_norm.weight", arch.head_dim))
    else:
        yield "norms", arch.norm_parameters()


def _experts(arch: Arch, experts: Experts) -> Iterator[tuple[str, int]]:
    yield "ffn.router.weight", arch.router_parameters()
    yield from _projections(arch, "ffn.experts", experts.count * arch.hidden_size * experts.ffn_size)
    if experts.shared_ffn_size:
        yield from _projections(arch, "ffn.shared", arch.hidden_size * experts.shared_ffn_size)
        if experts.shared_gate:
            yield "ffn.shared_gate.weight", arch.hidden_size


def _projections(arch: Arch, path: str, size: int) -> Iterator[tuple[str, int]]:
    parts = ("gate", "up", "down") if arch.gated_ffn else ("up", "down")
    yield from ((f"{path}.{name}_proj.weight", size) for name in parts)


def trained_share(arch: Arch, frozen: Sequence[str]) -> float:
    """The share of the parameters that no pattern freezes, from 0 to 1.

    Raises: RecipeError for a pattern that no name matches, and where nothing is left to train.
    """
    sizes = named_sizes(arch)
    names: set[str] = set()
    for pattern in frozen:
        found = fnmatch.filter(sizes, pattern)
        if not found:
            near = difflib.get_close_matches(pattern, sizes, n=1, cutoff=0.0)[0]
            raise RecipeError(
                f"model.trainable.frozen: {pattern!r} is the name of no parameter of {arch.name}.",
                why="patterns are matched with whole names, as in blocks.0.attention.q_proj.weight or blocks.1.*",
                fix=f'model.trainable.frozen = ["{near}"]',
            )
        names.update(found)
    kept = sum(size for name, size in sizes.items() if name not in names)
    if not kept:
        raise RecipeError(
            "model.trainable.frozen leaves nothing to train.", fix='model.trainable = "full", or name fewer parameters'
        )
    return kept / arch.parameters()
