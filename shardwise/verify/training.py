"""The small training that parity compares: by the engine under a plan, and by a loop written by hand with torch alone.

The second has no part of the engine's passes: one process, the whole batch at once, torch's own loss and clipping.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from shardwise import ranks
from shardwise.checkpoint.checkpointer import Checkpointer
from shardwise.data.batches import Batches
from shardwise.data.order import Permutation
from shardwise.errors import CheckpointError, ModelError
from shardwise.inputs import hub
from shardwise.models import inspect, materialize
from shardwise.models.decoder import Decoder, initialize_decoder
from shardwise.models.hf import build as hf
from shardwise.models.hf import small
from shardwise.models.split_probe import SplitProbe, two_split_probe
from shardwise.optimizer import build as optimizers
from shardwise.parallel import parallelize as passes
from shardwise.plan.plan import Plan
from shardwise.torch_private import Dropout, tree_leaves
from shardwise.train import evaluate as evaluation
from shardwise.train import own_loop, setup, step
from shardwise.verify import shrink
from shardwise.verify.messages import STOP_AFTER, Case
from shardwise.verify.verdict import Masks, Told

IGNORED = -100
# Of a user's module, after its blocks are cut to few: more would not train in a minute on two cores.
MOST_PARAMETERS = 20_000_000
DROPOUT = 0.5
SINGLE = {"fp64": torch.float64, "fp32": torch.float32}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences whose numbers of counted labels all differ; `sample` is each one's own number."""

    def __init__(self, samples: int, length: int, vocabulary: int, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, vocabulary, (samples, length + 1), generator=generator)
        self.counted = torch.randint(1, length + 1, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[self.counted[index] :] = IGNORED
        return {"tokens": self.tokens[index, :-1], "labels": labels, "sample": torch.tensor(index)}


class Data(NamedTuple):
    train: Tokens
    valid: Tokens


def data(plan: Plan, module: nn.Module) -> Data:
    """Random tokens that the module's embeddings and outputs hold. Raises: ModelError for no language model."""
    length, vocabulary = plan.recipe.data.sequence_length, _vocabulary(module, plan)
    # Not a multiple of the batch: evaluation ends with a short one.
    return Data(
        Tokens(shrink.samples(plan), length, vocabulary),
        Tokens(2 * plan.decision.global_batch + 1, length, vocabulary, 8),
    )


def _vocabulary(module: nn.Module, plan: Plan) -> int:
    if plan.arch is not None:
        return plan.arch.vocab_size
    rows = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    if not rows:
        raise ModelError("The module has no embedding, so random tokens are no data for it.",
                         fix="parity needs a language model: tokens in, logits [B, S, V] out")  # fmt: skip
    return min(rows)


def build(plan: Plan, *, meta: bool) -> nn.Module:
    """The plan's model: our decoder, one of Hugging Face in the plan's sizes, or the user's with its blocks cut to few.

    Raises: ModelError.
    """
    dtype = SINGLE[plan.decision.precision]
    if plan.arch is not None and plan.recipe.model.hf is not None:
        return small.build(hub.find(plan.recipe.model.hf, weights=False), plan.arch, plan.recipe.seed).to(dtype)
    if plan.arch is not None:
        with torch.device("meta" if meta else "cpu"):
            module: nn.Module = Decoder(plan.arch)
        return module.to(dtype)
    module = materialize.build(materialize.load_factory(str(plan.recipe.model.factory)), plan.recipe.seed)
    blocks = inspect.find_blocks(module, plan.recipe.model.blocks)
    kept = shrink.blocks_kept(plan.decision, plan.decision.mesh)
    if blocks.path and len(blocks.blocks) > kept:
        del module.get_submodule(blocks.path)[kept:]  # type: ignore[operator]
    for child in module.modules():
        if isinstance(child, Dropout):
            child.p = 0.0
    size = inspect.parameter_count(module)
    if size > MOST_PARAMETERS:
        raise ModelError(f"{size:,} parameters are left after its blocks were cut to {kept}.",
                         fix="a factory that builds a narrow model where it is asked to")  # fmt: skip
    return module.to(dtype)


def whole(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The logical value of a tensor. Collective."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().numpy().copy()


def named_gradients(module: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Collective."""
    return {f"gradient/{n}": whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}


class Trained(NamedTuple):
    told: Told
    tensors: dict[str, np.ndarray[Any, Any]]
    split: dict[str, tuple[str, ...]]
    masks: Masks | None = None


class Outputs:
    """The sum of squares of what each block gives in the first step, equal numbers once."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.seen: dict[str, dict[float, None]] = {}
        self.hooks: list[Any] = []
        if plan.decision.compile == "off":
            path, blocks, _ = inspect.find_blocks(module, plan.recipe.model.blocks)
            self.hooks = [
                block.register_forward_hook(partial(self._see, f"{path}.{index}")) for index, block in enumerate(blocks)
            ]

    def _see(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        if first is not None:
            value = float(step.local(first).detach().double().square().sum())
            self.seen.setdefault(name, {})[value] = None

    def told(self) -> dict[str, tuple[float, ...]]:
        """What was seen until now; nothing is looked at afterwards."""
        for hook in self.hooks:
            hook.remove()
        return {name: tuple(values) for name, values in self.seen.items()}


def by_the_engine(case: Case, run: Path, mutation: str = "", *, resume: bool = False) -> Trained:
    """Train under the plan; at the end evaluate. With `resume`, from the checkpoint on. Collective."""
    from shardwise.verify import mutations

    plan, spec = case.plan, case.optimizer
    module, batches_of = (
        build(plan, meta=True),
        data(plan, build(plan, meta=False) if plan.arch is None else nn.Module()),
    )
    initialize = (lambda m: initialize_decoder(m, plan.recipe.seed)) if plan.ours else None
    seen = Outputs(module, plan)
    module = passes.parallelize(module, plan, blocks=plan.recipe.model.blocks, initialize=initialize)
    mutations.after_splitting(mutation, module)
    optimizer = own_loop.build_optimizer(module, spec)
    batches = own_loop.batches(Batches(batches_of.train, workers=0), plan)
    checkpointer = Checkpointer(run, module, optimizer, data=batches)
    done = checkpointer.resume() if resume else 0
    mutations.after_resume(mutation if resume else "", optimizer, batches)
    parallel, losses, counts, norms = passes.parallel_of(module), [], [], []
    tensors = {f"initial value/{name}": whole(p) for name, p in module.named_parameters()}
    split, squares, samples, outputs, unsaved = _split(module), {}, (), {}, ""
    for number, micros in enumerate(batches, start=done + 1):
        outcome = step.forward_backward(module, micros, setup.next_token_loss, inputs=inputs_of(plan), step=number)
        mutations.after_backward(mutation, module)
        if number == 1:
            tensors |= named_gradients(module)
            squares, outputs = _squares(module), seen.told()
            samples = tuple(int(i) for m in micros if m.samples for i in m.batch["sample"][: m.samples])
        limit = spec.clip_norm
        norms.append(step.clip_grad_norm(module, float("inf") if limit == "off" else limit))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outcome.loss)
        counts.append(outcome.count)
        if number == STOP_AFTER and not resume:
            try:
                checkpointer.save(number)
            except CheckpointError as error:  # copies that differ, say: what made them differ is the fault to be told
                unsaved = error.what
        if number == shrink.STEPS:
            break
    inputs = step.call_inputs(module, inputs_of(plan))
    valid = evaluation.evaluate(module, parallel, Batches(batches_of.valid, workers=0), setup.next_token_loss, inputs)
    tensors |= {f"parameter/{name}": whole(p) for name, p in module.named_parameters()}
    told = Told(tuple(losses), tuple(counts), tuple(norms), valid.loss, samples, squares, outputs, unsaved)
    masks = dropout_masks(module, plan, batches_of.train) if case.name == "logic" and not resume else None
    return Trained(told, tensors, split, masks)


def _split(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """By name, the axes over which a parameter is sharded."""
    found = {}
    for name, p in module.named_parameters():
        axes = p.device_mesh.mesh_dim_names or () if isinstance(p, DTensor) else ()
        places = p.placements if isinstance(p, DTensor) else ()
        found[name] = tuple(axis for axis, place in zip(axes, places, strict=True) if not place.is_replicate())
    return found


def _squares(module: nn.Module) -> dict[str, float]:
    pairs = [(name, step.local(p.grad)) for name, p in module.named_parameters() if p.grad is not None]
    return {name: float(gradient.double().square().sum()) for name, gradient in pairs}


def dropout_masks(module: nn.Module, plan: Plan, tokens: Tokens) -> Masks:
    """What each dropout module drops in two steps of training. Collective."""
    drawn: dict[str, list[str]] = {}
    hooks = []
    parallel = passes.parallel_of(module)

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            # Without data where the root runs it on a stage that has not what it is given.
            if type(output) is torch.Tensor:
                drawn.setdefault(name, []).append(_digest((output == 0).numpy()))

        return hook

    for name, child in module.named_modules():
        if isinstance(child, Dropout):
            child.p = DROPOUT
            hooks.append(child.register_forward_hook(watch(name)))
    forwards = 0
    if ranks.gather_json(len(hooks)) != [0] * ranks.world():
        for number, micros in enumerate(own_loop.batches(Batches(tokens, workers=0), plan), start=1):
            step.forward_backward(module, micros, setup.next_token_loss, inputs=inputs_of(plan), step=number)
            for parameter in module.parameters():
                parameter.grad = None
            forwards += len(micros)
            if number == 2:
                break
    for hook in hooks:
        hook.remove()
    return Masks({name: tuple(digests) for name, digests in drawn.items()}, forwards, parallel.draws_apart)


def draws(plan: Plan) -> dict[str, int]:
    """How often each dropout module draws in one forward."""
    module = build(plan, meta=False).train()
    times: dict[str, int] = {}
    for name, child in module.named_modules():
        if isinstance(child, Dropout):
            times[name] = 0
            child.register_forward_hook(lambda *_, name=name: times.update({name: times[name] + 1}))
    with torch.no_grad():
        _called(plan, module, _stacked(data(plan, module).train, range(2))[0])
    return times


def _digest(array: np.ndarray[Any, Any]) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).tobytes() + str(array.shape).encode())


def by_hand(case: Case) -> Trained:
    """The same training with torch alone: one process, the whole batch in one forward."""
    plan, spec = case.plan, case.optimizer
    module = build(plan, meta=False)
    if plan.ours:
        initialize_decoder(module, plan.recipe.seed)
    module.train()
    train, valid = data(plan, module)
    optimizer, seen = optimizers.build(spec, module), Outputs(module, plan)
    losses, counts, norms, tensors, samples, outputs = [], [], [], {}, (), {}
    tensors |= {f"initial value/{name}": whole(p) for name, p in module.named_parameters()}
    position, batch = 0, plan.decision.global_batch
    for number in range(1, shrink.STEPS + 1):
        epoch, first = divmod(position, len(train))
        order = np.arange(first, min(first + batch, len(train)))
        chosen = [int(i) for i in Permutation(len(train), plan.recipe.seed, epoch)(order)]
        tokens, labels = _stacked(train, chosen)
        total, count = _cross_entropy(plan, module, tokens, labels)
        optimizer.zero_grad()
        (total / count).backward()
        if number == 1:
            samples = tuple(chosen)
            for p in module.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            tensors |= named_gradients(module)
            outputs = seen.told()
        limit = float("inf") if spec.clip_norm == "off" else spec.clip_norm
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), limit)))
        optimizer.step()
        losses.append(float(total) / count)
        counts.append(float(count))
        position += len(chosen)
    module.eval()
    with torch.no_grad():
        total, count = _cross_entropy(plan, module, *_stacked(valid, range(len(valid))))
    tensors |= {f"parameter/{name}": whole(p) for name, p in module.named_parameters()}
    told = Told(tuple(losses), tuple(counts), tuple(norms), float(total) / count, samples, outputs=outputs)
    return Trained(told, tensors, {})


def _stacked(tokens: Tokens, chosen: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [tokens[index] for index in chosen]
    return torch.stack([row["tokens"] for row in rows]), torch.stack([row["labels"] for row in rows])


def inputs_of(plan: Plan) -> step.Inputs | str:
    """What a batch gives forward."""
    return "auto" if plan.recipe.model.hf is None else hf.inputs


def _called(plan: Plan, module: nn.Module, tokens: torch.Tensor) -> Any:
    """The outputs, of a model of Hugging Face its logits."""
    if plan.recipe.model.hf is None:
        return module(tokens)
    args, kwargs = hf.inputs({"tokens": tokens})
    return module(*args, **kwargs).logits


def _cross_entropy(
    plan: Plan, module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """The sum over the labels that count, and how many they are. Raises: ModelError for other outputs than logits."""
    logits = _called(plan, module, tokens)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        raise ModelError("The module's output is not one tensor of logits [B, S, V].", fix="return the logits")
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, int((labels != IGNORED).sum())


def probe(plan: Plan) -> SplitProbe:
    """Whether the model mixes the samples of a batch, by running one whole and in two parts."""
    module = build(plan, meta=False)
    if plan.ours:
        initialize_decoder(module, plan.recipe.seed)
    tokens, labels = _stacked(data(plan, module).train, range(6))
    inputs = step.call_inputs(module, inputs_of(plan))
    return two_split_probe(module, setup.next_token_loss, inputs, {"tokens": tokens, "labels": labels})


def ties(plan: Plan) -> list[tuple[str, ...]]:
    return inspect.ties(build(plan, meta=True))
