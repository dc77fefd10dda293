"""Weights out of a checkpoint: dtypes as torch rounds them, whole folders or none, and what is asked wrongly."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.checkpoint.export import converted, export
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
