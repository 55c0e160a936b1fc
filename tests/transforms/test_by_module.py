"""Decisions that a model which stays Python can carry out."""

from roost.core.graph import GraphBuilder
from roost.transforms.by_module import ByModule

BIG = 2**21


def tower(handed_on=BIG // 8):
    """Two layers in a pair, an activation between, attention on top; a norm with a small weight; a
    tied head."""
    builder = GraphBuilder()
    for name in ("pair.up.weight", "pair.down.weight", "attend.inner.weight", "embed.weight"):
        builder.parameter(name, BIG)
    for number in range(60):
        builder.parameter(f"other.{number}.weight", BIG)
    builder.parameter("norm.weight", 64)
    builder.parameter("loose", BIG)
    builder.add("ids", "input", phase="input")
    builder.add("gather", "embedding", ["ids", "embed.weight"], module="embed")
    builder.add("scale", "mul", ["gather", "norm.weight"], module="norm")
    builder.add(
        "up", "mm", ["scale", "pair.up.weight"], flop=1e6, output_bytes=handed_on, module="pair.up"
    )
    builder.add("act", "relu", ["up"], flop=10, module="pair")
    builder.add("down", "mm", ["act", "pair.down.weight"], flop=1e6, module="pair.down")
    builder.add("scores", "attention", ["down", "attend.inner.weight"], module="attend")
    builder.add("add", "add", ["scores", "loose"], module="")
    last = "add"
    for number in range(60):
        last = builder.add(
            f"other{number}", "mm", [last, f"other.{number}.weight"], module=f"other.{number}"
        )
    builder.add("again", "mm", [last, "embed.weight"], module="head@1")
    return builder.freeze()


def together(graph):
    return [
        {name for name, group in zip(graph.op_names, graph.group, strict=True) if group == number}
        for number in range(graph.num_groups)
    ]


def allowed(graph):
    return dict(zip(graph.op_names, graph.allowed, strict=True))


def test_modules_are_groups_and_large_weights_are_free():
    done = ByModule().apply(tower()).graph
    assert {"up", "act", "down"} in together(done)  # one decision: little is computed between them
    assert {"norm.weight", "scale"} in together(done)
    free = {name for name, group in zip(done.op_names, done.group, strict=True) if group < 0}
    assert {"pair.up.weight", "pair.down.weight", "other.3.weight"} <= free


def test_where_little_is_handed_on_each_module_is_a_decision_of_its_own():
    done = ByModule().apply(tower(handed_on=BIG // 1000)).graph
    assert not any({"up", "down"} <= group for group in together(done))
    assert allowed(done)["up"] == allowed(done)["down"] == ("cuda", "cpu")
    assert allowed(done)["act"] == ("cuda",)


def test_where_activations_do_not_fit_each_module_is_a_decision_of_its_own():
    done = ByModule(light=True).apply(tower()).graph
    groups = together(done)
    assert not any({"up", "down"} <= group for group in groups)
    assert allowed(done)["up"] == allowed(done)["down"] == ("cuda", "cpu")


def test_what_is_between_modules_runs_on_the_main_device():
    where = allowed(ByModule("gpu", ("cpu", "dsp")).apply(tower()).graph)
    assert where["add"] == where["ids"] == ("gpu",)
    assert where["up"] == where["act"] == ("gpu", "cpu", "dsp")
    assert where["pair.up.weight"] == ()


def test_what_is_light_or_takes_several_tensors_stays_on_the_main_device():
    builder = GraphBuilder()
    for name in ("norm.weight", "one.weight", "two.weight", "three.weight"):
        builder.parameter(name, 64 if name == "norm.weight" else BIG)
    builder.add("x", "input", phase="input")
    builder.add("scaled", "mul", ["x", "norm.weight"], module="norm")
    builder.add("a", "mm", ["scaled", "one.weight"], module="one")
    builder.add("b", "mm", ["a", "two.weight"], module="two")
    builder.add("c", "add", ["b", "scaled"], module="two")  # of two tensors
    builder.add("d", "mm", ["c", "three.weight"], module="three@0")
    # Called twice, with one tensor each time.
    builder.add("e", "mm", ["d", "three.weight"], module="three@1")
    where = allowed(ByModule().apply(builder.freeze()).graph)
    assert where["scaled"] == where["b"] == where["c"] == ("cuda",)
    assert where["a"] == where["d"] == where["e"] == ("cuda", "cpu")


def test_weights_stay_where_nobody_can_bring_them():
    where = allowed(ByModule().apply(tower()).graph)
    assert where["loose"] == ("cuda",)  # of no module
    assert where["embed.weight"] == ("cuda",)  # read by another module than its own
    assert where["attend.inner.weight"] == ()  # read by the module around its own
    tied = allowed(ByModule(tied={"head.weight": "embed.weight"}).apply(tower()).graph)
    assert tied["embed.weight"] == ()


def test_a_large_module_of_modules_is_not_one_decision():
    names = together(ByModule().apply(tower()).graph)
    assert not any({"other0", "other1"} <= group for group in names)
