"""Expert: placements as people make them by hand, by a rule for the model or layer by layer.

The expert baselines of Mirhoseini et al., ICML 2017 (arXiv 1706.04972), as recalled. RNNLM and NMT:
one LSTM layer on each GPU, embeddings with the first layer, attention and softmax with the last.
Inception-V3: contiguous parts with as many layers each. NASNet, which Placeto (arXiv 1906.08879)
adds: contiguous cells, our reading. Any other model: contiguous layers, in proportion to the speed
of the devices and within their memory.

Differs in: models are known by the names of their modules. Layers that do not fit where the rule
wants them are moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial, best_of
from roost.errors import InputError, UnknownName
from roost.placers import Evaluate
from roost.placers._shared.fitting import fitted, lasting_bytes
from roost.placers._shared.layers import Layers
from roost.placers._shared.units import Units
from roost.placers._splits import expert_rules
from roost.placers._splits.unit_graph import accelerators, mean_seconds, speeds
from roost.placers.published import Published

_SCALES = (1.0, 0.85, 0.7)  # of the memory, until what was estimated fits

_BY_NAME: dict[str, Callable[[Graph, Layers, int], Array]] = {
    "recurrent": expert_rules.recurrent,
    "blocks": expert_rules.blocks,
    "cells": expert_rules.cells,
}
RULES = ("auto", "layers", *_BY_NAME, "published")


@dataclass(frozen=True)
class Expert:
    """A rule for the model, or "auto" for the one that fits its structure; see RULES."""

    rule: str = "auto"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UnknownName("rule of the expert placer", self.rule, RULES)

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        """Put layers on the devices that are no CPU, by the rule."""
        if self.rule == "published":
            return Published().place(problem, evaluate)
        layers = Layers.of(problem.graph)
        rule = expert_rules.rule_for(problem.graph, layers) if self.rule == "auto" else self.rule
        units = Units.of(problem)
        devices = np.array(accelerators(problem))
        if rule == "layers":
            return _by_speed(units, layers, devices, evaluate).placement
        if rule == "recurrent" and not expert_rules.recurrent_layers(problem.graph, layers):
            raise InputError(
                f"graph {problem.graph.name!r} has no recurrent layers to split; use another rule"
            )
        part = _BY_NAME[rule](problem.graph, layers, len(devices))
        return fitted(units, evaluate, devices[part][layers.of_units(units)], layers).placement


def _by_speed(units: Units, layers: Layers, devices: Array, evaluate: Evaluate) -> Trial:
    """Contiguous layers in proportion to the speed of the devices, as far as memory allows."""
    layer = layers.of_units(units)
    seconds = np.bincount(layer, mean_seconds(units, devices.tolist()), minlength=layers.num_layers)
    sizes = np.bincount(layer, lasting_bytes(units), minlength=layers.num_layers)
    # They take the layers that the others cannot hold.
    spare = np.setdiff1d(np.arange(units.problem.cluster.num_devices), devices)
    share = np.concatenate([speeds(units, devices.tolist()), np.zeros(len(spare))])
    devices = np.concatenate([devices, spare])
    trials: list[Trial] = []
    for scale in _SCALES:
        part = expert_rules.split_within(
            seconds, share, sizes, units.problem.cluster.memory[devices] * scale
        )
        trials.append(fitted(units, evaluate, devices[part][layer], layers))
        if trials[-1].feasible:
            break
    return best_of(trials)
