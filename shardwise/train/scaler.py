"""The loss scale of fp16: doubled after a run of finite steps, halved at each overflow, always a power of two."""

import math

GROWTH_EVERY_STEPS = 2000
# torch.amp.GradScaler's own start, for a loss that is an average; ours is a sum, so the count is divided out.
INITIAL_SCALE_OF_AN_AVERAGE = 2.0**16


class LossScaler:
    """A scale of 1 for every precision but fp16. The same on every rank: it sees only what the ranks agreed on."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = 1.0
        self.finite_steps = 0
        self.started = not enabled

    def start(self, count: float) -> None:
        """Choose the first scale from what one global batch counts."""
        if not self.started:
            self.scale = 2.0 ** (math.log2(INITIAL_SCALE_OF_AN_AVERAGE) - math.ceil(math.log2(max(count, 1.0))))
            self.started = True

    def update(self, finite: bool) -> None:
        if not self.enabled:
            return
        if not finite:
            self.scale, self.finite_steps = self.scale / 2, 0
            return
        self.finite_steps += 1
        if self.finite_steps == GROWTH_EVERY_STEPS:
            self.scale, self.finite_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float | int | bool]:
        return {"scale": self.scale, "finite_steps": self.finite_steps, "started": self.started}

    def load_state_dict(self, state: dict[str, float | int | bool]) -> None:
        self.scale = float(state["scale"])
        self.finite_steps = int(state["finite_steps"])
        self.started = bool(state["started"])
