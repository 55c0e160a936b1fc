"""Devices and links, the matrices made of them, and what is no cluster."""

from __future__ import annotations

import math

import numpy as np
import pytest

from roost.core.cluster import MOST_BYTES, MOST_SECONDS, Cluster, Device, Link
from roost.errors import InputError, UnknownName

HOSTS = (("cpu", "h"), ("cuda:0", "h"), ("cuda:1", "k"))
DEVICES = tuple(Device(name, name[:4].rstrip(":"), 2**30, host) for name, host in HOSTS)


def test_what_is_not_given_takes_no_time():
    device, link = Device("cpu", "cpu", 1), Link("*", "*", 1.0)
    assert (device.memory_bandwidth, device.launch_overhead, device.gap) == (0.0, 0.0, 0.0)
    assert (link.latency, link.gap, link.send_bandwidth, link.send_latency) == (0.0,) * 4
    assert (link.sender_busy, link.receiver_busy) == (0.0, 0.0)
    assert link.both_ways
    cluster = Cluster("plain", DEVICES, (link,))
    assert cluster.copies_in_memory
    assert not cluster.broadcast
    assert not cluster.keeps_busy
    assert not cluster.has_shared_buses
    assert not cluster.latency.any()
    assert (cluster.seconds_per_byte == 1 - np.eye(3)).all()
    assert cluster.bus_gap.tolist() == [0.0] * 6
    assert cluster.device_gap.tolist() == [0.0] * 3


def test_the_last_rule_for_a_pair_counts():
    links = (
        Link("*", "*", 4.0, latency=1.0, bus="all", gap=0.25),
        Link("cpu", "cuda:*", 2.0, send_bandwidth=0.5, bus="{source_host} to {target_host}"),
        Link(
            "cuda:0",
            "cuda:1",
            8.0,
            latency=2.0,
            send_latency=3.0,
            sender_busy=5.0,
            receiver_busy=7.0,
            both_ways=False,
            gap=0.5,
            bus="all",
        ),
    )
    cluster = Cluster("mixed", DEVICES, links)
    assert cluster.latency.tolist() == [[0, 0, 0], [0, 0, 2], [0, 1, 0]]
    assert cluster.sent_latency.tolist() == [[0, 0, 0], [0, 0, 3], [0, 1, 0]]
    assert cluster.seconds_per_byte.tolist() == [[0, 0.5, 0.5], [0.5, 0, 0.125], [0.5, 0.25, 0]]
    sent = [[0, 2, 2], [2, 0, 0.125], [2, 0.25, 0]]
    assert cluster.sent_seconds_per_byte.tolist() == sent
    assert cluster.sender_busy.tolist() == [[0, 0, 0], [0, 0, 5], [0, 0, 0]]
    assert cluster.receiver_busy.tolist() == [[0, 0, 0], [0, 0, 7], [0, 0, 0]]
    assert cluster.keeps_busy
    assert cluster.bus_names == ("h to h", "h to k", "all", "k to h")
    assert cluster.bus.tolist() == [[0, 0, 1], [0, 0, 2], [3, 2, 0]]
    assert cluster.bus_gap.tolist() == [0.0, 0.0, 0.5, 0.0]
    assert cluster.has_shared_buses  # cuda:0 and cuda:1 send over `all`


def test_a_broadcast_needs_one_bus_for_each_sender():
    assert Cluster("one", DEVICES, (Link("*", "*", 1.0, bus="{source}"),), broadcast=True).broadcast
    with pytest.raises(InputError, match="all links from 'cpu' must share a bus"):
        Cluster("many", DEVICES, (Link("*", "*", 1.0),), broadcast=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "needs a name and a kind"),
        ({"kind": ""}, "needs a name and a kind"),
        ({"memory": -1}, "memory of device 'cpu' is -1"),
        ({"memory": 1.5}, "must be whole bytes"),
        ({"memory": MOST_BYTES + 1}, "must be whole bytes"),
        ({"memory_bandwidth": math.inf}, "must be finite"),
        ({"launch_overhead": -1.0}, "not negative"),
        ({"gap": 2 * MOST_SECONDS}, "the limit is 1e.15 s"),
        ({"peak": {"float32": math.nan}}, "peak.float32"),
        ({"efficiency": {"matmul": 0.0}}, "above 0, at most 1"),
        ({"efficiency": {"matmul": 1.5}}, "above 0, at most 1"),
    ],
)
def test_what_is_no_device_is_refused(change, message):
    given = {"name": "cpu", "kind": "cpu", "memory": 1} | change
    with pytest.raises(InputError, match=message):
        Device(**given)


def test_limits_of_a_device_are_allowed():
    device = Device("cpu", "cpu", MOST_BYTES, gap=MOST_SECONDS, efficiency={"matmul": 1.0})
    assert device.memory == MOST_BYTES
    assert Device("cpu", "cpu", 0).memory == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth": 0.0}, "must be above zero"),
        ({"bandwidth": math.nan}, "must be finite"),
        ({"bandwidth": 1e-16}, "a byte over link"),
        ({"send_bandwidth": 5e-16}, "a byte sent over link"),
        ({"latency": -1.0}, "not negative"),
        ({"receiver_busy": math.inf}, "must be finite"),
        ({"send_bandwidth": 2.5}, "is above its bandwidth"),
        ({"latency": 2.0, "send_latency": 1.0}, "is below its latency"),
    ],
)
def test_what_is_no_link_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        Link("*", "*", **({"bandwidth": 2.0} | change))


def test_limits_of_a_link_are_allowed():
    link = Link("*", "*", 2.0, latency=2.0, send_bandwidth=2.0, send_latency=2.0)
    assert link.send_latency == link.latency


def test_a_link_joins_both_ways_unless_it_says_otherwise():
    both, one = Link("cpu", "cuda:*", 1.0), Link("cpu", "cuda:*", 1.0, both_ways=False)
    assert both.joins("cpu", "cuda:3")
    assert both.joins("cuda:3", "cpu")
    assert one.joins("cpu", "cuda:3")
    assert not one.joins("cuda:3", "cpu")
    assert not both.joins("cuda:3", "cuda:4")
    assert not both.joins("cpu", "cpu")


@pytest.mark.parametrize(
    ("devices", "links", "message"),
    [
        ((), (), "has no devices"),
        ((DEVICES[0], DEVICES[0]), (), "two devices of cluster 'c' are called 'cpu'"),
        (DEVICES[:2], (), "no link from 'cpu' to 'cuda:0'"),
        (DEVICES[:2], (Link("cpu", "cuda:0", 1.0, both_ways=False),), "from 'cuda:0' to 'cpu'"),
    ],
)
def test_what_is_no_cluster_is_refused(devices, links, message):
    with pytest.raises(InputError, match=message):
        Cluster("c", devices, links)


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(UnknownName, match="tpu"):
        Cluster("c", DEVICES, (Link("*", "*", 1.0), Link("cpu", "tpu:*", 1.0)))
    with pytest.raises(UnknownName, match="cuda:7"):
        Cluster("c", DEVICES, (Link("*", "*", 1.0),)).index_of("cuda:7")
