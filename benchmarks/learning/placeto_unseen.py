"""Placeto on graphs it has never seen: 64 episodes, no learning on the graph; beside what
`generalise.py` measured.

    roost learn --family cifar10 --placer placeto --on k80x4 --seconds 200 -o out/placeto_cifar10
    python benchmarks/learning/placeto_unseen.py --family cifar10 --weights
    out/placeto_cifar10/policy.safetensors

Members 24 to 31 of a family are never learned on. Step times of `auto`, `rules`, `lister` and of
the best of single and expert are those of benchmarks/results/generalise_*.jsonl, on the same
graphs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import roost
from roost.core.problem import Problem
from roost.placers._placeto.learner import PlacetoLearner
from roost.placers._placeto.settings import SETTINGS
from roost.placers.placeto import Placeto
from roost.policies.weights import save_weights
from roost.search.solve import search
from rows import measured_with

RESULTS = Path(__file__).parents[1] / "results"
BESIDE = RESULTS / "generalise_x86_64_2core_202611.jsonl"
ROWS = RESULTS / "placeto_x86_64_2core_202611.jsonl"
# What is kept of a row of generalise.py, and under which name.
KEPT = {
    "auto": "auto", "rules_like_lister": "rules", "only_64_rules": "rules_64", "lister": "lister", "single": "single",
    "expert": "expert", "best_of_single_and_expert": "best_of_single_and_expert",
}  # fmt: skip


def untrained(folder: Path) -> Path:
    """Weights of a policy that knows nothing: every device is as likely."""
    path = folder / "untrained.safetensors"
    save_weights(path, "placeto", PlacetoLearner(SETTINGS["tuned"], 0, 1).weights, {})
    return path


def beside(family: str, clusters: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """What generalise.py measured on each cluster and graph with its first seeds; nothing was made
    up to learn on."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in BESIDE.read_text().splitlines():
        row = json.loads(line)
        first = row["seed"] == row["learned_seed"] == 0 and "made-up" not in row["learned_on"]
        if first and row["family"] == family and row["cluster"] in clusters:
            found[row["cluster"], row["graph"]] = {said: row[name] for name, said in KEPT.items()}
    return found


def timed(problem: Problem, placer: Placeto, seed: int, warm: bool = True) -> tuple[float, float]:
    """The step time of the best episode, infinite where it does not fit, and CPU seconds; if warm
    of a second run."""
    if warm:
        search(problem, placer, trials=10_000, seed=seed, prove=False)
    began = time.process_time()
    best = search(problem, placer, trials=10_000, seed=seed, prove=False).best
    return best.step_time if best.feasible else float("inf"), time.process_time() - began


def measured(problem: Problem, weights: Path, no_weights: Path, seed: int) -> dict[str, float]:
    found = {}
    for name, file, baselines in (
        ("placeto", weights, ("single", "expert")),
        ("placeto_alone", weights, ()),
        ("untrained", no_weights, ()),
    ):
        placer = Placeto(weights=str(file), tune=False, baselines=baselines)
        found[name], found[f"{name}_cpu"] = timed(problem, placer, seed, warm=seed == 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", required=True)
    parser.add_argument(
        "--on", default="k80x4,a100x4,rtx4090_rtx3060", help="clusters to test on, with commas"
    )
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument(
        "--graphs", type=Path, default=Path("out/families"), help="where captured graphs are kept"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=ROWS)
    given = parser.parse_args()
    learned_on = ",".join(json.loads((given.weights.parent / "card.json").read_text())["clusters"])
    with tempfile.TemporaryDirectory() as folder, given.output.open("a") as out:
        nothing = untrained(Path(folder))
        for (cluster, graph), known in beside(given.family, given.on.split(",")).items():
            problem = roost.estimate(roost.load(given.graphs / f"{graph}.json.gz"), cluster)
            for seed in range(given.seeds):
                row = {
                    **measured_with(), "part": "unseen", "family": given.family, "graph": graph, "cluster": cluster,
                    "learned_on": learned_on, "seed": seed, **known,
                    **measured(problem, given.weights, nothing, seed),
                }  # fmt: skip
                out.write(json.dumps(row) + "\n")
                out.flush()
            print(
                cluster,
                graph,
                {k: round(row[k] / row["auto"], 3) for k in ("placeto", "untrained")},
                flush=True,
            )


if __name__ == "__main__":
    main()
