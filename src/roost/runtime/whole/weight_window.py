"""The window through which weights pass that live elsewhere: fetched ahead in the order of their
use.

The window is one block of memory, filled round and round. A module that comes as expected finds its
weights there, or on their way; after it has run their place is free for the next. What comes out of
turn is fetched at once, and what had been fetched in vain is passed over. The order of one run is
what the next is expected to follow, and after its last module comes the first of the next run:
generating text never waits for its first weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from roost.runtime.whole.copy_streams import CopyQueue

_ALIGNED = 512  # bytes: what kernels of every kind like
_MANY = 64  # places for each load of which the views are kept


def aligned(size: int) -> int:
    """Bytes that a weight takes in the window."""
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(eq=False)
class ModuleWeights:
    """The weights that one module needs for a call."""

    name: str
    holders: list[Tensor]  # the parameters themselves, at home
    tensors: list[Tensor] = field(default_factory=list)  # what is in them
    offsets: list[int] = field(default_factory=list)
    size: int = 0  # bytes in the window

    def __post_init__(self) -> None:
        for tensor in self.holders:
            self.offsets.append(self.size)
            self.size += aligned(tensor.numel() * tensor.element_size())
        self._state: list[tuple[int, int]] = []
        self.is_stale()

    def is_stale(self) -> bool:
        """Whether somebody has written other weights since this was asked last."""
        state = [(0 if t.is_inference() else t._version, t.data_ptr()) for t in self.holders]
        if state == self._state:
            return False
        self._state, self.tensors = state, [tensor.detach() for tensor in self.holders]
        return True


@dataclass(eq=False)
class WindowEntry:
    """A load in the window."""

    load: ModuleWeights
    begin: int
    views: list[Tensor]
    ready: Any
    begun: bool = False  # its module has come, or never will
    done: Any = None  # after which its place is free
    left: bool = False

    @property
    def end(self) -> int:
        return self.begin + self.load.size


class WeightWindow:
    """Weights on their way to one device."""

    def __init__(
        self, way: CopyQueue, device: torch.device, size: int, loads: Sequence[ModuleWeights]
    ) -> None:
        """At least the largest load fits, whatever the size."""
        self.way, self.size = way, max([size, *(load.size for load in loads)])
        with torch.inference_mode(False):
            self._memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        self._device = device
        self._visits: list[WindowEntry] = []  # oldest first
        self._order, self._next = list(loads), 0  # what is expected, and what of it is fetched next
        self._came: list[ModuleWeights] = []
        # Views, by where a load lies: the same in every run.
        self._made: dict[tuple[ModuleWeights, int], list[Tensor]] = {}
        self.num_unexpected = 0
        # Nobody can see whether somebody has written into such: nothing of them is fetched before
        # its run has begun.
        self._unseen = any(tensor.is_inference() for load in loads for tensor in load.holders)
        if not self._unseen:
            self._fetch_ahead()

    def enter(self, load: ModuleWeights) -> WindowEntry:
        """The weights of a module that is about to run."""
        self._came.append(load)
        if load.is_stale():
            self._made = {key: views for key, views in self._made.items() if key[0] is not load}
            for visit in self._visits:
                if visit.load is load and not visit.begun:
                    visit.begun = visit.left = True
        if not any(visit.load is load and not visit.begun for visit in self._visits):
            self._expect(load)
        for visit in self._visits:
            if visit.begun:
                continue
            visit.begun = True
            if visit.load is load:
                self.way.wait(visit.ready)
                return visit
            visit.left = True  # fetched in vain
        return self._outside(load)

    def leave(self, visit: WindowEntry) -> None:
        """A module has run."""
        visit.done, visit.left = self.way.mark(), True
        self._fetch_ahead()

    def end_run(self) -> None:
        """The model has run once; the next run is expected to be like it."""
        came, self._came = self._came, []
        if came and came != self._order:
            # What was fetched ahead by the old order is still good where the new one begins alike.
            ahead = [visit.load for visit in self._visits if not visit.begun]
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
        """Whether a tensor looks into the window."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def close(self) -> None:
        self.way.close()
        self._visits.clear()

    def _expect(self, load: ModuleWeights) -> None:
        """Something comes out of turn: begin again with it."""
        self.num_unexpected += 1
        self._pass_over()
        if load in self._order:
            start = self._next
            count = len(self._order)
            self._next = min(
                (i for i in range(count) if self._order[i] is load),
                key=lambda i: (i - start) % count,
            )
            self._fetch_ahead()

    def _pass_over(self) -> None:
        for visit in self._visits:
            if not visit.begun:
                visit.begun = visit.left = True

    def _outside(self, load: ModuleWeights) -> WindowEntry:
        """There is no room: a module with weights runs inside another whose weights fill the
        window."""
        copies = (tensor.to(self._device, copy=True) for tensor in load.tensors)
        views = [alike(copy, holder) for copy, holder in zip(copies, load.holders, strict=True)]
        return WindowEntry(load, 0, views, None, begun=True)

    def _fetch_ahead(self) -> None:
        while len(self._visits) - self._num_begun() < len(self._order):
            load = self._order[self._next]
            begin = self._room(load.size)
            if begin is None:
                return
            self._next = (self._next + 1) % len(self._order)
            self._fetch(load, begin)

    def _num_begun(self) -> int:
        return sum(visit.begun for visit in self._visits)

    def _room(self, size: int) -> int | None:
        """Where the next load goes; None where something stands there that is still to be used."""
        begin = self._visits[-1].end if self._visits else 0
        if begin + size > self.size:
            begin = 0
        over = (visit for visit in self._visits if visit.begin < begin + size and begin < visit.end)
        return begin if all(visit.left for visit in over) else None

    def _fetch(self, load: ModuleWeights, begin: int) -> None:
        over = [
            visit for visit in self._visits if visit.begin < begin + load.size and begin < visit.end
        ]
        self._visits = [visit for visit in self._visits if visit not in over]
        views = self._made.get((load, begin))
        if views is None:
            # Where a load lies may differ from run to run for long.
            if len(self._made) > _MANY * len(self._order):
                self._made.clear()
            with torch.inference_mode(False):
                views = self._made[load, begin] = self._views(load, begin)
        used = [visit.done for visit in over if visit.done is not None]
        ready = self.way.copy(list(zip(views, load.tensors, strict=True)), used)
        self._visits.append(WindowEntry(load, begin, views, ready))

    def _views(self, load: ModuleWeights, begin: int) -> list[Tensor]:
        found = []
        for tensor, offset, holder in zip(load.tensors, load.offsets, load.holders, strict=True):
            own = self._memory[
                begin + offset : begin + offset + tensor.numel() * tensor.element_size()
            ]
            # Its own, where that leaves no gaps.
            layout = torch.empty_like(tensor, device="meta").stride()
            found.append(alike(own.view(tensor.dtype).as_strided(tensor.shape, layout), holder))
        return found


def alike(tensor: Tensor, holder: Tensor) -> Tensor:
    """A parameter where the holder is one. Its versions are counted by themselves, not with all
    that is around it."""
    own = tensor.data
    return nn.Parameter(own, requires_grad=False) if isinstance(holder, nn.Parameter) else own
