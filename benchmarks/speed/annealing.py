"""How fast annealing is beside the simulator it stands on: moves in a CPU second, side by side in
one run.

    python benchmarks/speed/annealing.py

Nothing is asserted about time. The simulator is given the very moves that annealing draws, all as
neighbours of one placement; so what is left is the loop: drawing moves, choosing, keeping the best,
what the step waits for.
"""

from __future__ import annotations

import time

import numpy as np

from roost.core.problem import Problem
from roost.placers._annealing.annealer import Annealer
from roost.placers._annealing.proposals import even_odds
from roost.placers._annealing.sixteen_moves import STAY, draw_moves, settle
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator
from roost.testing.problems import scattered, training_like

SIZES = (1_000, 10_000, 100_000)
REPEATS = 5


def best_seconds(work) -> float:  # type: ignore[no-untyped-def]
    found = []
    for _ in range(REPEATS):
        begin = time.thread_time()
        work()
        found.append(time.thread_time() - begin)
    return min(found)


def drawn_moves(annealer: Annealer, start: np.ndarray, count: int) -> tuple[np.ndarray, ...]:  # type: ignore[type-arg]
    """So many batches of moves as annealing would draw them from one placement."""
    chain, scratch = annealer.chain(start, 1), annealer._new_scratch()
    draft = scratch.draft
    settle(annealer.layout, annealer.space, annealer.tables, chain, scratch)
    even_odds(draft)
    starts, ops, devices = [np.zeros(1, np.int64)], [], []
    for _ in range(count):
        draw_moves(annealer.space, chain, scratch, 0, 0)
        size = int(draft.start[STAY])
        starts.append(draft.start[1 : STAY + 1] + starts[-1][-1])
        ops.append(draft.op[:size].copy())
        devices.append(draft.device[:size].copy())
    return np.concatenate(starts), np.concatenate(ops), np.concatenate(devices)


def measure(problem: Problem) -> tuple[float, float]:
    """Moves in a CPU second: of the simulator alone, and of annealing."""
    units = Units.of(problem)
    start = units.unit_devices(scattered(problem, run=16))
    placement = problem.placement(units.devices(start))
    annealer = Annealer(problem, units, placement)
    simulator = Simulator.of(problem)
    batches = max(8, 3_000_000 // (16 * problem.graph.num_ops))
    moves = drawn_moves(annealer, start, batches)
    raw = (len(moves[0]) - 1) / best_seconds(lambda: simulator.neighbours(placement, *moves))
    spent = 0

    def anneal() -> None:
        nonlocal spent
        chain = annealer.chain(start, 1)
        spent = annealer.run(chain, batches, 1e-12, 1e-12)

    seconds = best_seconds(anneal)
    return raw, spent / seconds


def main() -> None:
    for size in SIZES:
        raw, annealed = measure(training_like(size, 4))
        print(
            f"{size:>7,} ops: {raw:>10,.0f} simulated, {annealed:>10,.0f} annealed moves/s, loop {raw / annealed:.2f}"
        )


if __name__ == "__main__":
    main()
