"""Timelines worked out by hand from the rules, in `tests/golden/`: the simulators must give them
exactly."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from roost.core import formats
from roost.core.timeline import TRANSFER_KINDS, Timeline

GOLDEN = Path(__file__).parents[1] / "golden"

NEEDED = {
    "broadcast",
    "broadcast_unequal_links",
    "chain",
    "copies_not_counted",
    "crossings_keep_both_ends_busy",
    "fetch_and_send_share_a_link",
    "fetch_between_sends",
    "fifo_memory_in_time",
    "fork_join",
    "infeasible",
    "link_contention",
    "memory_in_dispatch_order",
    "memory_peak_in_the_middle",
    "one_device",
    "order_fifo",
    "order_priority",
    "order_rank",
    "order_rank_allowed",
    "parameters_only",
    "placement_counts_its_own_devices",
    "sends_later_than_fetches",
    "sends_slower_than_fetches",
    "shared_bus",
    "shared_bus_ties",
    "streaming_fifo",
    "streaming_keeps_both_ends_busy",
    "streaming_keeps_what_it_needs",
    "streaming_refetch",
    "streaming_window_grows",
    "streaming_within_window",
    "tensor_needed_twice_sent_once",
    "update_sends_home",
    "update_streams",
    "update_two_parameters",
    "zero_time_and_zero_bytes",
}


def golden_cases() -> list[Any]:
    """Every golden; a file with several placements of one problem has a list of `cases`."""
    found = []
    for path in sorted(GOLDEN.glob("*.json")):
        golden = json.loads(path.read_text(encoding="utf-8"))
        for case in golden.get("cases", [golden]):
            name = f"{path.stem}-{case['name']}" if "cases" in golden else path.stem
            found.append(
                pytest.param({**case, "problem": golden["problem"], "file": path.name}, id=name)
            )
    return found


def simulate(simulator: str, case: dict[str, Any], **options: bool) -> Timeline:
    module = importlib.import_module(f"roost.simulator.{simulator}")
    problem, placement = (
        formats.decode(json.dumps(case[noun]).encode(), f"{case['file']}: {noun}")
        for noun in ("problem", "placement")
    )
    timeline: Timeline = module.simulate(problem, placement, **options)
    return timeline


def in_words(timeline: Timeline) -> dict[str, Any]:
    """A timeline as the goldens write it."""
    ops, devices = timeline.op_names, timeline.device_names
    moves = timeline.transfers
    assert timeline.start is not None
    assert timeline.finish is not None
    assert moves is not None
    spans = zip(timeline.start.tolist(), timeline.finish.tolist(), strict=True)
    columns = (moves.tensor, moves.source, moves.target, moves.kind, moves.start, moves.finish)
    return {
        "step_time": timeline.step_time,
        "feasible": timeline.feasible,
        "missing_bytes": timeline.missing_bytes,
        "peak_memory": dict(zip(devices, timeline.peak_memory.tolist(), strict=True)),
        "ops": {name: list(span) for name, span in zip(ops, spans, strict=True)},
        "transfers": [
            {
                "tensor": ops[tensor],
                "source": devices[source],
                "target": devices[target],
                "kind": TRANSFER_KINDS[kind],
                "start": start,
                "finish": finish,
            }
            for tensor, source, target, kind, start, finish in zip(
                *(c.tolist() for c in columns), strict=True
            )
        ],
    }


def memory_steps(timeline: Timeline, device: str) -> list[list[float]]:
    """[time, bytes held] at the start and after each change; a change by 0 bytes is none."""
    track = timeline.memory
    assert track is not None
    number = timeline.device_names.index(device)
    steps: list[list[float]] = []
    for on, time, held in zip(
        track.device.tolist(), track.time.tolist(), track.held.tolist(), strict=True
    ):
        if on == number and (not steps or steps[-1][1] != held):
            steps.append([time, held])
    return steps


@pytest.mark.parametrize("case", golden_cases())
@pytest.mark.parametrize("simulator", ["reference", "compiled"])
def test_timeline_is_the_one_worked_out_by_hand(simulator: str, case: dict[str, Any]) -> None:
    timeline = simulate(simulator, case, **({"full": True} if simulator == "compiled" else {}))
    expect = dict(case["expect"])
    memory = expect.pop("memory", {})
    assert in_words(timeline) == expect
    assert timeline.num_transfers == len(expect["transfers"])
    for device, steps in memory.items():
        in_time = isinstance(steps[0], list)  # with fifo the goldens say when as well
        found = memory_steps(timeline, device)
        assert (found if in_time else [held for _, held in found]) == steps, device


@pytest.mark.parametrize("case", golden_cases())
def test_compiled_without_the_full_timeline_gives_the_same_figures(case: dict[str, Any]) -> None:
    timeline, expect = simulate("compiled", case, full=False), case["expect"]
    assert timeline.step_time == expect["step_time"]
    assert (
        dict(zip(timeline.device_names, timeline.peak_memory.tolist(), strict=True))
        == expect["peak_memory"]
    )
    assert timeline.num_transfers == len(expect["transfers"])
    assert (timeline.feasible, timeline.missing_bytes) == (
        expect["feasible"],
        expect["missing_bytes"],
    )


def test_every_needed_golden_is_there() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} >= NEEDED


def test_every_golden_says_why() -> None:
    for path in sorted(GOLDEN.glob("*.json")):
        golden = json.loads(path.read_text(encoding="utf-8"))
        assert golden["why"], path.name
        assert golden["problem"]["graph"]["name"] == path.stem
