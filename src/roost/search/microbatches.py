"""Find the best placement of a step over numbers of microbatches: M is part of the answer.

1. The whole batch, M = 1, is searched as any step.
2. Pipelines, data parallelism and mixtures are estimated for every M, before anything is unrolled.
   The most promising are unrolled, with gradients added up as their devices ask for, and simulated.
3. The best of these are annealed, first the best few in turn, then the best alone.

The answer is never worse than any of them, the whole batch included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite, isinf

import numpy as np

from roost.core.graph import UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Result, Trial, best_of
from roost.cost_models import estimate
from roost.errors import BudgetSpent, InputError
from roost.placers import Placer
from roost.placers.auto import Auto, Heat
from roost.placers.toolkit import CopiedStep, Sketch, sketch_trial, sketches
from roost.search.budget import Budget
from roost.search.evaluate import Evaluation, Progress, Search, Stopped
from roost.search.simulating import Simulating
from roost.search.solve import checked_seed, search
from roost.search.warm_up import warm_up
from roost.transforms.microbatch import Microbatch, Microbatched, refuse_batch_statistics

log = logging.getLogger(__name__)

COUNTS = (1, 2, 4, 8, 16)  # numbers of microbatches that are searched by default
_SECONDS = 10.0  # where neither trials nor seconds are given
_WHOLE = 0.1  # of the budget, for a first look at the whole batch
_STARTS = 0.5  # of the budget: no start is simulated after it
_TURNS = 0.1  # of the budget, for each of the best few that are annealed in turn
_FINALISTS = 3
_NEAR = 1.04  # times the shortest step: starts that are annealed in turn
_HOPELESS = 1.2  # times the shortest step: sketches estimated at more are not unrolled
# Starts made by hand are good: a hot chain would only lose them.
_HEAT = Heat(hot=1e-4, warm=3e-5, cold=3e-6)
_FAR = 1.25  # times the step of the whole batch: no sketch estimated at more is unrolled
_FIRST = 10  # trials of the first start, whatever the budget is
_LAST_RESORT = "offload"  # tried where nothing else fits
_MOST_OF_FAMILY = 8  # starts of one family
_MOST_OF_COUNT = 3  # of these with one number of microbatches


@dataclass(frozen=True)
class MicrobatchRow:
    """The best step that a placer has with a number of microbatches."""

    count: int
    placer: str
    step_time: float  # seconds
    feasible: bool


@dataclass(frozen=True, eq=False)
class PlainPlacement:
    """The best pipeline, data parallelism or mixture, as it was before any annealing."""

    microbatched: Microbatched
    problem: Problem
    trial: Trial


@dataclass(frozen=True, eq=False)
class MicrobatchResult:
    """The best placement over all numbers of microbatches, and its problem."""

    count: int  # microbatches
    microbatched: Microbatched
    problem: Problem  # of the unrolled graph
    result: Result
    rows: tuple[MicrobatchRow, ...]
    plain: tuple[PlainPlacement, ...] = ()  # one of each family that fits, the shortest first

    def instead(self, other: PlainPlacement) -> MicrobatchResult:
        """The result with another placement as its best."""
        result = replace(self.result, best=other.trial, bound=None, problem=other.problem.digest)
        count = other.microbatched.count
        return replace(
            self, count=count, microbatched=other.microbatched, problem=other.problem, result=result
        )

    @property
    def best(self) -> Trial:
        return self.result.best

    def __repr__(self) -> str:
        return f"MicrobatchResult({self.count} microbatches: {self.result!r})"


@dataclass(eq=False)
class _Start:
    """An unrolled step with its best placements so far."""

    microbatched: Microbatched
    problem: Problem
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial:
        return self.trials[0]

    def add(self, trial: Trial) -> None:
        """Keep a trial, the best first."""
        self.trials.append(trial)
        self.trials.sort(key=lambda each: (not each.feasible, each.missing_bytes, each.step_time))


def solve_microbatches(
    problem_of: Callable[[int], Problem],
    counts: Sequence[int] = COUNTS,
    *,
    seconds: float | None = None,
    trials: int | None = None,
    seed: int = 0,
    placer: str | Placer = "auto",
    on_trial: Callable[[Progress], object] | None = None,
    batch_statistics: bool = False,
    shared_inputs: Sequence[str] = (),
    threads: int | None = None,
    budget: Budget | None = None,
) -> MicrobatchResult:
    """Search placements of a step in M microbatches, for every M of `counts`.

    - `problem_of(M)` gives the problem of the step of one microbatch, captured at batch B / M.
    - `placer`: another placer than `auto` searches the unrolled step of each M, for equal shares of
      the budget.
    - `shared_inputs`: inputs that all microbatches read whole, by op name.
    - `batch_statistics`: allow layers such as BatchNorm, which see one microbatch at a time.
    - `threads` that anneal; default: as many as there are cores.
    - `budget` replaces seconds and trials.

    The default budget is 10 seconds; capturing is not counted. Equal trials give equal results.
    """
    chosen = _checked_counts(counts)
    seed = checked_seed(seed)
    if seconds is None and trials is None:
        seconds = _SECONDS
    limits = (inf if trials is None else trials, inf if seconds is None else seconds)
    Budget(*limits)
    problems = {count: problem_of(count) for count in chosen}
    if not batch_statistics and max(chosen) > 1:
        refuse_batch_statistics(problems[max(chosen)].graph)
    settings = Microbatch(1, shared_inputs=tuple(shared_inputs), batch_statistics=batch_statistics)
    placer_of_copies = Auto(threads=threads)
    warm_up(placer_of_copies, prove=True, busy=problems[chosen[0]].cluster.keeps_busy)
    spending = Budget(*limits) if budget is None else budget
    run = _Run(problems, settings, spending, seed, on_trial, threads)
    if not (placer == "auto" or isinstance(placer, Auto)):
        return run.searched_by(placer)
    if 1 in problems:
        run.search_whole(placer)
    if max(chosen) > 1:
        run.simulate_starts()
        run.anneal_in_turn(placer)
    return run.finished(placer)


class _Run:
    """One search over numbers of microbatches."""

    def __init__(
        self,
        problems: dict[int, Problem],
        settings: Microbatch,
        budget: Budget,
        seed: int,
        on_trial: Callable[[Progress], object] | None,
        threads: int | None,
    ) -> None:
        self.problems = problems
        self.settings = settings
        self.budget = budget
        self.seed = seed
        self.on_trial = None if on_trial is None else self._tell
        self._told = on_trial
        self._best: Trial | None = None  # of those that were told
        self.threads = threads
        self.starts: list[_Start] = []
        self.rows: dict[tuple[int, str], Trial] = {}
        self.chains: dict[int, _Start] = {}  # count -> its steps, gradients added up in a chain
        self.plain: dict[str, PlainPlacement] = {}  # family -> its best
        self.whole: Result | None = None
        self.ended = ""  # "interrupted" or "stopped": nothing more is searched

    @cached_property
    def sketches(self) -> list[Sketch]:
        """The sketches of all numbers of microbatches, the shortest first."""
        found: list[Sketch] = []
        for count, problem in self.problems.items():
            if count > 1:
                found += sketches(CopiedStep.of(problem), count)
        return sorted(found, key=lambda each: each.seconds)

    def _tell(self, progress: Progress) -> object:
        """Tell of a trial, with the best over all numbers of microbatches."""
        assert self._told is not None
        if progress.best.better_than(self._best):
            self._best = progress.best
        assert self._best is not None
        # A bound holds for one number of microbatches.
        bound = progress.bound if progress.best is self._best else None
        return self._told(replace(progress, best=self._best, bound=bound))

    def searched_by(self, placer: str | Placer) -> MicrobatchResult:
        """Search the unrolled step of each number of microbatches with one placer."""
        found: list[tuple[_Start, Result]] = []
        for count, problem in self.problems.items():
            made = replace(self.settings, count=count).apply(problem.graph)
            start = _Start(*self._unrolled(made))
            result = self._searched(start, placer, 1.0 / len(self.problems))
            for name, trial in {**result.baselines, result.placer: result.best}.items():
                self._note(count, name, trial)
            found.append((start, result))
            if self.ended:
                break
        best = best_of(result.best for _, result in found)
        start, result = next(each for each in found if each[1].best is best)
        return self._result(start.microbatched, start.problem, result, result.placer)

    def search_whole(self, placer: str | Placer) -> None:
        """Search the whole batch with a part of the budget; with all of it if M is 1 only."""
        problem = self.problems[1]
        alone = single_device(problem)
        shortest = min((sketch.seconds for sketch in self.sketches), default=inf)
        # Where no microbatches can pay, the whole batch has the whole budget.
        pays = alone is None or shortest <= _FAR * alone.step_time
        share = _WHOLE if self.sketches and pays else 1.0
        start = _Start(replace(self.settings, count=1).apply(problem.graph), problem)
        result = self._searched(start, placer, share)
        self.whole = result
        name = placer if isinstance(placer, str) else result.placer
        for each, trial in {**result.baselines, name: result.best}.items():
            self._note(1, each, trial)

    def simulate_starts(self) -> None:
        """Unroll and simulate the most promising sketches of each family, in turn."""
        fewest_seconds = (1 - _STARTS) * self.budget.seconds
        fewest_trials = (1 - _STARTS) * self.budget.trials
        self._note_single()
        families: set[str] = set()
        for sketch in _in_turn(self.sketches):
            if self.ended and (self.starts or self.whole is not None):
                break
            late = (
                self.budget.seconds_left < fewest_seconds or self.budget.trials_left < fewest_trials
            )
            hopeless = sketch.seconds > _HOPELESS * self._shortest()
            if (late or hopeless) and sketch.family in families and self.starts:
                continue
            if sketch.seconds > _FAR * self._whole_step:
                continue
            if sketch.family == _LAST_RESORT and isfinite(self._shortest()):
                continue
            try:
                self._simulate(sketch)
            except (BudgetSpent, KeyboardInterrupt, Stopped) as error:
                self.starts = [start for start in self.starts if start.trials]
                if not isinstance(error, BudgetSpent):
                    self.ended = "stopped" if isinstance(error, Stopped) else "interrupted"
                if self.whole is None and not self.starts:
                    raise
                break
            families.add(sketch.family)

    def _note_single(self) -> None:
        """Note the best single device with the fewest microbatches that fit there."""
        if any(placer == "single" and trial.feasible for (_, placer), trial in self.rows.items()):
            return
        for count, problem in self.problems.items():
            made = replace(self.settings, count=count).apply(problem.graph)
            found = single_device(unrolled_problem(problem, made))
            if found is not None:
                self._note(count, "single", found)
                return

    @property
    def _whole_step(self) -> float:
        """The step of the whole batch so far; infinite if it does not fit."""
        fits = self.whole is not None and self.whole.best.feasible
        return self.whole.best.step_time if self.whole is not None and fits else inf

    def _shortest(self) -> float:
        """The shortest step of a start that fits."""
        steps = [start.best.step_time for start in self.starts if start.best.feasible]
        return min(steps, default=inf)

    def _simulate(self, sketch: Sketch) -> None:
        """Unroll the step of a sketch, with sums that suit it, and simulate it."""
        if sketch.count not in self.chains:
            settings = replace(self.settings, count=sketch.count)
            made = settings.apply(self.problems[sketch.count].graph)
            self.chains[sketch.count] = _Start(*self._unrolled(made))
        chain = self.chains[sketch.count]
        devices = sketch.devices(chain.problem)
        arranged, _ = chain.microbatched.arranged(chain.problem.placement(devices))
        start = self._start(arranged)
        # However small the budget is, there is an answer.
        first = self.whole is None and not any(each.trials for each in self.starts)
        budget = Budget(trials=_FIRST) if first else self.budget
        state = Search(
            start.problem, Simulating(start.problem, 1), budget, self.seed, on_trial=self.on_trial
        )
        trial = sketch_trial(start.problem, sketch, Evaluation(state, sketch.family))
        self.budget.num_trials += budget.num_trials if first else 0
        trial = replace(trial, placer=sketch.family)
        start.add(trial)
        before = self.plain.get(sketch.family)
        if before is None or trial.better_than(before.trial):
            self.plain[sketch.family] = PlainPlacement(start.microbatched, start.problem, trial)
        self._note(sketch.count, sketch.family, trial)

    def _start(self, arranged: Microbatched) -> _Start:
        """The start with this graph, which may be there already."""
        for start in self.starts:
            if start.microbatched.graph == arranged.graph:
                return start
        self.starts.append(_Start(*self._unrolled(arranged)))
        return self.starts[-1]

    def _unrolled(self, made: Microbatched) -> tuple[Microbatched, Problem]:
        base = self.problems[made.count]
        return made, unrolled_problem(base, made)

    def anneal_in_turn(self, placer: str | Placer) -> None:
        """Anneal the best few starts for a short time each, and the whole batch if it is near."""
        shortest = self._shortest()
        if self.whole is not None and isfinite(shortest) and self._whole_step < _FAR * shortest:
            self._search_whole_again(placer, 2 * _TURNS)
        finalists = [
            start
            for start in self._ranked()[:_FINALISTS]
            if not start.best.feasible or start.best.step_time <= _NEAR * shortest
        ]
        if len(finalists) < 2:
            return
        for start in finalists:
            if self.budget.is_spent or self.ended:
                return
            self._anneal(start, _TURNS)

    def _search_whole_again(self, placer: str | Placer, share: float) -> Result:
        """Go on with the whole batch from its best placement so far, and keep the better one."""
        assert self.whole is not None
        before = self.whole
        own = placer if isinstance(placer, Auto) else Auto(threads=self.threads)
        own = replace(own, begin=(*own.begin, before.best.placement))
        made = replace(self.settings, count=1).apply(self.problems[1].graph)
        start = _Start(made, self.problems[1], [before.best])
        again = self._searched(start, own, share, prove=before.bound is None)
        best = best_of([before.best, again.best])
        self.whole = replace(again, best=best, bound=before.bound or again.bound)
        self._note(1, "auto", best)
        return self.whole

    def finished(self, placer: str | Placer) -> MicrobatchResult:
        """Anneal the best start with the rest of the budget, unless the whole batch is better."""
        ranked = self._ranked()
        whole = self.whole
        if whole is not None and not (ranked and ranked[0].best.better_than(whole.best)):
            made = replace(self.settings, count=1).apply(self.problems[1].graph)
            if len(self.problems) > 1 and not self.budget.is_spent and not self.ended:
                whole = self._search_whole_again(placer, 1.0)
            return self._result(made, self.problems[1], whole)
        best = self._rearranged(ranked[0])
        if self.ended:
            trial = best.best
            spent = replace(self._last, best=trial, graph=best.problem.graph.name, bound=None)
            return self._result(best.microbatched, best.problem, spent)
        if self.budget.is_spent:
            self.budget.trials += 8  # the answer is simulated once more, and its bound proved
            self.budget.seconds += 0.1
        result = self._anneal(best, 1.0, prove=True)
        return self._result(best.microbatched, best.problem, result)

    def _rearranged(self, start: _Start) -> _Start:
        """The start with sums arranged for its best placement, if that is better."""
        made, placement = start.microbatched.arranged(start.best.placement)
        if made.graph == start.microbatched.graph:
            return start
        other = _Start(*self._unrolled(made))
        trial = Simulating(other.problem, 1).trials([placement])[0]
        if not trial.better_than(start.best):
            return start
        self.budget.num_trials += 1
        other.add(replace(trial, placer=start.best.placer))
        return other

    def _anneal(self, start: _Start, share: float, prove: bool = False) -> Result:
        """Anneal from the best placements of a start."""
        begin = tuple(_distinct(trial.placement for trial in start.trials))[:4]
        result = self._searched(start, self._annealer(begin), share, prove)
        start.add(result.best)
        for placer, trial in {**result.baselines, "auto": result.best}.items():
            self._note(start.microbatched.count, placer, trial)
        return result

    def _annealer(self, begin: tuple[Placement, ...]) -> Auto:
        return Auto(baselines=("single",), begin=begin, threads=self.threads, heat=_HEAT)

    def _searched(
        self, start: _Start, placer: str | Placer, share: float, prove: bool = True
    ) -> Result:
        """Search with a share of the whole budget, as far as it is left."""
        seconds = min(self.budget.seconds_left, share * self.budget.seconds)
        trials = min(self.budget.trials_left, share * self.budget.trials)
        part = Budget(
            trials=inf if isinf(trials) else max(1, int(trials)),
            seconds=inf if isinf(seconds) else max(0.05, seconds),
            clock=self.budget.clock,
        )
        result = search(
            start.problem,
            placer,
            seed=self.seed,
            on_trial=self.on_trial,
            workers=self.threads,
            budget=part,
            prove=prove,
        )
        self.budget.num_trials += part.num_trials
        self._last = result
        if result.ended in ("interrupted", "stopped"):
            self.ended = result.ended
        return result

    def _ranked(self) -> list[_Start]:
        """The starts, the best first."""
        ranked: list[_Start] = []
        for start in self.starts:
            worse = (n for n, each in enumerate(ranked) if start.best.better_than(each.best))
            ranked.insert(next(worse, len(ranked)), start)
        return ranked

    def _note(self, count: int, placer: str, trial: Trial) -> None:
        if trial.better_than(self.rows.get((count, placer))):
            self.rows[count, placer] = trial

    def _result(
        self, made: Microbatched, problem: Problem, result: Result, placer: str = "auto"
    ) -> MicrobatchResult:
        rows = [
            MicrobatchRow(count, placer, trial.step_time, trial.feasible)
            for (count, placer), trial in sorted(self.rows.items())
        ]
        spent = replace(
            result,
            placer=placer,
            num_trials=self.budget.num_trials,
            seconds=self.budget.elapsed,
            problem=problem.digest,
            ended=self.ended or result.ended,
        )
        fitting = [each for each in self.plain.values() if each.trial.feasible]
        plain = sorted(fitting, key=lambda each: each.trial.step_time)
        return MicrobatchResult(made.count, made, problem, spent, tuple(rows), tuple(plain))


def single_device(problem: Problem) -> Trial | None:
    """The fastest device that has room for a whole step; None if none has."""
    whole = np.flatnonzero(problem.allowed.all(axis=0)).tolist()
    placements = [problem.placement(np.full(problem.graph.num_ops, each)) for each in whole]
    trials = [t for t in Simulating(problem, 1).trials(placements) if t.feasible]
    return replace(best_of(trials), placer="single") if trials else None


def unrolled_problem(base: Problem, made: Microbatched) -> Problem:
    """The problem of an unrolled graph, with the costs of the step of one microbatch.

    Sums of gradients cost what a roofline of the cluster says. Where ops were timed, they cost as
    many seconds a byte as updates.
    """
    if made.count == 1:
        return base
    graph = made.graph
    updates = base.graph.phase == UPDATE
    moved = base.graph.bytes_read + base.graph.bytes_written
    if base.costs.source == "roofline" or not moved[updates].sum():
        estimated = estimate(graph, base.cluster).op_time
    else:
        rate = base.op_time[updates].sum(axis=0) / moved[updates].sum()
        estimated = (graph.bytes_read + graph.bytes_written)[:, None] * rate[None, :]
    costs = replace(base.costs, op_time=made.op_time(base.op_time, estimated))
    return Problem(graph, base.cluster, costs)


def _in_turn(found: Sequence[Sketch]) -> Iterable[Sketch]:
    """The best of each family, then the second best of each, and so on."""
    rows: dict[str, list[Sketch]] = {}
    for sketch in found:
        row = rows.setdefault(sketch.family, [])
        same = sum(each.count == sketch.count for each in row)
        if len(row) < _MOST_OF_FAMILY and same < _MOST_OF_COUNT:
            row.append(sketch)
    for turn in range(_MOST_OF_FAMILY):
        for row in sorted(rows.values(), key=lambda row: row[0].seconds):
            if turn < len(row):
                yield row[turn]


def _distinct(placements: Iterable[Placement]) -> list[Placement]:
    return list({placement.digest: placement for placement in placements}.values())


def _checked_counts(counts: Sequence[int]) -> list[int]:
    if isinstance(counts, int) or not counts:
        raise InputError(f"counts is {counts!r}; give numbers of microbatches, such as (1, 2, 4)")
    return sorted({Microbatch(count).count for count in counts})
