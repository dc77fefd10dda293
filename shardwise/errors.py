"""The tree of errors: what happened, why, and what to do.

ShardwiseError
├── BadInput                 the user's input cannot be run; found before ranks start (exit code 2)
│   ├── RecipeError          a recipe, a keyword or a command line
│   ├── PlanInfeasible       the plan breaks a rule
│   ├── DataError            data that is missing, empty, too short or of an unknown kind
│   ├── ModelError           a module that cannot be trained as it is
│   ├── LossError            a loss that cannot be summed over the global batch
│   └── RunFolderError       a run folder that is in use, belongs to another recipe, or is not shared
└── TrainingFailed           something broke while it ran (exit code 1)
    ├── NonFinite            the loss or the gradient stayed non-finite
    ├── OutOfMemory          a device or the host ran out of memory
    ├── RankFailed           a rank raised; the first one to fail is named
    ├── RanksDiverged        what must be the same on several ranks is not; the first tensor and the ranks are named
    └── CheckpointError      a checkpoint cannot be written, or what is there is not whole
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_REQUEUE = 75
EXIT_INTERRUPTED = 130


class ShardwiseError(Exception):
    """An error that says what happened, why, and what to do.

    `what` is one sentence with the numbers that decided; `why` the cause; `fix` a change, in the user's own
    keys, that makes it go away.
    """

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.why, self.fix))


def _rebuild(kind: type[ShardwiseError], what: str, why: str, fix: str) -> ShardwiseError:
    return kind(what, why=why, fix=fix)


class BadInput(ShardwiseError):
    """The user's input cannot be run."""

    exit_code = EXIT_BAD_INPUT


class RecipeError(BadInput):
    """A recipe, a keyword or a command line is wrong."""


class PlanInfeasible(BadInput):
    """The plan breaks a rule."""


class DataError(BadInput):
    """Data is missing, empty, too short or of an unknown kind."""


class ModelError(BadInput):
    """A module cannot be trained as it is."""


class LossError(BadInput):
    """A loss cannot be summed over the global batch."""


class RunFolderError(BadInput):
    """A run folder is in use, belongs to another recipe, or is not shared by all nodes."""


class TrainingFailed(ShardwiseError):
    """Something broke while it ran."""


class NonFinite(TrainingFailed):
    """The loss or the gradient stayed non-finite."""


class OutOfMemory(TrainingFailed):
    """A device or the host ran out of memory."""


class RankFailed(TrainingFailed):
    """A rank raised; the first one to fail is named."""


class RanksDiverged(TrainingFailed):
    """What must be the same on several ranks is not; the first tensor and the ranks are named."""


class CheckpointError(TrainingFailed):
    """A checkpoint cannot be written, or what is there is not whole."""
