"""`roost place` with microbatches and with requests under way."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_problem import build_cluster, tight_cluster

import roost as library
from roost.cli._microbatches import counts_of
from roost.core.graph import Graph, GraphBuilder
from roost.cost_models import estimate
from roost.errors import InputError

SIZE = ("layers=1", "hidden=16", "heads=2", "kv_heads=2", "intermediate=16", "vocab=20", "length=4")
LLAMA = ["llama", "--train", *[text for each in SIZE for text in ("--set", each)]]
RULES = ["--placer", "rules", "--trials", 20]


def step(kind: str = "mm", train: bool = True) -> Graph:
    """Two layers with weights, and their gradients and updates where they are trained."""
    builder = GraphBuilder("step")
    builder.add("x", "input", phase="input", output_bytes=80)
    before = "x"
    for name in ("one", "two"):
        builder.parameter(f"{name}.w", 4000)
        inputs = [before, f"{name}.w"]
        before = builder.add(name, kind, inputs, flop=3e9, output_bytes=400, module=name)
    for name, source in (("two", "one"), ("one", "x")) if train else ():
        grad = [before, source]
        phase = {"phase": "backward", "module": name}
        before = builder.add(f"{name}.grad", "mm", grad, flop=5e9, output_bytes=4000, **phase)
        update = [f"{name}.w", before]
        builder.add(f"{name}.update", "sgd", update, flop=1e3, phase="update", module=name)
    return builder.freeze()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    step().save(tmp_path / "step.json")
    step(train=False).save(tmp_path / "serve.json")
    step("native_batch_norm").save(tmp_path / "norm.json")
    build_cluster().save(tmp_path / "mini.toml")
    return tmp_path


@pytest.fixture
def placed(roost: Callable[..., Any], folder: Path) -> Callable[..., dict[str, Any]]:
    def run(source: str, *more: object) -> dict[str, Any]:
        on = ["--on", folder / "mini.toml"]
        result = roost("place", folder / source, *on, *RULES, "--json", *more)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return run


def test_a_model_is_captured_at_each_share_of_its_batch(roost: Any, folder: Path) -> None:
    cut = ["--set", "batch=4", "--microbatches", "1,2", "--on", folder / "mini.toml"]
    out = folder / "out"
    result = roost("place", *LLAMA, *cut, *RULES, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    chosen = found["microbatches"]
    assert chosen["batch"] == 4
    steps = {(row["count"], row["placer"]): row["step_time"] for row in chosen["rows"]}
    assert {count for count, _ in steps} == {1, 2}
    assert steps[chosen["count"], "rules"] == found["step_time"] == min(steps.values())
    assert not (out / "trials.jsonl").exists()
    assert "trials" not in found["files"]
    again = roost("simulate", out / "problem.json.gz", "--placement", out, "--json")
    assert json.loads(again.stdout)["step_time"] == found["step_time"]


def test_a_table_has_each_placer_at_each_number_of_microbatches(roost: Any, folder: Path) -> None:
    on = ["--on", folder / "mini.toml", "--microbatches", 2, "--placer", "auto", "--trials", 200]
    result = roost("place", folder / "step.json", *on)
    assert result.exit_code == 0, result.output
    assert "the batch is 2 times as large" in result.stderr
    lines = result.stdout.splitlines()
    assert "2 microbatches: " in result.stdout
    table = lines[lines.index("best step with so many microbatches:") :]
    assert table[1].split() == ["placer", "2"]
    names = {line.split()[0] for line in table[3:] if line}
    assert {"auto", "data_parallel", "single"} <= names


def test_a_file_of_one_microbatch_is_unrolled_and_its_trace_names_the_copies(
    placed: Any, folder: Path
) -> None:
    found = placed("step.json", "--microbatches", 3, "-o", folder / "out")
    problem = library.load(folder / "out" / "problem.json.gz")
    assert "one#2" in problem.graph.op_names
    assert found["microbatches"]["count"] == 3
    assert found["microbatches"]["batch"] is None
    trace = json.loads(gzip.decompress((folder / "out" / "trace.json.gz").read_bytes()))
    by_name = {event["name"]: event for event in trace["traceEvents"] if event.get("cat") == "op"}
    assert by_name["one#2"]["args"]["microbatch"] == 2
    assert "microbatch" not in by_name["one.update"]["args"]
    assert by_name["one#2"]["cname"] != by_name["one.grad#2"]["cname"]


def test_the_folder_of_a_search_is_exported(placed: Any, roost: Any, folder: Path) -> None:
    out = folder / "out"
    placed("step.json", "--microbatches", 2, "--placer", "single", "-o", out)
    form = ["--placement", out, "--format", "microbatches", "--json"]
    result = roost("export", out / "problem.json.gz", *form)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["form"], found["accumulate"]) == ("one device", 2)


def test_where_nothing_fits_the_exit_code_says_so(roost: Any, folder: Path) -> None:
    tight_cluster(100).save(folder / "small.toml")
    on = ["--on", folder / "small.toml", "--microbatches", 2, *RULES]
    result = roost("place", folder / "step.json", *on)
    assert result.exit_code == 3, result.output
    assert "too large" in result.stdout
    assert "nothing fits" in result.stderr


def test_smaller_microbatches_are_named_where_nothing_fits(roost: Any, folder: Path) -> None:
    small = ["rnnlm", "--train", "--set", "batch=8", "--set", "layers=1", "--set", "length=2"]
    small += ["--set", "hidden=8", "--set", "vocab=512"]
    tight_cluster(80_000).save(folder / "small.toml")
    given = [*small, "--on", folder / "small.toml", "--trials", 300, "--json", "--microbatches"]
    result = roost("place", *given, 1)
    assert result.exit_code == 3, result.output
    fix = json.loads(result.stdout)["fix"]["microbatches"]
    assert f"fits in {fix} microbatches" in result.stderr
    assert roost("place", *given, fix).exit_code == 0


def test_requests_have_a_period_a_latency_and_a_bound(
    placed: Any, roost: Any, folder: Path
) -> None:
    found = placed("serve.json", "--requests", 4)
    flow = found["requests"]
    assert flow["count"] == 4
    assert flow["bound"]["period"] <= flow["period"] <= found["step_time"] / 4
    assert flow["per_second"] == 1 / flow["period"]
    assert flow["latency"] <= flow["longest_latency"]
    on = ["--on", folder / "mini.toml", "--requests", 4]
    told = roost("place", folder / "serve.json", *on, *RULES).stdout
    assert "a step of 4 requests" in told
    assert "between the ends of two requests" in told
    assert "No placement ends requests closer than" in told


def test_batch_norm_is_named_and_allowed_when_asked(
    placed: Any, refused: Any, folder: Path
) -> None:
    on = ["--on", folder / "mini.toml", "--microbatches", 2]
    message = refused("place", folder / "norm.json", *on)
    assert message.startswith("BatchNorm in one, two takes its statistics from the batch")
    assert message.endswith("allow it with --batch-statistics")
    found = placed("norm.json", "--microbatches", 2, "--batch-statistics")
    assert found["microbatches"]["count"] == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["step.json", "--microbatches", "auto"], "was captured at one batch"),
        (["step.json", "--microbatches", "1,2"], "give one number"),
        (["step.json", "--microbatches", "few"], "'few': give auto, a number, or a list"),
        (["step.json", "--microbatches", "0"], "'0': give auto"),
        (["step.json", "--requests", 2], "'step' is a training step; use --microbatches"),
        (["serve.json", "--requests", 0], "--requests is 0; give 1 or more"),
        (["serve.json", "--requests", 2, "--microbatches", 2], "give one"),
        (["serve.json", "--batch-statistics"], "--batch-statistics needs --microbatches"),
    ],
)
def test_what_cannot_be_unrolled_is_refused(
    refused: Any, folder: Path, options: list[Any], says: str
) -> None:
    name, *more = options
    assert says in refused("place", folder / name, "--on", folder / "mini.toml", *more)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "batch=4", "--microbatches", 8], "8: is more than the batch, 4"),
        (["--set", "batch=6", "--microbatches", 4], "4: does not divide the batch, 6"),
        (["--set", "batch=1", "--microbatches", "auto"], "the batch is 1: there is nothing to cut"),
        (["--requests", 2], "--requests is for inference; with --train use --microbatches"),
        (["--microbatches", 2, "--evaluate", "measured"], "leave out --microbatches"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_before_it_is_captured(
    refused: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, options: list[Any], says: str
) -> None:
    monkeypatch.setattr("roost.cli._model.ModelSpec.capture", lambda spec: pytest.fail("captured"))
    monkeypatch.setattr("roost.cli._measured_search.check", lambda how, *rest: how == "measured")
    assert says in refused("place", *LLAMA, "--on", folder / "mini.toml", *options)


def test_a_model_without_a_batch_is_refused(refused: Any, folder: Path) -> None:
    on = ["--on", folder / "mini.toml", "--microbatches", 2]
    assert "add --set batch=N" in refused("place", "torch.nn:Identity", *on)


def test_costs_of_one_graph_are_for_one_number(refused: Any, folder: Path) -> None:
    estimate(step(), build_cluster()).save(folder / "costs.json")
    more = ["--costs", folder / "costs.json", "--microbatches", "1,2", "--set", "batch=2"]
    assert "holds the costs of one graph" in refused("place", *LLAMA, *more)


def test_trials_of_another_search_stand_in_the_way(refused: Any, placed: Any, folder: Path) -> None:
    placed("serve.json", "-o", folder / "out")
    on = ["--on", folder / "mini.toml", "--requests", 2]
    message = refused("place", folder / "serve.json", *on, "-o", folder / "out")
    assert "holds trials of another search" in message


def test_an_unrolled_graph_is_not_unrolled_again(placed: Any, refused: Any, folder: Path) -> None:
    placed("step.json", "--microbatches", 2, "-o", folder / "out")
    message = refused("place", folder / "out" / "problem.json.gz", "--microbatches", 2)
    assert "is unrolled already" in message


def test_the_problem_of_copies_is_named_where_the_model_is_given(
    refused: Any, placed: Any, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    placed("step.json", "--microbatches", 2, "-o", folder / "out")
    monkeypatch.setattr("roost.cli._model.ModelSpec.capture", lambda spec: step())
    where = ["--placement", folder / "out", "--format", "split_spec"]
    message = refused("export", *LLAMA, *where)
    assert "is a problem of 2 copies of 'step'; name this file in place of llama" in message


def test_numbers_of_microbatches_divide_the_batch() -> None:
    assert counts_of("auto", 16) == (1, 2, 4, 8, 16)
    assert counts_of("auto", 12) == (1, 2, 4)
    assert counts_of("6,2,2", 12) == (2, 6)
    with pytest.raises(InputError, match=r"no divisor among 2, 4, 8 and 16; give one of 1, 7"):
        counts_of("auto", 7)
