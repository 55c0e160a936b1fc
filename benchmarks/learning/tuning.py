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

from curves import CLUSTERS, MODELS, problem_of
from provenance import measured_with, told

from roost.placers._lessons.sequence_learner import Network
from roost.placers.post import Post
from roost.placers.spotlight import Spotlight
from roost.search.solve import search

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
    return replace(placer, network=Network(heuristic_prior=logit))


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


def page() -> str:
    found, keys = rows(), [(model, cluster) for model in MODELS for cluster in CLUSTERS]
    lines = [
        "# Settings of `spotlight`, and of the start of `post`, side by side\n",
        f"Step times in seconds after {TRIALS:,} trials, from scratch or with a prior on the logit of the "
        "device that the best heuristic has; one figure for each of the seeds 10, 11 and 12, a dash for one not run. "
        "None of them is among the seeds of [the results](learning_x86_64_202611.md). "
        "`python benchmarks/learning/tuning.py run`, `page`, on one core; rows of the first three commits were "
        "made by the same call of `search` outside this script. "
        f"Commit {told(found)}; machine {told(found, 'machine')}.\n",
        "Batches of 8 without a bonus are the default now: on six problems and three seeds their step times are 0.988 "
        "of those with batches of 32 and a bonus, the default before (geometric mean; of the medians of seeds 0.990). "
        "12 of 18 pairs are better, and most of it is NMT (rnnlm 0.999, nmt 0.967, inception_v3 0.998). It takes 1.6 "
        "to 2.4 times the CPU seconds. On the seeds of the results little of that is left after 5,000 trials (0.1 %), "
        "and 3 % after 2,000. Batches of 16 with no bonus seemed ahead on k80x4, and were not on seeds of the "
        "results, where two of five were measured on all six rows before that was stopped. More than a fifth for "
        "refining, refining downhill alone, or without moving whole groups first: within 1 % of each other, tried on "
        "what `post` learns with seeds 10 and 11. Priors: the heuristic of seed 10 happens to lie near good "
        "placements of RNNLM, those of seeds 11 and 12 do not, and from these even the weakest prior does not always "
        "lead away; on NMT a prior is worth 1 % to 2 %. So `Spotlight.heuristic()` tries the heuristic first and has "
        "no prior, and `Post.heuristic()` likewise.\n",
        "Refining. What batches of 8 had learned after so many of the 5,000 trials was refined in several ways with "
        "the trials that were left: geometric means over the six problems and the three seeds, each refined three "
        "times with other chances. How learning goes does not depend on what comes after it, so one run of learning "
        "serves all of them; the script of this was not kept.\n",
        "| refined | for 1,000 trials | 1,500 | 2,000 | 2,500 |\n|---|---|---|---|---|\n"
        "| annealing, sixteen neighbours at once (the default before) | 0.4618 | 0.4622 | 0.4644 | 0.4648 |\n"
        "| downhill, sixteen neighbours at once | 0.4620 | 0.4621 | 0.4643 | 0.4643 |\n"
        "| downhill, one move at a time | 0.4602 | 0.4600 | 0.4643 | 0.4657 |\n"
        "| **the same, three of four moves of what the step waits for** | 0.4597 | **0.4587** | 0.4618 | 0.4633 |\n"
        "| the same at a temperature of 0.0001 falling to 0.00001 | 0.4594 | 0.4592 | 0.4624 | 0.4644 |\n",
        "So three tenths of the trials, downhill, is the default of `spotlight` now: 0.7 % below a fifth for "
        "annealing, most of it Inception-V3. Whole groups first, for 15 or 30 % of the refining: 0.4586 and 0.4591 "
        "with 1,500 trials, no better. Each placement in the order that list scheduling makes for it: nothing gained "
        "on Inception-V3 with seed 10. To end learning early where it stands still was not taken up: with seed 11, "
        "RNNLM on four GPUs stands at 0.386 s from 2,000 to 3,000 trials and falls to 0.330 by 3,500; NMT on four GPUs "
        "falls to the end. "
        "The table below is from before, all of it refined by annealing.\n",
        "| | " + " | ".join(f"{model} {cluster}" for model, cluster in keys) + " |",
        "|---|" + "---|" * len(keys),
    ]
    for name in SETTINGS:
        cells = []
        for key in keys:
            mine = [
                row
                for row in found
                if (row["settings"], row["model"], row["cluster"]) == (name, *key)
            ]
            by_seed = {row["seed"]: row["best"] for row in mine}
            cells.append(
                ", ".join(f"{by_seed[s]:.4f}" if s in by_seed else "-" for s in SEEDS)
                if by_seed
                else ""
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"] and len(sys.argv) < 4:
        run_all([name for name in "".join(sys.argv[2:]).split(";") if name])
    elif sys.argv[1:] == ["page"]:
        ROWS.with_suffix(".md").write_text(page())
    else:
        sys.exit(__doc__)
