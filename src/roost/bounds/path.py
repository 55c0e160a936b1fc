"""Critical path: ops that wait for each other run in turn, each on its fastest device."""

from __future__ import annotations

from roost.bounds._relaxed import Relaxed


def critical_path(relaxed: Relaxed) -> float:
    """The longest path through the graph, with nothing taken for transfers."""
    graph = relaxed.problem.graph
    fastest = relaxed.time.min(axis=1).tolist()
    longest = 0.0
    finish = [0.0] * graph.num_ops
    for op, sources in enumerate(graph.input_lists()):
        finish[op] = max((finish[source] for source in sources), default=0.0) + fastest[op]
        longest = max(longest, finish[op])
    return longest
