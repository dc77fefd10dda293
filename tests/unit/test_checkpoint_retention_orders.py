"""Retention over all orders of save, failure, crash, damage, pin, roll-back and other jobs: what counts stays."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from msgspec.structs import replace

from shardwise.checkpoint import marks
from shardwise.checkpoint.manifest import MANIFEST, Damaged, FileEntry, digest_of, seal
from shardwise.checkpoint.retention import folder_name, look, retain, verify_commit
from shardwise.inputs.recipe import CheckpointPolicy, History
from tests.unit.test_checkpoint_format import manifest
from tests.unit.test_checkpoint_store import FaultyStore, MemoryStore

HOUR = 3600.0


def killed(operation: str) -> None:
    raise KeyboardInterrupt(operation)  # Not an Exception: nobody tidies up after a kill.


class Orders(RuleBasedStateMachine):
    """A run whose sessions follow each other over one store, in which others keep things too."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.policy = CheckpointPolicy(keep=2, history=History(hourly=2, daily=1), best=1)
        self.step, self.now, self.session, self.saves = 0, 0.0, 0, 0
        self.foreign: dict[str, bytes] = {}
        self.in_progress: dict[str, int] = {}
        self.damaged = False

    def folder(self, session: int | None = None) -> str:
        self.saves += 1
        return folder_name(self.step, "run", f"{self.session if session is None else session:08x}", self.saves)

    def put(self, folder: str, *, lineage: str = "run") -> None:
        data = f"state of {folder}".encode()
        self.store.values[f"{folder}/rank-00000"] = data
        files = (FileEntry("rank-00000", len(data), digest_of(data)),)
        made = replace(manifest(self.step), created=self.now, lineage=lineage, files=files)
        self.store.values[f"{folder}/{MANIFEST}"] = seal(made)

    def verified(self) -> list[str]:
        """Newest first, those that may be resumed from."""
        over = marks.passed_over(self.store)
        found = []
        for item in look(self.store, "run").committed:
            try:
                verify_commit(self.store, item.folder)
            except Damaged:
                continue
            found += [] if item.folder in over else [item.folder]
        return found

    @rule(
        steps=st.integers(1, 3), hours=st.sampled_from([0.0, 0.4, 3.0, 30.0, -2.0]),
        dies_at=st.integers(0, 30), unreadable=st.integers(0, 9),
    )  # fmt: skip
    def save(self, steps: int, hours: float, dies_at: int, unreadable: int) -> None:
        """A commit and what follows it, which may be killed at any operation. The clock may jump, the disk may fail."""
        self.step, self.now = self.step + steps, self.now + hours * HOUR
        folder = self.folder()
        self.put(folder)
        if unreadable == 0:
            self.store.values[f"{folder}/rank-00000"] = b""
        self.retained(folder, dies_at)

    def retained(self, folder: str, dies_at: int) -> None:
        before, pins = self.verified(), set(marks.pinned(self.store))
        waiting = [key for key, step in self.in_progress.items() if step >= self.step and key in self.store.values]
        there = {item.folder for item in look(self.store, "run").committed}
        try:
            done = retain(
                FaultyStore(self.store, dies_at, killed), "run", self.policy, folder, session=f"{self.session:08x}"
            )
        except KeyboardInterrupt:
            self.session += 1
        else:
            assert (done.notes == ()) is (folder in before)
        after = self.verified()
        if folder in before:
            assert folder in after
            assert self.damaged or before[: self.policy.keep] == after[: self.policy.keep]
        else:
            # The newest could not be read back: nothing at all may go.
            assert after == before
        assert pins & there <= {item.folder for item in look(self.store, "run").committed}
        assert all(key in self.store.values for key in waiting)

    @rule(steps=st.integers(0, 3))
    def save_fails(self, steps: int) -> None:
        """A rank dies before the commit; another session takes over."""
        self.step += steps
        self.store.values[f"{self.folder()}/.rank-00000.0a.tmp"] = b"torn"
        self.session += 1

    @rule()
    def another_session_saves(self) -> None:
        """A later step than what is committed: it may be in progress, and must not be touched."""
        self.step += 1
        key = f"{self.folder(session=999)}/rank-00000"
        self.store.values[key], self.in_progress[key] = b"in progress", self.step
        self.step -= 1

    @rule(steps=st.integers(1, 4))
    def roll_back(self, steps: int) -> None:
        self.step = max(0, self.step - steps)
        for item in look(self.store, "run").committed:
            if item.manifest.step > self.step and len(self.verified()) > 1:
                marks.pass_over(self.store, item.folder, "rolled back", now=0.0)
        self.session += 1

    @precondition(lambda self: len(self.verified()) > 1)
    @rule(data=st.data(), kind=st.sampled_from(["cut", "manifest"]))
    def damage(self, data: st.DataObject, kind: str) -> None:
        """The disk loses one, and another is still whole."""
        folder = data.draw(st.sampled_from(self.verified()))
        key = f"{folder}/{MANIFEST if kind == 'manifest' else 'rank-00000'}"
        value, self.damaged = self.store.values[key], True
        self.store.values[key] = value[:-1] if kind == "cut" else bytes([value[0] ^ 1]) + value[1:]

    @precondition(lambda self: self.verified())
    @rule(data=st.data(), keeps=st.booleans())
    def pin(self, data: st.DataObject, keeps: bool) -> None:
        folder = data.draw(st.sampled_from(self.verified()))
        if keeps:
            assert marks.pin(self.store, folder, now=0.0)
        else:
            marks.unpin(self.store, folder)

    @precondition(lambda self: self.verified())
    @rule(data=st.data(), loss=st.floats(0, 9))
    def evaluate(self, data: st.DataObject, loss: float) -> None:
        marks.evaluated(self.store, data.draw(st.sampled_from(self.verified())), {"loss": loss})

    @rule(kind=st.sampled_from(["lineage", "folder", "file"]))
    def others_keep(self, kind: str) -> None:
        self.saves += 1
        name = {
            "lineage": folder_name(self.step, "another", "0" * 8, self.saves) + f"/{MANIFEST}",
            "folder": f"step-{self.saves}/weights",
            "file": f".gitignore-{self.saves}",
        }[kind]
        self.foreign[name] = self.store.values[name] = b"somebody's"

    @invariant()
    def what_others_keep_is_never_touched(self) -> None:
        assert {key: self.store.values.get(key) for key in self.foreign} == self.foreign


def test_what_can_be_resumed_from_is_never_lost() -> None:
    run_state_machine_as_test(Orders, settings=settings(max_examples=25, stateful_step_count=20, deadline=None))
