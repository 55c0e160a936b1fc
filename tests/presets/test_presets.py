"""The presets: what each must say, and how they are found."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from roost import presets
from roost.core.cluster import Cluster, Device, Link
from roost.errors import InputError, UnknownName

ALL = presets.names()
WANTED = {
    *("k80x2", "k80x4", "placeto_k80x2", "placeto_k80x4"),
    *("a100x4", "two_hosts_a100x4", "h100x8", "h200", "rtx4090_rtx3060", "cpu"),
}
# Figures a block always explains, zero or not; a gap and efficiencies only where there are any.
ALWAYS = {
    Device: {"memory", "peak", "memory_bandwidth", "launch_overhead"},
    Link: {"bandwidth", "latency", "bus"},
}


def explained(block: Device | Link) -> dict[str, str]:
    """What `figures_from` says of each figure: one line each, the field's name before the colon."""
    lines = [line.partition(":") for line in block.figures_from.strip().splitlines()]
    assert len({name for name, _, _ in lines}) == len(lines), "a figure is explained twice"
    return {name: text.strip() for name, _, text in lines}


def given(block: Device | Link) -> set[str]:
    """The figures that a block must explain."""
    sometimes = {"gap": block.gap, "efficiency": getattr(block, "efficiency", None)}
    return ALWAYS[type(block)] | {figure for figure, value in sometimes.items() if value}


def test_the_presets_that_the_documents_name_are_there() -> None:
    assert set(ALL) >= WANTED


@pytest.mark.parametrize("name", ALL)
def test_a_preset_is_called_after_its_file_and_described_in_one_sentence(name: str) -> None:
    cluster = presets.cluster(name)
    assert cluster.name == name
    assert re.fullmatch(r"[A-Z0-9](?!.*\. [A-Z]).{20,110}\.", cluster.description)


@pytest.mark.parametrize("name", ALL)
def test_a_preset_gives_the_source_of_every_figure_and_of_no_other(name: str) -> None:
    cluster = presets.cluster(name)
    blocks: list[Device | Link] = [*cluster.devices, *cluster.links]
    for block in blocks:
        sources = explained(block)
        assert set(sources) == given(block), f"{block}"
        assert all(len(text) > 10 for text in sources.values()), f"{block}"


@pytest.mark.parametrize("name", ALL)
def test_a_preset_gives_the_source_of_the_peak_of_every_dtype(name: str) -> None:
    for device in presets.cluster(name).devices:
        told = set(re.findall(r"\w+", explained(device)["peak"]))
        assert set(device.peak) <= told, device.name


@pytest.mark.parametrize("name", ALL)
def test_devices_of_a_preset_have_the_figures_a_cost_model_needs(name: str) -> None:
    for device in presets.cluster(name).devices:
        assert device.memory >= 2**30
        assert 1e11 < device.peak["float32"] < 1e15
        assert max(device.peak.values()) < 1e16
        assert 1e10 < device.memory_bandwidth < 1e13
        assert 0 < device.launch_overhead + device.gap <= 20e-6


@pytest.mark.parametrize("name", ALL)
def test_device_names_say_their_kind_and_cpus_come_first(name: str) -> None:
    devices = presets.cluster(name).devices
    kinds = [device.kind for device in devices]
    assert kinds == sorted(kinds)  # "cpu" before "cuda"
    for kind in set(kinds):
        alike = [device.name for device in devices if device.kind == kind]
        assert alike == [f"{kind}:{number}" for number in range(len(alike))]


@pytest.mark.parametrize("name", ALL)
def test_links_of_every_pair_exist_and_carry_bytes_at_a_known_speed(name: str) -> None:
    cluster = presets.cluster(name)
    pairs = list(permutations(range(cluster.num_devices), 2))
    assert bool(pairs) == (name != "cpu")
    for pair in pairs:
        assert 1e9 < 1 / cluster.seconds_per_byte[pair] < 1e12
        assert 0 <= cluster.latency[pair] < 1e-3


@pytest.mark.parametrize("name", ALL)
def test_a_preset_is_the_same_after_saving_and_loading(name: str, tmp_path: Path) -> None:
    cluster = presets.cluster(name)
    cluster.save(tmp_path / "cluster.toml")
    again = presets.cluster(tmp_path / "cluster.toml")
    assert again == cluster
    assert again.description == cluster.description
    assert [each.figures_from for each in again.links] == [
        each.figures_from for each in cluster.links
    ]


@pytest.mark.parametrize("num_devices", [2, 4])
def test_the_placeto_presets_have_the_constants_of_its_simulator(num_devices: int) -> None:
    cluster = presets.cluster(f"placeto_k80x{num_devices}")
    assert [device.name for device in cluster.devices] == [
        f"cuda:{number}" for number in range(num_devices)
    ]
    assert cluster.device_gap.tolist() == pytest.approx([5.7e-6] * num_devices, rel=1e-12)
    assert all(device.launch_overhead == 0 for device in cluster.devices)
    assert cluster.broadcast
    assert not cluster.copies_in_memory
    assert cluster.bus_names == cluster.device_names
    assert cluster.bus_gap.tolist() == pytest.approx([25e-6] * num_devices, rel=1e-12)
    for pair in permutations(range(num_devices), 2):
        assert cluster.bus[pair] == pair[0]
        assert cluster.latency[pair] == 0
        assert cluster.seconds_per_byte[pair] == pytest.approx(1 / 7.6e9, rel=1e-12)


@pytest.mark.parametrize("name", ["k80x2", "k80x4"])
def test_the_k80_machines_are_the_die_not_the_board_on_independent_links(name: str) -> None:
    cluster = presets.cluster(name)
    gpus = [device for device in cluster.devices if device.kind == "cuda"]
    assert len(gpus) == int(name[-1])
    assert {(gpu.memory, gpu.peak["float32"], gpu.memory_bandwidth) for gpu in gpus} == {
        (12e9, 2.8e12, 240e9)
    }
    assert "float16" not in gpus[0].peak
    assert not cluster.has_shared_buses
    assert len(cluster.bus_names) == cluster.num_devices * (cluster.num_devices - 1)


def test_two_hosts_share_one_bus_in_each_direction_of_the_network() -> None:
    cluster = presets.cluster("two_hosts_a100x4")
    assert cluster.has_shared_buses
    host = [device.host for device in cluster.devices]
    across = {}
    for source, target in permutations(range(cluster.num_devices), 2):
        bus = cluster.bus_names[cluster.bus[source, target]]
        if host[source] != host[target]:
            across[source, target] = bus
            assert bus == f"net {host[source]}->{host[target]}"
            assert 1 / cluster.seconds_per_byte[source, target] == pytest.approx(12.5e9)
        else:
            assert not bus.startswith("net")
            assert 1 / cluster.seconds_per_byte[source, target] > 12.5e9
    assert len(across) == 50
    assert set(across.values()) == {"net a->b", "net b->a"}


def test_inside_a_host_of_two_the_links_are_those_of_the_single_host() -> None:
    one, two = presets.cluster("a100x4"), presets.cluster("two_hosts_a100x4")
    for host in ("a", "b"):
        rows = [number for number, device in enumerate(two.devices) if device.host == host]
        for i, j in permutations(range(one.num_devices), 2):
            assert two.seconds_per_byte[rows[i], rows[j]] == one.seconds_per_byte[i, j]
            assert two.latency[rows[i], rows[j]] == one.latency[i, j]


def test_an_h100_sends_over_one_nvlink_bus_and_reaches_the_host_on_another() -> None:
    cluster = presets.cluster("h100x8")
    cpu = cluster.index_of("cpu:0")
    for source in range(1, cluster.num_devices):
        to_gpus = {int(cluster.bus[source, target]) for target in range(1, 9) if target != source}
        assert [cluster.bus_names[bus] for bus in to_gpus] == [f"nvlink cuda:{source - 1}"]
        assert int(cluster.bus[source, cpu]) not in to_gpus
    assert not cluster.has_shared_buses


def test_unlike_gpus_without_peer_to_peer_pay_two_hops_on_the_senders_way_up() -> None:
    cluster = presets.cluster("rtx4090_rtx3060")
    cpu, big, small = (cluster.index_of(name) for name in ("cpu:0", "cuda:0", "cuda:1"))
    for source, target in ((big, small), (small, big)):
        assert cluster.bus[source, target] == cluster.bus[source, cpu]
        assert cluster.bus[source, cpu] != cluster.bus[cpu, source]
        assert cluster.seconds_per_byte[source, target] == 2 * cluster.seconds_per_byte[source, cpu]
        assert cluster.latency[source, target] == 2 * cluster.latency[source, cpu]
    assert cluster.memory[big] > 1.9 * cluster.memory[small]
    assert not cluster.has_shared_buses


def test_an_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(
        UnknownName, match=r"no preset called 'k80x3'; did you mean 'k80x[24]'\?"
    ) as caught:
        presets.cluster("k80x3")
    assert caught.value.nearest in {"k80x2", "k80x4"}


@pytest.mark.parametrize("name", ["", ".", "nothing like it", "x" * 5000, "nul\0byte"])
def test_what_is_neither_a_preset_nor_a_path_is_an_unknown_name(name: str) -> None:
    with pytest.raises(UnknownName, match="no preset called"):
        presets.cluster(name)


@pytest.mark.parametrize("file", ["mine.toml", "mine.toml.gz"])
def test_a_path_works_as_text_and_as_a_path(file: str, tmp_path: Path) -> None:
    cluster = Cluster("mine", (Device("cpu:0", "cpu", 2**30),))
    cluster.save(tmp_path / file)
    assert presets.cluster(tmp_path / file) == cluster
    assert presets.cluster(str(tmp_path / file)) == cluster


def test_a_path_to_a_missing_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "missing.toml", "missing.toml", "./k80x4"):
        with pytest.raises(InputError, match="no such file") as caught:
            presets.cluster(path)
        assert not isinstance(caught.value, UnknownName)


def test_a_preset_wins_over_a_file_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cpu").write_text("not a cluster")
    assert presets.cluster("cpu").name == "cpu"
    with pytest.raises(InputError, match="cpu"):
        presets.cluster("./cpu")


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.toml"
    path.write_text('format = "roost.graph"\nversion = 1\nname = "g"\nops = [{name = "a"}]\n')
    with pytest.raises(InputError, match="is a graph file; a cluster file is needed here"):
        presets.cluster(path)


def test_listing_the_presets_imports_nothing_heavy() -> None:
    code = (
        "import sys; from roost import presets; assert 'k80x4' in presets.names(); "
        "print(*sorted({'msgspec', 'torch', 'numba', 'roost.core.formats'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")
