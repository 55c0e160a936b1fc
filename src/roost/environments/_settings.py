"""The settings of an environment, and the problems it is played on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

from roost import presets, zoo
from roost.core import formats
from roost.core.cluster import Cluster
from roost.core.graph import Graph
from roost.core.problem import Problem
from roost.cost_models import estimate
from roost.errors import InputError, UnknownName

GROUP_BY_GROUP = "group_by_group"
MOVE_BY_MOVE = "move_by_move"
MODES = (GROUP_BY_GROUP, MOVE_BY_MOVE)
STARTS = ("random", "single")
_ORDERS = ("program", "rank", "fifo")
# Groups, edges, devices or sweeps: beyond, nothing is meant but "all of them".
_MOST_ROOM = 10_000_000
# Beyond, the differences that are rewarded are lost in roundings, or are no numbers.
_MOST_PENALTY = 1e9


@dataclass(frozen=True)
class Settings:
    """How the game is played. The sizes at the end are those of an observation; None is the largest
    that is needed."""

    mode: str = GROUP_BY_GROUP  # or "move_by_move", from a complete placement
    order: str = "rank"  # in which devices take their ops
    groups: int = 100  # a problem with more is merged until it has about so many
    start: str = "random"  # where move by move starts: "random", or all on the best "single" device
    sweeps: int = 1  # how often move by move visits every group
    # For a placement that does not fit, and up to as much again the less of it fits.
    memory_penalty: float = 2.0
    forbidden_penalty: float = 0.1  # for choosing a device where the group may not run
    max_groups: int | None = None
    max_edges: int | None = None
    max_devices: int | None = None

    def __post_init__(self) -> None:
        for what, among in (("mode", MODES), ("order", _ORDERS), ("start", STARTS)):
            if getattr(self, what) not in among:
                raise InputError(
                    f"{what} {getattr(self, what)!r} must be one of {', '.join(among)}"
                )
        for what in ("groups", "sweeps", "max_groups", "max_edges", "max_devices"):
            value = getattr(self, what)
            if what.startswith("max_") and value is None:
                continue
            if not _whole(value) or value < 1:
                raise InputError(f"{what} is {value!r}; it must be a whole number, at least 1")
            if what != "groups" and value > _MOST_ROOM:
                raise InputError(f"{what} is {value}; it must be at most {_MOST_ROOM:,}")
        for what in ("memory_penalty", "forbidden_penalty"):
            value = getattr(self, what)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value <= _MOST_PENALTY
            ):
                raise InputError(
                    f"{what} is {value!r}; it must be a number from 0 to {_MOST_PENALTY:g}"
                )

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """From keywords; raises UnknownName with the nearest."""
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise UnknownName(
                    "setting of roost/Placement-v0", key, [*known, "problem", "problems", "graph"]
                )
        return cls(**given)


def problems_of(problem: Any, problems: Any, graph: Any, cluster: Any) -> tuple[Problem, ...]:
    """The problems that were given, in whichever of the three ways."""
    ways = {"problem": problem, "problems": problems, "graph": graph}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise InputError(f"give one of problem, problems, and graph with cluster; found {found}")
    if (cluster is not None) != (graph is not None):
        raise InputError("graph and cluster go together; a problem has both")
    if graph is not None:
        return (estimate(_graph(graph), _cluster(cluster)),)
    if problem is not None:
        return (_problem(problem, "problem"),)
    if not isinstance(problems, Sequence) or isinstance(problems, str) or not problems:
        raise InputError(
            f"problems must be a list of problems, at least one, not {type(problems).__name__}"
        )
    return tuple(_problem(one, f"problems[{number}]") for number, one in enumerate(problems))


def _problem(given: Any, what: str) -> Problem:
    if isinstance(given, str | PathLike):
        found = formats.load_as(Problem, given)  # type: ignore[arg-type]
        assert isinstance(found, Problem)
        return found
    if not isinstance(given, Problem):
        raise InputError(
            f"{what} is a {type(given).__name__}; it must be a roost.Problem or the path of one; "
            "roost.estimate makes one of a graph"
        )
    return given


def _graph(given: Any) -> Graph:
    if isinstance(given, Graph):
        return given
    if not isinstance(given, str | PathLike):
        raise InputError(
            f"graph is a {type(given).__name__}; it must be a roost.Graph, a path, or a name of "
            f"the zoo"
        )
    if str(given) in zoo.names():
        return zoo.build(str(given))
    if not str(given).endswith((".json", ".gz")):
        raise UnknownName("model", str(given), zoo.names())
    found = formats.load_as(Graph, given)  # type: ignore[arg-type]
    assert isinstance(found, Graph)
    return found


def _cluster(given: Any) -> Cluster:
    if isinstance(given, Cluster):
        return given
    if not isinstance(given, str | PathLike):
        raise InputError(
            f"cluster is a {type(given).__name__}; it must be a roost.Cluster, a preset, or a path"
        )
    return presets.cluster(given)  # type: ignore[arg-type]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
