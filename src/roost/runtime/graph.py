"""The official home of the graph runtime, for code outside the package."""

from roost.runtime.ops.run import GraphRuntime as GraphRuntime
