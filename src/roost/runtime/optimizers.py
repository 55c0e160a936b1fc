"""The official home of the optimizers of the graph runtime, for code outside the package."""

from roost.runtime.step.optimizers import Optimizer as Optimizer
