"""The contracts of front-ends, cost models, exporters, presets and transforms.

Each check takes a name, such as `their_pkg.module:Class`, or the plug-in itself. It raises
AssertionError with what is wrong.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roost import catalog, presets
from roost.core import formats
from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import Graph, GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.cost_models import CostModel, estimate
from roost.errors import InputError
from roost.report.exports import Export
from roost.simulator.compiled import simulate
from roost.testing.tiny_problems import tiny_problem, tiny_problems
from roost.transforms import Transform

_PRESETS = ("cpu", "k80x4", "h200")  # a CPU, several GPUs, a GPU and its host


def check_frontend(front_end: str | Any, source: str | Path, **options: Any) -> Graph:
    """Read a model file with a front-end, and return the graph.

    Reading twice gives equal graphs. The graph has ops that compute, survives a file, and gets
    costs. A front-end of an installed package names the suffixes of its files.
    """
    reader = _made("frontends", front_end)
    if isinstance(front_end, str) and ":" in front_end:
        suffixes = getattr(reader, "suffixes", None)
        named = isinstance(suffixes, tuple) and str(source).endswith(suffixes)
        assert named, f"suffixes is {suffixes!r}; it must be a tuple with the ending of {source}"
        options = {"train": False, "optimizer": "sgd", **options}
    graph = reader.read(str(source), **options)
    assert isinstance(graph, Graph), f"read gave a {type(graph).__name__}, not a Graph"
    again = reader.read(str(source), **options)
    assert again.digest == graph.digest, "the same file gave another graph"
    assert not graph.is_parameter.all(), "the graph has no op that computes"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        graph.save(path)
        assert formats.load(path) == graph, "the graph is another one when it comes from a file"
    for name in _PRESETS:
        estimate(graph, name)
    return graph


def check_cost_model(
    model: str | CostModel,
    graph: Graph | None = None,
    clusters: Iterable[str | Cluster] = _PRESETS,
) -> None:
    """Estimate the costs of a graph on some clusters.

    Costs are [ops, devices] seconds, alike each time; parameters take none, and something does.
    """
    chosen: CostModel = _made("cost_models", model)
    graph = graph or _small_model()
    for given in clusters:
        cluster = presets.cluster(given) if isinstance(given, str) else given
        costs = chosen.estimate(graph, cluster)
        assert isinstance(costs, Costs), f"estimate gave a {type(costs).__name__}, not Costs"
        shape = (graph.num_ops, cluster.num_devices)
        assert costs.op_time.shape == shape, (
            f"{cluster.name}: op_time is {list(costs.op_time.shape)}; it must be {list(shape)}"
        )
        assert not costs.op_time[graph.is_parameter].any(), f"{cluster.name}: a weight takes time"
        assert costs.op_time.any(), f"{cluster.name}: no op takes time"
        assert costs.source, f"{cluster.name}: the costs do not name their source"
        assert costs == chosen.estimate(graph, cluster), f"{cluster.name}: other costs each time"


def check_exporter(
    exporter: str | type[Export],
    problem: Problem | None = None,
    placements: Sequence[Placement] = (),
) -> None:
    """Export some placements of a small model, or those given.

    An export has a text and fields, alike each time, and saves its text. A placement that the tool
    cannot run raises InputError; one at least can be run.
    """
    kind = catalog.find("report/exports", exporter) if isinstance(exporter, str) else exporter
    assert issubclass(kind, Export), f"{kind.__name__} is no roost.report.exports.Export"
    problem = problem or _offloading()
    exported = 0
    reasons = []
    for placement in placements or _layer_by_layer(problem):
        try:
            export = kind.of(None, problem, placement)
        except InputError as error:
            reasons.append(str(error))
            continue
        exported += 1
        again = kind.of(None, problem, placement)
        assert export.text(), "the text is empty"
        assert export.text() == again.text(), "the same placement gave another text"
        assert str(export), "str(export) is empty; it tells the cost of the rounding"
        json.dumps(export.facts())
        with tempfile.TemporaryDirectory() as folder:
            export.save(Path(folder) / "export")
            saved = (Path(folder) / "export").read_text()
        assert saved == export.text(), "save writes another text"
    assert exported, f"no placement was exported: {'; '.join(reasons)}"


def check_preset(name_or_path: str | Path) -> Cluster:
    """Load the cluster of a preset or a file, and return it.

    It is called after its file. Each block explains its figures. Devices are linked, each with the
    figures of a roofline, and a small model runs on every device.
    """
    cluster = presets.cluster(name_or_path)
    assert cluster.name == Path(str(name_or_path)).stem, f"it is called {cluster.name}"
    assert cluster.description, "the cluster has no description"
    blocks: list[Device | Link] = [*cluster.devices, *cluster.links]
    for block in blocks:
        assert block.figures_from.strip(), f"{block}: figures_from is empty"
    problem = estimate(_small_model(), cluster)
    for device in range(cluster.num_devices):
        step = simulate(problem, problem.placement(np.full(problem.graph.num_ops, device)))
        assert step.step_time > 0, f"nothing takes time on {cluster.device_names[device]}"
    apart = np.arange(problem.graph.num_ops) % cluster.num_devices
    assert np.isfinite(simulate(problem, problem.placement(apart)).step_time)
    return cluster


def check_transform(transform: str | Transform, problems: Iterable[str] | None = None) -> None:
    """Apply a transform to the graphs of tiny problems, and go back with a placement.

    The new graph has the same parameters' bytes. Any placement of it that keeps its rules is one of
    the original. A second try gives the same graph, and the original is left as it was.
    """
    chosen: Transform = _made("transforms", transform)
    possible = 0
    for name in tiny_problems() if problems is None else problems:
        problem = tiny_problem(name)
        before = problem.graph.digest
        done = chosen.apply(problem.graph)
        assert problem.graph.digest == before, f"{name}: the graph was changed"
        assert done.original == problem.graph, f"{name}: the result is of another graph"
        assert chosen.apply(problem.graph).graph == done.graph, f"{name}: another graph each time"
        try:
            smaller = done.problem(problem)
        except InputError:  # a transform for other kinds of devices
            continue
        possible += 1
        may = smaller.allowed.copy()
        for group in range(smaller.graph.num_groups):
            members = smaller.graph.group == group
            may[members] = may[members].all(axis=0)
        assert may.any(axis=1).all(), f"{name}: an op has no device left"
        for device in (may.argmax(axis=1), may.shape[1] - 1 - may[:, ::-1].argmax(axis=1)):
            placement = smaller.placement(device)
            smaller.check(placement)
            problem.check(done.expand(placement))
    assert possible, "no problem is possible after the transform"


def _made(folder: str, plugin: str | Any) -> Any:
    """The plug-in, made without settings where its name is given."""
    chosen = catalog.find(folder, plugin) if isinstance(plugin, str) else plugin
    return chosen() if inspect.isclass(chosen) else chosen


def _small_model() -> Graph:
    """Two layers of a language model, inference, in float32."""
    builder = GraphBuilder("small_model")
    builder.add("tokens", phase="input", output_bytes=8 * 64)
    before = "tokens"
    names = ["model.embed_tokens"]
    names += [
        f"model.layers.{n}.{part}" for n in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")
    ]
    for name in [*names, "lm_head"]:
        weight = builder.parameter(f"{name}.weight", 4 * 64 * 64, module=name)
        before = builder.add(
            f"{name}.out",
            "matmul",
            [before, weight],
            flop=2.0 * 64**3,
            bytes_read=8 * 64 * 64,
            bytes_written=4 * 64 * 64,
            output_bytes=4 * 64 * 64,
            module=name,
        )
    return builder.freeze()


def _offloading() -> Problem:
    """A small model for one GPU and its host."""
    return estimate(_small_model(), "h200")


def _layer_by_layer(problem: Problem) -> list[Placement]:
    """All on each device, and the last layers on another device than the first."""
    count = problem.graph.num_ops
    last = np.array([m.startswith(("model.layers.1", "lm_head")) for m in problem.graph.modules])
    whole = [np.full(count, device) for device in range(problem.cluster.num_devices)]
    split = [np.where(last, whole[-1], whole[0]), np.where(last, whole[0], whole[-1])]
    return [problem.placement(device) for device in [*whole, *split]]
