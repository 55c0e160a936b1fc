"""The features of groups that policies see."""

import numpy as np

from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import GraphBuilder
from roost.core.problem import Problem
from roost.policies.features import group_features, speed_prior
from roost.testing.problems import training_like
from support.nasty import nasty


def chain():
    builder = GraphBuilder("chain")
    builder.parameter("w", 100)
    builder.add("a", "matmul", ["w"], output_bytes=10)
    builder.add("b", "relu", ["a"], output_bytes=20)
    builder.add("c", "relu", ["b"], output_bytes=0)
    cluster = Cluster(
        "two",
        (Device("cpu:0", "cpu", 1000), Device("cuda:0", "cuda", 1000)),
        (Link("*", "*", 1.0),),
    )
    return Problem(
        builder.freeze(), cluster, Costs(np.array([[0, 0], [8.0, 1.0], [4.0, 1.0], [1.0, 2.0]]))
    )


def test_neighbours_are_features():
    problem = chain()
    features = group_features(problem, np.array([0, 0, 1, 2]))
    before, after = features[:, -6:-3], features[:, -3:]
    assert before.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert after.tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_kinds_are_shares():
    features = group_features(chain(), np.array([0, 0, 1, 1]))
    assert features[:, :3].tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]  # matmul, parameter, relu


def test_all_features_lie_between_zero_and_one():
    for problem in [training_like(60, 3), *(nasty(seed)[0] for seed in range(40))]:
        features = group_features(problem, np.arange(problem.graph.num_ops))
        assert np.isfinite(features).all()
        assert features.min() >= 0
        assert features.max() <= 1 + 1e-6


def test_slow_devices_are_unlikely_by_how_slow_they_are():
    prior = speed_prior(chain(), np.array([0, 1, 2, 3]))
    np.testing.assert_allclose(prior[1:], -np.log([[8, 1], [4, 1], [1, 2]]), rtol=1e-5)
    # No time of its own: as all others together.
    np.testing.assert_allclose(prior[0], [-np.log(13 / 4), 0], rtol=1e-5)
