"""What both runtimes need: devices, threads, random ops, optimizers, and the unplaced step."""
