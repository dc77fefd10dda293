"""What ended a dry run, told as a violation: which rank, in which phase, where in the model, and what to do."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.names import canonical
from shardwise.plan.mesh import AXES, Coord
from shardwise.plan.violation import Violation
from shardwise.torch_private import needs_data

_OURS, _TORCHS = (str(Path(file).parent) for file in (Path(__file__).parent, torch.__file__))
_SAYS_SHAPES = (
    "shapes cannot be multiplied",
    "same reduction dim",
    "must match",
    "size mismatch",
    "shape",
    "dimension",
)
_CORRECT_IT = "correct it where it was raised: the run would end with the same error"


class RunFailed(Exception):
    """A dry run that ended early; its `violation` says how."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.what)
        self.violation = violation


class Doing:
    """What the code under way is doing, in words that follow "while"; and the module, to name its parts."""

    def __init__(self, what: str, module: nn.Module | None = None) -> None:
        self.what, self.module = what, module


@contextmanager
def told(who: str, doing: Doing) -> Iterator[None]:
    """Raises: RunFailed for any error inside. `who`: of which rank, in words."""
    try:
        yield
    except RunFailed:
        raise
    except Exception as error:
        raise RunFailed(violation(error, who, doing)) from error


def rank_in_words(rank: int, coord: Coord, degrees: tuple[int, ...]) -> str:
    """`rank 5 (pp 1, tp 1)`: the coordinates on axes of several ranks."""
    axes = [f"{axis} {at}" for axis, at, degree in zip(AXES, coord, degrees, strict=True) if degree > 1]
    return f"rank {rank} ({', '.join(axes)})" if axes else f"rank {rank}"


def violation(error: Exception, who: str, doing: Doing) -> Violation:
    """Ours with its own reason and fix; any other by its kind and message, with the place, and a fix where known."""
    place = _place(error, doing.module)
    if isinstance(error, ShardwiseError):
        return Violation("runs", f"{who}, while {doing.what}: {error.what}", error.why, error.fix or _CORRECT_IT)
    message = (str(error).strip() or "no message").splitlines()[0]
    what = f"{who}, while {doing.what}: {type(error).__name__}: {message}"
    return Violation("runs", what, f"raised in {place}" if place else "raised by torch", _fix(error, message))


def _fix(error: Exception, message: str) -> str:
    if needs_data(error):
        return (
            "a dry run has shapes and no numbers: let shapes and branches depend on shapes alone, "
            "or see what shardwise verify --half parity says, which has numbers"
        )
    if isinstance(error, NotImplementedError):
        return "give the operator a fake kernel (torch.library.register_fake), or see shardwise verify --half parity"
    if isinstance(error, TypeError) and "forward()" in message:
        return "inputs=lambda batch: (args, kwargs) that forward takes"
    if isinstance(error, KeyError):
        return "a batch with this key: the sample batch of a dry run has the keys of a real one"
    if isinstance(error, RuntimeError | ValueError) and any(words in message for words in _SAYS_SHAPES):
        return (
            "compare the sizes that this layer was made for with those of the batch; where one process runs it, "
            "model.roles = {this layer's path: 'replicated'}"
        )
    return _CORRECT_IT


def _place(error: Exception, module: nn.Module | None) -> str:
    """The innermost module whose forward the error left, and the innermost line of the user's own code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = {inner: canonical(name) for name, inner in module.named_modules()} if module is not None else {}
    inside = [owner for frame in frames if (owner := _owner(frame)) in names]
    found = [names[inside[-1]] or type(inside[-1]).__name__] if inside else []
    own = [step for step in traceback.extract_tb(error.__traceback__) if _is_users(step.filename)]
    found += [f"{Path(own[-1].filename).name}:{own[-1].lineno}"] if own else []
    return ", ".join(found)


def _owner(frame: FrameType) -> nn.Module | None:
    owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
    return owner if isinstance(owner, nn.Module) else None


def _is_users(file: str) -> bool:
    return file.endswith(".py") and not file.startswith((_OURS, _TORCHS)) and "site-packages" not in file
