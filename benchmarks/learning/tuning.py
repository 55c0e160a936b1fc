"""Settings of `spotlight`, and of the start of `post`, on seeds that no other page of results is
made with.

    python benchmarks/learning/tuning.py run [SETTINGS]    rows, one for each run, but for those
    that are there already
    python benchmarks/learning/tuning.py page              the page made from them

Not every setting was run on every seed in the time there was; `run` runs what is missing, of all
settings or of those named, separated by ;. In the environment: WORKERS=14 for so many runs at once,
a core each, ROWS for another file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from curves import CLUSTERS, MODELS, problem_of

import rows as results
from roost.placers._learning.sequence_policy import SequenceNetwork
from roost.placers.post import Post
from roost.placers.spotlight import Spotlight
from roost.search.solve import search
from rows import measured_with

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ROWS = Path(
    os.environ.get("ROWS", RESULTS / f"learning_tuning_{platform.machine()}_2core_202611.jsonl")
)
SEEDS, TRIALS = (10, 11, 12), 5_000
# The others on k80x4 alone.
EVERYWHERE = ("batch 32, entropy bonus", "batch 8 (the default now, but for refining)")

# Rows of all of these were refined by annealing, which is no longer done.
THIRTY_TWO = Spotlight(batch=32, entropy=0.01, refine=0.2)
SIXTEEN = Spotlight(batch=16, entropy=0.01, refine=0.2)
EIGHT = Spotlight(batch=8, entropy=0.0, refine=0.2)


def prior(placer: Spotlight, logit: float) -> Spotlight:
    return replace(placer, network=SequenceNetwork(heuristic_prior=logit))


SETTINGS: dict[str, Spotlight | Post] = {
    "batch 32, entropy bonus": THIRTY_TWO,
    "batch 32, entropy bonus, two fifths for refining": replace(THIRTY_TWO, refine=0.4),
    "batch 16, entropy bonus": SIXTEEN,
    "batch 16": replace(SIXTEEN, entropy=0.0),
    "batch 8 (the default now, but for refining)": EIGHT,
    "batch 8, three epochs": replace(EIGHT, epochs=3),
    "batch 32, entropy bonus, prior 1": prior(THIRTY_TWO, 1.0),
    "batch 32, entropy bonus, prior 2": prior(THIRTY_TWO, 2.0),
    "batch 32, entropy bonus, prior 3": prior(THIRTY_TWO, 3.0),
    "batch 16, entropy bonus, prior 2": prior(SIXTEEN, 2.0),
    "batch 16, entropy bonus, prior 3": prior(SIXTEEN, 3.0),
    "batch 16, prior 3": prior(replace(SIXTEEN, entropy=0.0), 3.0),
    "batch 8, prior 1": prior(EIGHT, 1.0),
    "batch 8, prior 2": prior(EIGHT, 2.0),
    "`post`, prior 5": Post(heuristic_prior=5.0),
    "`post`, the best heuristic tried first": Post(heuristic_first=True),
}


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def run(job: tuple[str, str, str, int]) -> dict[str, Any]:
    name, model, cluster, seed = job
    placer = SETTINGS[name]
    if isinstance(placer, Spotlight):
        placer = replace(placer, network=replace(placer.network, train_on="cpu"))
    notes: list[Any] = []
    begin = time.process_time()
    problem = problem_of(model, cluster)
    best = search(
        problem, placer, None, TRIALS, seed, prove=False, on_note=notes.append, workers=1
    ).best
    found = {
        "best": best.step_time,
        "learned": notes[-1]["best"],
        "cpu": round(time.process_time() - begin, 1),
    }
    return {
        "settings": name,
        "model": model,
        "cluster": cluster,
        "seed": seed,
        **found,
        **measured_with(),
    }


def run_all(names: list[str]) -> None:
    done = {(row["settings"], row["model"], row["cluster"], row["seed"]) for row in rows()}
    jobs = [
        (name, model, cluster, seed)
        for seed in SEEDS  # all settings on one of them, then on the next
        for name in names or SETTINGS
        for model in MODELS
        for cluster in CLUSTERS
        if (name in EVERYWHERE or cluster == "k80x4") and (name, model, cluster, seed) not in done
    ]
    workers = int(os.environ.get("WORKERS", "1"))
    with multiprocessing.get_context("spawn").Pool(workers) as pool, ROWS.open("a") as file:
        for row in pool.imap_unordered(run, jobs):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(
                *(row[key] for key in ("settings", "model", "cluster", "seed", "best", "cpu")),
                flush=True,
            )


def _compared(found: list[dict[str, Any]], name: str, other: str) -> list[str]:
    """A line of ratios, where there are pairs."""

    def by_case(which: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        mine = (row for row in found if row["settings"] == which)
        return {(row["model"], row["cluster"], row["seed"]): row for row in mine}

    ours, theirs = by_case(name), by_case(other)
    pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
    if not pairs or name == other:
        return []
    used = [row for pair in pairs for row in pair]
    steps = [one["best"] / two["best"] for one, two in pairs]
    spent = [one["cpu"] / two["cpu"] for one, two in pairs]
    better = sum(ratio < 1 for ratio in steps)
    means = " | ".join(
        results.mark(f"{np.exp(np.mean(np.log(r))):.3f}", used) for r in (steps, spent)
    )
    return [f"| {name} | {len(pairs)} | {results.mark(str(better), used)} | {means} |"]


def page(path: Path) -> str:
    """Step times of each setting and seed; ratios where all pairs are there."""
    found, keys = results.read(path), [(model, cluster) for model in MODELS for cluster in CLUSTERS]
    seeds = ", ".join(map(str, SEEDS))
    lines = [
        "# Settings of `spotlight`, and of the start of `post`, side by side\n",
        results.provenance(found),
        f"Step times in seconds after {TRIALS:,} trials, from scratch or with a prior on the logit of the "
        f"device that the best heuristic has; one figure for each of the seeds {seeds}, a dash for one not "
        "run. None of them is among the seeds of [the results](learning_x86_64_202611.md). All of it was "
        "refined by annealing. `python benchmarks/learning/tuning.py run`, `page`, on one core.\n",
        f"Ratios of step times to `{EVERYWHERE[0]}`, over the pairs of one problem and one seed that both "
        "have:\n",
        "| | pairs | better | geometric mean | CPU seconds |", "|---|---|---|---|---|",
        *(line for name in SETTINGS for line in _compared(found, name, EVERYWHERE[0])),
        "",
        "| | " + " | ".join(f"{model} {cluster}" for model, cluster in keys) + " |",
        "|---|" + "---|" * len(keys),
    ]  # fmt: skip
    for name in SETTINGS:
        cells = []
        for key in keys:
            mine = [
                row
                for row in found
                if (row["settings"], row["model"], row["cluster"]) == (name, *key)
            ]
            by_seed = {row["seed"]: results.mark(f"{row['best']:.4f}", [row]) for row in mine}
            cells.append(", ".join(by_seed.get(seed, "-") for seed in SEEDS) if by_seed else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"] and len(sys.argv) < 4:
        run_all([name for name in "".join(sys.argv[2:]).split(";") if name])
    elif sys.argv[1:] == ["page"]:
        ROWS.with_suffix(".md").write_text(page(ROWS))
    else:
        sys.exit(__doc__)
