"""The Workload: what a step trains, whatever the split; and the Stack: how an engine holds it. No torch."""

from typing import Literal

import msgspec

from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import Precision


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen value that crosses layers."""


class Stack(Frozen, frozen=True):
    """How an engine holds what it trains: bytes a parameter, by what they are for.

    weights: the copy that stays between steps for matmuls to read; 0 where it is cast from the masters when used.
    masters: the full-precision copy that the optimizer updates; 0 where the weights are it. gathered: of a weight as
    collectives carry it and as it stands whole. gradients: of one kept between micro-batches. reduced: of one on the
    wire. states: of the optimizer (8: two fp32 moments). fused_attention: no score matrix is kept.
    fused_loss: no fp32 copy of the logits is kept. overlap: collectives of data parallelism run beside arithmetic.
    kernels: eager: torch's own on a GPU; composed: norms in several operators, as on a CPU; fused: of gate and product
    in one, and inputs of split layers gathered again in backward, as Megatron's. selective: what that recompute keeps,
    the results of products and of attention, or all but the inside of attention. deterministic: torch's deterministic
    algorithms, which fill every tensor before it is written. stepping: of what the optimizer's step makes beside, for
    each number of the share that it updates (copies of 16-bit gradients, flat and in fp32; results on their way).
    """

    name: str
    weights: int
    masters: int
    gathered: int
    gradients: int
    reduced: int
    states: int
    fused_attention: bool = True
    fused_loss: bool = False
    overlap: bool = True
    kernels: Literal["composed", "eager", "fused"] = "eager"
    selective: Literal["products", "all but attention"] = "products"
    deterministic: bool = False
    stepping: int = 0

    @property
    def ours(self) -> bool:
        """This engine: its tables of positions, its pipeline's messages and what waits to be sent are known."""
        return self.name == OURS


OURS = "shardwise"


# This engine: fp32 masters are the parameters, compute copies are cast or gathered, gradients are fp32.
SHARDWISE_MIXED = Stack(OURS, weights=0, masters=4, gathered=2, gradients=4, reduced=4, states=8)
SHARDWISE_FP32 = Stack(OURS, weights=0, masters=4, gathered=4, gradients=4, reduced=4, states=8)


class Trainable(Frozen, frozen=True):
    """What of the model gets gradients. lora: the weights are frozen, and each of `targets` has two factors of `rank`.

    frozen: `share` of the parameters trains.
    """

    kind: Literal["full", "frozen", "lora"] = "full"
    share: float = 1.0
    rank: int = 0
    targets: tuple[str, ...] = ()
    base_bytes: float = 2.0  # of a frozen weight; 0.5 where it is held in four bits


class Workload(Frozen, frozen=True):
    """One step: `global_batch` samples of `sequence_length` tokens through `arch`."""

    arch: Arch
    sequence_length: int
    global_batch: int
    precision: Precision
    stack: Stack = SHARDWISE_MIXED
    trainable: Trainable = Trainable()

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.sequence_length
