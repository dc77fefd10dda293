"""What is asked of several nodes, where they meet, and what their host makes of what they tell it."""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli import nodes as verb
from shardwise.errors import RecipeError
from shardwise.inputs.hardware import MachineFacts, local_cluster
from shardwise.launch import address, meeting
from shardwise.launch.meeting import Begin, EndAttempt, Ended, FromHost, Join, Over
from shardwise.launch.nodes import Guest, Host
from shardwise.launch.outcome import Cause
from shardwise.launch.rounds import Round
from shardwise.launch.supervise import Exit, Span
from shardwise.launch.task import Several
from shardwise.plan import rough_memory
from shardwise.plan.machines import used


@given(st.integers(1, 9999), st.integers(1, 9999), st.integers(1, 65535))
def test_what_is_asked_for_is_what_was_written(least: int, most: int, port: int) -> None:
    least, most = sorted((least, most))
    for text in (f"{least}:{most}", *([f"{most}"] if least == most else [])):
        asked = verb.asked_for(text, f"node-0:{port}", "b")
        assert asked == Several(Span(least, most), ("node-0", port), "b")
    assert verb.asked_for(None, None, None) is None


@given(st.sampled_from(["node-0", "10.0.0.1", "fd00::1", "::1"]), st.integers(0, 65535))
def test_an_address_is_read_as_it_is_written(host: str, port: int) -> None:
    assert address.parts_of(address.written((host, port))) == (host, port)


@pytest.mark.parametrize(
    ("nodes", "rendezvous", "name", "said"),
    [
        ("0", "a:1", None, "--nodes 0 is no number"), ("2:", "a:1", None, "is no number"),
        ("3:2", "a:1", None, "--nodes 2:3"), ("2", None, None, "without --rendezvous"),
        (None, "a:1", None, "without --nodes"), (None, None, "b", "--node-name without --nodes"),
        ("2", "a", None, "no HOST:PORT"), ("2", "a:0", None, "no HOST:PORT"), ("2", "a:65536", None, "no HOST:PORT"),
        ("2", "fd00::1:29400", None, "no HOST:PORT"), ("2", "a:1", "b/c", "is no name"), ("2", "a:1", "", "is no name"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_says_why(
    nodes: str | None, rendezvous: str | None, name: str | None, said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        verb.asked_for(nodes, rendezvous, name)


@pytest.mark.parametrize(
    ("host", "said"),
    [("nowhere.invalid", "has no address"), ("0.0.0.0", "no one node's address"), ("::", "no one node's")],
)  # RFC 6761: .invalid never resolves
def test_an_address_that_no_node_reaches_is_refused(host: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        address.resolve((host, 29400))


def test_one_listens_at_an_address_and_nowhere_else_and_who_comes_second_joins() -> None:
    assert address.resolve(("localhost", 1)) == ("127.0.0.1", 1)
    assert address.is_here("127.0.0.1") and not address.is_here("203.0.113.9")  # RFC 5737: nobody has it
    for number in ("127.0.0.1", *(["::1"] if address.is_here("::1") else [])):
        where = (number, address.free_port(number))
        first = address.listen(where)
        assert first is not None and first.getsockname()[:2] == where
        with first:
            assert address.listen(where) is None


class Meeting:
    """A host `a` and a node `b` that has joined, over loopback, on one clock that the test sets."""

    def __init__(self, listener: socket.socket) -> None:
        self.now, self.listener = 100.0, listener
        wanted = meeting.Wanted(Span(1, 3), Span(1, 1))
        self.host = Host(listener, "secret", "recipe", wanted, (join("a"),), clock=lambda: self.now)
        self.guests: dict[str, Guest] = {}
        self.come("b")

    def come(self, name: str) -> None:
        connection = socket.create_connection(self.listener.getsockname())
        self.guests[name] = Guest(connection, join(name), lambda: "secret", clock=lambda: self.now)
        while not self.guests[name].joined:
            self.host.turn(0.01)
            self.guests[name].turn(0.01)

    def round(self, *names: str, attempt: int = 2) -> Round:
        members = [one for one in self.host.members if one.node in names]
        given = meeting.parts(members, 1, attempt, "127.0.0.1", 4000, b"{}")
        return Round(self.host, "a", attempt, given, lambda nodes: nodes > len(given), print, clock=lambda: self.now)

    def hears(self, name: str, this: Round) -> list[FromHost]:
        heard: list[FromHost] = []
        while not any(isinstance(one, EndAttempt | Begin | Over) for one in heard):
            this.look(0.01)
            heard += self.guests[name].turn(0.01)
        return heard


def join(name: str) -> Join:
    return Join(name, 1, "cpu", "recipe", "")


def ended(attempt: int, cause: Cause = "crash") -> Ended:
    return Ended(Exit(attempt=attempt, cause=cause, code=1))


@pytest.fixture
def met() -> Iterator[Meeting]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Meeting(listener)
        yield made
        for guest in made.guests.values():
            guest.close()
        made.host.close(Over(0))


def test_what_is_told_of_an_earlier_attempt_says_nothing_of_this_one(met: Meeting) -> None:
    this = met.round("a", "b")
    for said in (ended(1, "crash"), ended(2, "done")):
        met.guests["b"].tell(said)
    while "b" in this.left():
        this.look(0.01)
    met.now += meeting.FAILED_SECONDS
    assert this.wish(0) is None and this.ends == {"b": ended(2, "done")}


def test_what_failed_on_one_node_is_ended_on_the_others_after_a_while(met: Meeting) -> None:
    this = met.round("a", "b")
    this.end("a", ended(2))
    assert this.wish(0) is None
    met.now += meeting.FAILED_SECONDS
    assert this.wish(0) == "end"
    assert EndAttempt(2) in met.hears("b", this)


def test_what_ended_well_on_one_node_is_waited_for_on_the_others(met: Meeting) -> None:
    this = met.round("a", "b")
    this.end("a", ended(2, "done"))
    met.now += 5.0
    assert this.wish(0) is None and this.left() == ["b"]


def test_a_node_that_is_not_heard_of_ends_the_attempt_and_is_named(met: Meeting) -> None:
    this = met.round("a", "b")
    met.now += 19.9
    assert this.wish(0) is None
    met.now += 0.1
    assert this.wish(0) == "end" and this.gone == ["b"] and [one.node for one in met.host.members] == ["a"]
    assert met.round("a", "b").gone == [] and this.left() == ["a"]


def test_a_node_that_comes_takes_part_after_the_next_save_and_not_before(met: Meeting) -> None:
    this = met.round("a", "b")
    assert this.wish(10) is None
    met.come("c")
    assert [this.wish(committed) for committed in (10, 10, 20, 20)] == [None, None, "save", "save"]
    assert this.came == ["c"]


def test_a_node_that_no_plan_can_use_waits(met: Meeting) -> None:
    given = meeting.parts(met.host.members, 1, 2, "127.0.0.1", 4000, b"{}")
    this = Round(met.host, "a", 2, given, lambda nodes: False, print, clock=lambda: met.now)
    met.come("c")
    assert [this.wish(committed) for committed in (10, 20)] == [None, None]


def test_a_node_that_leaves_is_not_waited_for(met: Meeting) -> None:
    this = met.round("a", "b")
    met.guests["b"].tell(ended(2, "preempted"))
    met.guests["b"].tell(meeting.Leave())
    while len(met.host.members) > 1:
        this.look(0.01)
    assert this.gone == [] and this.left() == ["a"]


def test_memory_of_a_rank_is_a_share_of_its_own_host() -> None:
    here = local_cluster(MachineFacts(cpus=8, host_memory_bytes=64 * 2**30))
    for nodes in (2, 4):
        there = used(here, nodes, 2)
        assert (there.devices, there.node.devices, there.nodes) == (2 * nodes, 2, nodes)
        assert rough_memory.usable_bytes(there, 2 * nodes) == rough_memory.usable_bytes(here, 2)
