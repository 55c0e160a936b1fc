"""The roofline cost model."""

import pytest

import roost
from roost.core.cluster import Cluster, Device
from roost.cost_models.roofline import Roofline, class_of, known_share
from roost.errors import InputError


def graph():
    builder = roost.GraphBuilder()
    builder.parameter("w", 100)
    builder.add("compute", "mm", ["w"], flop=1e9, bytes_read=100)
    builder.add("memory", "my_mm", flop=1, bytes_read=10**9, bytes_written=10**9, counted=True)
    builder.add("half", "convolution", flop=1e9, dtype="float16")
    builder.add("unknown", "add", flop=1e9, dtype="int4", counted=True)
    builder.add("free", "output", ["compute"], output_bytes=5)
    return builder.freeze()


def times(**settings):
    device = Device(
        "d",
        "cuda",
        1,
        peak={"float32": 1e12, "float16": 4e12},
        memory_bandwidth=1e11,
        launch_overhead=1e-6,
        **settings,
    )
    return dict(
        zip(
            graph().op_names,
            Roofline().estimate(graph(), Cluster("c", (device,))).op_time[:, 0],
            strict=True,
        )
    )


def test_the_larger_of_compute_and_memory_plus_launch():
    found = times()
    assert found["compute"] == pytest.approx(1e-3 + 1e-6)
    assert found["memory"] == pytest.approx(20e-3 + 1e-6)
    assert found["half"] == pytest.approx(0.25e-3 + 1e-6)


def test_an_unknown_dtype_runs_at_the_slowest_peak():
    assert times()["unknown"] == pytest.approx(1e-3 + 1e-6)


def test_parameters_and_free_ops_take_no_time():
    assert times()["w"] == 0
    assert times()["free"] == 0


def test_efficiency_by_class_of_op():
    found = times(efficiency={"matmul": 0.5, "conv": 0.25, "memory": 0.1})
    assert found["compute"] == pytest.approx(2e-3 + 1e-6)
    assert found["half"] == pytest.approx(1e-3 + 1e-6)
    assert found["memory"] == pytest.approx(200e-3 + 1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("addmm", "matmul"),
        ("matmul", "matmul"),
        ("convolution_backward", "conv"),
        ("Conv2D", "conv"),
        ("attention_backward", "attention"),
        ("lstm", "recurrent"),
        ("add", "other"),
    ],
)
def test_classes(kind, expected):
    assert class_of(kind) == expected


def test_the_share_known_by_a_formula():
    flop, moved = known_share(graph())
    assert flop == pytest.approx(2e9 / (3e9 + 1))
    assert moved == pytest.approx(100 / (2 * 10**9 + 100))


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_efficiency_is_a_share(share):
    with pytest.raises(InputError, match=r"efficiency\.conv of device 'd'"):
        Device("d", "cuda", 1, efficiency={"conv": share})


def test_a_device_without_figures_is_refused():
    with pytest.raises(InputError, match="device 'd' needs peak and memory_bandwidth"):
        roost.estimate(graph(), Cluster("c", (Device("d", "cuda", 1),)))
