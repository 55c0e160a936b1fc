"""`plan.json`: the file of a plan and its problem; reading it needs no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from roost.core import formats, rows
from roost.core.cluster import MEMORY, Cluster
from roost.errors import InputError
from roost.plan.clusters import check_store
from roost.plan.plan import Plan, simulated
from roost.runtime.whole.module_placement import ModulePlacement


class ModulesBlock(rows.File):
    """The homes of weights and devices of modules; all others are on the main device."""

    main: str
    model: str  # digest of names, shapes and types of the parameters and buffers
    home: dict[str, str]
    runs_on: dict[str, str] = msgspec.field(default_factory=dict)
    streamed: dict[str, list[str]] = msgspec.field(default_factory=dict)
    window: rows.Count = 0
    few_rows: rows.Count = 0
    stays: list[str] = msgspec.field(default_factory=list)
    on_the_spot: list[str] = msgspec.field(default_factory=list)


class PlanFile(rows.File, tag_field="format", tag="roost.plan"):
    """`plan.json`: a plan for one model."""

    version: int
    modules: ModulesBlock
    placement: rows.PlacementFile
    problem: rows.ProblemFile
    result: rows.ResultFile
    measured: rows.Figure | None = None  # seconds of a step in a trial run


def plan_file(plan: Plan) -> PlanFile:
    return PlanFile(
        version=1,
        modules=msgspec.convert(msgspec.to_builtins(plan.modules), ModulesBlock),
        placement=rows.placement_file(plan.placement),
        problem=rows.problem_file(plan.problem),
        result=rows.result_file(plan.result),
        measured=plan.measured,
    )


def plan_from(file: PlanFile) -> Plan:
    with _named("problem"):
        problem = rows.problem_from(file.problem)
    with _named("placement"):
        placement = problem.check(rows.placement_from(file.placement))
    with _named("result"):
        result = rows.result_from(file.result)
    with _named("problem"):
        check_store(problem.cluster)
    modules = _modules(file.modules, problem.cluster)
    with _named("modules.on_the_spot"):
        timeline = simulated(problem, placement, modules)
    return Plan(problem, result, modules, placement, timeline, file.measured)


def _modules(block: ModulesBlock, cluster: Cluster) -> ModulePlacement:
    devices = [device.name for device in cluster.devices if device.kind != MEMORY]
    if not block.model:
        raise InputError(
            "modules.model: is empty; it must be the digest of the model that the plan is for"
        )
    named: dict[str, Mapping[str, str]] = {
        "home": block.home,
        "runs_on": block.runs_on,
        "main": {"": block.main},
    }
    for field, placed in named.items():
        for name, device in placed.items():
            if device not in devices:
                key = f"[{name!r}]" if name else ""
                raise InputError(
                    f"modules.{field}{key}: {device!r} is no device of the problem; it has "
                    f"{', '.join(devices)}"
                )
    most = cluster.devices[cluster.index_of(block.main)].memory
    if block.window > most:  # refused now, or applying the plan would run out of memory
        raise InputError(
            f"modules.window: is {block.window} bytes; {block.main!r} of the problem has {most}"
        )
    fields = msgspec.structs.asdict(block)
    fields["streamed"] = {module: tuple(names) for module, names in block.streamed.items()}
    fields |= {"stays": tuple(block.stays), "on_the_spot": tuple(block.on_the_spot)}
    with _named("modules"):
        return ModulePlacement(**fields)


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Put the field in front of errors."""
    try:
        yield
    except InputError as error:
        error.args = (f"{field}: {error}",)
        raise


formats.FORMATS["roost.plan"] = formats.Format(Plan, PlanFile, plan_file, plan_from)
