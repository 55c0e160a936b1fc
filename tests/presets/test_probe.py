"""This machine as a cluster: positive figures, measured once, and caps that are kept to."""

import errno
import json
import math
import os

import pytest
import torch

import roost
from roost import presets
from roost.errors import InputError, UnknownName
from roost.presets import _figures, machine, measurement_cache, probe

GPU = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)


FIGURES = {
    "devices": {
        "cpu": {"peak": {"float32": 1e11}, "memory_bandwidth": 1e10, "launch_overhead": 1e-6}
    },
    "links": [],
}


@pytest.fixture
def given(no_gpu, monkeypatch):
    """Figures as if measured, and how often they were."""
    calls = []

    def measured(virtual):
        calls.append(virtual)
        return FIGURES

    monkeypatch.setattr(probe, "measured", measured)
    return calls


def sound(cluster):
    for device in cluster.devices:
        numbers = [
            device.memory,
            device.memory_bandwidth,
            device.launch_overhead,
            *device.peak.values(),
        ]
        assert all(number > 0 and math.isfinite(number) for number in numbers), device
        assert {"float32", "bfloat16"} <= set(device.peak)
        assert device.peak["float32"] > 1e8
        assert device.launch_overhead < 1e-2
        assert all(
            f"{field}: " in device.figures_from for field in ("memory", "peak", "memory_bandwidth")
        )
    for link in cluster.links:
        assert 0 < link.latency < 1
        assert 1e6 < link.bandwidth < 1e14


def test_the_cpu_is_found_and_measured_once(no_gpu, monkeypatch):
    threads = torch.get_num_threads()
    cluster = roost.probe()
    assert cluster.device_names == ("cpu",)
    assert torch.get_num_threads() == threads
    sound(cluster)

    def never(virtual):
        raise AssertionError("measured again")

    monkeypatch.setattr(probe, "measured", never)
    again = roost.probe()
    assert again.devices[0].peak == cluster.devices[0].peak
    assert again.devices[0].memory_bandwidth == cluster.devices[0].memory_bandwidth
    with pytest.raises(AssertionError, match="measured again"):
        roost.probe(refresh=True)
    with pytest.raises(AssertionError, match="measured again"):
        roost.probe(virtual=2)


def test_threads_as_devices(no_gpu):
    cluster = roost.probe(virtual=2)
    assert cluster.device_names == ("cpu:0", "cpu:1")
    assert {device.kind for device in cluster.devices} == {"cpu"}
    sound(cluster)
    assert cluster.latency[0, 1] > 0
    assert cluster.bus[0, 1] != cluster.bus[1, 0]
    assert cluster.memory.sum() <= machine.available_memory() * 1.5


def test_what_a_crossing_takes_is_shared_out_between_its_ends_and_latency():
    up = _figures._ends(True, latency=20e-6, waits=100e-6, launching=25e-6, posting=45e-6)
    assert up == pytest.approx(
        {"send_latency": 30e-6, "sender_busy": 45e-6, "receiver_busy": 25e-6}
    )
    down = _figures._ends(False, latency=20e-6, waits=220e-6, launching=60e-6, posting=45e-6)
    assert down == pytest.approx(
        {"send_latency": 20e-6, "sender_busy": 60e-6, "receiver_busy": 200e-6}
    )
    for way in (True, False):  # no more is left than there was
        assert _figures._ends(way, 20e-6, 15e-6, 1e-6, 1e-6)["send_latency"] == 20e-6
    assert _figures._ends(False, 20e-6, 15e-6, 1e-6, 1e-6)["receiver_busy"] == 0.0


def test_figures_of_both_ends_come_to_the_link():
    found = {"bandwidth": 1e9, "latency": 2e-5, "send_bandwidth": 5e8}
    link = probe._link(
        *probe._row("cpu", "cuda:0", found | _figures._ends(True, 2e-5, 0.0, 1e-6, 3e-6), "there")
    )
    assert (link.send_bandwidth, link.send_latency) == (5e8, 2e-5)
    assert (link.sender_busy, link.receiver_busy) == (3e-6, 1e-6)
    assert "sender_busy: measured here" in link.figures_from
    plain = probe._link(
        *probe._row("cuda:0", "cuda:1", {"bandwidth": 1e9, "latency": 2e-5}, "there")
    )
    assert "receiver_busy: assumed" in plain.figures_from


def test_other_hardware_is_measured_anew(given, monkeypatch):
    roost.probe()
    roost.probe()
    assert given == [0]
    before = machine.hardware()
    monkeypatch.setattr(machine, "hardware", lambda: {**before, "driver": "999.1"})
    roost.probe()
    assert given == [0, 0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"key": 3, "found": {}}',
        b"[" * 100_000,
        {},
        {"devices": {}, "links": []},
        {"devices": {"cpu": {**FIGURES["devices"]["cpu"], "memory_bandwidth": -1.0}}, "links": []},
        {"devices": {"cpu": {**FIGURES["devices"]["cpu"], "launch_overhead": "fast"}}, "links": []},
        {"devices": {"cpu": {**FIGURES["devices"]["cpu"], "peak": {}}}, "links": []},
        {**FIGURES, "links": [["cpu", "cuda:7", 1.0, 1.0, "", 0.0, 0.0, 0.0, 0.0]]},
        {**FIGURES, "links": [["cpu", "cpu", 1.0, 1.0, "", 0.0, 0.0, -1.0, 0.0]]},
        {**FIGURES, "links": [3]},
    ],
)
def test_a_damaged_file_is_measured_anew(given, content):
    key = machine.hardware() | {"virtual": 0}
    path = measurement_cache.path_of("probe", key)
    path.parent.mkdir()
    path.write_bytes(
        content
        if isinstance(content, bytes)
        else json.dumps({"key": key, "found": content}).encode()
    )
    assert roost.probe().devices[0].peak == {"float32": 1e11}
    assert given == [0]
    roost.probe()
    assert given == [0]


def test_a_folder_that_cannot_be_written_is_no_error(given, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert roost.probe().device_names == ("cpu",)


def test_memory_is_capped(given):
    assert roost.probe({"cpu": "100MiB"}).devices[0].memory == 100 * 2**20
    assert roost.probe({"cpu": 12345}).devices[0].memory == 12345
    whole = roost.probe().devices[0].memory
    assert 0 < whole <= machine.available_memory() * 1.5


def test_caps_that_cannot_be(given):
    with pytest.raises(UnknownName, match=r"'cuda:0'.*cpu"):
        roost.probe({"cuda:0": "6GiB"})
    with pytest.raises(InputError, match=r"memory of 'cpu' is 1024.0 TiB; only .* can be had"):
        roost.probe({"cpu": "1PiB"})
    with pytest.raises(InputError, match="cannot read 'much'"):
        roost.probe({"cpu": "much"})
    for count in (-1, 65, 1.5):
        with pytest.raises(InputError, match="virtual is"):
            roost.probe(virtual=count)


def test_here_is_this_machine(given):
    assert presets.cluster("here") == roost.probe()
    assert "here" not in presets.names()


def test_cores_are_shared_evenly(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: {3, 5, 7, 9, 11})
    assert machine.shares(2) == [{3, 5}, {7, 9, 11}]
    assert machine.shares(5) == [{3}, {5}, {7}, {9}, {11}]
    assert machine.shares(7) == [{3}, {5}, {7}, {9}, {11}, {3}, {5}]


def test_a_thread_of_its_own_says_what_it_raised():
    with machine.OwnThread(1) as thread:
        assert thread(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            thread(lambda: 1 / 0)
        assert thread(torch.get_num_threads) == 1


@GPU
def test_gpus_are_found_and_measured():
    cluster = roost.probe()
    count = torch.cuda.device_count()
    assert cluster.device_names == ("cpu", *(f"cuda:{number}" for number in range(count)))
    sound(cluster)
    gpu, cpu = cluster.devices[1], cluster.devices[0]
    assert gpu.kind == "cuda"
    assert 0 < cluster.sender_busy[0, 1] < 1e-2
    assert 0 < cluster.receiver_busy[0, 1] < 1e-2
    assert 0 < cluster.sender_busy[1, 0] < 1e-2
    assert gpu.memory < torch.cuda.get_device_properties(0).total_memory
    assert gpu.peak["float16"] > cpu.peak["float16"]
    assert cluster.bus[0, 1] != cluster.bus[1, 0]
    capped = roost.probe({"cuda:0": "1GiB"})
    assert capped.devices[1].memory == 2**30


@pytest.fixture
def _nothing_warned(monkeypatch):
    monkeypatch.setattr(measurement_cache, "_warned", set())


@pytest.mark.usefixtures("_nothing_warned")
def test_a_folder_that_cannot_be_written_to_is_warned_of_once(caplog, tmp_path, monkeypatch):
    """And is no reason to stop. Root may write anywhere, so that it may not is said in its
    place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def closed(*args, **settings):
        raise PermissionError(errno.EACCES, "Permission denied", "the folder")

    for name in ("os.open", "pathlib.Path.mkdir"):
        caplog.clear()
        measurement_cache._warned.clear()
        with monkeypatch.context() as patch:
            patch.setattr(name, closed)
            for what in ("probe", "profile", "probe"):
                measurement_cache.write(what, {"a": 1}, {})
        [said] = caplog.messages
        assert said.startswith("measurements cannot be kept: ")
        assert "Permission denied" in said
        assert said.endswith("; XDG_CACHE_HOME can name another folder")


@pytest.mark.usefixtures("_nothing_warned")
def test_what_is_kept_and_cannot_be_read_is_measured_again(caplog, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measurement_cache.write("probe", {"a": 1}, {"b": 2})
    assert measurement_cache.read("probe", {"a": 1}) == {"b": 2}

    def closed(*args, **settings):
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("pathlib.Path.open", "pathlib.Path.exists"):
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(name, closed)
            assert measurement_cache.read("probe", {"a": 1}) == {}
            assert measurement_cache.read("probe", {"a": 1}) == {}
        [said] = caplog.messages
        assert "Permission denied" in said


@pytest.mark.usefixtures("_nothing_warned")
def test_without_a_home_nothing_is_kept(caplog, monkeypatch):
    """As in a container with a user that it does not know."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert measurement_cache.read("probe", {}) == {}
    measurement_cache.write("probe", {}, {})
    assert len(caplog.messages) == 2
    assert all("home directory" in said for said in caplog.messages)


def test_a_thread_that_tells_a_gpu_what_to_do_has_a_core_of_its_own(monkeypatch):
    monkeypatch.setattr(machine, "own_cores", lambda: list(range(8)))
    assert machine.parts(["cpu", "cuda"]) == [set(range(6)), {6, 7}]
    assert machine.parts(["cpu", "cpu"]) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    many = machine.parts(["cpu", *["cuda"] * 8])
    assert many == [set(range(6)), *[{6, 7}] * 8]  # the CPU keeps most
    monkeypatch.setattr(machine, "own_cores", lambda: [0, 1])
    assert machine.parts(["cpu", "cuda"]) == [{0, 1}, set()]  # too few
    assert machine.parts(["cuda"]) == [set()]


def test_a_small_product_that_took_long_is_not_the_last(monkeypatch):
    """Threads that wait for a core made one of 256 rows take 24 ms, which is a hundredth of the
    rate."""
    seconds = {256: 0.024, 512: 0.002, 1024: 0.01, 2048: 0.08, 4096: 0.5, 8192: 4.0}
    sizes = []

    def clock(call):
        sizes.append(len(call()))
        return seconds[sizes[-1]]

    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda one, other: one)
    rate = _figures._matmul_rate(torch.float32, torch.device("cpu"), clock, 0.02)
    assert sizes == [256, 512, 1024, 2048]
    assert rate == 2 * 1024**3 / 0.01


def test_the_bandwidth_counts_what_a_copy_reads_and_writes(monkeypatch):
    bytes_copied = []

    def clock(call):
        bytes_copied.append(call().numel())
        return 0.5

    assert _figures._memory_bandwidth(torch.device("cpu"), clock, 1000) == 2 * 1000 / 0.5
    assert bytes_copied == [1000]


def test_the_copy_that_gives_the_bandwidth_is_larger_than_all_caches(monkeypatch):
    sizes = []
    monkeypatch.setattr(_figures, "_device", lambda device, clock, size, enough: sizes.append(size))
    monkeypatch.setattr(machine, "available_memory", lambda: 2**40)
    for cache in (2**20, 2**28):
        monkeypatch.setattr(machine, "cache_bytes", lambda cache=cache: cache)
        _figures.of_cpu(1)
    monkeypatch.setattr(machine, "available_memory", lambda: 2**20)
    _figures.of_cpu(1)
    assert sizes == [128 * 2**20, 4 * 2**28, 2**17]


@pytest.mark.usefixtures("_nothing_warned")
def test_a_link_in_the_cache_folder_is_not_followed(caplog, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measurement_cache.write("probe", {"a": 1}, {"b": 2})
    file = measurement_cache.path_of("probe", {"a": 1})
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    assert measurement_cache.read("probe", {"a": 1}) == {}
    assert "is not a plain file of this user" in caplog.text
    caplog.clear()
    measurement_cache.write("probe", {"a": 1}, {"b": 3})
    assert file.is_symlink()
    assert "is not a plain file of this user" in caplog.text
