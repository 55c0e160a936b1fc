"""How fast the simulator is: ratios measured side by side in one run, in CPU time, best of several
repeats.

    python benchmarks/speed/simulator.py [--save]

Nothing is asserted about time. What is asserted is the work: every way of simulating must give the
same step times, peaks and numbers of transfers. `--save` writes the page to benchmarks/results/.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import rows as results
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.simulator import reference
from roost.simulator.compiled import Simulator
from roost.simulator.kernels.base import Layout, compiled, new_moves
from roost.simulator.kernels.push import push, push_times
from roost.testing.problems import scattered, training_like

HERE = Path(__file__).parent
SIZES = (100, 1_000, 10_000, 100_000)
DEVICES = (4, 8)
RUNS = {"scattered": 1, "in runs of 16": 16}  # ops in a row that share a device
WORK = 1_500_000  # ops simulated in each repeat, at the least


def cpu_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        best = min(best, time.thread_time() - begin)
    return best


@compiled
def push_rows(layout, devices, held, memory, step_time, peak, num_transfers):  # type: ignore[no-untyped-def]
    """What the twin does: the push pass over each row, with nothing around it."""
    num_ops = devices.shape[1]
    ready, dying = np.zeros(num_ops), np.zeros(num_ops, np.int64)
    free, bus_free, arrives = np.zeros(64), np.zeros(len(layout.bus_gap)), np.zeros(64)
    last, now = np.zeros(64, np.uint32), np.zeros(64, np.int64)
    moves = new_moves(0)
    for row in range(len(devices)):
        now[: layout.num_devices] = held[row]
        if memory:
            step_time[row], num_transfers[row] = push(
                layout,
                devices[row],
                ready,
                dying,
                free,
                bus_free,
                arrives,
                last,
                now,
                peak[row],
                moves,
            )
        else:
            step_time[row], num_transfers[row] = push_times(
                layout,
                devices[row],
                ready,
                dying,
                free,
                bus_free,
                arrives,
                last,
                now,
                peak[row],
                moves,
            )


ARRAYS = ("time", "output", "workspace", "next_start", "next", "bus")
RATES = ("latency", "seconds_per_byte", "bus_gap", "device_gap")
FIELDS = (*ARRAYS, *RATES)  # in the order of the struct in twin.cpp


class Twin:
    """The same pass in C++, compiled here."""

    class Arrays(ctypes.Structure):
        _fields_ = [(n, ctypes.c_int64) for n in ("num_ops", "num_devices", "num_buses")] + [
            (n, ctypes.c_void_p) for n in FIELDS
        ]

    def __init__(self, folder: Path) -> None:
        library = folder / "twin.so"
        # Without -ffp-contract=off gcc fuses multiply and add, and the last digit differs.
        flags = ["-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.check_call(["g++", *flags, "-o", str(library), str(HERE / "twin.cpp")])
        self.library = ctypes.CDLL(str(library))

    def __call__(
        self, layout: Layout, devices, held, memory, step_time, peak, num_transfers
    ) -> None:  # type: ignore[no-untyped-def]
        counts = (devices.shape[1], layout.num_devices, len(layout.bus_gap))
        arrays = self.Arrays(*counts, *(getattr(layout, name).ctypes.data for name in FIELDS))
        pointer = [
            ctypes.c_void_p(array.ctypes.data)
            for array in (devices, held, step_time, peak, num_transfers)
        ]
        self.library.push_batch(
            ctypes.byref(arrays),
            pointer[0],
            ctypes.c_int64(len(devices)),
            pointer[1],
            int(memory),
            pointer[2],
            pointer[3],
            pointer[4],
        )


def outcome_arrays(count: int, num_devices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(count), np.zeros((count, num_devices), np.int64), np.zeros(count, np.int64)


def neighbours_of(problem: Problem, base: np.ndarray, count: int, moves: int, seed: int):  # type: ignore[no-untyped-def]
    """Random moves of ops that read no parameter, so that nothing has to be fetched."""
    graph, rng = problem.graph, np.random.default_rng(seed)
    reads = np.zeros(graph.num_ops, bool)
    reads[graph.edge_target[graph.is_parameter[graph.input_op]]] = True
    free = np.flatnonzero(~reads & ~graph.is_parameter)
    ops = rng.choice(free, (count, moves))
    devices = np.repeat(rng.integers(0, problem.cluster.num_devices, count), moves)
    rows = np.repeat(base[None], count, axis=0)
    rows[np.repeat(np.arange(count), moves), ops.ravel()] = devices
    return np.arange(0, count * moves + 1, moves), ops.ravel(), devices, rows


def measure(num_ops: int, num_devices: int, run: int, twin: Twin | None) -> dict[str, float]:
    problem = training_like(num_ops, num_devices)
    simulator = Simulator(problem)
    base = Placement(scattered(problem, 0, run))
    layout = simulator.layout(base)
    count = max(16, min(2048, WORK // num_ops))
    rows = np.array([scattered(problem, seed, run) for seed in range(min(count, 256))])
    rows = np.ascontiguousarray(np.tile(rows, (-(-count // len(rows)), 1))[:count])
    each = 1e9 / count / num_ops  # seconds for all -> ns for an op
    found: dict[str, float] = {}

    # The reference gives the truth, and with it the work that has to be done.
    truth = reference.simulate(problem, base)
    begin = time.thread_time()
    for _ in range(max(1, 20_000 // num_ops)):
        reference.simulate(problem, base)
    found["reference"] = (time.thread_time() - begin) / max(1, 20_000 // num_ops) / num_ops * 1e9
    outcome = simulator.evaluate(rows)
    assert outcome.step_time[0] == truth.step_time
    assert outcome.peak_memory[0].tolist() == truth.peak_memory.tolist()
    assert outcome.num_transfers[0] == truth.num_transfers
    found["transfers"] = truth.num_transfers / num_ops
    found["memory"] = cpu_seconds(lambda: simulator.evaluate(rows)) * each
    found["times"] = cpu_seconds(lambda: simulator.evaluate(rows, memory=False)) * each
    simulator.evaluate(rows[:1], "fifo")
    found["fifo"] = cpu_seconds(lambda: simulator.evaluate(rows, "fifo", memory=False)) * each
    found["fifo_memory"] = cpu_seconds(lambda: simulator.evaluate(rows, "fifo"), 3) * each

    placed = np.ascontiguousarray(rows[:, layout.op])
    held = np.zeros((count, num_devices), np.int64)
    ours = outcome_arrays(count, num_devices)
    push_rows(layout, placed, held, False, *ours)
    assert (ours[0] == outcome.step_time).all()
    found["push"] = cpu_seconds(lambda: push_rows(layout, placed, held, False, *ours)) * each
    if twin is not None:
        theirs = outcome_arrays(count, num_devices)
        twin(layout, placed, held, False, *theirs)
        assert (ours[0] == theirs[0]).all()
        assert (ours[2] == theirs[2]).all()
        found["twin"] = cpu_seconds(lambda: twin(layout, placed, held, False, *theirs)) * each

    for moves in (1, 8):
        start, ops, devices, changed = neighbours_of(problem, base.device, count, moves, seed=moves)
        together = simulator.neighbours(base, start, ops, devices)
        alone = simulator.evaluate(changed)
        assert (together.step_time == alone.step_time).all()
        assert (together.peak_memory == alone.peak_memory).all()
        assert (together.num_transfers == alone.num_transfers).all()
        found[f"together_{moves}"] = (
            cpu_seconds(lambda s=start, o=ops, d=devices: simulator.neighbours(base, s, o, d))
            * each
        )
        found[f"alone_{moves}"] = cpu_seconds(lambda c=changed: simulator.evaluate(c)) * each
    return found


START = """
from roost.core.placement import Placement
from roost.simulator.compiled import simulate
from roost.testing.problems import scattered, training_like
problem = training_like(100, 4)
simulate(problem, Placement(scattered(problem)))
"""


def start_seconds(cache: Path) -> float:
    """CPU seconds of a process that imports Roost and simulates one placement."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.check_call(
        [sys.executable, "-c", START], env=os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def page(path: Path) -> str:
    """Goals with the worst figure found for each, then all rows."""
    rows = results.read(path)
    cases = [row for row in rows if row["part"] == "case"]
    lines = [
        "# Simulator speed\n",
        results.provenance(rows),
        "`make bench`, or `python benchmarks/speed/simulator.py --save` for this page. CPU time of one thread, "
        "the best of several repeats, per op of one placement. Reference and compiled both with memory (the "
        "reference always makes the full timeline); `push / C++` is the bare pass without memory on both sides; "
        "neighbours against the same placements one by one. Every way of simulating is checked to give the same "
        "step times, peaks and numbers of transfers.\n",
        f"{rows[0]['machine']}, {rows[0]['versions']}.\n",
        *goals(cases, [row for row in rows if row["part"] == "start"]),
        "",
        *table(cases),
    ]
    return "\n".join(lines) + "\n"


def table(cases: list[dict[str, Any]]) -> list[str]:
    """A line for each case."""
    lines = [
        "| ops | devices | placement | transfers per op | reference | compiled | ratio | times only | memory / times "
        f"| push / C++ | fifo / program | fifo memory / times | {LANES} neighbours, one move | several moves |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in cases:
        twin = f"{row['push'] / row['twin']:.2f}" if "twin" in row else "-"
        lines.append(
            f"| {row['ops']} | {row['devices']} | {row['placement']} | {row['transfers']:.2f} "
            f"| {row['reference']:.0f} ns | {row['memory']:.1f} ns | {row['reference'] / row['memory']:.0f}x "
            f"| {row['times']:.1f} ns | {row['memory'] / row['times']:.2f} | {twin} "
            f"| {row['fifo'] / row['times']:.2f} | {row['fifo_memory'] / row['fifo']:.2f} "
            f"| {row['alone_1'] / row['together_1']:.1f}x | {row['alone_8'] / row['together_8']:.1f}x |"
        )
    return lines


LANES = 16
SMALL, MIDDLE, LARGE = (100,), (1_000, 10_000), (1_000, 10_000, 100_000)
# What, the figure, the goal, whether the goal is the most allowed, and the sizes it is for.
GOALS: list[tuple[str, Callable[[dict[str, Any]], float], float, bool, tuple[int, ...]]] = [
    ("compiled against reference", lambda r: r["reference"] / r["memory"], 50.0, False, MIDDLE),
    ("with memory against without", lambda r: r["memory"] / r["times"], 2.0, True, SIZES),
    ("fifo against program", lambda r: r["fifo"] / r["times"], 5.0, True, SIZES),
    (
        "neighbours, one move, against alone",
        lambda r: r["alone_1"] / r["together_1"],
        3.5,
        False,
        LARGE,
    ),
    ("the same, small graphs", lambda r: r["alone_1"] / r["together_1"], 3.5, False, SMALL),
    ("program order against C++", lambda r: r["push"] / r["twin"], 1.25, True, SIZES),
]
MOST_GROWTH, MOST_SECOND_START = 2.0, 0.125


def goals(cases: list[dict[str, Any]], starts: list[dict[str, Any]]) -> list[str]:
    """Each goal with the worst value found for it."""
    lines = ["| goal | asked | worst found | |", "|---|---|---|---|"]
    for what, figure, goal, at_most, sizes in GOALS:
        fit = [row for row in cases if row["ops"] in sizes and ("C++" not in what or "twin" in row)]
        if not fit:
            continue
        worst = (max if at_most else min)(fit, key=figure)
        where = f"{worst['ops']} ops, {worst['devices']} devices, {worst['placement']}"
        said = results.verdict(figure(worst), goal, fit, at_most)
        asked = f"{'<=' if at_most else '>='} {goal:g}"
        lines.append(f"| {what} | {asked} | {figure(worst):.2f} ({where}) | {said} |")
    time_of = {(row["devices"], row["placement"], row["ops"]): row for row in cases}
    growth = [
        (time_of[devices, name, LARGE[-1]]["memory"] / row["memory"], devices, name)
        for (devices, name, ops), row in time_of.items()
        if ops == LARGE[0] and (devices, name, LARGE[-1]) in time_of
    ]
    if growth:
        ratio, devices, name = max(growth)
        said = results.verdict(ratio, MOST_GROWTH, cases)
        what = f"time per op, {LARGE[-1]} ops against {LARGE[0]}"
        lines.append(
            f"| {what} | <= {MOST_GROWTH:g} | {ratio:.2f} ({devices} devices, {name}) | {said} |"
        )
    for row in starts:
        ratio, seconds = (
            row["second"] / row["first"],
            f"{row['second']:.2f} s after {row['first']:.1f} s",
        )
        said = results.verdict(ratio, MOST_SECOND_START, [row])
        asked = f"<= {MOST_SECOND_START}"
        lines.append(f"| second start against first | {asked} | {ratio:.3f} ({seconds}) | {said} |")
    return lines


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = start_seconds(Path(folder)), start_seconds(Path(folder))
        twin = Twin(Path(folder)) if shutil.which("g++") else None
        about = results.measured_with()
        rows: list[dict[str, Any]] = [{"part": "start", "first": first, "second": second, **about}]
        for num_ops in SIZES:
            for num_devices in DEVICES:
                for name, run in RUNS.items():
                    said = f"{num_ops} ops, {num_devices} devices, {name}"
                    print(f"{said} ...", file=sys.stderr, flush=True)
                    found = measure(num_ops, num_devices, run, twin)
                    case = {
                        "part": "case",
                        "ops": num_ops,
                        "devices": num_devices,
                        "placement": name,
                    }
                    rows.append(case | found | about)
        name = f"simulator_{platform.machine()}_{os.cpu_count()}core_{time.strftime('%Y%m')}"
        saved = "--save" in sys.argv
        path = (results.RESULTS if saved else Path(folder)) / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = page(path)
    print(text)
    if saved:
        path.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
