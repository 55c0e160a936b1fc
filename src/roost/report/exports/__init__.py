"""Exporters: one file for each tool that can take a placement, found by the name of the file.

An exporter rounds a placement to one that its tool can express, and tells the cost of the rounding.
It raises InputError with the reason if the tool cannot run the placement. `roost export` calls it.
"""

from roost.report.exports._export import Export
from roost.report.exports.device_map import DeviceMap, device_map
from roost.report.exports.llama_cpp import LlamaCpp, llama_cpp
from roost.report.exports.microbatches import Microbatches, microbatches
from roost.report.exports.split_spec import SplitSpec, split_spec

__all__ = [
    "DeviceMap",
    "Export",
    "LlamaCpp",
    "Microbatches",
    "SplitSpec",
    "device_map",
    "llama_cpp",
    "microbatches",
    "split_spec",
]
