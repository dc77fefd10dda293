"""Canonical parameter names: the same under every wrapper, so that a checkpoint or a seed can key on them."""

# What DDP, torch.compile and activation checkpointing insert in front of a module's own name.
_INSERTED_ANYWHERE = ("_orig_mod", "_checkpoint_wrapped_module")
_INSERTED_IN_FRONT = "module"


def canonical(name: str) -> str:
    """`name` without what wrappers add: `_orig_mod.` and its like anywhere, DDP's `module.` in front.

    A submodule of the user's that is called `module` keeps its name unless it leads. Idempotent.
    """
    *path, last = name.split(".")
    path = [part for part in path if part not in _INSERTED_ANYWHERE]
    while path and path[0] == _INSERTED_IN_FRONT:
        path = path[1:]
    return ".".join((*path, last))
