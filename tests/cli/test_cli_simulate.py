"""`roost simulate`: the numbers of `roost.simulate`, and what it says about bad input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_problem import DEVICES, build_cluster, build_graph

import roost as library
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.cost_models import estimate
from roost.report.trace import encode


def expected(problem: Problem, placement: Placement) -> dict[str, Any]:
    """What --json must print, from the library."""
    step = library.simulate(problem, placement, full=True)
    assert step.device is not None
    assert step.transfers is not None
    rows = []
    for number, device in enumerate(problem.cluster.devices):
        sizes = problem.graph.output_bytes[step.transfers.tensor]
        row = {
            "name": device.name,
            "num_ops": int((step.device == number).sum()),
            "busy": float(step.busy[number]),
            "sent_bytes": int(sizes[step.transfers.source == number].sum()),
            "received_bytes": int(sizes[step.transfers.target == number].sum()),
            "peak_memory": int(step.peak_memory[number]),
            "capacity": device.memory,
        }
        rows.append(row)
    return {
        "graph": problem.graph.name,
        "cluster": problem.cluster.name,
        "costs": problem.costs.source,
        "order": placement.order,
        "step_time": step.step_time,
        "feasible": step.feasible,
        "num_transfers": step.num_transfers,
        "peak_memory": {row["name"]: row["peak_memory"] for row in rows},
        "capacity": {row["name"]: row["capacity"] for row in rows},
        "missing_bytes": {
            row["name"]: max(0, row["peak_memory"] - row["capacity"]) for row in rows
        },
        "devices": rows,
    }


def as_json(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def args(files: Path, *more: object, cluster: str = "mini.toml") -> list[object]:
    return [
        "simulate",
        files / "graph.json",
        "--on",
        files / cluster,
        "--placement",
        files / "placement.json",
        *more,
    ]


@pytest.mark.parametrize("order", ["program", "rank", "fifo"])
@pytest.mark.parametrize("window", [None, "2kB"])
def test_json_is_what_the_library_says(roost, files: Path, order: str, window: str | None) -> None:
    more = ["--order", order, *(["--prefetch", window] if window else [])]
    found = as_json(roost(*args(files, *more, "--json")))
    problem = estimate(build_graph(), build_cluster())
    placement = Placement(np.array(DEVICES), order, prefetch_bytes=2000 if window else 0)
    assert found == expected(problem, placement)
    assert found["feasible"]
    assert found["num_transfers"] == 5
    assert found["devices"][1]["busy"] > 0


def test_the_options_of_the_placement_count_unless_others_are_given(roost, files: Path) -> None:
    placement = Placement(np.array(DEVICES), "priority", np.arange(6.0)[::-1], prefetch_bytes=9000)
    placement.save(files / "placement.json")
    problem = estimate(build_graph(), build_cluster())
    assert as_json(roost(*args(files, "--json"))) == expected(problem, placement)
    overridden = Placement(np.array(DEVICES), "rank", prefetch_bytes=50)
    found = as_json(roost(*args(files, "--json", "--order", "rank", "--prefetch", "50")))
    assert found == expected(problem, overridden)


def test_a_problem_file_needs_no_cluster(roost, files: Path) -> None:
    alone = roost(
        "simulate", files / "problem.json.gz", "--placement", files / "placement.json", "--json"
    )
    assert as_json(alone) == as_json(roost(*args(files, "--json")))


def test_costs_from_a_file(roost, files: Path) -> None:
    times = np.full((6, 3), 0.5)
    times[0] = 0.0
    library.Costs(times, source="profiled").save(files / "costs.npz")
    found = as_json(roost(*args(files, "--costs", files / "costs.npz", "--json")))
    placement = Placement(np.array(DEVICES))
    assert found == expected(
        Problem(build_graph(), build_cluster(), library.Costs(times, "profiled")), placement
    )
    assert found["costs"] == "profiled"
    assert found["step_time"] > 1.5


def test_a_placement_that_does_not_fit_is_a_result(roost, files: Path) -> None:
    result = roost(*args(files, "--json", cluster="small.toml"))
    found = as_json(result)
    assert found == expected(
        estimate(build_graph(), build_cluster(10_000)), Placement(np.array(DEVICES))
    )
    assert not found["feasible"]
    assert found["missing_bytes"]["cuda:0"] == found["peak_memory"]["cuda:0"] - 10_000 > 0
    assert found["missing_bytes"]["cuda:1"] == 0


def test_text_says_what_does_not_fit_and_by_how_much(roost, files: Path) -> None:
    result = roost(*args(files, cluster="small.toml"))
    assert result.exit_code == 0
    assert "does not fit: cuda:0 lacks 7.8 KiB" in result.stdout
    assert "over by" in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("cuda:0"))
    assert row.split()[-6:] == ["17.6", "KiB", "9.8", "KiB", "7.8", "KiB"]


def test_text_says_what_fits(roost, files: Path) -> None:
    result = roost(*args(files))
    head, about = result.stdout.splitlines()[:2]
    assert head.endswith("a step, 5 transfers, fits")
    assert about == "tiny (6 ops) on mini, program order, costs: roofline"
    assert "over by" not in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("cluster", ["mini.toml", "small.toml"])
def test_the_table_has_a_line_for_each_device_and_nothing_is_cut(
    roost, files: Path, columns: int, cluster: str
) -> None:
    lines = roost(*args(files, cluster=cluster), columns=columns).stdout.splitlines()
    assert [line.split()[0] for line in lines[3:]] == [
        "device",
        lines[4].strip(),
        "cpu:0",
        "cuda:0",
        "cuda:1",
    ]
    assert all(len(line) <= columns for line in lines)
    assert not any("…" in line for line in lines)


def test_the_same_table_in_narrow_windows_loses_nothing(roost, files: Path) -> None:
    text = roost(*args(files, cluster="small.toml"), columns=40).stdout
    assert "…" not in text
    assert all(len(line) <= 40 for line in text.splitlines())


def test_one_device_for_every_op(roost, files: Path) -> None:
    base = ["simulate", files / "free.json", "--on", files / "mini.toml", "--json"]
    named = roost(*base, "--device", "cuda:1")
    assert [each["num_ops"] for each in as_json(named)["devices"]] == [0, 0, 2]
    assert named.stderr == ""
    unnamed = roost(*base)
    assert [each["num_ops"] for each in as_json(unnamed)["devices"]] == [0, 2, 0]
    assert unnamed.stderr == "no --placement or --device given: every op goes on cuda:0\n"
    on_cpu = roost("simulate", files / "free.json", "--on", "cpu", "--json")
    assert [each["num_ops"] for each in as_json(on_cpu)["devices"]] == [2]


def test_timeline_and_trace_are_written(roost, files: Path) -> None:
    timeline, trace = files / "timeline.json.gz", files / "trace.json.gz"
    result = roost(*args(files, "--timeline", timeline, "--trace", trace, "--json"))
    as_json(result)
    problem = estimate(build_graph(), build_cluster())
    step = library.simulate(problem, Placement(np.array(DEVICES)), full=True)
    assert library.load(timeline).step_time == step.step_time
    assert library.load(timeline).finish.tolist() == step.finish.tolist()
    assert gzip.decompress(trace.read_bytes()) == encode(step, problem.graph)
    assert result.stderr == f"wrote {timeline}\nwrote {trace}; open it in ui.perfetto.dev\n"


def test_a_step_of_no_time_divides_by_nothing(roost, tmp_path: Path) -> None:
    builder = library.GraphBuilder("idle")
    builder.parameter("weight", 100)
    builder.freeze().save(tmp_path / "idle.json")
    result = roost("simulate", tmp_path / "idle.json", "--on", "cpu")
    assert result.exit_code == 0
    assert result.stdout.startswith("0 s a step, 0 transfers, fits\nidle (1 op) on cpu, ")


# Bad input: exit code 2, and a line that names the file or the option, and what to mend.


def test_an_unknown_preset_suggests_the_nearest(refused, files: Path) -> None:
    assert refused("simulate", files / "graph.json", "--on", "k80x5").endswith(
        "did you mean 'k80x4'?"
    )


def test_an_unknown_device_suggests_the_nearest(refused, files: Path) -> None:
    message = refused("simulate", files / "graph.json", "--on", "k80x4", "--device", "cuda:7")
    assert message.startswith("no device of cluster 'k80x4' called 'cuda:7'; did you mean 'cuda:")


def test_a_missing_file(refused, files: Path) -> None:
    path = files / "none.json"
    assert refused("simulate", path, "--on", "cpu") == f"{path}: no such file"
    assert (
        refused("simulate", files / "graph.json", "--on", "cpu", "--placement", path)
        == f"{path}: no such file"
    )
    assert (
        refused("simulate", files / "graph.json", "--on", "cpu", "--costs", path)
        == f"{path}: no such file"
    )


def test_a_directory(refused, files: Path) -> None:
    assert refused("simulate", files, "--on", "cpu").startswith(
        f"{files}: is no model; known are .onnx, "
    )


def test_a_truncated_file(refused, files: Path) -> None:
    path = files / "graph.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert refused("simulate", path, "--on", "cpu").startswith(f"{path}: is not whole JSON")
    packed = files / "problem.json.gz"
    packed.write_bytes(packed.read_bytes()[:-20])
    assert refused("simulate", packed).startswith(f"{packed}: damaged gzip file")


def test_a_version_that_is_not_known(refused, files: Path) -> None:
    path = files / "graph.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 9'))
    assert refused("simulate", path, "--on", "cpu").startswith(
        f"{path}: version: roost.graph 9 is not known"
    )


def test_a_field_of_the_wrong_type(refused, files: Path) -> None:
    path = files / "graph.json"
    path.write_bytes(path.read_bytes().replace(b'"output_bytes":4000', b'"output_bytes":"4000"'))
    assert refused("simulate", path, "--on", "cpu").startswith(f"{path}: ops[0].output_bytes: ")


def test_a_file_of_another_noun(refused, files: Path) -> None:
    path = files / "placement.json"
    assert (
        refused("simulate", path, "--on", "cpu")
        == f"{path}: holds a placement, not a graph or a problem"
    )
    message = refused(
        "simulate", files / "graph.json", "--on", "cpu", "--placement", files / "graph.json"
    )
    assert message.endswith("graph.json: is a graph file; a placement file is needed here")


def test_a_graph_without_a_cluster(refused, files: Path) -> None:
    message = refused("simulate", files / "graph.json")
    assert message.startswith(f"{files / 'graph.json'}: ")
    assert "--on" in message


@pytest.mark.parametrize(("option", "value"), [("--on", "cpu"), ("--costs", "costs.npz")])
def test_a_problem_brings_its_own_cluster_and_costs(
    refused, files: Path, option: str, value: str
) -> None:
    path = files / "problem.json.gz"
    message = refused("simulate", path, option, value)
    assert (
        message == f"{path}: is a problem, with a cluster and costs of its own; leave out {option}"
    )


def test_a_placement_and_a_device(refused, files: Path) -> None:
    assert "--placement and --device" in refused(*args(files, "--device", "cuda:0"))


def place(files: Path, device: list[int]) -> Path:
    path = files / "placement.json"
    Placement(np.array(device), devices=("cpu:0", "cuda:0", "cuda:1")).save(path)
    return path


def test_a_placement_of_the_wrong_length(refused, files: Path) -> None:
    path = place(files, [0, 1, 1])
    assert refused(*args(files)) == f"{path}: the placement has 3 entries; graph 'tiny' has 6 ops"


def test_a_placement_that_splits_a_group(refused, files: Path) -> None:
    path = place(files, [0, 1, 1, 2, 0, 2])
    assert refused(*args(files)).startswith(
        f"{path}: ops 'left' and 'right' share the group 'pair'"
    )


def test_a_placement_on_a_forbidden_kind(refused, files: Path) -> None:
    path = place(files, [0, 1, 1, 1, 1, 2])
    assert refused(*args(files)).startswith(
        f"{path}: op 'load' may only run on cpu; the placement puts it on 'cuda:0'"
    )


def test_a_placement_for_another_graph(refused, files: Path) -> None:
    Placement(np.array(DEVICES), graph="0123456789abcdef").save(files / "placement.json")
    assert "placement.json: the placement was made for graph 0123456789abcdef" in refused(
        *args(files)
    )


def test_a_device_that_cannot_run_every_op_suggests_one_that_can(refused, files: Path) -> None:
    base = ["simulate", files / "graph.json", "--on", files / "mini.toml"]
    for message in (refused(*base, "--device", "cuda:0"), refused(*base)):
        assert message.startswith("op 'load' may only run on cpu; ")
        assert "--device cpu:0" in message


def test_where_no_device_can_run_every_op_a_placement_is_asked_for(refused, files: Path) -> None:
    builder = library.GraphBuilder("split")
    builder.add("here", allowed=["cpu"])
    builder.add("there", allowed=["cuda"])
    builder.freeze().save(files / "split.json")
    message = refused("simulate", files / "split.json", "--on", files / "mini.toml")
    assert message.endswith("no device may run every op: give a --placement")


@pytest.mark.parametrize("size", ["12XB", "-5", "", "lots", "1e99GiB", "nan"])
def test_a_prefetch_that_is_no_size(refused, files: Path, size: str) -> None:
    message = refused(*args(files, f"--prefetch={size}"))
    assert "prefetch" in message


def test_an_order_that_is_none(roost, files: Path) -> None:
    result = roost(*args(files, "--order", "priority"))
    assert result.exit_code == 2
    assert "'program', 'rank', 'fifo'" in result.stderr


def test_costs_of_another_shape(refused, files: Path) -> None:
    library.Costs(np.zeros((4, 3))).save(files / "costs.npz")
    message = refused(*args(files, "--costs", files / "costs.npz"))
    assert message.startswith(f"{files / 'costs.npz'}: op_time is [4, 3]; the graph has 6 ops")


@pytest.mark.parametrize("option", ["--timeline", "--trace"])
def test_a_folder_that_is_not_there(refused, files: Path, option: str) -> None:
    path = files / "none" / "out.json"
    assert (
        refused(*args(files, option, path))
        == f"{path}: cannot be written: folder {path.parent} does not exist"
    )


def test_a_model_in_place_of_a_file(roost, refused) -> None:
    given = [
        "cifar10_cnn",
        "--train",
        "--set",
        "batch=2",
        "--on",
        "k80x2",
        "--device",
        "cuda:1",
        "--json",
    ]
    found = as_json(roost("simulate", *given))
    graph = library.zoo.build("cifar10_cnn", train=True, batch=2)
    assert [device["num_ops"] for device in found["devices"]] == [0, 0, graph.num_ops]
    assert "did you mean 'cifar10_cnn'" in refused("simulate", "cifar11_cnn", "--on", "k80x2")


def test_where_modules_run(roost, tmp_path: Path) -> None:
    graph = Path(__file__).parents[2] / "examples" / "inception_v3.json.gz"
    roost("place", graph, "--on", "k80x2", "--trials", "50", "-o", tmp_path / "out")
    arguments = (
        "simulate",
        graph,
        "--on",
        "k80x2",
        "--placement",
        tmp_path / "out",
        "--modules",
        "1",
    )
    found = as_json(roost(*arguments, "--json"))
    rows = {row["name"]: row for row in found["modules"]}
    # In program order, after the images.
    assert list(rows)[1:3] == ["Conv2d_1a_3x3", "Conv2d_2a_3x3"]
    assert sum(row["num_ops"] for row in rows.values()) == sum(
        device["num_ops"] for device in found["devices"]
    )
    for device in found["devices"]:
        busy = sum(row["seconds"][device["name"]] for row in rows.values())
        assert busy == pytest.approx(device["busy"])
    deeper = as_json(roost(*arguments[:-1], "2", "--json"))["modules"]
    assert len(deeper) > len(rows)
    shown = roost(*arguments).stdout
    assert "Mixed_7c" in shown
    assert roost(*arguments[:-1], "0").exit_code == 2
    assert "modules" not in as_json(roost(*arguments[:-2], "--json"))
