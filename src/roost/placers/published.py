"""The published placement of Inception-V3 on four GPUs, a fixed baseline for this model only.

Mirhoseini et al., ICML 2017 (arXiv 1706.04972), as transcribed by the park project in
inception_learned_placement.py.

Differs in: elements that the table does not name are on the first GPU, as the logits are. Two
convolutions side by side and their concat are one element there. Parameters, backward and update
ops go with their forward op.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import best_of
from roost.errors import InputError
from roost.placers import Evaluate
from roost.placers._shared.fitting import best_reordered, fastest_allowed
from roost.placers._shared.layers import Layers
from roost.placers._shared.orders import common_orders
from roost.placers._shared.units import Units
from roost.placers._splits.unit_graph import accelerators

NUM_GPUS = 4

# One digit for each element of a block, in the order of the forward pass; a space ends a branch.
PUBLISHED = {
    "Conv2d_1a_3x3": "0",
    "Conv2d_2a_3x3": "0",
    "Conv2d_2b_3x3": "0",
    "maxpool1": "1",
    "Conv2d_3b_1x1": "0",
    "Conv2d_4a_3x3": "0",
    "maxpool2": "0",
    "Mixed_5b": "2 20 233 02 2",
    "Mixed_5c": "2 20 223 02 0",
    "Mixed_5d": "3 03 300 20 3",
    "Mixed_6a": "0 333 0 1",
    "Mixed_6b": "0 203 00030 20 0",
    "Mixed_6c": "1 333 00000 22 2",
    "Mixed_6d": "2 022 22200 32 2",
    "Mixed_6e": "2 000 03223 32 3",
    "Mixed_7a": "33 3320 0 3",
    "Mixed_7b": "0 0333 02000 33 0",
    "Mixed_7c": "3 0000 20333 30 3",
}
BLOCKS = tuple(name for name in PUBLISHED if name.startswith("Mixed_"))


@dataclass(frozen=True)
class Published:
    """The published placement; raises InputError for other models and fewer than four GPUs."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Take the devices of the table, in the best order."""
        gpus = accelerators(problem)
        if len(gpus) < NUM_GPUS:
            raise InputError(
                f"the published placement is for {NUM_GPUS} GPUs; cluster "
                f"{problem.cluster.name!r} has {len(gpus)}"
            )
        units = Units.of(problem)
        wish = np.array(gpus)[published_gpus(problem.graph)[units.leader]]
        device = units.devices(fastest_allowed(units, wish))
        best = best_of(evaluate(common_orders(problem, device)))
        return best_reordered(problem, evaluate, best).placement


def element(path: str) -> str:
    """The table's element of a module path: `Mixed_5b.b1x1`, or `Conv2d_1a_3x3`."""
    block, _, rest = path.partition(".")
    if block not in BLOCKS:
        return block
    return f"{block}.{rest.partition('.')[0]}" if rest else ""


def published_gpus(graph: Graph) -> Array:  # [ops] i4 GPU 0 to 3
    """The published GPU of each op."""
    layers = Layers.of(graph, element)
    elements: dict[str, list[int]] = defaultdict(list)
    for number, name in enumerate(layers.names):
        elements[name.partition(".")[0]].append(number)
    gpu = np.zeros(layers.num_layers, dtype=np.int32)
    for block, text in PUBLISHED.items():
        digits = [int(digit) for digit in text.replace(" ", "")]
        if len(elements[block]) != len(digits):
            raise InputError(
                f"the published placement is for Inception-V3; graph {graph.name!r} has "
                f"{len(elements[block])} elements in {block!r}, not {len(digits)}"
            )
        gpu[elements[block]] = digits
    return gpu[layers.layer]
