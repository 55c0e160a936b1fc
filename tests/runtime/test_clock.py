"""The measured timeline: what ran when, as the placement has it."""

import numpy as np
import pytest
from test_graph_runtime import made, on_one

import roost
from roost.errors import InputError
from roost.report.trace import write_trace
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.devices import CpuDevice
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import residents_of
from support.late import late_place
from support.runs import any_placement, mixed_problem


@pytest.mark.parametrize("kinds", ["c", "cc", "cg"])
def test_ops_run_after_what_they_read_and_one_at_a_time(kinds, tmp_path):
    model, inputs, step = made("adam", dropout=0.5)
    names = ["cpu" if kind == "c" and "g" in kinds else f"cpu:{n}" for n, kind in enumerate(kinds)]
    names = [name if kind == "c" else "cuda:0" for name, kind in zip(names, kinds, strict=True)]
    problem, rng = mixed_problem(step, *names), np.random.default_rng(3)
    graph = problem.graph
    for seed in range(3):
        placement = any_placement(problem, rng)
        runs = {}
        for record in (True, False):
            devices = [CpuDevice() if kind == "c" else late_place(seed) for kind in kinds]
            rate = Optimizer(rate=1e-2)
            with GraphRuntime(
                step, problem, placement, residents_of(model), rate, devices=devices, record=record
            ) as run:
                runs[record] = [float(run.step(*inputs)[0]) for _ in range(2)]
                if not record:
                    with pytest.raises(InputError, match="record=True"):
                        run.timeline()
                    continue
                found = run.timeline()
        assert runs[True] == runs[False]
        assert found.source == "measured"
        assert (found.device == placement.device).all()
        took = ~graph.is_parameter & np.array([kind != "output" for kind in graph.kinds])
        assert (found.start[took] < found.finish[took]).all()
        assert found.start.min() >= 0
        assert found.finish.max() <= found.step_time
        for op in np.flatnonzero(took).tolist():
            for read in graph.input_lists()[op]:
                assert found.finish[read] <= found.start[op]
        for device in range(len(kinds)):
            here = np.flatnonzero(took & (placement.device == device))
            here = here[np.argsort(found.start[here])]
            assert (found.finish[here[:-1]] <= found.start[here[1:]]).all()
        found.save(tmp_path / "timeline.json.gz")
        again = roost.load(tmp_path / "timeline.json.gz")
        assert again.source == "measured"
        assert (again.finish == found.finish).all()
        write_trace(found, tmp_path / "trace.json.gz", graph)


def test_what_was_not_run_has_no_timeline():
    model, _, step = made()
    problem = mixed_problem(step, "cpu")
    with (
        GraphRuntime(step, problem, on_one(step), residents_of(model), record=True) as run,
        pytest.raises(InputError, match="no step has been run"),
    ):
        run.timeline()
    with pytest.raises(InputError, match="leave out graphs"):
        GraphRuntime(step, problem, on_one(step), residents_of(model), record=True, graphs=True)
