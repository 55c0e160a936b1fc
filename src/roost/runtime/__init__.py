"""Runtimes: they run a placement on the devices of this machine.

`step/` has what both runtimes need; `ops/` runs a captured step op by op (the graph runtime);
`whole/` runs an unchanged `nn.Module` (the module runtime). Code outside the package imports
`roost.runtime.graph` and `roost.runtime.optimizers`.
"""
