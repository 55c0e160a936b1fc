"""A learned list scheduler: a portfolio of rules that were learned on other graphs, and a network.

Our own generalising placer, after the idea of learned list scheduling (Paliwal et al. 2020, REGAL;
Placeto's claim to place graphs it has never seen). Nothing depends on the number or the names of
devices. With weights from `roost learn` it first tries some of its learned rules, and a few drawn
ones for a graph unlike those that it learned on. It varies the best of them. Then the network
learns on the problem at hand for as long as the budget lasts. Without weights, rules are random,
and the network begins as a rule of earliest finish.

Differs in: a family teaches mostly rules, by evolution: which linear rules are best together, in
which orders to list ops, and whether the devices then run in an order made for them. A schedule of
the network costs as much as twenty of a rule. So the network (imitation, then trial and error) only
makes schedules if `drawn` is above 0, or to learn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf
from typing import Any, ClassVar

import numpy as np

from roost.core.arrays import Array, taken
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import BudgetSpent, InputError, MissingExtra
from roost.learners.threads import one_thread
from roost.placers import Evaluate, Round
from roost.placers._annealing.population import Heat, Population
from roost.placers._lister.compiled_network import SamplingSettings
from roost.placers._lister.network_scheduler import (
    ORDERS,
    NetworkScheduler,
    NetworkSchedules,
    network_schedulers,
)
from roost.placers._lister.portable_rules import COLUMN, COLUMNS
from roost.placers._lister.rule_search import MOST_KEPT, RuleSearch
from roost.placers._lister.sampling import cost_of, exploring, sampled_by
from roost.placers._lister.visiting_orders import ORDERS as RULE_ORDERS
from roost.placers._lister.weights import (
    PORTFOLIO,
    load,
    network_of,
    network_only,
    new_tensors,
    random_samplers,
)
from roost.placers._listing.list_scheduler import SCALES, affordable
from roost.placers._shared.checkpoints import restore
from roost.placers._shared.orders import all_orders
from roost.placers._starts.starting_points import ask

log = logging.getLogger(__name__)

_FEWEST_TRIALS = 16  # that are left, to try the best devices in other orders


@dataclass(frozen=True)
class Lister:
    """Tries learned rules, then draws schedules from its network and learns from them."""

    weights: str | None = None  # a file that `roost learn` wrote
    # Rules: the first of those learned, some that are drawn, some varied from the best so far.
    samples: int = PORTFOLIO
    varied: int = 192  # rules after that: the others that were learned, and then varied ones
    drawn: int = 0  # schedules that are then drawn from the network, before it begins to learn
    tune: bool = True  # learn on this problem until the budget is spent
    refine: float = 0.0  # share of the budget that annealing gets at the end
    most_units: int = 5000  # decisions in a schedule, at most about so many
    batch: int = 16  # schedules in an update
    rate: float = 2e-3
    entropy: float = 0.01
    baselines: tuple[str, ...] = ("single", "expert")  # tried first, with weights only
    heat: Heat = field(default_factory=Heat)
    # Of learning.
    parts: ClassVar[tuple[str, ...]] = ("rules", "targets", "imitation", "trial and error", "ways")

    def __post_init__(self) -> None:
        if min(self.samples, self.varied, self.drawn) < 0 or self.samples + self.drawn < 1:
            raise InputError(
                f"samples, varied and drawn are {self.samples}, {self.varied} and {self.drawn}; "
                "none may be below 0, and samples or drawn must be above 0"
            )
        if self.most_units < 1 or self.batch < 2:
            raise InputError(
                f"most_units and batch are {self.most_units} and {self.batch}; at least 1 and 2"
            )
        if not 0 <= self.refine <= 1 or not self.rate > 0:
            raise InputError(
                f"refine is {self.refine} and rate is {self.rate}; 0 to 1, and above 0"
            )
        if self.weights is not None:
            load(self.weights)  # an invalid file is refused before any time is spent

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        if self.weights is None:
            tensors = new_tensors(evaluate.rng)
        else:
            tensors = load(self.weights)
            self._try_baselines(problem, evaluate)
        has_budget = self._budget_check(evaluate)
        if self.samples > 0:
            rules = tensors["rules"].astype(np.float64)
            RuleSearch(problem, evaluate).run(rules, self.samples, self.varied)
        schedulers: list[NetworkScheduler] = []
        if self.drawn or (self.tune and has_budget(evaluate)):
            schedulers = network_schedulers(problem, self.most_units)
        least_cost = self._draw_schedules(schedulers, tensors, evaluate)
        self._try_orders(problem, evaluate)
        if self.tune and has_budget(evaluate):
            self._tune(schedulers, network_only(tensors), evaluate, has_budget, least_cost)
        if self.refine > 0 and evaluate.best is not None:
            Population(problem, evaluate, self.heat).run([evaluate.best.placement])
        assert evaluate.best is not None
        return evaluate.best.placement

    def _budget_check(self, evaluate: Evaluate) -> Callable[[Evaluate], bool]:
        """A function that is true while the budget has room for another update.

        The share of `refine` is left. Without any limit there is no room: learning would never end.
        Updates are whole, so a search that goes on with more trials makes the same ones.
        """
        seconds = evaluate.seconds_left
        trials = evaluate.trials_left
        is_endless = isinf(seconds) and isinf(trials)
        seconds_kept = 0.0 if isinf(seconds) else self.refine * seconds
        trials_kept = 0.0 if isinf(trials) else self.refine * trials

        def has_budget(now: Evaluate) -> bool:
            if is_endless or now.trials_left < self.batch + trials_kept:
                return False
            return now.seconds_left > seconds_kept

        return has_budget

    def _try_baselines(self, problem: Problem, evaluate: Evaluate) -> None:
        for name in self.baselines:
            try:
                ask(name, problem, evaluate.named(name))
            except (MissingExtra, InputError) as error:
                log.info("without %s: %s", name, error)

    def _draw_schedules(
        self,
        schedulers: Sequence[NetworkScheduler],
        tensors: Mapping[str, Array],
        evaluate: Evaluate,
    ) -> list[float]:
        """Schedules of the network before it learns; the least cost under each order."""
        samplers = tensors["ways"]
        if self.drawn > len(samplers):
            more = random_samplers(evaluate.rng, self.drawn - len(samplers), len(ORDERS))
            samplers = np.concatenate([samplers, more])
        samplers = samplers[: self.drawn]
        least_cost = []
        for number, scheduler in enumerate(schedulers):
            mine = samplers[samplers[:, -1] == number]
            sampling = sampled_by(evaluate.rng, scheduler, mine)
            cost = self._round(scheduler, tensors, sampling, evaluate) if len(mine) else np.zeros(0)
            least_cost.append(float(cost.min(initial=np.inf)))
        return least_cost

    def _round(
        self,
        scheduler: NetworkScheduler,
        tensors: Mapping[str, Array],
        sampling: SamplingSettings,
        evaluate: Evaluate,
    ) -> Array:
        """One round of schedules, as many as there are trials for; their costs."""
        if evaluate.trials_left < 1:
            raise BudgetSpent("no trial is left for another schedule")
        left = evaluate.simulations_left
        is_tight = scheduler.scheduler.is_tight
        count, scales = affordable(len(sampling.heat), left, is_tight)
        first = SamplingSettings(*(np.array(values[:count]) for values in sampling))

        def run() -> Round:
            schedules = scheduler.schedule(network_of(tensors, scheduler), first, scales)
            cost = cost_of(schedules, scheduler.problem)
            best = _best(scheduler, schedules, cost, MOST_KEPT)
            return Round(best, schedules.simulations, {"cost": cost})

        return taken(evaluate.round(run), "cost", (None,), finite=False)

    def _try_orders(self, problem: Problem, evaluate: Evaluate) -> None:
        """Try the best devices in every order, if trials are left for that."""
        best = evaluate.best
        if best is None or evaluate.trials_left < _FEWEST_TRIALS:
            return
        device = problem.check(best.placement).device
        if not np.any(best.placement.prefetch_bytes):
            evaluate(all_orders(problem, device))

    def _tune(
        self,
        schedulers: Sequence[NetworkScheduler],
        tensors: Mapping[str, Array],
        evaluate: Evaluate,
        has_budget: Callable[[Evaluate], bool],
        least_cost: list[float],
    ) -> None:
        """Learn on this problem by trial and error.

        Three of four updates are under the order with the least cost so far.
        """
        import torch

        from roost.learners.recorded import clipped
        from roost.placers._lister.training import batch_of
        from roost.placers._lister.training_plan import TrainingSettings
        from roost.policies.lister_network import ListerPolicy

        settings = TrainingSettings(schedules=self.batch, entropy=self.entropy)
        with one_thread():
            policy = ListerPolicy(tensors)
            optimizer = torch.optim.Adam(policy.parameters(), lr=self.rate)
            update = 0
            while has_budget(evaluate):
                order = int(np.argmin(least_cost)) if update % 4 else update // 4 % len(schedulers)
                scheduler = schedulers[order]
                sampling = exploring(evaluate.rng, scheduler, self.batch)
                schedules = _recorded_round(scheduler, policy.arrays(), sampling, evaluate)
                cost = cost_of(schedules, scheduler.problem)
                least_cost[order] = min(least_cost[order], float(cost.min()))
                batch = batch_of(scheduler, schedules, sampling, cost, evaluate.rng, settings)
                figures: dict[str, float] = {}
                for _ in range(settings.steps if batch is not None else 0):
                    figures = clipped(policy, optimizer, [batch], self.entropy)
                evaluate.note({"update": float(update), "mean_cost": float(cost.mean()), **figures})
                update += 1

    def learn(
        self,
        problems: Sequence[Problem],
        seconds: float,
        seed: int,
        on_note: Callable[[Mapping[str, float]], object],
        checkpoint: Any,
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Weights for problems like these, and the facts of their card, in about so many seconds.

        `checkpoint` has `load() -> state or None` and `save(state)`, where a state is a dict of
        arrays.
        """
        import torch

        from roost.placers._lister.training import ListerTraining
        from roost.placers._lister.training_plan import TrainingSettings

        with one_thread():
            settings = TrainingSettings()
            training = ListerTraining(problems, seconds, seed, self.most_units, settings, on_note)
            state = checkpoint.load()
            if state is not None:
                restore(training, state, checkpoint)
            training.run(checkpoint.save)
        rules = training.rules.rules
        orders = np.bincount(rules[:, COLUMN["order"]].astype(int), minlength=len(RULE_ORDERS))
        card = {
            "rules": {
                "columns": COLUMNS,
                "orders": dict(zip(RULE_ORDERS, orders.tolist(), strict=True)),
            },
            "plan": training.plan,
            "most_units": self.most_units,
            "torch": str(torch.__version__),
        }
        samplers = training.samplers.astype(np.float32)
        return {**training.tensors, "ways": samplers, "rules": rules.astype(np.float32)}, card


def _recorded_round(
    scheduler: NetworkScheduler,
    tensors: Mapping[str, Array],
    sampling: SamplingSettings,
    evaluate: Evaluate,
) -> NetworkSchedules:
    """One round of schedules with their decisions; the best one becomes a trial."""
    network = network_of(tensors, scheduler)
    recorded = []

    def run() -> Round:
        recorded.append(scheduler.schedule(network, sampling, SCALES[:1], record=True))
        schedules = recorded[0]
        cost = cost_of(schedules, scheduler.problem)
        return Round(_best(scheduler, schedules, cost, 1), schedules.simulations)

    evaluate.round(run)
    if not recorded:  # a journal had the round: make the same schedules again, to learn from them
        run()
    return recorded[0]


def _best(
    scheduler: NetworkScheduler, schedules: NetworkSchedules, cost: Array, most: int
) -> list[Placement]:
    """The best placements, each once."""
    rows = schedules.ranked(cost)[:most]
    return [scheduler.placement(schedules.unit_device[row]) for row in rows]
