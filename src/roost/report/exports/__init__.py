"""A placement for other tools: what of it they can express, rounded to whole modules, and what that
costs.

`device_map` is for accelerate and transformers, `split_spec` for torch.distributed.pipelining,
`llama_cpp` for llama.cpp. Each refuses with an InputError, and a reason, what its tool cannot do.
"""

from roost.report.exports._device_map import DeviceMap, device_map
from roost.report.exports._llama_cpp import Overrides, llama_cpp
from roost.report.exports._split_spec import SplitSpec, split_spec

__all__ = ["DeviceMap", "Overrides", "SplitSpec", "device_map", "llama_cpp", "split_spec"]
