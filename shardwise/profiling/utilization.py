"""Model FLOP utilisation: the arithmetic a step needs over what the devices could have done meanwhile."""


def model_flops_utilization(
    flops_per_token: float, tokens_per_second: float, ranks: int, peak_flops_per_second: float
) -> float:
    """The fraction of the devices' peak that the model's own arithmetic takes.

    Recomputed activations do not count, so they show as lost utilisation.
    Units: FLOPs, tokens over all ranks a second, devices, FLOPs a second of one device -> a fraction.
    Raises: ValueError unless ranks and peak are positive.
    """
    if ranks <= 0 or peak_flops_per_second <= 0:
        raise ValueError(f"ranks = {ranks} and peak = {peak_flops_per_second} must be positive")
    return flops_per_token * tokens_per_second / (ranks * peak_flops_per_second)


def format_utilization(fraction: float | None) -> str:
    """`41.2 %`, or a dash where the peak is not known: never a guess."""
    return "—" if fraction is None else f"{100 * fraction:.1f} %"
