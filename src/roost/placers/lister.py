"""A learned list scheduler: a portfolio of rules that were learned on other graphs, and a small
network.

Our own generalising placer, after the idea of learned list scheduling (Paliwal et al. 2020, REGAL;
Placeto's claim to place graphs it has never seen). Nothing depends on the number or the names of
devices. With weights from `roost learn` it tries the first of its rules and a few that were never
learned, for a graph unlike those that it learned on; it varies the best of them, and then lets the
network learn on the problem at hand for as long as the budget lasts. Without, rules are random, and
the network begins as a rule of earliest finish.

Differs in: what is learned over a family is foremost which linear rules are best together, in which
orders ops are to be listed, and whether the devices found then run in an order made for them (by
evolution), for a schedule of the network costs as much as twenty of a rule. The network (imitation,
then trial and error) is drawn from only where `drawn` asks for it, or to learn on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf
from typing import Any, ClassVar

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import BudgetSpent, InputError, MissingExtra
from roost.learners.threads import one_thread
from roost.placers import Evaluate, Round
from roost.placers._annealing.population import Heat, Population
from roost.placers._lister.compiled_network import Rolls
from roost.placers._lister.portable_rules import COLUMNS, Bench, Near, varied
from roost.placers._lister.portable_rules import drawn as drawn_rules
from roost.placers._lister.problem_view import Framed, Rolled
from roost.placers._lister.rollouts import (
    NUM_SEEN,
    ORDERS,
    PORTFOLIO,
    cost_of,
    drawn_ways,
    framed,
    free_rolls,
    load,
    network_of,
    new_tensors,
    rolls_of,
)
from roost.placers._lister.visiting_orders import ORDERS as LIST_ORDERS
from roost.placers._listing.list_scheduler import SCALES, total_time
from roost.placers._shared.checkpoints import restore
from roost.placers._shared.groups import groups_of, may_group
from roost.placers._shared.orders import all_orders
from roost.placers._starts.starting_points import ask

log = logging.getLogger(__name__)

_KEPT = 4  # of the best schedules of a round become trials, at most one of eight
# Of the samples: rules as they were learned, and rules drawn alike for every problem; the others
# are varied. Chosen on members that were not learned on, and on those of other families
# (benchmarks/results/generalise_*.md).
_LEARNED, _DRAWN, _DRAWN_SEED = 3 / 8, 1 / 8, 12345
# Where accelerators differ in speed, fewer are as they were learned, and more are drawn: under
# every order, for whole groups. There each graph needs a rule of its own, and orders and units that
# are good on like devices are not.
_LEARNED_UNLIKE, _DRAWN_UNLIKE = 1 / 4, 3 / 8
_UNLIKE = 1.5  # times as long for everything as another accelerator
# Rules varied at a time among the samples, and after; from how many of the best.
_SOON, _FAMILY, _PARENTS = 4, 32, 6
# Share of these that keep near the best placement; how firmly, in ops of mean length.
_NEAR, _HOLD = 0.5, (1.0, 30.0)


@dataclass(frozen=True)
class Lister:
    """Tries learned rules, then draws schedules from its network and learns from them."""

    weights: str | None = None  # a file that `roost learn` wrote
    # Rules: the first of those learned, some that are drawn, some varied from the best so far.
    samples: int = PORTFOLIO
    varied: int = 192  # rules after that: the others that were learned, and then varied ones
    drawn: int = 0  # schedules that are then drawn from the network, before it begins to learn
    tune: bool = True  # whether it goes on learning, until the budget is spent
    refine: float = 0.0  # share of the budget that annealing gets at the end
    most_units: int = 5000  # decisions in a schedule, at most about so many
    batch: int = 16  # schedules in an update
    rate: float = 2e-3
    entropy: float = 0.01
    baselines: tuple[str, ...] = ("single", "expert")  # asked first, where it has weights
    heat: Heat = field(default_factory=Heat)
    # Of learning.
    parts: ClassVar[tuple[str, ...]] = ("rules", "targets", "imitation", "trial and error", "ways")

    def __post_init__(self) -> None:
        if min(self.samples, self.varied, self.drawn) < 0 or self.samples + self.drawn < 1:
            raise InputError(
                f"samples, varied and drawn are {self.samples}, {self.varied} and {self.drawn}; "
                f"none may be below 0, "
                "and there must be samples or something drawn"
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
            load(self.weights)  # what is wrong with it is told before any time is spent

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        tensors = new_tensors(evaluate.rng) if self.weights is None else load(self.weights)
        if self.weights is not None:
            self._ask_baselines(problem, evaluate)
        until = self._until(evaluate)
        self._follow(problem, tensors["rules"], evaluate)
        frames = (
            framed(problem, self.most_units, ORDERS)
            if self.drawn or (self.tune and until(evaluate))
            else []
        )
        best = self._sample(frames, tensors, evaluate)
        self._reorder(problem, evaluate)
        if self.tune and until(evaluate):
            self._learn(frames, tensors, evaluate, until, best)
        if self.refine > 0 and evaluate.best is not None:
            Population(problem, evaluate, self.heat).run([evaluate.best.placement])
        assert evaluate.best is not None
        return evaluate.best.placement

    def _until(self, evaluate: Evaluate) -> Callable[[Evaluate], bool]:
        """Whether its own share of the budget has room for another update; where nothing sets an
        end, it has none.

        Updates are whole: a search that goes on with more trials then makes the same ones.
        """
        seconds, trials = (
            0.0 if isinf(left) else self.refine * left
            for left in (evaluate.seconds_left, evaluate.trials_left)
        )
        endless = isinf(evaluate.seconds_left) and isinf(evaluate.trials_left)

        def lasts(now: Evaluate) -> bool:
            return (
                not endless
                and now.trials_left >= self.batch + trials
                and now.seconds_left > seconds
            )

        return lasts

    def _ask_baselines(self, problem: Problem, evaluate: Evaluate) -> None:
        for name in self.baselines:
            try:
                ask(name, problem, evaluate.named(name))
            except (MissingExtra, InputError) as error:
                log.info("without %s: %s", name, error)

    def _follow(self, problem: Problem, rules: Array, evaluate: Evaluate) -> None:
        """The schedules of learned and drawn rules, and then of rules that are varied from the best
        of them."""
        if self.samples < 1:
            return
        benches = _benches(problem)
        rows, kind, rest = self._split(rules.astype(np.float64), len(benches) > 1)
        cost = self._tried(benches, rows, kind, False, evaluate)
        while len(rows) < self.samples + self.varied and evaluate.trials_left >= 1:
            soon = self.samples - len(rows)
            is_varied = soon != 0 or not len(rest)
            if is_varied:
                count = min(_SOON, soon) if soon > 0 else min(_FAMILY, soon + self.varied)
                parents = np.argsort(cost, kind="stable")[:_PARENTS]
                chosen = parents[evaluate.rng.integers(0, len(parents), count)]
                new, of = varied(evaluate.rng, rows[chosen], rows), kind[chosen]
            else:
                new, of = rest, np.zeros(len(rest), np.int64)
            cost = np.concatenate([cost, self._tried(benches, new, of, is_varied, evaluate)])
            rows, kind = np.concatenate([rows, new]), np.concatenate([kind, of])

    def _split(self, learned: Array, unlike: bool = False) -> tuple[Array, Array, Array]:
        """The rules to begin with [rules, columns], on which bench each is tried, and those to try
        later.

        Some are drawn: under the orders of the others, or for unlike accelerators under all of
        them, for whole groups.
        """
        shares = (_LEARNED_UNLIKE, _DRAWN_UNLIKE) if unlike else (_LEARNED, _DRAWN)
        count, more = max(1, round(shares[0] * self.samples)), round(shares[1] * self.samples)
        first, rest = learned[:count], learned[count:][: self.varied]
        orders = sorted(set(first[:, COLUMNS.index("order")].astype(int).tolist()))
        other = drawn_rules(
            np.random.default_rng(_DRAWN_SEED), more, range(len(LIST_ORDERS)) if unlike else orders
        )
        if unlike:
            other[:, COLUMNS.index("listed")] = 1.0
        return np.concatenate([first, other]), np.repeat([0, int(unlike)], [len(first), more]), rest

    def _tried(
        self, benches: list[Bench], rows: Array, kind: Array, near: bool, evaluate: Evaluate
    ) -> Array:
        """What rules cost [rules], each on its bench; `near` says whether some keep near the best
        placement."""
        cost = np.full(len(rows), np.inf)
        for number, bench in enumerate(benches):
            mine = np.flatnonzero(kind == number)
            if len(mine):
                held = _near(bench, evaluate, len(mine)) if near else None
                cost[mine] = self._round_of_rules(bench, rows[mine], held, evaluate)
        return cost

    def _round_of_rules(
        self, bench: Bench, rows: Array, near: Near | None, evaluate: Evaluate
    ) -> Array:
        """One round of rules, as many as there are trials for; what each costs, infinite where it
        was not tried."""
        left, more = (
            evaluate.simulations_left,
            int(bench.is_tight and evaluate.simulations_left > 1),
        )
        # Where memory is tight, both orders are simulated.
        attempts = len(SCALES) + 1 if bench.is_tight else 1
        count = int(max(1, min(len(rows), left // attempts)))
        scales = SCALES[: int(max(1, min(attempts, left // count) - more))]
        if bench.is_tight and not more:
            rows = rows.copy()
            rows[:, COLUMNS.index("listed")] = 0.0

        def run() -> Round:
            tried = bench.roll(rows[:count], scales, None if near is None else near.first(count))
            cost = np.full(len(rows), np.inf)
            cost[:count] = cost_of(tried, bench.problem)
            kept = tried.ranked()[: min(_KEPT, max(1, len(rows) // 8))]
            return Round([tried.placement(row) for row in kept], tried.simulations, {"cost": cost})

        return np.asarray(evaluate.round(run)["cost"])

    def _sample(
        self, frames: Sequence[Framed], tensors: Mapping[str, Array], evaluate: Evaluate
    ) -> list[float]:
        """Schedules of the network before it learns; the least cost under each order."""
        ways = tensors["ways"]
        if self.drawn > len(ways):
            ways = np.concatenate(
                [ways, drawn_ways(evaluate.rng, self.drawn - len(ways), len(ORDERS))]
            )
        found = []
        for number, frame in enumerate(frames):
            rows = np.flatnonzero(ways[: self.drawn, -1] == number)
            rolls = rolls_of(evaluate.rng, frame, ways[rows, :NUM_SEEN], ways[rows, NUM_SEEN])
            cost = self._round(frame, tensors, rolls, evaluate) if len(rows) else np.zeros(0)
            found.append(float(cost.min(initial=np.inf)))
        return found

    def _round(
        self, frame: Framed, tensors: Mapping[str, Array], rolls: Rolls, evaluate: Evaluate
    ) -> Array:
        """One round of schedules, as many as there are trials for; their costs."""
        if evaluate.trials_left < 1:
            raise BudgetSpent("nothing is left for another schedule")
        attempts = len(SCALES) if frame.under.is_tight else 1
        count = int(max(1, min(len(rolls.heat), evaluate.simulations_left // attempts)))
        scales = SCALES[: int(max(1, min(attempts, evaluate.simulations_left // count)))]

        def run() -> Round:
            rolled = frame.roll(network_of(tensors, frame), first_rolls(rolls, count), scales)
            cost = cost_of(rolled, frame.units.problem)
            return Round(_best(frame, rolled, cost), rolled.simulations, {"cost": cost})

        return np.asarray(evaluate.round(run)["cost"])

    def _reorder(self, problem: Problem, evaluate: Evaluate) -> None:
        """Try the best devices in every order there is, where trials are left for that."""
        best = evaluate.best
        if best is None or evaluate.trials_left < 16:
            return
        device = problem.check(best.placement).device
        if not np.any(best.placement.prefetch_bytes):
            evaluate(all_orders(problem, device))

    def _learn(
        self,
        frames: Sequence[Framed],
        tensors: Mapping[str, Array],
        evaluate: Evaluate,
        until: Callable[[Evaluate], bool],
        best: list[float],
    ) -> None:
        """Trial and error: mostly under the order that has been best so far."""
        import torch

        from roost.learners.recorded import clipped
        from roost.placers._lister.training import Rates, batch_of
        from roost.policies.lister_network import ListerPolicy

        rates = Rates(rolls=self.batch, entropy=self.entropy)
        now = {name: value for name, value in tensors.items() if name not in ("ways", "rules")}
        with one_thread():
            policy = ListerPolicy(now)
            optimizer = torch.optim.Adam(policy.parameters(), lr=self.rate)
            number = 0
            while until(evaluate):
                order = int(np.argmin(best)) if number % 4 else (number // 4) % len(frames)
                frame = frames[order]
                rolls = free_rolls(evaluate.rng, frame, self.batch)
                done: list[Rolled] = []

                def run(
                    frame: Framed = frame, rolls: Rolls = rolls, done: list[Rolled] = done
                ) -> Round:
                    done.append(
                        frame.roll(
                            network_of(policy.arrays(), frame), rolls, SCALES[:1], record=True
                        )
                    )
                    cost = cost_of(done[0], frame.units.problem)
                    return Round(_best(frame, done[0], cost)[:1], done[0].simulations)

                evaluate.round(run)
                # The journal had it: the same schedules are made again, to learn the same from
                # them.
                if not done:
                    run()
                cost = cost_of(done[0], frame.units.problem)
                best[order] = min(best[order], float(cost.min()))
                batch = batch_of(frame, done[0], rolls, cost, evaluate.rng, rates)
                figures: dict[str, float] = {}
                for _ in range(rates.steps if batch is not None else 0):
                    figures = clipped(policy, optimizer, [batch], self.entropy)
                evaluate.note({"update": float(number), "mean_cost": float(cost.mean()), **figures})
                number += 1

    def learn(
        self,
        problems: Sequence[Problem],
        seconds: float,
        seed: int,
        on_note: Callable[[Mapping[str, float]], object],
        checkpoint: Any,
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Weights for problems like these, about so many seconds' work; and what the card is to say
        of them.

        `checkpoint` has `load() -> state or None` and `save(state)`, where a state is a dict of
        arrays.
        """
        import torch

        from roost.placers._lister.training import Course, Rates

        with one_thread():
            course = Course(problems, seconds, seed, self.most_units, Rates(), on_note)
            state = checkpoint.load()
            if state is not None:
                restore(course, state, checkpoint)
            course.run(checkpoint.save)
        orders = np.bincount(
            course.rules.rules[:, COLUMNS.index("order")].astype(int), minlength=len(LIST_ORDERS)
        )
        card = {
            "rules": {
                "columns": COLUMNS,
                "orders": dict(zip(LIST_ORDERS, orders.tolist(), strict=True)),
            },
            "plan": course.plan,
            "most_units": self.most_units,
            "torch": str(torch.__version__),
        }
        ways = {
            "ways": course.ways.astype(np.float32),
            "rules": course.rules.rules.astype(np.float32),
        }
        return {**course.tensors, **ways}, card


def _benches(problem: Problem) -> list[Bench]:
    """The problem for rules; where accelerators are unlike, a second time in whole groups
    (`_groups.py`)."""
    bench = Bench(problem)
    total = total_time(bench.units)[[device.kind != "cpu" for device in problem.cluster.devices]]
    total = total[np.isfinite(total)]
    if len(total) < 2 or total.max() <= _UNLIKE * total.min() or not may_group(problem):
        return [bench]
    return [bench, Bench(problem, groups_of(problem))]


def _near(bench: Bench, evaluate: Evaluate, count: int) -> Near:
    """Some of so many rules are to keep near the best placement so far, each as firmly as is drawn
    for it."""
    assert evaluate.best is not None
    best = bench.units.unit_devices(bench.problem.check(evaluate.best.placement).device)
    held = evaluate.rng.random(count) < _NEAR
    least, most = np.log(_HOLD)
    hold = np.exp(evaluate.rng.uniform(least, most, count))
    return Near(np.tile(best, (count, 1)), np.where(held, hold, 0.0))


def first_rolls(rolls: Rolls, count: int) -> Rolls:
    """The first so many of them."""
    return Rolls(*(np.array(value[:count]) for value in rolls))


def _best(frame: Framed, rolled: Rolled, cost: Array) -> list[Placement]:
    """The best of these schedules, each once."""
    found: dict[bytes, int] = {}
    for row in np.argsort(cost, kind="stable").tolist():
        found.setdefault(rolled.unit_device[row].tobytes(), row)
    return [frame.placement(rolled.unit_device[row]) for row in list(found.values())[:_KEPT]]
