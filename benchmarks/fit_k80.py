"""Fits the CPU's efficiencies in the k80 presets to the ratios that Mirhoseini et al. 2017
published.

    python benchmarks/fit_k80.py

Source figures, seconds a step (their table, as recalled in full by several later papers): RNNLM
Single-CPU 6.89 and Single-GPU 1.57, so 4.39; Inception-V3 26.21 and 4.60, so 5.70. NMT has 10.72 on
the CPU and does not fit a GPU. Only ratios are fitted: their TensorFlow of 2017 took several times
as long for each op as the hardware needs, on both.

The GPU's efficiencies are assumed: 0.7 of the peak in matrix products, 0.6 in convolutions, 0.75 of
the memory bandwidth (GDDR5 with ECC); the CPU's share of memory bandwidth is assumed the same. What
is left, the CPU's share of its peak in matrix products and in convolutions, is found by bisection,
one ratio each.
"""

from __future__ import annotations

from dataclasses import replace

import roost
from roost.core.cluster import Cluster

GPU = {"matmul": 0.7, "conv": 0.6, "memory": 0.75}
TARGETS = {"matmul": ("rnnlm", 6.89 / 1.57), "conv": ("inception_v3", 26.21 / 4.60)}


def with_efficiency(cluster: Cluster, cpu: dict[str, float]) -> Cluster:
    devices = [replace(d, efficiency=cpu if d.kind == "cpu" else GPU) for d in cluster.devices]
    return replace(cluster, devices=tuple(devices))


def ratio(graph: roost.Graph, cluster: Cluster) -> tuple[float, float, float]:
    """Seconds of a step on the CPU and on a GPU, and how many times longer the CPU takes."""
    times = roost.estimate(graph, cluster).op_time.sum(axis=0)
    return float(times[0]), float(times[1]), float(times[0] / times[1])


def main() -> None:
    cluster = roost.cluster("k80x2")
    graphs = {name: roost.zoo.build(name, train=True) for name in ("rnnlm", "inception_v3", "nmt")}
    cpu = {"matmul": 1.0, "conv": 1.0, "memory": GPU["memory"]}
    for kind, (name, target) in TARGETS.items():
        low, high = 0.01, 1.0
        for _ in range(60):
            cpu[kind] = (low + high) / 2
            low, high = (
                (cpu[kind], high)
                if ratio(graphs[name], with_efficiency(cluster, cpu))[2] > target
                else (low, cpu[kind])
            )
    cpu = {kind: round(share, 3) for kind, share in cpu.items()}
    print(f"cpu efficiency {cpu}, gpu efficiency {GPU}")
    for name, graph in graphs.items():
        on_cpu, on_gpu, found = ratio(graph, with_efficiency(cluster, cpu))
        print(f"{name}: {on_cpu:.2f} s on the CPU, {on_gpu:.2f} s on a GPU, {found:.2f} times")


if __name__ == "__main__":
    main()
