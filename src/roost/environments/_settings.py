"""The settings of an environment, and its problems."""

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
from roost.placers.toolkit import check_choice, check_number, check_whole

Named = str | PathLike[str]  # a name or a path
MOVE_BY_MOVE = "move_by_move"
MODES = ("group_by_group", MOVE_BY_MOVE)
STARTS = ("random", "single")
_ORDERS = ("program", "rank", "fifo")
_ROOMS = ("max_groups", "max_edges", "max_devices")
# Groups, edges, devices or sweeps: beyond, nothing is meant but "all of them".
_MOST_ROOM = 10_000_000
# Beyond, the differences that are rewarded are lost in roundings, or are no numbers.
_MOST_PENALTY = 1e9


@dataclass(frozen=True)
class EnvironmentSettings:
    """The rules of an environment. The sizes at the end are those of an observation; None is the
    largest that is needed."""

    mode: str = "group_by_group"  # or "move_by_move", from a complete placement
    order: str = "rank"  # in which devices take their ops
    groups: int = 100  # a problem with more is merged until it has about so many
    start: str = "random"  # of move by move: "random", or all on the best "single" device
    sweeps: int = 1  # times that move by move visits every group
    # For a placement that does not fit, and up to as much again the less of it fits.
    memory_penalty: float = 2.0
    forbidden_penalty: float = 0.1  # for a device where the group may not run
    max_groups: int | None = None
    max_edges: int | None = None
    max_devices: int | None = None

    def __post_init__(self) -> None:
        check_choice(self, "mode", MODES)
        check_choice(self, "order", _ORDERS)
        check_choice(self, "start", STARTS)
        rooms = [name for name in _ROOMS if getattr(self, name) is not None]
        check_whole(self, 1, "groups", "sweeps", *rooms)
        for name in ("sweeps", *rooms):
            if getattr(self, name) > _MOST_ROOM:
                raise InputError(
                    f"{name} is {getattr(self, name)}; it must be at most {_MOST_ROOM:,}"
                )
        check_number(self, 0.0, _MOST_PENALTY, "memory_penalty", "forbidden_penalty")

    @classmethod
    def of(cls, given: dict[str, Any]) -> EnvironmentSettings:
        """From keywords; raises UnknownName with the nearest."""
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                others = ["problem", "problems", "graph"]
                raise UnknownName("setting of roost/Placement-v0", key, [*known, *others])
        return cls(**given)


def problems_of(problem: Any, problems: Any, graph: Any, cluster: Any) -> tuple[Problem, ...]:
    """The problems in the keywords of an environment, in any of the three ways."""
    values = {"problem": problem, "problems": problems, "graph": graph}
    given = [name for name, value in values.items() if value is not None]
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
        kind = type(problems).__name__
        raise InputError(f"problems must be a list of problems, at least one, not {kind}")
    return tuple(_problem(one, f"problems[{number}]") for number, one in enumerate(problems))


def _problem(given: Any, name: str) -> Problem:
    wanted = "a roost.Problem or the path of one; roost.estimate makes one of a graph"
    _check_kind(given, name, Problem, wanted)
    return given if isinstance(given, Problem) else formats.load_as(Problem, given)


def _graph(given: Any) -> Graph:
    _check_kind(given, "graph", Graph, "a roost.Graph, a path, or a name of the zoo")
    if isinstance(given, Graph):
        return given
    name = str(given)
    if name in zoo.names():
        return zoo.build(name)
    if not name.endswith((".json", ".gz")):
        raise UnknownName("model", name, zoo.names())
    return formats.load_as(Graph, name)  # type: ignore[no-any-return]


def _cluster(given: Any) -> Cluster:
    _check_kind(given, "cluster", Cluster, "a roost.Cluster, a preset, or a path")
    return given if isinstance(given, Cluster) else presets.cluster(given)


def _check_kind(given: Any, name: str, kind: type, wanted: str) -> None:
    if not isinstance(given, kind | str | PathLike):
        raise InputError(f"{name} is a {type(given).__name__}; it must be {wanted}")
