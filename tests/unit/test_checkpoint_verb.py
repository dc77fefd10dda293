"""`shardwise checkpoints`: what lies in a store, whether it is whole, and how two of them differ."""

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardwise.checkpoint import Checkpointer, LocalStore, marks
from shardwise.checkpoint.audit import audit, survey
from shardwise.checkpoint.compare import compare
from shardwise.checkpoint.manifest import MANIFEST, seal, unseal
from shardwise.cli.main import app
from shardwise.data.ledger import Ledger
from shardwise.errors import CheckpointError


def trained(run: Path, steps: tuple[int, ...] = (1, 2), **more: Any) -> list[Path]:
    """Checkpoints of a small training, one after each step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(module[0].parameters())
    checkpointer = Checkpointer(run, module, optimizer, **{"state": {"best": {"loss": 2.0}}, **more})
    found = []
    for step in steps:
        module[0](torch.ones(3, 5)).square().sum().backward()
        optimizer.step()
        found.append(Path(checkpointer.save(step).path))
    return found


def asked(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout


# ---------------------------------------------------------------- ledger


def test_the_ledger_of_a_checkpoint_says_whether_each_sample_came_once(tmp_path: Path) -> None:
    kept = Ledger(attempt=1)
    kept.add(1, 0, 8)
    kept.pass_over(8, 12, "the loss rose")
    kept.attempt = 2
    kept.add(2, 12, 8)
    trained(tmp_path / "well", (2,), state={"trainer.ledger": kept})
    text = asked("ledger", tmp_path / "well")
    assert "each once: 16 samples in 2 steps of 2 attempts" in text
    assert "8 to 11, before step 2: the loss rose" in text
    assert json.loads(asked("ledger", tmp_path / "well", "--json"))["faults"] == []
    kept.add(3, 16, 8)
    kept.add(4, 30, 8)
    [folder] = trained(tmp_path / "ill", (4,), state={"trainer.ledger": kept})
    text = asked("ledger", folder, code=1)
    assert "samples 16 to 19 were read twice, before step 3" in text
    assert "samples 24 to 29 were never read, before step 4" in text
    trained(tmp_path / "own")
    result = CliRunner().invoke(app, ["checkpoints", "ledger", str(tmp_path / "own")])
    assert result.exit_code == 1 and "has no ledger of samples" in result.stderr


# ---------------------------------------------------------------- list


def test_a_list_says_what_is_whole_damaged_torn_and_pinned(tmp_path: Path) -> None:
    decision = {"mesh": {"pp": 1, "dp_shard": 2, "tp": 2}, "zero": 3}
    first, second, third = trained(tmp_path, (1, 2, 3), decision=decision, lineage="mine")
    (second / "rank-00000.safetensors").write_bytes(b"short")
    (third / MANIFEST).unlink()
    marks.pin(LocalStore(tmp_path / "checkpoints"), first.name)
    items = json.loads(asked("list", tmp_path, "--json"))["checkpoints"]
    assert [(item["step"], item["state"], item["marks"]) for item in items] == [
        (3, "torn", []), (2, "damaged", []), (1, "whole", ["pinned"]),
    ]  # fmt: skip
    assert items[2]["plan"] == "dp_shard 2 x tp 2, zero 3" and items[2]["world"] == 1
    assert len(items[2]["root"]) == 32 and items[2]["bytes"] > 100
    text = asked("list", tmp_path)
    assert all(word in text for word in ("torn", "damaged", "whole", "pinned", first.name, "does not end after"))


def test_an_empty_or_missing_place_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["checkpoints", "list", str(tmp_path / "nothing")])
    assert result.exit_code == 2 and "There is no run or checkpoint" in result.stderr
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoints" in asked("list", tmp_path)


# ---------------------------------------------------------------- verify


def test_what_is_whole_is_verified_with_its_root_and_without_torch(tmp_path: Path) -> None:
    trained(tmp_path)
    roots = {item.step: item.root for item in survey(LocalStore(tmp_path / "checkpoints"))}
    code = (
        "import sys\nfrom shardwise.cli.main import main\n"
        f"try:\n    main(['checkpoints', 'verify', {str(tmp_path)!r}, '--json'])\n"
        "except SystemExit as left:\n    assert left.code == 0, left.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    audits = json.loads(done.stdout)["checkpoints"]
    assert {one["step"]: one["root"] for one in audits} == roots
    assert all(one["faults"] == [] for one in audits)


def flip(raw: bytearray, at: int) -> bytes:
    raw[at] ^= 1
    return bytes(raw)


@pytest.mark.parametrize(
    ("damage", "what", "named"),
    [
        (lambda raw: flip(raw, -3), "has another digest than was saved", True),
        (lambda raw: flip(raw, 20), "has another header than was saved", False),
        (lambda raw: bytes(raw[:-5]), "ends after", True),
        (lambda raw: bytes(raw) + b"x", "goes on behind", False),
        (lambda raw: b"", "ends after 0", False),
    ],
)
def test_damage_is_named_by_file_tensor_and_bytes(
    damage: Callable[[bytearray], bytes], what: str, named: bool, tmp_path: Path
) -> None:
    (folder,) = trained(tmp_path, (1,))
    file = folder / "rank-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(damage(bytearray(whole)))
    found = json.loads(asked("verify", tmp_path, "--json", code=1))["checkpoints"][0]["faults"]
    assert found[0]["file"] == file.name and what in found[0]["what"]
    manifest = unseal((folder / MANIFEST).read_bytes(), "")
    places = {entry.name: chunk for entry in manifest.tensors for chunk in entry.chunks}
    if named:
        chunk = places[found[0]["tensor"]]
        assert chunk.start <= found[0]["begin"] < found[0]["end"] == chunk.start + chunk.bytes
        assert f"{found[0]['tensor']}" in asked("verify", folder, code=1)
    assert file.name in asked("verify", folder, code=1)


def test_every_flipped_bit_of_every_file_is_found(tmp_path: Path) -> None:
    (folder,) = trained(tmp_path, (1,))
    store = LocalStore(tmp_path / "checkpoints")
    for name in (MANIFEST, "rank-00000.safetensors"):
        whole = (folder / name).read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 60)):
            (folder / name).write_bytes(flip(bytearray(whole), at))
            try:
                assert audit(store, folder.name).faults, f"byte {at} of {name}"
            except CheckpointError:
                assert name == MANIFEST
        (folder / name).write_bytes(whole)
    assert audit(store, folder.name).faults == ()


def test_files_that_were_exchanged_between_checkpoints_or_ranks_are_found(tmp_path: Path) -> None:
    first, second = trained(tmp_path)
    one, two = first / "rank-00000.safetensors", second / "rank-00000.safetensors"
    swapped = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(swapped)
    audits = json.loads(asked("verify", tmp_path, "--json", code=1))["checkpoints"]
    assert all(any("digest" in fault["what"] for fault in each["faults"]) for each in audits)
    one.write_bytes(two.read_bytes())
    (first / MANIFEST).write_bytes((second / MANIFEST).read_bytes())  # one step's manifest over another's files
    assert json.loads(asked("verify", first, "--json", code=1))["checkpoints"][0]["faults"]


def test_bytes_that_are_whole_and_are_not_what_was_summed_are_found(tmp_path: Path) -> None:
    """Digests made anew over changed bytes, as a careless tool does: the root tells."""
    (folder,) = trained(tmp_path, (1,))
    manifest = unseal((folder / MANIFEST).read_bytes(), "")
    entry = manifest.tensors[0]
    wrong = msgspec.structs.replace(entry, sum="0" * 32)
    for changed in ({"tensors": (wrong, *manifest.tensors[1:])}, {"root": "ab" * 16}, {"step": 9}):
        (folder / MANIFEST).write_bytes(seal(msgspec.structs.replace(manifest, **changed)))
        assert json.loads(asked("verify", folder, "--json", code=1))["checkpoints"][0]["faults"]


class Bomb:
    def __reduce__(self) -> Any:
        return (print, ("BOOM",))


def test_crafted_pickles_and_foreign_files_are_never_run_and_are_named(tmp_path: Path, capfd: Any) -> None:
    (folder,) = trained(tmp_path, (1,))
    saved = io.BytesIO()
    torch.save({"weight": Bomb()}, saved)
    for name in (".metadata", "rank-00001.safetensors", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb()) if name != "optimizer.pt" else saved.getvalue())
    audited = json.loads(asked("verify", folder, "--json"))["checkpoints"][0]
    assert audited["foreign"] == [".metadata", "optimizer.pt", "rank-00001.safetensors"]
    assert "never read" in asked("verify", folder)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(module[0].parameters())
    assert Checkpointer(tmp_path, module, optimizer, state={"best": {}}).resume() == 1
    for raw in (pickle.dumps(Bomb()), saved.getvalue()):
        for name in ("rank-00000.safetensors", MANIFEST):
            kept = (folder / name).read_bytes()
            (folder / name).write_bytes(raw)
            assert "damaged" in asked("verify", folder, code=1) or name != MANIFEST
            with pytest.raises(CheckpointError):
                Checkpointer(tmp_path, module, optimizer, state={"best": {}}).resume()
            (folder / name).write_bytes(kept)
    out = capfd.readouterr()
    assert "BOOM" not in out.out + out.err


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside", "..", MANIFEST, "a\\b", ""])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    (folder,) = trained(tmp_path, (1,))
    (tmp_path / "checkpoints" / "outside").write_bytes(b"secret")
    manifest = unseal((folder / MANIFEST).read_bytes(), "")
    file = msgspec.structs.replace(manifest.files[0], name=name)
    tensors = tuple(
        msgspec.structs.replace(e, chunks=tuple(msgspec.structs.replace(c, file=name) for c in e.chunks))
        for e in manifest.tensors
    )
    (folder / MANIFEST).write_bytes(seal(msgspec.structs.replace(manifest, files=(file,), tensors=tensors)))
    assert "is not one of its folder's" in asked("verify", folder, code=1)
    with pytest.raises(CheckpointError, match="None of the 1 checkpoints"):
        Checkpointer(tmp_path, nn.Linear(1, 1)).resume()


def test_a_manifest_of_version_1_still_reads(tmp_path: Path) -> None:
    (folder,) = trained(tmp_path, (1,))
    raw = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    old = {key: value for key, value in raw.items() if key not in ("root", "plan")} | {"schema_version": 1}
    old["machine"] = {key: value for key, value in old["machine"].items() if key != "revision"}
    old["tensors"] = [{key: value for key, value in entry.items() if key != "sum"} for entry in old["tensors"]]
    from shardwise.checkpoint.manifest import digest_of

    body = json.dumps(old).encode()
    (folder / MANIFEST).write_bytes(b'{"digest":"%s","manifest":%s}' % (digest_of(body).encode(), body))
    assert unseal((folder / MANIFEST).read_bytes(), "").schema_version == 1
    assert json.loads(asked("verify", folder, "--json"))["checkpoints"][0]["root"] == ""
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(module[0].parameters())
    assert Checkpointer(tmp_path, module, optimizer, state={"best": {}}).resume() == 1


# ---------------------------------------------------------------- diff


def test_a_difference_names_tensors_values_state_and_settings(tmp_path: Path) -> None:
    first, second = trained(tmp_path, decision={"zero": 0})
    told = json.loads(asked("diff", first, second, "--json", code=1))
    names = {one["name"]: one for one in told["tensors"]}
    assert "model/0.weight" in names and "model/1.weight" not in names
    before, after = (weight(folder) for folder in (first, second))
    assert names["model/0.weight"]["largest"] == pytest.approx(float((before - after).abs().max()), rel=1e-6)
    assert names["model/0.weight"]["values"] == int((before != after).sum())
    assert {"path": "step", "before": "1", "after": "2"} in told["state"]
    assert told["settings"] == []
    text = asked("diff", first, second, code=1)
    assert "model/0.weight" in text and "step" in text
    same = json.loads(asked("diff", first, first, "--json"))
    assert same["same"] and not same["tensors"] and not same["state"]
    assert "the same state" in asked("diff", first, first)


def weight(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(folder / "rank-00000.safetensors")["model/0.weight"]


def test_other_plans_and_machines_are_settings_and_not_another_state(tmp_path: Path) -> None:
    (first,), (second,) = (trained(tmp_path / str(zero), (1,), decision={"zero": zero}) for zero in (0, 3))
    told = compare((LocalStore(first.parent), first.name), (LocalStore(second.parent), second.name))
    assert told.same and not told.tensors and not told.state
    assert [change.path for change in told.settings] == ["plan.decision.zero"]


# ---------------------------------------------------------------- prune


def test_prune_keeps_what_the_policy_keeps_and_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    from shardwise.inputs.recipe import CheckpointPolicy

    folders = trained(tmp_path, (1, 2, 3, 4, 5), policy=CheckpointPolicy(keep=9))
    marks.pin(LocalStore(tmp_path / "checkpoints"), folders[0].name)
    would = json.loads(asked("prune", tmp_path, "--keep", 2, "--dry-run", "--json"))
    assert would["deleted"] == [folder.name for folder in folders[1:3]]
    assert all(folder.exists() for folder in folders)
    assert json.loads(asked("prune", tmp_path, "--keep", 2, "--json"))["deleted"] == would["deleted"]
    assert [folder.exists() for folder in folders] == [True, False, False, True, True]
    assert "nothing to delete" in asked("prune", tmp_path, "--keep", 2)


def test_prune_deletes_nothing_where_the_newest_is_damaged(tmp_path: Path) -> None:
    folders = trained(tmp_path, (1, 2, 3))
    (folders[-1] / "rank-00000.safetensors").write_bytes(b"short")
    asked("prune", tmp_path, "--keep", 1, code=1)
    assert all(folder.exists() for folder in folders)


def test_prune_leaves_a_run_in_use_alone(tmp_path: Path) -> None:
    from shardwise.launch import run_folder

    folders = trained(tmp_path, (1, 2, 3))
    with run_folder.locked(tmp_path):
        result = CliRunner().invoke(app, ["checkpoints", "prune", str(tmp_path), "--keep", "1"])
    assert result.exit_code == 2 and "in use" in result.stderr
    assert all(folder.exists() for folder in folders)
