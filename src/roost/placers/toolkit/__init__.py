"""Building blocks for placers: all that Roost's own placers share, for placers from outside.

| to | use |
|---|---|
| move ops that belong together | `Units`, `groups_of`, `Layers` |
| choose an order for given devices | `all_orders`, `common_orders`, `own_orders`, `list_schedule` |
| begin from what other placers find | `starting_points` |
| choose devices by list scheduling | `list_placements`, with weights of `FEATURES` |
| improve a placement move by move | `go_downhill` |
| make a placement fit | `fastest_allowed`, `lasting_bytes`, `fitted` |
| estimate pipelines and data parallelism | `CopiedStep`, `Sketch`, `sketches`, `sketch_trial` |
| let a policy place group by group | `GroupEpisodes` |
| check settings | `check_whole`, `check_number`, `check_choice` |
| compare trials | `best_of` |
| type the method `place` | `Evaluate` |

Each function that takes `evaluate` counts its trials against the budget of the search, and raises
`BudgetSpent` when that is spent. A placer may let it pass: `solve` keeps the best trial.

>>> import roost
>>> from roost.placers.toolkit import Evaluate, all_orders, best_of, go_downhill, starting_points
>>> class Downhill:
...     def place(self, problem: roost.Problem, evaluate: Evaluate) -> roost.Placement:
...         start, *_ = starting_points(problem, evaluate, ("single", "rules"))
...         best = best_of(evaluate(all_orders(problem, start.device)))
...         return go_downhill(problem, evaluate, best.placement)
>>> problem = roost.estimate(roost.zoo.build("rnnlm", layers=1, length=3), "k80x4")
>>> roost.solve(problem, Downhill(), trials=500).best.feasible
True
"""

from __future__ import annotations

from collections.abc import Mapping

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import best_of
from roost.placers import Evaluate, Placer, Round
from roost.placers._annealing.downhill import go_downhill
from roost.placers._episodes.group_episodes import GroupEpisodes
from roost.placers._listing.linear_rules import FEATURES
from roost.placers._listing.list_scheduler import ListScheduler, named_rules
from roost.placers._microbatches.copied_step import CopiedStep
from roost.placers._microbatches.sketches import Sketch, sketch_trial, sketches
from roost.placers._shared.fitting import fastest_allowed, fitted, lasting_bytes
from roost.placers._shared.groups import groups_of
from roost.placers._shared.layers import Layers
from roost.placers._shared.orders import (
    ListSchedule,
    all_orders,
    common_orders,
    list_schedule,
    own_orders,
)
from roost.placers._shared.setting_checks import check_choice, check_number, check_whole
from roost.placers._shared.units import Units
from roost.placers._starts.starting_points import starting_points

__all__ = [
    "FEATURES",
    "CopiedStep",
    "Evaluate",
    "GroupEpisodes",
    "Layers",
    "ListSchedule",
    "Placer",
    "Round",
    "Sketch",
    "Units",
    "all_orders",
    "best_of",
    "check_choice",
    "check_number",
    "check_whole",
    "common_orders",
    "fastest_allowed",
    "fitted",
    "go_downhill",
    "groups_of",
    "lasting_bytes",
    "list_placements",
    "list_schedule",
    "own_orders",
    "sketch_trial",
    "sketches",
    "starting_points",
]


def list_placements(
    problem: Problem, weights: Mapping[str, float] | None = None, order: str = "rank"
) -> list[Placement]:
    """Placements by list scheduling: each unit goes to the device with the least score.

    The score is the sum of the `FEATURES` times their weights; {"finish": 1.0}, the default, is
    HEFT. Only devices with room are asked. `order` is "rank" or "program". Several placements come
    back, since slow kinds of devices are tried with and without; evaluate them to learn the best.
    """
    units = Units.of(problem)
    rules = named_rules(units, weights or {"finish": 1.0})
    schedules = [scheduler.schedule(rules) for scheduler in ListScheduler.all_of(units, (order,))]
    return [placement for made in schedules for placement in made.best(count=4)]
