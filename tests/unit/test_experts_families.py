"""Our experts against the families' own modules in transformers, with the same weights, in fp64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from shardwise.inputs.arch import Arch, Experts, from_config_json
from shardwise.models.decoder import Decoder, FeedForward
from shardwise.models.experts import SparseFeedForward

# transformers makes scores and norms in fp32 whatever the weights are: ten of these in a model of three blocks, each
# rounded to 6e-8, of numbers up to ten.
FP32: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
SHAPE = {
    "vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "head_dim": 4, "num_experts_per_tok": 2, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "attn_implementation": "eager",
    "experts_implementation": "eager",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 10, "norm_topk_prob": True},
    "qwen3_moe, weights as they are": {"num_experts": 6, "moe_intermediate_size": 10, "mlp_only_layers": [0]},
}


def scattered(module: nn.Module) -> nn.Module:
    """In fp64, with numbers that no initialiser makes: norms are no ones, and no bias is zero."""
    torch.manual_seed(0)
    module = module.to(torch.float64)
    with torch.no_grad():
        for tensor in [*module.parameters(), *(b for n, b in module.named_buffers() if "correction" in n)]:
            tensor.copy_(torch.randn(tensor.shape, dtype=torch.float64) * 0.3 + (tensor.ndim == 1))
    return module


@torch.no_grad()
def take_experts(ours: SparseFeedForward, theirs: nn.Module) -> None:
    """Theirs hold [experts, 2 x width, hidden], gate above up; ours one matrix each, expert below expert."""
    gate, up = theirs.experts.gate_up_proj.chunk(2, dim=1)
    networks = ours.experts
    assert networks.gate_proj is not None
    networks.gate_proj.weight.copy_(gate.flatten(0, 1))
    networks.up_proj.weight.copy_(up.flatten(0, 1))
    networks.down_proj.weight.copy_(theirs.experts.down_proj.flatten(0, 1))
    ours.router.weight.copy_(theirs.gate.weight)


@torch.no_grad()
def take(ours: Decoder, theirs: nn.Module) -> None:
    plain = {
        "attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
        **{f"attention.{name}.weight": f"self_attn.{name}.weight"
           for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
        **{f"ffn.{name}.weight": f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")},
    }  # fmt: skip
    taken = set()
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        there = dict(layer.named_parameters())
        for name, parameter in block.named_parameters():
            if name in plain:
                parameter.copy_(there[plain[name]])
                taken.add(plain[name])
        if isinstance(block.ffn, SparseFeedForward):
            take_experts(block.ffn, layer.mlp)
        else:
            taken.update(name for name in there if name.startswith("mlp."))
        assert all(name in taken or name.startswith("mlp.") for name in there), "a weight of theirs was not taken"
    ours.embed_tokens.weight.copy_(theirs.model.embed_tokens.weight)
    ours.norm.weight.copy_(theirs.model.norm.weight)
    ours.lm_head.weight.copy_(theirs.lm_head.weight)


@pytest.mark.parametrize("name", MODELS)
def test_a_family_with_experts_is_transformers_own(name: str, tmp_path: Path) -> None:
    """Logits and gradients of a whole model, read from the config.json that transformers writes."""
    config = AutoConfig.for_model(name.partition(",")[0], **{**SHAPE, **MODELS[name]})
    config.save_pretrained(tmp_path)
    theirs = scattered(AutoModelForCausalLM.from_config(config)).train()
    arch = from_config_json(tmp_path)
    assert arch.engine_problem() == "" and arch.experts is not None
    ours = Decoder(arch).double()
    ours.rotary.fill()
    take(ours, theirs)
    tokens = torch.randint(0, 41, (2, 11), generator=torch.Generator().manual_seed(1))
    mine, there = ours(tokens), theirs(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(mine, there.to(mine.dtype), **FP32)
    for logits in (mine, there):
        logits.square().mean().backward()
    for one, other in ((ours.embed_tokens, theirs.model.embed_tokens), (ours.norm, theirs.model.norm)):
        torch.testing.assert_close(one.weight.grad, other.weight.grad, **FP32)
    for block, there_ in zip(ours.blocks, theirs.model.layers, strict=True):
        if not isinstance(block.ffn, SparseFeedForward):
            continue
        torch.testing.assert_close(block.ffn.router.weight.grad, there_.mlp.gate.weight.grad, **FP32)
        networks = block.ffn.experts
        halves = [p.weight.grad.unflatten(0, (arch.experts.count, -1)) for p in (networks.gate_proj, networks.up_proj)]
        torch.testing.assert_close(torch.cat(halves, dim=1), there_.mlp.experts.gate_up_proj.grad, **FP32)


def sparse(arch: Arch) -> SparseFeedForward:
    experts = arch.experts
    assert experts is not None
    shared = FeedForward(arch, experts.shared_ffn_size)
    return SparseFeedForward(arch.hidden_size, experts, gated=True, shared=shared).double()


def test_shared_experts_behind_a_gate_are_those_of_qwen2() -> None:
    config = AutoConfig.for_model(
        "qwen2_moe", **SHAPE, num_experts=6, moe_intermediate_size=10, shared_expert_intermediate_size=14
    )
    theirs = scattered(Qwen2MoeSparseMoeBlock(config))
    arch = from_config_json(config.to_dict())
    assert arch.experts == Experts(6, 2, 10, 14, shared_gate=True, renormalised=False, balance_coefficient=0.001)
    ours = sparse(arch)
    take_experts(ours, theirs)
    ours.shared.load_state_dict(theirs.shared_expert.state_dict())
    ours.shared_gate.load_state_dict(theirs.shared_expert_gate.state_dict())
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), **FP32)


def test_sigmoid_scores_with_a_bias_that_chooses_are_those_of_deepseek_v3() -> None:
    sizes = {"n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 10, "n_group": 1, "topk_group": 1}
    config = AutoConfig.for_model("deepseek_v3", **{**SHAPE, **sizes, "first_k_dense_replace": 1})
    theirs = scattered(DeepseekV3MoE(config))
    arch = from_config_json({**config.to_dict(), "model_type": "deepseek_v3"})
    assert arch.experts is not None
    assert (arch.experts.scoring, arch.experts.renormalised, arch.experts.scale) == ("sigmoid", True, 2.5)
    ours = sparse(arch)
    take_experts(ours, theirs)
    ours.router.bias.copy_(theirs.gate.e_score_correction_bias)
    ours.shared.load_state_dict(theirs.shared_experts.state_dict())
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), **FP32)
