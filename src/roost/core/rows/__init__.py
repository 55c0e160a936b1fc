"""The fields of all files, and the nouns to and from them.

A class that ends in `File` has the fields of a file. The published JSON Schema comes from these.
"""

from roost.core.rows.base import Count as Count
from roost.core.rows.base import Figure as Figure
from roost.core.rows.base import File as File
from roost.core.rows.base import Quantity as Quantity
from roost.core.rows.cluster import ClusterFile as ClusterFile
from roost.core.rows.cluster import DeviceBlock as DeviceBlock
from roost.core.rows.cluster import LinkBlock as LinkBlock
from roost.core.rows.cluster import cluster_file as cluster_file
from roost.core.rows.cluster import cluster_from as cluster_from
from roost.core.rows.graph import GraphFile as GraphFile
from roost.core.rows.graph import OpRow as OpRow
from roost.core.rows.graph import graph_file as graph_file
from roost.core.rows.graph import graph_from as graph_from
from roost.core.rows.placement import PlacementFile as PlacementFile
from roost.core.rows.placement import ProblemFile as ProblemFile
from roost.core.rows.placement import placement_file as placement_file
from roost.core.rows.placement import placement_from as placement_from
from roost.core.rows.placement import problem_file as problem_file
from roost.core.rows.placement import problem_from as problem_from
from roost.core.rows.timeline import MemoryStep as MemoryStep
from roost.core.rows.timeline import OpSpan as OpSpan
from roost.core.rows.timeline import TimelineFile as TimelineFile
from roost.core.rows.timeline import TransferSpan as TransferSpan
from roost.core.rows.timeline import timeline_file as timeline_file
from roost.core.rows.timeline import timeline_from as timeline_from
from roost.core.rows.trial import BoundRow as BoundRow
from roost.core.rows.trial import ResultFile as ResultFile
from roost.core.rows.trial import TrialRow as TrialRow
from roost.core.rows.trial import result_file as result_file
from roost.core.rows.trial import result_from as result_from
from roost.core.rows.trial import trial_fields as trial_fields
from roost.core.rows.trial import trial_from as trial_from
from roost.core.rows.trial import trial_of as trial_of
from roost.core.rows.trial import trial_row as trial_row
