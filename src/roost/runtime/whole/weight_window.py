"""The window through which streamed weights pass, fetched ahead in the order of their use.

`apply.py` makes it, and streamed modules enter and leave it. The window is one block of memory,
filled round and round. A module that comes as expected finds its weights there, or on their way;
when it has run, their place is free. The weights of an unexpected module are fetched at once, and
those that were fetched in vain are passed over. The next run is expected to follow the order of the
last one, and after its last module comes the first of the next run: generating text never waits for
its first weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from roost.runtime.whole.copy_streams import CopyQueue

_ALIGNED = 512  # bytes: suits kernels of every kind
_MANY = 64  # places of each module's weights whose views are kept


def aligned(size: int) -> int:
    """Bytes that a weight takes in the window."""
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(eq=False)
class ModuleWeights:
    """The weights that one module needs for a call."""

    name: str
    holders: list[Tensor]  # the parameters at home
    tensors: list[Tensor] = field(default_factory=list)  # their values
    offsets: list[int] = field(default_factory=list)
    size: int = 0  # bytes in the window

    def __post_init__(self) -> None:
        for tensor in self.holders:
            self.offsets.append(self.size)
            self.size += aligned(tensor.nbytes)
        self._state: list[tuple[int, int]] = []
        self.is_stale()

    def is_stale(self) -> bool:
        """Tell if somebody has written other weights since the last call of this."""
        state = [(0 if t.is_inference() else t._version, t.data_ptr()) for t in self.holders]
        if state == self._state:
            return False
        self._state = state
        self.tensors = [tensor.detach() for tensor in self.holders]
        return True


@dataclass(eq=False)
class WindowEntry:
    """The weights of a module at a place of the window."""

    weights: ModuleWeights
    begin: int
    views: list[Tensor]
    ready: Any
    begun: bool = False  # its module has come, or is passed over
    done: Any = None  # the event after which its place is free
    left: bool = False

    @property
    def end(self) -> int:
        return self.begin + self.weights.size

    def pass_over(self) -> None:
        self.begun = self.left = True


class WeightWindow:
    """Weights on their way to one device."""

    def __init__(
        self,
        queue: CopyQueue,
        device: torch.device,
        size: int,
        modules: Sequence[ModuleWeights],
    ) -> None:
        """Make a window of `size` bytes, or larger if the weights of one module need it."""
        self.queue = queue
        self.size = max([size, *(weights.size for weights in modules)])
        with torch.inference_mode(False):
            self._memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        self._device = device
        self._entries: list[WindowEntry] = []  # oldest first
        self._order = list(modules)  # the order that is expected
        self._next = 0  # in that order, the next to be fetched
        self._came: list[ModuleWeights] = []
        # Views by weights and their place: the same in every run.
        self._views_at: dict[tuple[ModuleWeights, int], list[Tensor]] = {}
        self.num_unexpected = 0
        # Inference tensors do not show if somebody writes into them: nothing of them is fetched
        # before its run has begun.
        self._unseen = any(tensor.is_inference() for each in modules for tensor in each.holders)
        if not self._unseen:
            self._fetch_ahead()

    def enter(self, weights: ModuleWeights) -> WindowEntry:
        """Give the weights of a module that is about to run."""
        self._came.append(weights)
        if weights.is_stale():
            self._views_at = {
                key: views for key, views in self._views_at.items() if key[0] is not weights
            }
            for entry in self._ahead():
                if entry.weights is weights:
                    entry.pass_over()
        if not any(entry.weights is weights for entry in self._ahead()):
            self._expect(weights)
        for entry in self._ahead():
            if entry.weights is weights:
                entry.begun = True
                self.queue.wait(entry.ready)
                return entry
            entry.pass_over()  # fetched in vain
        return self._outside(weights)

    def leave(self, entry: WindowEntry) -> None:
        """Free the place of a module that has run."""
        entry.done = self.queue.record_event()
        entry.left = True
        self._fetch_ahead()

    def end_run(self) -> None:
        """Note the end of a run of the model; the next run is expected to be like it."""
        came = self._came
        self._came = []
        if came and came != self._order:
            # Weights fetched by the old order are still good if the new order begins with them.
            ahead = [entry.weights for entry in self._ahead()]
            self._order = came
            if ahead == came[: len(ahead)]:
                self._next = len(ahead) % len(came)
            else:
                self._pass_over()
                self._next = 0
            self._fetch_ahead()
        if self._unseen:
            self._pass_over()

    def holds(self, tensor: Tensor) -> bool:
        """Tell if a tensor lies in the window."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def close(self) -> None:
        self.queue.close()
        self._entries.clear()

    def _ahead(self) -> list[WindowEntry]:
        """The entries whose modules have not come yet."""
        return [entry for entry in self._entries if not entry.begun]

    def _expect(self, weights: ModuleWeights) -> None:
        """Begin again with an unexpected module."""
        self.num_unexpected += 1
        self._pass_over()
        if weights in self._order:
            count = len(self._order)
            after = (number % count for number in range(self._next, self._next + count))
            self._next = next(number for number in after if self._order[number] is weights)
            self._fetch_ahead()

    def _pass_over(self) -> None:
        for entry in self._ahead():
            entry.pass_over()

    def _outside(self, weights: ModuleWeights) -> WindowEntry:
        """Copy weights without the window: the weights of a module around this one fill it."""
        copies = (tensor.to(self._device, copy=True) for tensor in weights.tensors)
        views = [alike(copy, holder) for copy, holder in zip(copies, weights.holders, strict=True)]
        return WindowEntry(weights, 0, views, None, begun=True)

    def _fetch_ahead(self) -> None:
        while len(self._ahead()) < len(self._order):
            weights = self._order[self._next]
            begin = self._entries[-1].end if self._entries else 0
            if begin + weights.size > self.size:
                begin = 0
            over = [
                entry
                for entry in self._entries
                if entry.begin < begin + weights.size and begin < entry.end
            ]
            if not all(entry.left for entry in over):
                return  # weights there are still to be used
            self._next = (self._next + 1) % len(self._order)
            self._entries = [entry for entry in self._entries if entry not in over]
            used = [entry.done for entry in over if entry.done is not None]
            self._fetch(weights, begin, used)

    def _fetch(self, weights: ModuleWeights, begin: int, used: list[Any]) -> None:
        views = self._views_at.get((weights, begin))
        if views is None:
            # The places may differ from run to run for long.
            if len(self._views_at) > _MANY * len(self._order):
                self._views_at.clear()
            with torch.inference_mode(False):
                views = self._views_at[weights, begin] = self._views(weights, begin)
        ready = self.queue.copy(list(zip(views, weights.tensors, strict=True)), used)
        self._entries.append(WindowEntry(weights, begin, views, ready))

    def _views(self, weights: ModuleWeights, begin: int) -> list[Tensor]:
        views = []
        for tensor, offset, holder in zip(
            weights.tensors, weights.offsets, weights.holders, strict=True
        ):
            own = self._memory[begin + offset : begin + offset + tensor.nbytes]
            # The layout of the tensor, without gaps.
            layout = torch.empty_like(tensor, device="meta").stride()
            views.append(alike(own.view(tensor.dtype).as_strided(tensor.shape, layout), holder))
        return views


def alike(tensor: Tensor, holder: Tensor) -> Tensor:
    """Make a parameter of a tensor if the holder is one; its versions are counted for itself."""
    own = tensor.data
    return nn.Parameter(own, requires_grad=False) if isinstance(holder, nn.Parameter) else own
