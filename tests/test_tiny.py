"""The whole line on a six-op graph: model, cluster, problem, placement, timeline, files, trace."""

import numpy as np

import roost
from roost.report.trace import write_trace


def test_the_whole_line(tmp_path):
    builder = roost.GraphBuilder("tiny")
    builder.add("x", "input", phase="input", output_bytes=4_000_000)
    builder.parameter("w", 16_000_000)
    builder.add(
        "left", "matmul", ["x", "w"], flop=4e9, bytes_read=20_000_000, output_bytes=4_000_000
    )
    builder.add("right", "matmul", ["x"], flop=4e9, bytes_read=4_000_000, output_bytes=4_000_000)
    builder.add("sum", "add", ["left", "right"], bytes_read=8_000_000, output_bytes=4_000_000)
    builder.add("step", "sgd", ["sum", "w"], phase="update", bytes_written=16_000_000)
    builder.freeze().save(tmp_path / "graph.json")

    graph = roost.load(tmp_path / "graph.json")
    problem = roost.estimate(graph, roost.cluster("k80x2"))
    alone = roost.simulate(problem, roost.Placement(np.full(6, 1)))
    both = roost.simulate(problem, roost.Placement(np.array([1, 1, 1, 2, 1, 1])), full=True)
    assert alone.feasible
    assert both.feasible
    assert alone.num_transfers == 0
    assert both.num_transfers == 2  # x there, right's output back
    assert both.step_time != alone.step_time

    both.save(tmp_path / "timeline.json.gz")
    assert roost.load(tmp_path / "timeline.json.gz").step_time == both.step_time
    write_trace(both, tmp_path / "trace.json.gz")
    assert (tmp_path / "trace.json.gz").stat().st_size > 0
