"""Graph -> Graph: one file per transform, each with a way back for placements.

`microbatch` is another kind: it makes several ops of one, so it has its own result.
"""

from __future__ import annotations

from typing import Protocol

from roost.core.graph import Graph
from roost.transforms._transformed import Transformed as Transformed


class Transform(Protocol):
    """A transform: it makes a graph from another."""

    def apply(self, graph: Graph) -> Transformed: ...


def apply(graph: Graph, *transforms: Transform) -> Transformed:
    """The graph after these transforms, one after the other."""
    transformed = Transformed.unchanged(graph)
    for transform in transforms:
        transformed = transformed.then(transform)
    return transformed
