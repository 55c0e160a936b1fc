"""The figures that `roost zoo` shows are those of the models."""

import pytest

from roost import zoo


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names())
def test_a_default_training_step_has_the_figures_that_are_shown(name):
    graph = zoo.build(name, train=True)
    shown = zoo.figures()[name]["train"]
    found = {
        "ops": graph.num_ops,
        "edges": graph.num_edges,
        "flop": graph.flop.sum(),
        "parameter_bytes": graph.output_bytes[graph.is_parameter].sum(),
    }
    assert {key: shown[key] for key in found} == found, (
        "out of date: python benchmarks/zoo_table.py"
    )
