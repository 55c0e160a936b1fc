"""The table of the zoo: every model captured, for inference and for a training step, each in a
process of its own.

    python benchmarks/zoo_table.py [MODEL ...]

Writes docs/zoo.md, and src/roost/zoo/figures.json that `roost zoo` shows. CPU seconds include
building the model and importing PyTorch; peak memory is the resident memory of the process, of
which PyTorch alone takes about 300 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "src" / "roost" / "zoo" / "figures.json"
EXTRA = {"llama_70b": ("llama", {"size": "70b"}), "nmt_8_layers": ("nmt", {"layers": 8})}

ONE = """
import json, resource, sys, time
name, train, settings = json.loads(sys.argv[1])
from roost import zoo
from roost.transforms.colocate import Colocate
begin = time.process_time()
graph = zoo.build(name, train=train, **settings)
seconds = time.process_time()
groups = Colocate().apply(graph).graph
alone = int((groups.group < 0).sum())
print(json.dumps({
    "ops": graph.num_ops,
    "edges": graph.num_edges,
    "groups": groups.num_groups + alone,
    "parameter_bytes": int(graph.output_bytes[graph.is_parameter].sum()),
    "flop": float(graph.flop.sum()),
    "seconds": round(seconds, 1),
    "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
}))
"""

PARAMETERS = """
import json, sys, torch
from roost import zoo
name, settings = json.loads(sys.argv[1])
with torch.device("meta"):
    model, _ = zoo.model(name, train=False, **settings)
print(sum(parameter.numel() for parameter in model.parameters()))
"""


def run(code: str, argument: object) -> str:
    return subprocess.check_output(
        [sys.executable, "-c", code, json.dumps(argument)], text=True, cwd=ROOT
    )


def main() -> None:
    names = sys.argv[1:] or sorted(
        path.stem
        for path in (ROOT / "src" / "roost" / "zoo").glob("*.py")
        if not path.stem.startswith("_")
    )
    found = json.loads(FIGURES.read_text()) if FIGURES.exists() and sys.argv[1:] else {}
    for label in [*names, *(() if sys.argv[1:] else EXTRA)]:
        name, settings = EXTRA.get(label, (label, {}))
        row: dict[str, object] = {"parameters": int(run(PARAMETERS, [name, settings]))}
        for way, train in (("inference", False), ("train", True)):
            row[way] = json.loads(run(ONE, [name, train, settings]))
        found[label] = row
        print(label, row, file=sys.stderr, flush=True)
    FIGURES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    (ROOT / "docs" / "zoo.md").write_text(page(found))


FAMILIES = """
## Families

A family is random models of one kind, after Placeto. Learn on some members, then place others:

| family | members |
|---|---|
| `cifar10` | convolutional cells, wired at random |
| `ptb` | recurrent cells |
| `nmt` | translation |

`roost.zoo.member("cifar10", 24, seed=0)` is the graph of the 25th member. By default `roost learn` takes the first 24
of seed 0, so members from 24 on are unseen.
"""

INTRODUCTION = """# The zoo

Models of the papers and of today, written from scratch, with random weights. If a paper's settings are unsure, the
docstring of the model says so.

| to | call |
|---|---|
| list the models | `roost zoo` |
| see the settings of one | `roost zoo NAME` |
| capture one | `roost capture NAME -o graph.json --train --set batch=8` |
| capture one in Python | `roost.zoo.build(NAME, train=True, batch=8)` |

The table is made by `python benchmarks/zoo_table.py`, at the default settings.

- Groups are those of `Colocate()`.
- CPU seconds include importing PyTorch and building the model.
- Memory is the most that the process held. About 300 MB of it is PyTorch.
"""


def page(found: dict[str, dict]) -> str:  # type: ignore[type-arg]
    lines = [
        INTRODUCTION,
        "| model | parameters | step | ops | edges | groups | FLOP | capture CPU s | memory MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(found.items()):
        for way in ("inference", "train"):
            facts = row[way]
            lines.append(
                f"| {name} | {row['parameters'] / 1e6:,.1f} M | {way} | {facts['ops']} | {facts['edges']} "
                f"| {facts['groups']} | {facts['flop'] / 1e9:,.1f} G | {facts['seconds']} | {facts['megabytes']} |"
            )
    return "\n".join([*lines, FAMILIES])


if __name__ == "__main__":
    main()
