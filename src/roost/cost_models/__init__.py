"""Graph x Cluster -> Costs: one file per cost model."""

from __future__ import annotations

from typing import Protocol

from roost import catalog
from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.problem import Problem


class CostModel(Protocol):
    """What a cost model is."""

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs: ...


def estimate(graph: Graph, cluster: Cluster, model: str | CostModel = "roofline") -> Problem:
    """The problem of placing a graph on a cluster, with costs from a cost model or its name."""
    chosen: CostModel = catalog.find("cost_models", model)() if isinstance(model, str) else model
    return Problem(graph, cluster, chosen.estimate(graph, cluster))
