"""The answer of every placer on three problems with two seeds, to show that a change of the code
changed no result.

    python benchmarks/answers.py write FILE       a line of JSON for each search
    python benchmarks/answers.py compare A B      exit code 1 where an answer differs or is missing

Each line has the digest of the placement, its step time as the exact float, and the number of
trials. Budgets are trials, so a line does not depend on the speed of the machine. `cpsat` stops by
its own clock, so it gets a problem that it solves to the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import roost
from roost import catalog
from roost.errors import RoostError
from roost.search.solve import search

HERE = Path(__file__).parent
SEEDS = (0, 1)
TRIALS = {
    "annealing": 20_000,
    "auto": 20_000,
    "descent": 5_000,
    "genetic": 5_000,
    "lister": 200,
    "placeto": 60,
}
DEFAULT_TRIALS = 120


def problems() -> dict[str, roost.Problem]:
    """A wide model on four GPUs, a training step that does not fit, and a recurrent model on unlike
    GPUs."""
    inception = roost.load(HERE.parent / "examples" / "inception_v3.json.gz")
    gpt2 = roost.zoo.build(
        "gpt2", train=True, layers=2, hidden=64, heads=2, vocab=500, batch=2, length=32
    )
    rnnlm = roost.zoo.build("rnnlm", train=True, layers=2, hidden=64, vocab=500, batch=8, length=5)
    two = roost.cluster("k80x2")
    small = [
        device if device.kind == "cpu" else replace(device, memory=900_000)
        for device in two.devices
    ]
    return {
        "inception_v3/k80x4": roost.estimate(inception, "k80x4"),
        "gpt2/k80x2, 900 kB each": roost.estimate(gpt2, replace(two, devices=tuple(small))),
        "rnnlm/rtx4090_rtx3060": roost.estimate(rnnlm, "rtx4090_rtx3060"),
    }


def answer(problem: roost.Problem, placer: str, seed: int) -> dict[str, Any]:
    """One search, or the class and first words of the error that it ends with."""
    try:
        result = search(
            problem, placer, trials=TRIALS.get(placer, DEFAULT_TRIALS), seed=seed, prove=False
        )
    except RoostError as error:
        return {"error": type(error).__name__}
    best = result.best
    return {
        "digest": best.placement.digest,
        "step_time": float(best.step_time).hex(),
        "feasible": bool(best.feasible),
        "trials": int(result.num_trials),
    }


def answers() -> Iterator[dict[str, Any]]:
    """All searches, one after the other."""
    for name, problem in problems().items():
        for placer in catalog.names("placers"):
            if placer == "cpsat" and problem.graph.num_ops > 300:
                continue
            for seed in SEEDS:
                yield {
                    "problem": name,
                    "placer": placer,
                    "seed": seed,
                    **answer(problem, placer, seed),
                }


def compare(before: Path, after: Path) -> int:
    """Print what differs; 1 where anything does."""
    left, right = (
        {key(row): row for row in map(json.loads, path.read_text().splitlines())}
        for path in (before, after)
    )
    differing = [name for name in left.keys() | right.keys() if left.get(name) != right.get(name)]
    for name in sorted(differing):
        print(f"{name}: {left.get(name)} before, {right.get(name)} after")
    print(
        f"{len(left.keys() & right.keys()) - len(set(differing) & left.keys() & right.keys())} of {len(left)} equal"
    )
    return 1 if differing else 0


def key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["problem"], row["placer"], row["seed"]


def main() -> int:
    match sys.argv[1:]:
        case ["write", path]:
            with Path(path).open("w") as file:
                for row in answers():
                    print(json.dumps(row), file=file, flush=True)
                    print(json.dumps(row), flush=True)
            return 0
        case ["compare", before, after]:
            return compare(Path(before), Path(after))
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
