"""The state of this process's random generators, as JSON values and tensors."""

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Python's, numpy's global, torch's CPU generator, and the current GPU's where CUDA is in use."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": _with_tensors(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Puts back what `capture` gave; the GPU's only where there is one."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(_with_arrays(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tensors(item) for key, item in value.items()}
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
