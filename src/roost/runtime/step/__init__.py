"""The unplaced step, devices, threads, random ops and differences: for both runtimes."""
