"""A function of tensors whose many small GPU kernels are recorded once and then replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Sequence[Tensor]


class GpuReplay:
    """Calls `run` on copies of its arguments, with one recording for each set of shapes.

    The weights that `run` reads may change in place between two calls.
    """

    def __init__(self, run: Callable[..., Sequence[Tensor]]) -> None:
        self.run = run
        self.recordings: dict[tuple[torch.Size, ...], _Recording] = {}

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        shapes = tuple(argument.shape for argument in arguments)
        if shapes not in self.recordings:
            self.recordings[shapes] = self._record([argument.clone() for argument in arguments])
        recording = self.recordings[shapes]
        for copy, argument in zip(recording.inputs, arguments, strict=True):
            copy.copy_(argument)
        recording.graph.replay()
        return [output.clone() for output in recording.outputs]

    def _record(self, inputs: list[Tensor]) -> _Recording:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        # The first calls allocate and choose kernels; a recording must not contain that.
        with torch.cuda.stream(stream):
            self.run(*inputs)
            self.run(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.run(*inputs)
        return _Recording(graph, inputs, outputs)
