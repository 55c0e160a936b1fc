"""Small problems to play on."""

import numpy as np

import roost


def diamond(num_devices=3, memory=1000, cpu_memory=100_000, width=4, name="diamond"):
    """A source, branches that may run at once, a sink that only the CPU may run; a CPU of a tenth
    of the speed."""
    builder = roost.GraphBuilder(name)
    builder.add("source", "op", output_bytes=10)
    for branch in range(width):
        builder.parameter(f"w{branch}", 200)
        builder.add(f"branch{branch}", "op", ["source", f"w{branch}"], output_bytes=100)
    builder.add("sink", "op", [f"branch{branch}" for branch in range(width)], allowed=("cpu",))
    graph = builder.freeze()
    cpu = roost.Device("cpu:0", "cpu", cpu_memory)
    gpus = tuple(
        roost.Device(f"cuda:{number}", "cuda", memory) for number in range(num_devices - 1)
    )
    links = (roost.Link("*", "*", 1e3, 0.001),) if num_devices > 1 else ()
    cluster = roost.Cluster(f"{num_devices} devices", (cpu, *gpus), links)
    seconds = np.ones((graph.num_ops, num_devices))
    seconds[:, 0] = 10.0
    seconds[graph.is_parameter] = 0.0
    return roost.Problem(graph, cluster, seconds)


def lone():
    """One op on one device: one group, no edges, nothing to choose."""
    builder = roost.GraphBuilder("lone")
    builder.add("op", "op")
    return roost.Problem(
        builder.freeze(), roost.Cluster("one", (roost.Device("cpu:0", "cpu", 10),)), np.ones((1, 1))
    )


def play(env, seed, policy=None, **options):
    """One episode: all observations, rewards, and the last info. Without a policy, any allowed
    device."""
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed, **options)
    seen, rewards, done = [observation], [], False
    while not done:
        mask = info["action_mask"]
        action = policy(observation) if policy else rng.choice(np.flatnonzero(mask))
        observation, reward, done, truncated, info = env.step(int(action))
        assert not truncated
        seen.append(observation)
        rewards.append(reward)
    return seen, rewards, info
