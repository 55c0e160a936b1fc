"""The first paper's units, on captured models: one LSTM cell and step, one convolution."""

import numpy as np
import torch

from roost import zoo
from roost.frontends.torch import capture
from roost.transforms.colocate import Colocate


def captured(name):
    settings = zoo.settings(name).small()
    with torch.device("meta"):
        return capture(settings.model(), settings.inputs(True), train=True)


def groups_of(graph, pattern):
    """Group -> the modules of its ops of phase forward that match."""
    found = {}
    for op in np.flatnonzero(graph.phase == 2):
        if pattern in graph.modules[op] and graph.group[op] >= 0:
            found.setdefault(int(graph.group[op]), set()).add(graph.modules[op])
    return found


def test_one_group_for_each_lstm_cell_and_step():
    graph = captured("rnnlm")
    units = Colocate(
        units=[r"layers\.\d+(@\d+)?$"], parameters_with_consumer=False, updates_with_parameter=False
    )
    found = groups_of(units.apply(graph).graph, "layers.")
    settings = zoo.settings("rnnlm").small()
    assert len(found) == settings.layers * settings.length
    assert all(len(modules) == 1 for modules in found.values())


def test_one_group_for_each_convolution_of_inception():
    graph = captured("inception_v3")
    grouped = Colocate(units=[r"Mixed_\w+\.\w+"]).apply(graph).graph
    for modules in groups_of(grouped, "Mixed_").values():
        assert len({".".join(module.split(".")[:2]) for module in modules}) == 1
