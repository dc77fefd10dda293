"""The ledger: histories with crashes prove themselves, and a doubled or lost sample does not."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.ledger import Ledger, Segment, added, agrees, expected_sums, prove, read_sums
from shardwise.data.micros import MicroBatch, Micros
from shardwise.data.order import cells, span

HISTORIES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=6)


def trained(ledger: Ledger, step: int, position: int, steps: int, n: int, batch: int) -> tuple[int, int]:
    for _ in range(steps):
        at = span(position, n, batch, "short")
        assert at is not None
        step += 1
        ledger.add(step, at.first, at.samples)
        position = at.next_position
    return step, position


@given(HISTORIES, st.integers(5, 40), st.integers(1, 7))
def test_attempts_that_go_back_to_a_checkpoint_prove_themselves(history, n, batch):
    """Each attempt makes some steps, saves after a part of them and is killed: the next one begins there."""
    kept, step, position, attempts = {"segments": []}, 0, 0, 0
    for attempt, (steps, lost) in enumerate(history, start=1):
        ledger = Ledger(attempt)
        ledger.load_state_dict(kept)
        step, position = trained(ledger, step, position, steps, n, batch)
        kept = msgspec.json.decode(msgspec.json.encode(ledger.state_dict()))
        attempts += 1
        trained(ledger, step, position, lost, n, batch)  # never saved
    final = Ledger()
    final.load_state_dict(kept)
    proof = prove(final.segments)
    assert proof.faults == ()
    assert (proof.trained, proof.steps, proof.attempts) == (position, step, attempts)


def test_a_doubled_a_lost_and_a_repeated_step_are_told():
    ledger = Ledger(1)
    ledger.add(1, 0, 8)
    ledger.add(2, 8, 8)
    assert prove(ledger.segments).faults == ()
    for step, first, told in ((3, 8, "samples 8 to 15 were read twice"), (3, 20, "samples 16 to 19 were never read")):
        broken = Ledger(2)
        broken.load_state_dict(ledger.state_dict())
        broken.add(step, first, 8)
        assert prove(broken.segments).faults == (f"{told}, before step 3",)
    ledger.add(2, 16, 8)
    assert prove(ledger.segments).faults == ("step 2 follows step 2",)


def test_samples_passed_over_on_purpose_are_no_fault_and_are_told():
    ledger = Ledger(1)
    ledger.add(1, 0, 8)
    ledger.pass_over(8, 24, "a spike of the loss")
    ledger.add(2, 24, 8)
    proof = prove(ledger.segments)
    assert proof.faults == ()
    assert proof.passed_over == (Segment(1, 2, 2, 8, 24, 16, "a spike of the loss"),)
    assert proof.trained == 16


def test_what_an_epoch_drops_at_its_end_is_told():
    ledger, step, position = Ledger(1), 0, 0
    for step in range(1, 6):
        at = span(position, 10, 4, "drop")
        assert at is not None
        ledger.add(step, at.first, at.samples, at.next_position)
        position = at.next_position
    proof = prove(ledger.segments)
    assert proof.faults == ()
    assert (proof.trained, [(one.first, one.end) for one in proof.passed_over]) == (20, [(8, 10), (18, 20)])


def test_a_ledger_of_many_equal_steps_is_one_segment():
    ledger = Ledger(1)
    for step in range(1, 10_001):
        ledger.add(step, (step - 1) * 4, 4)
    assert ledger.segments == [Segment(1, 1, 10_000, 0, 40_000, 4)]


def step_of(first: int, samples: int, rank: int, ranks: int, micro_batches: int) -> Micros:
    own = cells(first, samples, rank, ranks, micro_batches)
    batches = tuple(MicroBatch(None, cell.weight, cell.samples, cell.first) for cell in own)
    return Micros(batches, first, samples, 0, False, first + samples)


@given(st.integers(0, 2**50), st.integers(1, 5000), st.integers(1, 5), st.integers(1, 4))
def test_what_the_ranks_read_adds_up_to_the_step(first, samples, ranks, micro_batches):
    steps = [step_of(first, samples, rank, ranks, micro_batches) for rank in range(ranks)]
    crossed = [float(sum(column)) for column in zip(*(read_sums(one) for one in steps), strict=True)]
    assert agrees(steps[0], crossed)
    assert added(read_sums(one) for one in steps) == expected_sums(first, samples)


@given(st.integers(0, 10**9), st.integers(2, 64), st.integers(2, 4))
def test_a_rank_that_reads_anothers_samples_or_the_step_before_is_seen(first, share, ranks):
    """Every rank has `share` samples: the counts agree, and only which samples they are does not."""
    samples = share * ranks
    steps = [step_of(first, samples, rank, ranks, 1) for rank in range(ranks)]
    for wrong in (step_of(first, samples, 1, ranks, 1), step_of(first + samples, samples, 0, ranks, 1)):
        crossed = [float(sum(column)) for column in zip(*map(read_sums, [wrong, *steps[1:]]), strict=True)]
        assert not agrees(steps[0], crossed)
