"""Pipelines, data parallelism and mixtures: placements of a step that is unrolled into copies."""
