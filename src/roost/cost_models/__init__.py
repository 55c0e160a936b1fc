"""Graph x Cluster -> Costs: one file per cost model."""

from __future__ import annotations

from typing import Protocol

from roost import catalog, presets
from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.problem import Problem
from roost.errors import InputError


class CostModel(Protocol):
    """A cost model: it estimates the costs of a graph on a cluster."""

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs: ...


def estimate(graph: Graph, cluster: Cluster | str, model: str | CostModel = "roofline") -> Problem:
    """The problem of placing a graph on a cluster; both cluster and model may be given by name."""
    if isinstance(cluster, str):
        cluster = presets.cluster(cluster)
    if not isinstance(graph, Graph) or not isinstance(cluster, Cluster):
        given = f"{type(graph).__name__} and {type(cluster).__name__}"
        raise InputError(
            f"estimate takes a graph and a cluster, not {given}; roost.capture makes a graph of a "
            "model"
        )
    chosen: CostModel = catalog.find("cost_models", model)() if isinstance(model, str) else model
    return Problem(graph, cluster, chosen.estimate(graph, cluster))
