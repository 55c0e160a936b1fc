"""How fast the environment is: steps in a CPU second, one episode at a time and many at once, at
100 groups.

    python benchmarks/speed/environment.py

Actions are drawn ahead, resets are counted in, and nothing is asserted about time. Beside it stands
what the simulator alone would take for the same placements, one by one; group by group simulates
once an episode, move by move at every step that moves something.
"""

from __future__ import annotations

import time

import numpy as np

from roost.core.problem import Problem
from roost.environments.placement import PlacementEnvironment
from roost.environments.vector import VectorEnvironment
from roost.placers._shared.groups import groups_of
from roost.simulator.compiled import Simulator
from roost.testing.problems import training_like

GROUPS = 100
NUM_DEVICES = 4
SIZES = (300, 1_000, 3_000)  # ops
MANY = (16, 64, 256)  # episodes at once
REPEATS = 5
MODES = ("group_by_group", "move_by_move")


def best_rate(work) -> float:  # type: ignore[no-untyped-def]
    """Of some repeats: `work` returns how many steps it took."""
    found = []
    for _ in range(REPEATS):
        begin = time.thread_time()
        steps = work()
        found.append(steps / (time.thread_time() - begin))
    return max(found)


def plain_rate(problem: Problem, mode: str) -> float:
    env = PlacementEnvironment(problem, mode=mode, groups=GROUPS)
    actions = np.random.default_rng(0).integers(0, NUM_DEVICES, 10 * GROUPS).tolist()
    env.reset(seed=0)

    def work() -> int:
        for action in actions:
            if env.step(action)[2]:
                env.reset()
        return len(actions)

    return best_rate(work)


def vector_rate(problem: Problem, mode: str, count: int) -> float:
    env = VectorEnvironment(count, problem, mode=mode, groups=GROUPS, autoreset_mode="SameStep")
    actions = np.random.default_rng(0).integers(0, NUM_DEVICES, (GROUPS, count))
    env.reset(seed=0)

    def work() -> int:
        for row in actions:
            env.step(row)
        return int(actions.size)

    return best_rate(work)


def simulator_rate(problem: Problem) -> float:
    """Placements in a CPU second, in one call."""
    units = groups_of(problem, GROUPS)
    devices = np.random.default_rng(0).integers(
        0, NUM_DEVICES, (64, units.num_units), dtype=np.int32
    )[:, units.unit]
    simulator = Simulator.of(problem)
    return best_rate(lambda: len(simulator.evaluate(devices, "rank")))


def main() -> None:
    for size in SIZES:
        problem = training_like(size, NUM_DEVICES)
        print(f"{size:>6,} ops, {groups_of(problem, GROUPS).num_units} groups: ", end="")
        print(f"the simulator alone {simulator_rate(problem):,.0f} placements/s")
        for mode in MODES:
            rates = [f"plain {plain_rate(problem, mode):,.0f}"]
            rates += [f"{count} at once {vector_rate(problem, mode, count):,.0f}" for count in MANY]
            print(f"        {mode:<16}{', '.join(rates)} steps/s", flush=True)


if __name__ == "__main__":
    main()
