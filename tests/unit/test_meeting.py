"""What a run's nodes say to each other and what their host concludes: laws first, then the cases of an operator."""

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import EXIT_REQUEUE
from shardwise.inputs.recipe import Restarts, TrainSpec
from shardwise.launch import meeting
from shardwise.launch.meeting import Begin, Ended, Join, Member, NoMessage
from shardwise.launch.outcome import Cause
from shardwise.launch.supervise import Device, Exit, Restart, Span, Stop, decide

RECIPE, SECRET, NONCE = "abc", "secret", "nonce"
FOR_NODES = (
    meeting.Challenge("n"), meeting.Refused("what", "why", "fix"), meeting.Beat(), meeting.EndAttempt(3),
    meeting.Over(75, "why"), Begin(1, 0, 2, "10.0.0.1", 4000, 0, 2, 4, msgspec.Raw(b'{"a":1}')),
)  # fmt: skip


def ended(
    cause: Cause, code: int = 1, error: str = "", told: bool = False, step: int = 0, committed: int = 0,
    device: int | None = None,
) -> Ended:  # fmt: skip
    said = Exit(attempt=1, cause=cause, code=code, error=error, step=step, committed=committed, device=device)
    return Ended(said, told)


def member(node: str, joined: float = 0.0, heard: float = 0.0, device: str = "cpu") -> Member:
    return Member(node, 2, device, joined, heard)


def join(node: str = "b", recipe: str = RECIPE, device: str = "cpu", secret: str = SECRET) -> Join:
    return Join(node, 2, device, recipe, meeting.prove(secret, NONCE, node))


def refused(said: Join, members: tuple[Member, ...] = (), ranks: tuple[int, int] = (1, 8), alike: bool = True) -> str:
    wanted = meeting.Wanted(Span(1, 2), Span(*ranks), alike)
    no = meeting.refusal(said, RECIPE, meeting.prove(SECRET, NONCE, said.node), members, wanted)
    return "" if no is None else no.what


@pytest.mark.parametrize("message", FOR_NODES, ids=lambda one: type(one).__name__)
def test_what_the_host_says_comes_as_it_was_said(message: meeting.FromHost) -> None:
    (line,), rest = meeting.split(meeting.to_line(message))
    assert rest == b""
    heard = meeting.from_host(line)
    assert msgspec.json.encode(heard) == msgspec.json.encode(message) and type(heard) is type(message)
    if not isinstance(message, meeting.Beat):
        with pytest.raises(NoMessage):
            meeting.from_node(line)


@pytest.mark.parametrize("message", [join(), meeting.Beat(), meeting.Leave(), ended("crash", told=True)])
def test_what_a_node_says_comes_as_it_was_said(message: meeting.FromNode) -> None:
    assert meeting.from_node(meeting.to_line(message).rstrip(b"\n")) == message


@given(st.lists(st.sampled_from(FOR_NODES), max_size=5), st.data())
def test_lines_come_whole_however_the_network_cuts_them(said: list[meeting.FromHost], data: st.DataObject) -> None:
    stream = b"".join(map(meeting.to_line, said))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    heard, rest = [], b""
    for begin, end in itertools.pairwise([0, *cuts, len(stream)]):
        lines, rest = meeting.split(rest + stream[begin:end])
        heard += lines
    assert rest == b"" and heard == stream.split(b"\n")[:-1]


@given(st.binary(max_size=60))
def test_what_is_no_message_is_refused_and_nothing_else_is_raised(raw: bytes) -> None:
    for read in (meeting.from_host, meeting.from_node):
        with pytest.raises(NoMessage):
            read(raw)


def test_a_message_with_an_unknown_key_and_one_without_end_are_refused() -> None:
    with pytest.raises(NoMessage):
        meeting.from_node(json.dumps({"says": "beat", "more": 1}).encode())
    with pytest.raises(NoMessage):
        meeting.split(b"x" * meeting.MESSAGE_BYTES)
    with pytest.raises(NoMessage):
        meeting.to_line(meeting.Over(0, "x" * meeting.MESSAGE_BYTES))


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_rank_is_on_one_node_and_nodes_are_in_the_order_of_joining(nodes: int, per_node: int) -> None:
    members = [member(f"n{index}") for index in range(nodes)]
    parts = meeting.parts(members, per_node, 3, "10.0.0.1", 4000, b"{}")
    held = [rank for part in parts.values() for rank in range(part.first_rank, part.first_rank + part.ranks)]
    assert held == list(range(nodes * per_node)) and list(parts) == [one.node for one in members]
    assert [part.node_rank for part in parts.values()] == list(range(nodes))
    assert {(part.world, part.nodes, part.attempt) for part in parts.values()} == {(nodes * per_node, nodes, 3)}


@given(st.floats(10.0, 1000.0), st.floats(0.0, 2000.0))
def test_a_node_that_is_cut_off_has_ended_before_the_others_go_on_without_it(lost: float, now: float) -> None:
    if meeting.silent([member("b", heard=0.0)], now, lost):
        assert meeting.alone(0.0, now - 5.0, lost)  # five: what the end of its ranks may take
    assert meeting.cut_off(lost).code == EXIT_REQUEUE


def test_no_recipe_gives_a_node_less_time_to_end_than_it_may_take() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"lost_seconds": 9.9}, TrainSpec)
    assert TrainSpec().lost_seconds >= 10.0


def test_nodes_begin_when_all_are_there_or_enough_and_no_other_comes() -> None:
    span = Span(2, 3)
    three = [member(name, joined=float(index)) for index, name in enumerate("abc")]
    assert meeting.begins(three, span, now=2.0)
    assert not meeting.begins(three[:2], span, now=1.0 + meeting.SETTLE_SECONDS - 0.1)
    assert meeting.begins(three[:2], span, now=1.0 + meeting.SETTLE_SECONDS)
    assert not meeting.begins(three[:1], span, now=1e9)


def test_who_takes_part_and_who_does_not() -> None:
    assert refused(join()) == "" and refused(join(), (member("a"),)) == ""
    assert "another recipe" in refused(join(recipe="def"))
    assert "already" in refused(join(), (member("b"),))
    assert "cpu" in refused(join(), (member("a", device="H100"),))
    more = (member("a")._replace(devices=4),)
    assert "has 2 devices; the others have 4" in refused(join(), more)
    assert refused(join(), more, (2, 4), alike=False) == ""
    assert "asks for at least 3" in refused(join(), more, (3, 4), alike=False)
    assert "2 nodes" in refused(join(), (member("a"), member("c")))


@given(st.text(max_size=5).filter(lambda text: text != SECRET))
def test_who_does_not_know_the_secret_of_the_folder_is_refused(secret: str) -> None:
    assert "run folder" in refused(join(secret=secret))


def test_a_proof_is_of_one_name_and_one_challenge() -> None:
    proofs = {meeting.prove(SECRET, nonce, node) for nonce, node in itertools.product(("1", "2"), ("a", "b"))}
    assert len(proofs) == 4


BEFORE = Exit(attempt=1, cause="crash", code=1, step=4)


def test_a_lost_node_is_not_counted_and_explains_what_the_others_met() -> None:
    of_others = {"a": ended("crash", error="DistNetworkError: gone", step=7, committed=5)}
    whole = meeting.together(of_others, ["b"], "a", BEFORE)
    assert (whole.cause, whole.elsewhere, whole.committed, whole.step) == ("lost", True, 5, 7)
    assert isinstance(decide([whole] * 20, Restarts()), Restart)


def test_an_error_of_a_node_is_before_what_its_peers_make_of_it_in_any_order() -> None:
    own, peer = ended("crash", error="ValueError: mine"), ended("crash", error="DistBackendError: reset")
    for ends in ({"a": own, "b": peer}, {"b": peer, "a": own}):
        assert meeting.together(ends, [], "a", BEFORE).error == "ValueError: mine"
    for cause in ("out_of_memory", "hang", "lost", "diverged", "bad_input"):
        assert meeting.together({"a": peer, "b": ended(cause)}, [], "a", BEFORE).cause == cause


def test_only_the_host_being_told_to_stop_stops_the_whole() -> None:
    for who, answer in (("a", Stop), ("b", Restart)):
        ends = {node: ended("preempted", EXIT_REQUEUE, told=node == who) for node in ("a", "b")}
        assert isinstance(decide([meeting.together(ends, [], "a", BEFORE)], Restarts()), answer)


def test_an_attempt_that_ended_for_a_node_that_came_is_not_counted_and_where_it_stands_is_the_hosts_word() -> None:
    ends = {"a": ended("preempted", EXIT_REQUEUE, step=9, committed=8), "b": ended("preempted", EXIT_REQUEUE)}
    whole = meeting.together(ends, [], "a", BEFORE, ["c"])
    assert (whole.elsewhere, whole.why, whole.committed) == (True, "c came", 8)
    assert isinstance(decide([whole] * 20, Restarts()), Restart)
    crashed = meeting.together({**ends, "b": ended("crash", error="ValueError: mine", step=7)}, [], "a", BEFORE, ["c"])
    assert (crashed.cause, crashed.elsewhere, crashed.step, crashed.committed) == ("crash", False, 7, 8)


def test_a_device_is_known_by_its_node_and_left_out_there_alone() -> None:
    lost = meeting.together({"a": ended("crash"), "b": ended("lost", device=1)}, [], "a", BEFORE)
    assert (lost.node, lost.device) == ("b", 1)
    gone = meeting.together({"a": ended("lost", device=1)}, ["b"], "a", BEFORE)
    assert gone.device is None  # what a node takes with it says nothing of the others' devices
    left = {Device("b", 1), Device("b", 0), Device("c", 2)}
    parts = meeting.parts([member("a"), member("b")], 2, 3, "10.0.0.1", 4000, b"{}", left)
    assert [part.leave_out for part in parts.values()] == [(), (0, 1)]


def test_all_done_is_done_and_nobody_heard_is_what_was_before() -> None:
    assert meeting.together({name: ended("done", 0) for name in "ab"}, [], "a", BEFORE).cause == "done"
    assert meeting.together({}, [], "a", BEFORE) == BEFORE
