"""transformers.Trainer with our callback: stopped by a signal it saves, ends with 75, and goes on; damage is found."""

from pathlib import Path

from shardwise.events.reader import read
from shardwise.events.values import Finished, Resumed, Saved, Stopped
from shardwise.launch.run_folder import events_path
from tests.docs.blocks import ROOT
from tests.docs.started import Starter

EXAMPLE = (ROOT / "examples" / "transformers_trainer.py").read_text()
# Told to stop while its third step runs, the first time.
STOPPED = EXAMPLE.replace(
    "trainer.train(",
    """class Preempted(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            __import__("os").kill(__import__("os").getpid(), 15)


if sw.newest_whole("out") is None:
    trainer.add_callback(Preempted())
trainer.train(""",
)
TRUSTING = EXAMPLE.replace('sw.newest_whole("out")', "True")


def test_a_signal_saves_ends_with_75_and_the_same_script_goes_on(tmp_path: Path, starter: Starter) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOPPED)
    first = starter.run(script, tmp_path)
    assert first.code == 75, first.output
    events = list(read(events_path(tmp_path / "runs" / "trainer", 1)))
    assert [event.step for event in events if isinstance(event, Saved)] == [2, 3]
    assert isinstance(events[-1], Stopped) and (events[-1].step, events[-1].exit_code) == (3, 75)
    second = starter.run(script, tmp_path)
    assert second.code == 0 and "step 6" in second.output, second.output
    events = list(read(events_path(tmp_path / "runs" / "trainer", 2)))
    assert [event.step for event in events if isinstance(event, Resumed)] == [3]
    assert isinstance(events[-1], Finished)

    # A flipped bit in the newest: passed over by newest_whole, and found where the Trainer chose for itself.
    weights = tmp_path / "out" / "checkpoint-6" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    script.write_text(TRUSTING)
    third = starter.run(script, tmp_path)
    assert third.code != 0 and "model.safetensors is damaged" in third.output, third.output
    assert "sw.newest_whole" in third.output
