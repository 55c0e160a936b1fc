"""`roost clusters`: the presets, or one cluster in detail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roost import presets


def test_every_preset_is_listed_with_its_devices_and_memory(roost) -> None:
    text = roost("clusters", columns=200).stdout
    lines = {line.split()[0]: line for line in text.splitlines() if not line.startswith((" ", "─"))}
    assert set(lines) == {"name", *presets.names()}
    assert "1 cpu + 4 cuda" in lines["k80x4"]
    assert "cpu 46.6 GiB" in lines["k80x4"]
    assert presets.cluster("k80x4").description in lines["k80x4"]


def test_the_list_as_json(roost) -> None:
    found = json.loads(roost("clusters", "--json").stdout)
    assert list(found) == ["clusters"]
    assert [each["name"] for each in found["clusters"]] == presets.names()
    for each in found["clusters"]:
        cluster = presets.cluster(each["name"])
        assert [(d["name"], d["kind"], d["memory"]) for d in each["devices"]] == [
            (d.name, d.kind, d.memory) for d in cluster.devices
        ]


@pytest.mark.parametrize("name", presets.names())
@pytest.mark.parametrize("columns", [80, 120])
def test_one_cluster_is_shown_whole_at_any_width(roost, name: str, columns: int) -> None:
    text = roost("clusters", name, columns=columns).stdout
    cluster = presets.cluster(name)
    words = {word.rstrip(":") for word in text.split()}
    assert all(len(line) <= columns for line in text.splitlines())
    assert "…" not in text
    for block in [*cluster.devices, *cluster.links]:
        assert {word.rstrip(":") for word in block.figures_from.split()} <= words
    for device in cluster.devices:
        assert set(device.peak) <= words
    for link in cluster.links:
        assert {link.source, link.target} <= words


def test_one_cluster_has_units(roost) -> None:
    text = roost("clusters", "two_hosts_a100x4").stdout
    for part in (
        "cuda:0..3",
        "39.5 GiB",
        "1.55 TB/s",
        "5.00 us",
        "float32 19.5 TFLOP/s",
        "12.5 GB/s",
        "20.0 us",
    ):
        assert part in text
    assert "Figures of cpu:0, cpu:1" in text


def test_what_makes_a_cluster_special_is_said(roost) -> None:
    text = roost("clusters", "placeto_k80x2").stdout
    assert "Broadcast" in text
    assert "do not count in memory" in text
    assert "5.70 us" in text  # the gap, a column that other clusters lack


@pytest.mark.parametrize("name", presets.names())
def test_one_cluster_as_json_is_the_cluster(roost, name: str) -> None:
    found = json.loads(roost("clusters", name, "--json").stdout)
    cluster = presets.cluster(name)
    assert (found["name"], found["description"]) == (name, cluster.description)
    assert (found["broadcast"], found["copies_in_memory"]) == (
        cluster.broadcast,
        cluster.copies_in_memory,
    )
    for block, device in zip(found["devices"], cluster.devices, strict=True):
        assert block == vars(device)
    for block, link in zip(found["links"], cluster.links, strict=True):
        assert block == vars(link)


def test_a_cluster_file_works_too(roost, files: Path) -> None:
    result = roost("clusters", files / "mini.toml")
    assert result.exit_code == 0
    assert "mini: Three devices." in result.stdout
    assert "Figures of" not in result.stdout


def test_names_are_shown_as_they_are(roost, tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(
        'format = "roost.cluster"\nversion = 1\nname = "[red]x[/red] :smile:"\n'
        '[[devices]]\nnames = ["[bold]", "npu:1:7"]\nkind = "npu"\nmemory = 10\n'
        '[[links]]\nbetween = ["*", "*"]\nbandwidth = 1\n'
    )
    text = roost("clusters", path).stdout
    assert "[red]x[/red] :smile:" in text
    assert "[bold], npu:1:7" in text


def test_an_unknown_preset_suggests_the_nearest(refused) -> None:
    assert refused("clusters", "h100x9") == "no preset called 'h100x9'; did you mean 'h100x8'?"
    assert refused("clusters", "zzz").startswith("no preset called 'zzz'; known: a100x4, cpu, ")


def test_a_file_that_is_no_cluster_is_refused(refused, files: Path) -> None:
    assert refused("clusters", files / "graph.json").endswith(
        "graph.json: is a graph file; a cluster file is needed here"
    )
    assert refused("clusters", files / "none.toml").endswith("none.toml: no such file")
