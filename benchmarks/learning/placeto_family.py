"""Parts of Placeto left out, over a family: each variant learns on the same graphs and is tried on
unseen ones.

    python benchmarks/learning/placeto_family.py --seconds 100

The paper's claim for messages and pools is that they generalise better. All variants learn as many
rounds, on members 0 to 23 of cifar10 on k80x4, and then place members 24 to 31 with 64 episodes and
no learning, without asking single and expert. Step times of `auto` are those of
benchmarks/results/generalise_*.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from placeto_unseen import ROWS, beside, timed

import roost
from roost.placers._placeto.settings import SETTINGS
from roost.placers.placeto import Placeto
from roost.policies.weights import save_weights
from rows import measured_with

LEARNED, TESTED = range(24), range(24, 32)
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no messages, no pools": {"messages": False, "pools": False},
    "no messages": {"messages": False},
    "no pools": {"pools": False},
    "no features of devices": {"device_features": False},
    "no features of devices, no messages, no pools": {
        "device_features": False,
        "messages": False,
        "pools": False,
    },
}


class Nowhere:
    """No checkpoint is kept."""

    def load(self) -> None:
        return None

    def save(self, state: Any) -> None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="cifar10")
    parser.add_argument("--on", default="k80x4", help="the cluster to learn for and to test on")
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="of learning, as planned for the whole"
    )
    parser.add_argument("--learn-seed", type=int, default=0)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="with semicolons")
    parser.add_argument(
        "--graphs", type=Path, default=Path("out/families"), help="where captured graphs are kept"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=ROWS)
    given = parser.parse_args()
    known = {graph: row for (_, graph), row in beside(given.family, [given.on]).items()}
    problems = {
        number: roost.estimate(
            roost.load(given.graphs / f"{given.family}_0_{number:03d}.json.gz"), given.on
        )
        for number in (*LEARNED, *TESTED)
    }
    for variant in given.variants.split(";"):
        setting = replace(SETTINGS["tuned"], **VARIANTS[variant])
        began = time.process_time()
        tensors, card = Placeto(setting=setting).learn(
            [problems[number] for number in LEARNED],
            given.seconds,
            given.learn_seed,
            lambda note: None,
            Nowhere(),
        )
        spent = time.process_time() - began
        with tempfile.TemporaryDirectory() as folder, given.output.open("a") as out:
            weights = Path(folder) / "policy.safetensors"
            save_weights(weights, "placeto", tensors, {})
            placer = Placeto(setting=setting, weights=str(weights), tune=False, baselines=())
            for number in TESTED:
                graph = f"{given.family}_0_{number:03d}"
                for seed in range(given.seeds):
                    best, cpu = timed(problems[number], placer, seed, warm=seed == 0)
                    row = {
                        **measured_with(), "part": "family", "family": given.family, "graph": graph,
                        "cluster": given.on, "variant": variant, "learned_seed": given.learn_seed,
                        "rounds": card["rounds"], "learned_cpu": spent, "seed": seed, "auto": known[graph]["auto"],
                        "best": best, "best_cpu": cpu,
                    }  # fmt: skip
                    out.write(json.dumps(row) + "\n")
                print(variant, graph, round(best / known[graph]["auto"], 3), flush=True)


if __name__ == "__main__":
    main()
