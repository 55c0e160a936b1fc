"""What crosses between the devices of a run: values, fetched parameters, and new values on their
way home.

Between two devices of the kind `cpu` a thread copies, one for each way. Where one of them is a CUDA
device, a stream copies, and it is told to by the thread that has the tensor at hand: of the device
that sends, or that fetches. One thread may have the CUDA devices and the CPU beside them
(`merged.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from torch import Tensor

from roost.runtime.ops.cuda import CudaDevice
from roost.runtime.ops.residents import HomeResidents
from roost.runtime.step.device_threads import AWAKE_SECONDS, Mailbox, OldValueReads, TaskThread
from roost.runtime.step.devices import (
    CopyFunction,
    CpuDevice,
    Event,
    RuntimeDevice,
    SentTensor,
    copied,
)
from roost.simulator.reference import Copy

_SMALL = 2**18  # bytes that are copied in less time than it takes to ask somebody else to do it


class TransferCalls:
    """The half of a runtime that the code of the devices calls for what crosses."""

    def __init__(self, device_names: Sequence[str], places: Sequence[RuntimeDevice]) -> None:
        self.device_names, self.places = device_names, places
        self.launchers: list[list[int]]  # the devices of each thread, once that has been decided
        self.home_residents: HomeResidents  # of residents, once they have been settled
        self._boxes: dict[tuple[str, int, int], Mailbox] = {}
        self._reads: dict[int, OldValueReads] = {}
        self._links: dict[tuple[int, int, str], TaskThread] = {}
        self._num_home = 0  # new values that go home in each step
        # What a step waits for.
        self._done: SimpleQueue[BaseException | Event | None] = SimpleQueue()

    def _fail(self, error: BaseException) -> None:
        """Whoever waits for something is told that nothing will come."""
        for box in self._boxes.values():
            box.end()
        for reads in self._reads.values():
            reads.end()

    def _box(self, kind: str, number: int, device: int) -> Mailbox:
        # Beside GPUs threads have cores of their own; devices that are threads share them with
        # those that copy.
        awake = (
            AWAKE_SECONDS if any(isinstance(place, CudaDevice) for place in self.places) else 0.0
        )
        return self._boxes.setdefault((kind, number, device), Mailbox(awake))

    def _link(self, source: int, target: int, what: str = "values") -> TaskThread:
        """A thread that copies from one device to another; one for new values, which may have to
        wait."""
        key = source, target, what
        if key not in self._links:
            name = f"{what} from {self.device_names[source]} to {self.device_names[target]}"
            self._links[key] = TaskThread(name, self._fail)
        return self._links[key]

    def _together(self, one: int, other: int) -> bool:
        """Whether one thread has both devices."""
        return any(one in host and other in host for host in self.launchers)

    def _carry(self, source: int, target: int) -> CopyFunction:
        """How a tensor gets from one device to another."""
        start, end = self.places[source], self.places[target]
        if isinstance(end, CudaDevice):
            return partial(end.bring, source=start) if isinstance(start, CudaDevice) else end.bring
        return start.take if isinstance(start, CudaDevice) else copied

    def _reads_of(self, parameter: int) -> OldValueReads:
        return self._reads.setdefault(parameter, OldValueReads())

    def sending(self, op: int, source: int, target: int) -> Callable[[Tensor], None]:
        box, carry = self._box("value", op, target), self._carry(source, target)
        start, end = self.places[source], self.places[target]
        if isinstance(start, CudaDevice):
            at_once = _SMALL if isinstance(end, CpuDevice) else -1
            return lambda tensor: box.put(
                start.handed(tensor) if tensor.nbytes <= at_once else carry(tensor, (start.mark(),))
            )
        link = None if self._together(source, target) else self._link(source, target)

        def send(tensor: Tensor) -> None:
            if tensor.nbytes <= _SMALL:
                box.put(end.posted(tensor) if isinstance(end, CudaDevice) else carry(tensor))
            elif link is None:
                box.put(carry(tensor))
            else:
                link.give(lambda: box.put(carry(tensor)))

        return send

    def receiving(self, op: int, source: int, target: int) -> Callable[[], Tensor]:
        box, place = self._box("value", op, target), self.places[target]
        return lambda: place.received(box.take())

    def fetching(self, device: int, number: int, copy: Copy) -> Callable[[], None]:
        parameter = copy.parameter
        box, home = self._box("copy", number, device), self.home_residents.device[parameter]
        value, start, end = (
            self.home_residents.tensor[parameter],
            self.places[home],
            self.places[device],
        )
        # Where nobody writes a new value, nobody takes what is added.
        reads = self._reads_of(parameter) if parameter in self.home_residents.written else None

        def fetched(parcel: SentTensor) -> None:
            box.put(parcel)
            if reads is not None:
                reads.add(parcel.arrival)

        if isinstance(end, CudaDevice):
            slot, source = (
                self.home_residents.window[device][number],
                start if isinstance(start, CudaDevice) else None,
            )
            return lambda: fetched(end.fetch(value, slot, source))
        if isinstance(start, CudaDevice):
            return lambda: fetched(start.take(value))
        link = self._link(home, device)
        return lambda: link.give(lambda: fetched(copied(value)))

    def fetched(self, device: int, number: int, copy: Copy) -> Callable[[], Tensor]:
        box, place = self._box("copy", number, device), self.places[device]

        def take() -> Tensor:
            parcel: SentTensor = box.take()
            place.wait(parcel.arrival)
            return parcel.tensor

        return take

    def read_at_home(self, parameter: int) -> Callable[[], None]:
        reads, place = self._reads_of(parameter), self.places[self.home_residents.device[parameter]]
        return lambda: reads.add(place.mark())

    def going_home(self, parameter: int, source: int, reads: int) -> Callable[[Tensor], None]:
        home = self.home_residents.device[parameter]
        carry, start = self._carry(source, home), self.places[source]
        # Made now, not when it is first needed: a run that is being closed would not know of it.
        link = None if self._together(source, home) else self._link(source, home, "new values")
        value, read = self.home_residents.tensor[parameter], self._reads_of(parameter)
        self._num_home += 1

        def write(tensor: Tensor, ready: Event | None) -> Event | None:
            arrival = carry(tensor, (ready, *read.take(reads)), value).arrival
            self._done.put(arrival)
            return arrival

        def go(tensor: Tensor) -> None:
            new = start.leaving(tensor) if isinstance(start, CudaDevice) else tensor
            ready = start.mark()
            if link is not None and not (isinstance(start, CudaDevice) and read.there(reads)):
                link.give(lambda: write(new, ready))
                return
            # Nobody has to be woken: all have read it, as nearly always.
            arrival = write(new, ready)
            if isinstance(start, CudaDevice):
                start.left(arrival, new.nbytes)

        return go


def launchers(places: Sequence[RuntimeDevice], together: bool = False) -> list[list[int]]:
    """The devices of each thread: one each, or if asked all, where no more than one of them has to
    compute itself."""
    every = list(range(len(places)))
    computing = sum(not isinstance(place, CudaDevice) for place in places)
    return [every] if together and computing <= 1 else [[device] for device in every]
