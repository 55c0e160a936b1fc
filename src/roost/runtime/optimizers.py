"""The official home of the optimizers of the graph runtime, for code outside the package.

An `Optimizer` has the settings of SGD, momentum, Adam and AdamW, as in `torch.optim`. The settings
of an `AdjustableOptimizer` may change from step to step.
"""

from roost.runtime.step.optimizers import AdjustableOptimizer as AdjustableOptimizer
from roost.runtime.step.optimizers import Optimizer as Optimizer
