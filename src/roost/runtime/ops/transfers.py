"""Transfers between the devices of a run: values, fetched parameters, and new values going home.

`GraphRuntime` inherits from `TransferCalls`, whose functions the device code calls. Between two
devices of the kind `cpu` a thread copies, one for each direction. If one of them is a CUDA device a
stream copies; the thread that has the tensor, or that fetches it, launches the copy. One launcher
may have the CUDA devices and the CPU beside them (`merged.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from torch import Tensor

from roost.runtime.ops.cuda import CudaDevice, RuntimeDevice
from roost.runtime.ops.residents import HomeResidents
from roost.runtime.step.device_threads import AWAKE_SECONDS, Mailbox, OldValueReads, TaskThread
from roost.runtime.step.devices import (
    CopyFunction,
    CpuDevice,
    Event,
    SentTensor,
    copied_on_cpu,
)
from roost.simulator.reference import Copy

_SMALL = 2**18  # bytes: to copy so many takes less time than to ask another thread for it


class TransferCalls:
    """The half of a graph runtime that the device code calls for transfers."""

    def __init__(self, device_names: Sequence[str], devices: Sequence[RuntimeDevice]) -> None:
        self.device_names = device_names
        self.devices = devices
        self.launchers: list[list[int]]  # the devices of each launcher; set by the subclass
        self.home_residents: HomeResidents  # set by the subclass
        self._mailboxes: dict[tuple[str, int, int], Mailbox] = {}
        self._reads: dict[int, OldValueReads] = {}
        self._links: dict[tuple[int, int, str], TaskThread] = {}
        self._num_home = 0  # new values that go home in each step
        # A step waits for these: None for each launcher, an event for each new value, or an error.
        self._done: SimpleQueue[BaseException | Event | None] = SimpleQueue()

    def _fail(self, error: BaseException) -> None:
        """End all waiting."""
        for mailbox in self._mailboxes.values():
            mailbox.end()
        for reads in self._reads.values():
            reads.end()

    def _mailbox(self, kind: str, number: int, device: int) -> Mailbox:
        # Beside GPUs threads have cores of their own. Devices that are threads share theirs with
        # the threads that copy.
        has_gpu = any(isinstance(each, CudaDevice) for each in self.devices)
        mailbox = Mailbox(AWAKE_SECONDS if has_gpu else 0.0)
        return self._mailboxes.setdefault((kind, number, device), mailbox)

    def _link(self, source: int, target: int, what: str = "values") -> TaskThread:
        """Give the thread that copies from one device to another; new values have one of their own.

        A new value may have to wait for reads of the old one.
        """
        key = source, target, what
        if key not in self._links:
            name = f"{what} from {self.device_names[source]} to {self.device_names[target]}"
            self._links[key] = TaskThread(name, self._fail)
        return self._links[key]

    def _together(self, one: int, other: int) -> bool:
        """Tell if one launcher has both devices."""
        return any(one in launcher and other in launcher for launcher in self.launchers)

    def _copy_function(self, source: int, target: int) -> CopyFunction:
        start = self.devices[source]
        end = self.devices[target]
        if isinstance(end, CudaDevice):
            source_gpu = start if isinstance(start, CudaDevice) else None
            return partial(end.copy_here, source=source_gpu)
        return start.copy_to_cpu if isinstance(start, CudaDevice) else copied_on_cpu

    def _reads_of(self, parameter: int) -> OldValueReads:
        return self._reads.setdefault(parameter, OldValueReads())

    def sending(self, op: int, source: int, target: int) -> Callable[[Tensor], None]:
        mailbox = self._mailbox("value", op, target)
        copy = self._copy_function(source, target)
        start = self.devices[source]
        end = self.devices[target]
        if isinstance(start, CudaDevice):
            at_once = _SMALL if isinstance(end, CpuDevice) else -1

            def send_from_gpu(tensor: Tensor) -> None:
                if tensor.nbytes <= at_once:
                    mailbox.put(start.hand_small(tensor))
                else:
                    mailbox.put(copy(tensor, (start.record_event(),)))

            return send_from_gpu
        link = None if self._together(source, target) else self._link(source, target)

        def send(tensor: Tensor) -> None:
            small = tensor.nbytes <= _SMALL
            if small and isinstance(end, CudaDevice):
                mailbox.put(end.post_small(tensor))
            elif small or link is None:
                mailbox.put(copy(tensor))
            else:
                link.submit(lambda: mailbox.put(copy(tensor)))

        return send

    def receiving(self, op: int, source: int, target: int) -> Callable[[], Tensor]:
        mailbox = self._mailbox("value", op, target)
        device = self.devices[target]
        return lambda: device.receive(mailbox.take())

    def fetching(self, device: int, number: int, copy: Copy) -> Callable[[], None]:
        parameter = copy.parameter
        residents = self.home_residents
        mailbox = self._mailbox("copy", number, device)
        home = residents.device[parameter]
        value = residents.tensor[parameter]
        start = self.devices[home]
        end = self.devices[device]
        # Only an update takes the reads that are added.
        reads = self._reads_of(parameter) if parameter in residents.written else None

        def deliver(sent: SentTensor) -> None:
            mailbox.put(sent)
            if reads is not None:
                reads.put(sent.arrival)

        if isinstance(end, CudaDevice):
            slot = residents.window[device][number]
            source = start if isinstance(start, CudaDevice) else None
            return lambda: deliver(end.fetch(value, slot, source))
        if isinstance(start, CudaDevice):
            return lambda: deliver(start.copy_to_cpu(value))
        link = self._link(home, device)
        return lambda: link.submit(lambda: deliver(copied_on_cpu(value)))

    def awaiting_fetch(self, device: int, number: int, copy: Copy) -> Callable[[], Tensor]:
        mailbox = self._mailbox("copy", number, device)
        owner = self.devices[device]

        def take() -> Tensor:
            sent: SentTensor = mailbox.take()
            owner.wait(sent.arrival)
            return sent.tensor

        return take

    def noting_read(self, parameter: int) -> Callable[[], None]:
        reads = self._reads_of(parameter)
        home = self.devices[self.home_residents.device[parameter]]
        return lambda: reads.put(home.record_event())

    def sending_home(self, parameter: int, source: int, reads: int) -> Callable[[Tensor], None]:
        home = self.home_residents.device[parameter]
        copy = self._copy_function(source, home)
        start = self.devices[source]
        # Made now and not when first needed: a run that is being closed would not know of it.
        link = None if self._together(source, home) else self._link(source, home, "new values")
        value = self.home_residents.tensor[parameter]
        old_reads = self._reads_of(parameter)
        self._num_home += 1

        def write(tensor: Tensor, ready: Event | None) -> Event | None:
            arrival = copy(tensor, (ready, *old_reads.take_all(reads)), value).arrival
            self._done.put(arrival)
            return arrival

        def send(tensor: Tensor) -> None:
            new = start.leaving(tensor) if isinstance(start, CudaDevice) else tensor
            ready = start.record_event()
            if link is not None and not (isinstance(start, CudaDevice) and old_reads.has(reads)):
                link.submit(lambda: write(new, ready))
                return
            # All have read the old value, as nearly always: no other thread has to wake up.
            arrival = write(new, ready)
            if isinstance(start, CudaDevice):
                start.left(arrival, new.nbytes)

        return send


def launchers(devices: Sequence[RuntimeDevice], together: bool = False) -> list[list[int]]:
    """Give the devices of each launcher: one each.

    `together` asks for one launcher; it gets one if at most one device has to compute by itself.
    """
    every = list(range(len(devices)))
    computing = sum(not isinstance(device, CudaDevice) for device in devices)
    return [every] if together and computing <= 1 else [[device] for device in every]
