"""resume-check on a real run: the same to the bit, and a run whose record was changed is found out."""

import json
from pathlib import Path

from tests.distributed.test_command import SHARDWISE, recipe, run


def test_a_replay_is_the_run_to_the_bit_and_a_changed_record_is_named(tmp_path: Path) -> None:
    trained = run(recipe(tmp_path, steps=12, devices=2), tmp_path)
    assert trained.returncode == 0, trained.stderr
    command = [SHARDWISE, "checkpoints", "resume-check", "run", "--json"]
    same = run(command, tmp_path)
    assert same.returncode == 0, same.stderr
    found = json.loads(same.stdout.strip().splitlines()[-1])
    assert (found["same"], found["begins"], found["steps"]) == (True, 8, 4)
    assert found["roots"][0] and found["roots"][0] == found["roots"][1]
    assert not list((tmp_path / "run").glob(".resume-check-*"))
    events = tmp_path / "run" / "events" / "attempt-001.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        if line["event"] == "step" and line["step"] == 11:
            line["loss"] += 1e-9
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = run(command, tmp_path)
    assert changed.returncode == 1, changed.stderr
    assert json.loads(changed.stdout.strip().splitlines()[-1])["step"] == 11
