"""Small nouns to save, load and spoil."""

import numpy as np
import pytest

import roost


@pytest.fixture
def graph():
    builder = roost.GraphBuilder("small")
    builder.add("x", "input", phase="input", output_bytes=100)
    builder.parameter("w", 1000)
    builder.add(
        "a",
        "matmul",
        ["x", "w"],
        flop=1e9,
        output_bytes=200,
        group="g",
        dtype="bfloat16",
        module="net.a",
    )
    builder.add(
        "b",
        "matmul",
        ["a", "w"],
        flop=2e9,
        output_bytes=200,
        workspace_bytes=7,
        group="g",
        allowed=["cuda"],
    )
    builder.add("u", "sgd", ["w", "b"], phase="update", bytes_read=5, bytes_written=6)
    return builder.freeze()


@pytest.fixture
def cluster():
    return roost.cluster("k80x2")


@pytest.fixture
def problem(graph, cluster):
    return roost.estimate(graph, cluster)


@pytest.fixture
def placement(problem):
    return roost.Placement(np.array([0, 1, 1, 1, 1]), prefetch_bytes=np.array([0, 64, 0]))


@pytest.fixture
def result(problem, placement):
    timeline = roost.simulate(problem, placement)
    trial = roost.Trial(
        placement, timeline.step_time, timeline.peak_memory, timeline.feasible, placer="by hand"
    )
    return roost.Result(
        best=trial,
        placer="by hand",
        seed=3,
        num_trials=1,
        seconds=0.5,
        baselines={"same": trial},
        bound=roost.Bound(timeline.step_time / 2, "half"),
    )
