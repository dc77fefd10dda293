"""A run over several nodes, as each of them knows it, and this node's part of an attempt."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs.recipe import Recipe
from shardwise.launch import local, run_folder
from shardwise.launch.address import Address, interface_of
from shardwise.launch.attempts import Follow, Say
from shardwise.launch.meeting import Begin, Join, Wanted
from shardwise.launch.supervise import Shape, Span
from shardwise.plan.plan import Plan

CORES = "CPU cores"


class Several(NamedTuple):
    """What --nodes, --rendezvous and --node-name ask for; the address as it is written."""

    span: Span
    address: Address
    name: str


class Task(NamedTuple):
    """A run over several nodes, as every node knows it. ranks: of each node; alike: all have as many devices, since
    nobody said how many ranks; devices: of this node, of the kind `device`.

    plan: for a shape, raises PlanInfeasible; job: of a plan, its logs, the places of its ranks' devices on this node,
    and their place among the nodes; follow: stands by a job; say: shows a line.
    """

    recipe: Recipe
    several: Several
    ranks: Span
    alike: bool
    devices: int
    device: str
    plan: Callable[[Shape], Plan]
    job: Callable[[Plan, Path, Sequence[int], local.Place | None], local.Job]
    follow: Follow
    say: Say

    def join(self) -> Join:
        """This node's word, but for its proof."""
        digest = hashlib.sha256(msgspec.json.encode(self.recipe, order="sorted")).hexdigest()[:16]
        return Join(self.several.name, self.devices, self.device, digest, "")

    @property
    def on_gpus(self) -> bool:
        return self.device != CORES

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.several.span, self.ranks, self.alike)

    def places(self, part: Begin) -> list[int]:
        """The devices of this node's ranks, in their order."""
        return [place for place in range(self.devices) if place not in part.leave_out][: part.ranks]

    def part(self, part: Begin, plan: Plan, here: str, logs: Path) -> local.Job:
        """This node's part of an attempt; its plan is written beside its logs. here: its address for the others."""
        run_folder.write_plan(logs, plan)
        return self.job(plan, logs, self.places(part), place_of(part, here))


def place_of(part: Begin, here: str) -> local.Place | None:
    """None where a node is alone: its ranks need no network. Raises: RecipeError."""
    if part.nodes == 1:
        return None
    interface = interface_of(here)
    if not interface:
        raise RecipeError(
            f"No network interface of this node has {here} as its first address.",
            why="the ranks talk by the interface by which the nodes meet",
            fix="--rendezvous with an address in a network of which each node has a first address",
        )
    return local.Place(part.node_rank, part.nodes, part.address, part.port, interface)
