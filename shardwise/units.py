"""Bytes, seconds, counts and FLOPs: parse and print. Nothing else converts."""

import re

from shardwise.errors import RecipeError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]+)\s*$")


def parse_bytes(text: str) -> int:
    """`"75.6 GiB"` or `"80GB"` in bytes; GiB and GB are different units and a bare number is refused.

    Raises: RecipeError.
    """
    match = _NUMBER.match(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _BYTES:
        raise RecipeError(f"{text!r} is not a size.", fix='write a number and its unit, as in "80 GB" or "75.6 GiB"')
    return round(float(match.group(1)) * _BYTES[unit])


def parse_count(text: str) -> float:
    """`"15T"`, `"300B"`, `"2e9"` or `"1500"` as a number: k, M, B and T are decimal steps.

    Raises: RecipeError.
    """
    steps = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    match = re.match(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMbBtT]?)\s*$", text)
    number = float(match.group(1)) * steps[match.group(2).lower()] if match else 0.0
    if not 0 < number < float("inf"):
        raise RecipeError(f"{text!r} is no number above 0.", fix='write "15T", "300B" or "2e9"')
    return number


def format_bytes(count: float) -> str:
    """Binary units, one decimal: `75.6 GiB`."""
    for size, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.1f} {name}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """Decimal steps, three figures: `1.23M`, `70.6B`."""
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{name}"
    return f"{count:.3g}"


def format_seconds(seconds: float) -> str:
    """`0.21 s`, `42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
