"""Faults are drawn from a seed, every kind as often as any other; and what the harness reports, it has seen."""

import json
from collections import Counter

import pytest

from shardwise.cli import chaos
from shardwise.data.ledger import Proof
from shardwise.errors import RecipeError
from shardwise.report import chaos as report
from shardwise.verify.faults import IN_TRAINING, KINDS, Befell, Fault, Verdict, drawn, kinds_at


def test_the_same_seed_draws_the_same_faults_and_another_seed_others():
    assert drawn(30, 1) == drawn(30, 1)
    assert drawn(30, 1) != drawn(30, 2)


@pytest.mark.parametrize("seed", range(4))
def test_every_kind_comes_as_often_as_any_other(seed):
    times = Counter(fault.kind for fault in drawn(3 * len(KINDS), seed))
    assert set(times.values()) == {3} and set(times) == set(KINDS)


def test_what_harms_a_file_comes_while_there_is_one_and_all_moments_come():
    faults = drawn(400, 0)
    assert {fault.moment for fault in faults if fault.kind in IN_TRAINING} == {"training"}
    others = Counter(fault.moment for fault in faults if fault.kind not in IN_TRAINING)
    # 300 draws of five moments: 60 each, with a standard deviation of 6.9; a moment left out would have none.
    assert len(others) == 5 and min(others.values()) > 20
    assert all(1 <= fault.after_steps <= 12 and 0 <= fault.draw < 1 for fault in faults)


def test_what_befalls_a_disk_befalls_no_store_and_both_ways():
    assert set(kinds_at("disk")) | set(kinds_at("s3")) == set(KINDS)
    assert set(KINDS) - set(kinds_at("disk")) == {"store errors"}
    assert set(KINDS) - set(kinds_at("s3")) == {"full disk", "slow disk"}


def asked(**changed):
    return chaos.Asked("r.toml", (), 3, 0, (), 1, "disk", "out", False)._replace(**changed)


@pytest.mark.parametrize(("kind", "where"), [("store errors", "disk"), ("full disk", "s3")])
def test_a_kind_that_needs_the_other_store_says_which_and_comes_with_it(kind, where, monkeypatch):
    monkeypatch.setattr(chaos.chaos_store, "why_not", lambda: "")
    with pytest.raises(RecipeError, match=f"does not come with --store {where}") as refused:
        chaos.kinds_of(asked(kinds=(kind,), where=where))
    other = refused.value.fix.removeprefix("--store ")
    assert chaos.kinds_of(asked(kinds=(kind,), where=other)) == (kind,)


def test_a_slow_disk_that_cannot_be_had_is_left_out_and_said_and_refused_where_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(chaos.chaos_disk, "why_not", lambda: "a container forbids it")
    assert set(kinds_at("disk")) - set(chaos.kinds_of(asked())) == {"slow disk"}
    assert "slow disk is left out: a container forbids it" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="a container forbids it"):
        chaos.kinds_of(asked(kinds=("slow disk",)))
    with pytest.raises(RecipeError, match="is no fault"):
        chaos.kinds_of(asked(kinds=("bad luck",)))


def verdict(**changed):
    kill = Fault("kill rank", "writing", 3, 0.5)
    seen = (Befell(kill, 7, None, 2, 6.0), Befell(kill, 12, 1, 0, 8.0))
    proof = Proof(trained=600, passed_over=(), steps=100, attempts=3, faults=())
    whole = Verdict(seen, (), 2, proof, True, (), 60.0)
    return whole._replace(**changed)


def test_the_report_says_how_often_what_came_and_that_nothing_was_lost():
    said = report.text(verdict(), "runs/chaos")
    assert "kill rank while writing" in said and "survived: 2 faults, 2 starts" in said
    assert "600 samples in 100 steps of 3 attempts, each once" in said
    assert json.loads(report.as_json(verdict(), "runs/chaos"))["survived"] is True


def test_whatever_was_found_is_told_and_is_no_survival():
    found = verdict(same_bits=False, findings=("the run did not end in the bits of the undisturbed one",))
    said = report.text(found, "runs/chaos")
    assert "NOT survived" in said and "NOT the bits" in said
    as_json = json.loads(report.as_json(found, "runs/chaos"))
    assert as_json["survived"] is False and as_json["findings"] == list(found.findings)


def test_faults_that_never_came_are_told():
    left = verdict(not_reached=(Fault("flip bit", "training", 1, 0.1),))
    assert "never came: flip bit while training" in report.text(left, "runs/chaos")
