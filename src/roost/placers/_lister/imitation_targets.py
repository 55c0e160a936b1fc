"""Good placements to imitate: the best of the rules, each annealed for a while, all with a fixed
amount of work."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.placers._annealing.annealer import Annealer
from roost.placers._lister.problem_view import Framed
from roost.placers.rules import draw

_RULES = 128
_HOT, _COLD = 0.003, 0.00003  # temperatures, as shares of the step time
_CLOSE = 1.03  # as good as the best, as a factor on its step time


def targets_of(
    under: Framed, rng: np.random.Generator, starts: int, batches: int, closeness: float = _CLOSE
) -> tuple[Array, float]:
    """[targets, units] placements in canonical names, all about as good as the best; and the best
    step time.

    Each of so many starts is annealed for so many batches. Where nothing fits, there are no
    targets.
    """
    rolled = under.under.schedule(draw(under.under, rng, _RULES))
    problem, units = under.units.problem, under.units
    found: list[tuple[float, float, Array]] = []
    for number, row in enumerate(rolled.ranked()[:starts]):
        start = rolled.unit_device[row]
        annealer = Annealer(problem, units, under.placement(start))
        chain = annealer.chain(start, int(rng.integers(2**62)) + number)
        annealer.run(chain, batches if annealer.batch > 1 else 4 * batches, _HOT, _COLD)
        excess, step = annealer.cost(chain.best)
        found.append((excess, step, chain.best.copy()))
    found = [each for each in found if each[0] == 0 and np.isfinite(each[1])]
    if not found:
        return np.zeros((0, units.num_units), np.int32), float("inf")
    best = min(step for _, step, _ in found)
    kept = {
        under.canonical(devices).tobytes(): devices
        for _, step, devices in found
        if step <= closeness * best
    }
    return np.stack([under.canonical(devices) for devices in kept.values()]), best
