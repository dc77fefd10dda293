"""Weights out of a checkpoint: dtypes as torch rounds them, whole folders or none, and what is asked wrongly."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.checkpoint.adapters import Adapter, merged_bits
from shardwise.checkpoint.export import converted, export
from shardwise.checkpoint.manifest import TensorEntry
from shardwise.checkpoint.store import LocalStore
from shardwise.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BITS = {"F64": torch.int64, "F32": torch.int32, "BF16": torch.int16, "F16": torch.int16}
_UNSIGNED = {8: np.uint64, 4: np.uint32, 2: np.uint16}


@pytest.mark.parametrize("held", ["F64", "F32", "BF16"])
@pytest.mark.parametrize("wanted", ["F32", "BF16", "F16"])
def test_a_dtype_becomes_another_as_torch_rounds_it(held: str, wanted: str) -> None:
    generator = torch.Generator().manual_seed(0)
    info = torch.iinfo(_BITS[held])
    drawn = torch.randint(info.min, info.max, (20_000,), generator=generator, dtype=_BITS[held]).view(DTYPES[held])
    usual = torch.randn(20_000, generator=generator).to(DTYPES[held])
    ends = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 65504.0, 65520.0, 3.4e38])
    values = torch.cat([drawn, usual, ends.to(DTYPES[held])])
    bits = values.view(_BITS[held]).numpy().view(_UNSIGNED[values.element_size()])
    made = torch.from_numpy(np.ascontiguousarray(converted(bits, held, wanted)).view(np.uint8)).view(DTYPES[wanted])
    # From fp64 torch goes to bf16 by way of fp32, and so do we.
    assert torch.equal(torch.isnan(made), torch.isnan(values))
    assert torch.equal(torch.nan_to_num(made), torch.nan_to_num(values.to(DTYPES[wanted])))


def test_an_export_writes_over_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").write_text("kept")
    with pytest.raises(CheckpointError, match="is there already"):
        export(LocalStore(tmp_path), "step-1", out, tmp_path)
    assert [one.name for one in out.iterdir()] == ["kept"]


def test_a_folder_without_a_config_is_told_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json") as raised:
        export(LocalStore(tmp_path), "step-1", tmp_path / "out", tmp_path)
    assert "--like" in raised.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("weight", "bound"), [("F64", 1e-15), ("F32", 1e-6), ("BF16", 1e-6)])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_adapter_is_added_to_its_weight(weight: str, bound: float, transposed: bool) -> None:
    """Under bf16 a frozen weight lies in bf16 and its adapter in fp32. Bounds: rounding of the wider dtype."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn((5, 7), generator=generator).to(DTYPES[weight])
    kind = "F64" if weight == "F64" else "F32"
    a, b = (torch.randn(shape, generator=generator).to(DTYPES[kind]) for shape in ((2, 7), (5, 2)))
    stored = w.T.contiguous() if transposed else w

    def bits(tensor: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]":
        name = next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
        return tensor.view(_BITS[name]).numpy().view(_UNSIGNED[tensor.element_size()])

    entries = [TensorEntry(name, kind, tuple(one.shape), ()) for name, one in (("a", a), ("b", b))]
    made, dtype = merged_bits(Adapter(*entries, 1.5, transposed), bits(stored), weight, bits(a), bits(b))
    assert dtype == kind
    found = torch.from_numpy(np.ascontiguousarray(made).view(np.uint8)).view(DTYPES[kind]).reshape(stored.shape)
    wanted = w.double() + 1.5 * b.double() @ a.double()
    torch.testing.assert_close(found.double(), wanted.T if transposed else wanted, rtol=0, atol=bound)
