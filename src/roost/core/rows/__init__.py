"""The fields of all files, and the nouns to and from them.

A class that ends in `File` has the fields of a file. The published JSON Schema comes from these.
"""

from roost.core.rows.base import (
    Count,
    Figure,
    File,
    Quantity,
)
from roost.core.rows.cluster import (
    ClusterFile,
    DeviceBlock,
    LinkBlock,
    cluster_file,
    cluster_from,
)
from roost.core.rows.graph import (
    GraphFile,
    OpRow,
    graph_file,
    graph_from,
)
from roost.core.rows.placement import (
    PlacementFile,
    ProblemFile,
    placement_file,
    placement_from,
    problem_file,
    problem_from,
)
from roost.core.rows.timeline import (
    MemoryStep,
    OpSpan,
    TimelineFile,
    TransferSpan,
    timeline_file,
    timeline_from,
)
from roost.core.rows.trial import (
    BoundRow,
    ResultFile,
    TrialRow,
    result_file,
    result_from,
    trial_fields,
    trial_from,
    trial_of,
    trial_row,
)

__all__ = [
    "BoundRow",
    "ClusterFile",
    "Count",
    "DeviceBlock",
    "Figure",
    "File",
    "GraphFile",
    "LinkBlock",
    "MemoryStep",
    "OpRow",
    "OpSpan",
    "PlacementFile",
    "ProblemFile",
    "Quantity",
    "ResultFile",
    "TimelineFile",
    "TransferSpan",
    "TrialRow",
    "cluster_file",
    "cluster_from",
    "graph_file",
    "graph_from",
    "placement_file",
    "placement_from",
    "problem_file",
    "problem_from",
    "result_file",
    "result_from",
    "timeline_file",
    "timeline_from",
    "trial_fields",
    "trial_from",
    "trial_of",
    "trial_row",
]
