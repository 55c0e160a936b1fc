"""Tries an installed wheel, outside the checkout: the line from a graph to a plan, and the command.

`make wheel` runs this. pytest does not collect it.
"""

import subprocess
import sys
from pathlib import Path

import torch

import roost


def main() -> None:
    checkout = Path(__file__).parents[1]
    assert checkout / "src" not in Path(roost.__file__).parents, roost.__file__
    graph = roost.zoo.build("gpt2", layers=1, hidden=16, heads=2, vocab=20, batch=1, length=4)
    result = roost.solve(roost.estimate(graph, "k80x2"), "single")
    assert result.best.feasible
    module = torch.nn.Linear(4, 4).eval()
    graph = roost.capture(module, (torch.zeros(1, 4),))
    assert graph.num_ops > 2
    for command in (["-m", "roost", "--version"], ["-m", "roost", "placers"]):
        done = subprocess.run(
            [sys.executable, *command], check=True, capture_output=True, text=True
        )
        assert done.stdout.strip(), command
    print(f"roost {roost.__version__} from {Path(roost.__file__).parent}: the wheel works")  # noqa: T201


if __name__ == "__main__":
    main()
