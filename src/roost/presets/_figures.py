"""Measurements of this machine's devices and links; all of them take some seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roost.presets import machine
from roost.presets.clock import cuda_time, host_time

DTYPES = ("float32", "bfloat16", "float16")
_SECONDS = 0.1  # for each figure
_LARGEST = 8192  # rows of a matrix
_SMALL, _LARGE = 4096, 128 * 2**20  # bytes of the transfers that give latency and bandwidth
_CPU_OP, _GPU_OP, _GPU_OPS = 4 * 2**20, 2**30, 6  # bytes of ops around a transfer; ops on the GPU
_SENT, _SENDS = (2**20, 4 * 2**20, 16 * 2**20), 15  # bytes of tensors, and times each is sent
# For large tensors new memory costs more than the copy. So this is as large as models send.
_ACTIVATION = 16 * 2**20

Clock = Callable[[Callable[[], Any]], float]


def of_cpu(threads: int, cores: set[int] | None = None) -> dict[str, Any]:
    """The figures of a device of the kind `cpu` with so many threads, on some cores."""
    cpu = torch.device("cpu")
    size = min(max(_LARGE, 4 * machine.cache_bytes()), machine.available_memory() // 8)
    with machine.OwnThread(threads, cores) as thread:
        figures: dict[str, Any] = thread(
            lambda: _device(cpu, lambda call: host_time([call], _SECONDS), size, 0.02)
        )
        return figures


def of_gpu(number: int) -> dict[str, Any]:
    """The figures of a GPU."""
    device = torch.device("cuda", number)
    size = min(2**30, machine.gpu_memory(number) // 8)
    figures = _device(device, lambda call: cuda_time([call], number, _SECONDS)[0], size, 0.002)
    _, figures["launch_overhead"] = cuda_time([_tiny_op(device)], number, _SECONDS)
    torch.cuda.empty_cache()
    return figures


def _tiny_op(device: torch.device) -> Callable[[], Tensor]:
    one = torch.ones(1, device=device)
    return lambda: torch.ops.aten.add.Tensor(one, one)


def _device(device: torch.device, clock: Clock, size: int, enough: float) -> dict[str, Any]:
    """The figures of a device.

    A matrix product that takes `enough` seconds is large enough. A copy of `size` bytes gives the
    bandwidth.
    """
    rates = {dtype: _matmul_rate(getattr(torch, dtype), device, clock, enough) for dtype in DTYPES}
    return {
        "peak": {dtype: rate for dtype, rate in rates.items() if rate > 0},
        "memory_bandwidth": _memory_bandwidth(device, clock, size),
        "launch_overhead": clock(_tiny_op(device)),
    }


def _memory_bandwidth(device: torch.device, clock: Clock, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / clock(lambda: target.copy_(source))


def _matmul_rate(dtype: torch.dtype, device: torch.device, clock: Clock, enough: float) -> float:
    """The best FLOP/s of larger and larger square products; 0 if the type has no kernel."""
    best = 0.0
    size = 256
    long = 0
    # Two long products are needed: threads that wait for a core make one small product long.
    while size <= _LARGEST and long < 2:
        try:
            other = torch.full((size, size), 0.5, dtype=dtype, device=device)
            # Data of a single value saves power and is faster.
            row = torch.rand((1, size), generator=torch.Generator().manual_seed(0))
            one = other + row.to(device, dtype)
            seconds = clock(lambda one=one, other=other: one @ other)  # type: ignore[misc]
        except RuntimeError:  # no such kernel, or out of memory
            break
        best = max(best, 2.0 * size**3 / seconds)
        long = long + (seconds > enough)
        size *= 2
    return best


def host_to_gpu(number: int, threads: int, cores: set[int] | None = None) -> dict[str, float]:
    """The figures of the link to a GPU; threads and cores are those of the device `cpu`."""
    return _host_link(number, True, threads, cores)


def gpu_to_host(number: int, threads: int, cores: set[int] | None = None) -> dict[str, float]:
    """The figures of the link from a GPU."""
    return _host_link(number, False, threads, cores)


def _host_link(number: int, up: bool, threads: int, cores: set[int] | None) -> dict[str, float]:
    """The figures of a link between host and GPU.

    Its latency is that of a small tensor that the next op waits for. It is measured in one thread,
    so it leaves out the time to wake another thread.
    """
    host = torch.zeros(_LARGE, dtype=torch.uint8, pin_memory=True)
    gpu = torch.device("cuda", number)
    on_gpu = torch.zeros(_LARGE, dtype=torch.uint8, device=gpu)
    source, target = (host, on_gpu) if up else (on_gpu, host)
    small, end = source[:_SMALL], torch.cuda.Event()  # type: ignore[no-untyped-call]

    def cross() -> None:
        locked = torch.empty_like(small, device="cpu", pin_memory=True)
        locked.copy_(small, non_blocking=True)
        if up:
            locked.to(gpu, non_blocking=True)
        end.record()
        end.synchronize()

    with torch.cuda.device(number):
        figures = _copies(source, target, lambda: torch.cuda.synchronize(number))
        latency = host_time([cross], _SECONDS)
        figures["latency"] = latency
        launching = host_time([_receiving(gpu) if up else _handing(gpu)], _SECONDS)
    with machine.OwnThread(threads, cores) as thread:
        posting = thread(lambda: host_time([_posting()], _SECONDS)) if up else 0.0
        waits = thread(lambda: _wait(gpu, up))
        sends = thread(lambda: [_send(gpu, up, size) - latency for size in _SENT])
    rates = [size / max(seconds, 1e-9) for size, seconds in zip(_SENT, sends, strict=True)]
    mean_rate = math.prod(rates) ** (1 / len(rates))
    figures["send_bandwidth"] = min(figures["bandwidth"], mean_rate)
    return figures | _ends(up, latency, waits, launching, posting)


def _ends(
    up: bool, latency: float, waits: float, launching: float, posting: float
) -> dict[str, float]:
    """The seconds of a transfer that keep either end busy, and the rest as latency.

    To a GPU one thread posts the tensor and another launches its copy. To the CPU one thread
    launches the copy; any longer wait is the time in which a pool of threads wakes up.
    """
    if up:
        rest = max(latency, waits - posting - launching)
        return {"send_latency": rest, "sender_busy": posting, "receiver_busy": launching}
    return {
        "send_latency": latency,
        "sender_busy": launching,
        "receiver_busy": max(0.0, waits - latency),
    }


def _handing(gpu: torch.device) -> Callable[[], None]:
    """The work of a GPU's thread to send a small tensor to the host, as the runtime does it."""
    tiny = torch.ones(_SMALL // 4, device=gpu)
    stream = torch.cuda.current_stream(gpu)

    def hand() -> None:
        torch.empty_like(tiny, device="cpu", pin_memory=True).copy_(tiny, non_blocking=True)
        torch.cuda.Event().record(stream)  # type: ignore[no-untyped-call]

    return hand


def _receiving(gpu: torch.device) -> Callable[[], None]:
    """The work of a GPU's thread to receive a small tensor, as the runtime does it."""
    locked = torch.ones(_SMALL // 4, pin_memory=True)

    def receive() -> None:
        locked.to(gpu, non_blocking=True)

    return receive


def _posting() -> Callable[[], None]:
    """The work of a CPU's thread to send a small tensor to a GPU, as the runtime does it."""
    made = torch.ones(_SMALL // 4)

    def post() -> None:
        torch.empty_like(made, device="cpu", pin_memory=True).copy_(made)

    return post


def _wait(gpu: torch.device, up: bool) -> float:
    """The seconds that a small transfer adds to the ops before and after it.

    While a GPU computes, the threads of a CPU fall asleep, and they wake up for the next op. A GPU
    that waited for the CPU is idle, and its next op has to be launched first.
    """
    taken = torch.ones(_CPU_OP // 4)
    size = min(_GPU_OP, machine.gpu_memory(gpu.index) // 8)
    made = torch.empty_like(taken)
    busy = torch.ones(size // 4, device=gpu)
    small_on_gpu = torch.ones(_SMALL // 4, device=gpu)
    small_on_cpu = torch.ones(_SMALL // 4)

    def on_cpu() -> None:
        torch.add(taken, 1, out=made)

    def on_gpu() -> None:
        for _ in range(_GPU_OPS):
            busy.mul_(1.0)

    def to_cpu() -> None:
        locked = torch.empty_like(small_on_gpu, device="cpu", pin_memory=True)
        locked.copy_(small_on_gpu, non_blocking=True)
        torch.cuda.current_stream(gpu).synchronize()

    def to_gpu() -> None:
        locked = torch.empty_like(small_on_cpu, pin_memory=True)
        locked.copy_(small_on_cpu)
        small_on_gpu.add_(locked.to(gpu, non_blocking=True))

    def median(*calls: Callable[[], None]) -> float:
        times = []
        for _ in range(_SENDS):
            on_cpu()
            torch.cuda.synchronize(gpu)
            on_gpu()  # long enough for threads to fall asleep
            torch.cuda.synchronize(gpu)
            on_cpu()  # and awake again
            began = time.perf_counter()
            for call in calls:
                call()
            torch.cuda.synchronize(gpu)
            times.append(time.perf_counter() - began)
        return sorted(times)[_SENDS // 2]

    alone = median(on_cpu)
    if up:
        return median(on_cpu, to_gpu) - alone
    return median(on_gpu, to_cpu, on_cpu) - median(on_gpu) - alone


def _send(gpu: torch.device, up: bool, size: int) -> float:
    """Seconds until a tensor just made on one side can be used on the other, with the host's work.

    A tensor that all cores of a CPU have just written is in their caches. It reached a GPU at 9
    GB/s, and the same bytes from memory at 40 GB/s. It is also copied to locked memory first.
    """
    source = torch.ones(size // 4, device="cpu" if up else gpu)
    made = torch.empty_like(source)
    side = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
    main = torch.cuda.current_stream(gpu)

    def send() -> None:
        ready, arrived = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(main)
        locked = torch.empty_like(made, device="cpu", pin_memory=True)
        if up:
            locked.copy_(made)
        torch.cuda.set_stream(side)
        side.wait_event(ready)
        received = torch.empty_like(made, device=gpu) if up else locked
        received.copy_(locked if up else made, non_blocking=True)
        arrived.record(side)
        torch.cuda.set_stream(main)
        main.wait_event(arrived)
        if up:
            received.record_stream(main)
        arrived.synchronize()

    times = []
    for _ in range(_SENDS):
        torch.add(source, 1, out=made)
        torch.cuda.synchronize(gpu)
        began = time.perf_counter()
        send()
        times.append(time.perf_counter() - began)
    return sorted(times)[_SENDS // 2]


def gpu_to_gpu(source: int, target: int) -> dict[str, float]:
    """The figures of the link between two GPUs."""
    one, other = (
        torch.zeros(_LARGE, dtype=torch.uint8, device=torch.device("cuda", number))
        for number in (source, target)
    )

    def wait() -> None:
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)

    return _copies(one, other, wait)


def _copies(source: Tensor, target: Tensor, wait: Callable[[], None]) -> dict[str, float]:
    """Latency and bandwidth of copies, from the call to the arrival."""

    def copy(size: int) -> Callable[[], None]:
        destination = target[:size]
        origin = source[:size]

        def call() -> None:
            destination.copy_(origin, non_blocking=True)
            wait()

        return call

    latency = host_time([copy(_SMALL)], _SECONDS)
    moving = max(host_time([copy(_LARGE)], _SECONDS) - latency, 1e-9)
    return {"latency": latency, "bandwidth": _LARGE / moving}


def between_threads() -> dict[str, float]:
    """The figures of the link between two threads: a third thread copies the tensor."""
    small, large = (torch.zeros(size, dtype=torch.uint8) for size in (_SMALL, _ACTIVATION))
    with machine.OwnThread(1) as link:
        latency = host_time([lambda: link(small.clone)], _SECONDS)
        whole = host_time([lambda: link(large.clone)], _SECONDS)
    return {"latency": latency, "bandwidth": _ACTIVATION / max(whole - latency, 1e-9)}
