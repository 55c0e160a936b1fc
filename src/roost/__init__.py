"""On which device should each operation of a neural network run?

Names are loaded when they are first used, so that `import roost` costs nothing.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # true for type checkers; `typing` takes long to import: see roost.cli
if TYPE_CHECKING:
    from typing import Any

    from roost import zoo
    from roost.bounds import bound
    from roost.core.cluster import Cluster, Device, Link
    from roost.core.costs import Costs
    from roost.core.formats import load
    from roost.core.graph import Graph, GraphBuilder
    from roost.core.placement import Placement
    from roost.core.problem import Problem
    from roost.core.timeline import Timeline
    from roost.core.trial import Bound, Result, Trial
    from roost.cost_models import estimate
    from roost.cost_models.profiled import profile
    from roost.errors import Infeasible, InputError, RoostError
    from roost.frontends.torch import capture
    from roost.plan import Plan, Trainer, place, trainer
    from roost.presets import cluster
    from roost.presets.probe import probe
    from roost.search.solve import solve
    from roost.simulator.compiled import Simulator, simulate

__version__ = "0.1.0"

_HOME = {
    "Bound": "core.trial",
    "Cluster": "core.cluster",
    "Costs": "core.costs",
    "Device": "core.cluster",
    "Graph": "core.graph",
    "GraphBuilder": "core.graph",
    "Infeasible": "errors",
    "InputError": "errors",
    "Link": "core.cluster",
    "Placement": "core.placement",
    "Plan": "plan",
    "Problem": "core.problem",
    "Result": "core.trial",
    "RoostError": "errors",
    "Simulator": "simulator.compiled",
    "Timeline": "core.timeline",
    "Trainer": "plan",
    "Trial": "core.trial",
    "bound": "bounds",
    "capture": "frontends.torch",
    "cluster": "presets",
    "estimate": "cost_models",
    "load": "core.formats",
    "place": "plan",
    "probe": "presets.probe",
    "profile": "cost_models.profiled",
    "simulate": "simulator.compiled",
    "solve": "search.solve",
    "trainer": "plan",
}

__all__ = [
    "Bound",
    "Cluster",
    "Costs",
    "Device",
    "Graph",
    "GraphBuilder",
    "Infeasible",
    "InputError",
    "Link",
    "Placement",
    "Plan",
    "Problem",
    "Result",
    "RoostError",
    "Simulator",
    "Timeline",
    "Trainer",
    "Trial",
    "bound",
    "capture",
    "cluster",
    "estimate",
    "load",
    "place",
    "probe",
    "profile",
    "simulate",
    "solve",
    "trainer",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name == "zoo":
        return importlib.import_module("roost.zoo")
    if name not in _HOME:
        raise AttributeError(f"module 'roost' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"roost.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
