"""Exports: whole modules, every tensor covered, tied weights together, and a reason where it cannot
be said."""

import json
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import roost
from roost import catalog
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import FORWARD, INPUT, PARAMETER, UPDATE, GraphBuilder
from roost.errors import InputError
from roost.report.exports import device_map, llama_cpp, split_spec
from roost.report.exports._modules import Modules
from roost.report.exports.llama_cpp import gguf_names, whole_numbers

FIGURES = {"peak": {"float32": 1e12}, "memory_bandwidth": 1e11, "launch_overhead": 1e-6}


def cluster(*names, memory=2**40):
    devices = tuple(Device(name, name.partition(":")[0], memory, **FIGURES) for name in names)
    return Cluster("mine", devices, (Link("*", "*", 1e9, 1e-5),))


OFFLOAD = cluster("cpu", "cuda:0")
TWO = cluster("cpu", "cuda:0", "cuda:1")


class Block(nn.Module):
    """A residual connection: what it was called with, and what its part returns."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.act, self.inner = nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width)

    def forward(self, x):
        return x + self.act(self.inner(self.norm(x)))


class Net(nn.Module):
    """Tied weights, a buffer nobody reads, two parts that meet, and blocks."""

    def __init__(self, count=3, width=8):
        super().__init__()
        self.words, self.places = nn.Embedding(20, width), nn.Embedding(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.idle = nn.Linear(2, 2)
        self.out = nn.Linear(width, 20, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("unread", torch.zeros(3))

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(5, device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def buffer_of(overrides, tensor):
    """The buffer that llama.cpp gives a tensor; None if no rule matches."""
    return next((buffer for regex, buffer in overrides.rules if re.search(regex, tensor)), None)


def net(on, **settings):
    torch.manual_seed(0)
    model = Net(**settings)
    return model, roost.estimate(roost.capture(model, torch.zeros(2, 5, dtype=torch.int64)), on)


def placed(problem, rules, weights_only=False):
    """Every op on the device of the first prefix of its module that is listed."""
    names, device = problem.cluster.device_names, []
    for op, module in enumerate(problem.graph.modules):
        found = next(
            name for prefix, name in rules.items() if re.sub(r"@\d+", "", module).startswith(prefix)
        )
        if weights_only and found == "cpu" and problem.graph.phase[op] != PARAMETER:
            found = "cuda:0"
        device.append(names.index(found))
    return problem.placement(np.array(device))


def test_blocks_on_two_gpus():
    model, problem = net(TWO)
    found = device_map(model, problem, placed(problem, {"blocks.2": "cuda:1", "": "cuda:0"}))
    others = dict.fromkeys(["words", "places", "blocks.0", "blocks.1"], 0)
    assert found.entries == others | {"blocks.2": 1, "idle": 0, "out": 0, "unread": 0}
    assert found.agreement == 1.0
    assert found.cost == 1.0
    assert found.feasible
    assert json.loads(found.text()) == found.entries


def test_all_on_one_device_is_one_entry():
    for name, value in (("cuda:1", 1), ("cpu", "cpu")):
        model, problem = net(TWO)
        assert device_map(model, problem, placed(problem, {"": name})).entries == {"": value}


def test_offloaded_weights_are_cpu_and_parents_whose_parts_agree_are_one_entry():
    model, problem = net(OFFLOAD)
    rules = {"blocks.1.inner": "cpu", "blocks.2": "cpu", "": "cuda:0"}
    found = device_map(model, problem, placed(problem, rules, weights_only=True))
    parts = {"blocks.1.norm": 0, "blocks.1.act": 0, "blocks.1.inner": "cpu", "blocks.2": "cpu"}
    others = {"words": 0, "places": 0, "blocks.0": 0, **parts, "idle": 0, "out": 0, "unread": 0}
    assert found.entries == others
    assert found.agreement == 1.0


def test_fetching_ahead_is_lost_and_the_cost_says_so():
    model, problem = net(OFFLOAD, width=512)
    placement = placed(problem, {"blocks": "cpu", "": "cuda:0"}, weights_only=True)
    ahead = problem.placement(placement.device, prefetch_bytes=2**30)
    found = device_map(model, problem, ahead)
    assert found.entries["blocks"] == "cpu"
    assert found.placed_time == roost.simulate(problem, ahead).step_time
    assert found.step_time == roost.simulate(problem, placement).step_time
    assert found.cost > 1.0


def test_computing_on_the_cpu_beside_a_gpu_cannot_be_said_and_costs():
    model, problem = net(OFFLOAD)
    found = device_map(model, problem, placed(problem, {"blocks.2": "cpu", "": "cuda:0"}))
    assert found.entries["blocks.2"] == "cpu"
    assert found.agreement < 1.0
    op = next(
        o
        for o, m in enumerate(problem.graph.modules)
        if m == "blocks.2.inner" and problem.graph.phase[o] == FORWARD
    )
    assert found.placement.device[op] == 1  # on the GPU, with weights from the CPU


def test_a_module_goes_where_most_of_its_seconds_are():
    model, problem = net(TWO)
    placement = placed(problem, {"blocks.1.norm": "cuda:1", "blocks.2": "cuda:1", "": "cuda:0"})
    found = device_map(model, problem, placement)
    assert found.entries["blocks.1"] in (0, 1)
    assert found.entries["blocks.2"] == 1
    assert 0.5 < found.agreement < 1.0


def test_tied_weights_and_parts_that_meet_share_a_device():
    model, problem = net(TWO)
    found = device_map(
        model, problem, placed(problem, {"out": "cuda:1", "places": "cuda:1", "": "cuda:0"})
    )
    assert found.entries["words"] == found.entries["out"] == found.entries["places"] == 1


LARGE = pytest.param("inception_v3", marks=pytest.mark.slow)  # the largest graph


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bert", "t5", "resnet50", LARGE, "moe", "vit", "rnnlm"]
)
@pytest.mark.parametrize("on", [OFFLOAD, TWO], ids=["offload", "two"])
def test_rounded_maps_keep_accelerates_rules(name, on):
    """Random modules of the zoo: all is covered, ties hold, and no op reads from two GPUs where
    nothing is moved."""
    sizes = catalog.find("zoo", name).small()
    with torch.device("meta"):
        model, inputs = sizes.model().eval(), sizes.inputs(False)
    problem = roost.estimate(roost.capture(model, inputs), on)
    rng, graph, made = np.random.default_rng(0), problem.graph, 0
    modules = Modules(graph, model)
    for _ in range(3):
        device = {module: int(rng.integers(on.num_devices)) for module in graph.modules}
        # As a layout along the model would have it: neighbours mostly together.
        chosen = np.array(
            [device.get(".".join(module.split(".")[:2]), 1) for module in graph.modules]
        )
        members = np.flatnonzero(graph.group >= 0)
        chosen[members] = chosen[problem.group_leader[graph.group[members]]]
        try:
            found = device_map(model, problem, problem.placement(chosen))
        except InputError as error:
            if not re.search("share a device|place it whole|every weight lies", str(error)):
                raise
            continue
        made += 1
        values = model.state_dict(keep_vars=True)
        assert all(found.device_of(tensor) is not None for tensor in values)
        tied = {}
        for tensor, value in values.items():
            assert tied.setdefault(id(value), found.device_of(tensor)) == found.device_of(tensor)
        if "" not in found.entries:
            for entry in found.entries:
                parent = entry.rpartition(".")[0]
                for part, _ in model.get_submodule(parent).named_children():
                    path = f"{parent}.{part}".removeprefix(".")
                    assert any(
                        known == path or known.startswith(f"{path}.") for known in found.entries
                    )
        for op in modules.forward_ops().tolist():
            sources = [s for s in modules.data_inputs(op) if modules.unit[s] is not None]
            if modules.unit_of_module(modules.path[op]) is None:
                assert len({int(found.placement.device[s]) for s in sources}) <= 1
        again = device_map(model, problem, found.placement)
        assert again.entries == found.entries
        assert again.agreement == again.cost == 1.0
    assert made


def test_accelerate_finds_everything_covered():
    modeling = pytest.importorskip("accelerate.utils.modeling", reason="needs the hf extra")
    model, problem = net(OFFLOAD)
    rules = {"blocks.1": "cpu", "": "cuda:0"}
    found = device_map(model, problem, placed(problem, rules, weights_only=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not expect the name of a tensor, and takes it
        modeling.check_device_map(model, dict(found.entries))
        with pytest.raises(ValueError, match="blocks"):
            modeling.check_device_map(
                model, {k: v for k, v in found.entries.items() if k != "blocks.1"}
            )


@pytest.mark.gpu
# It does not expect the name of a tensor.
@pytest.mark.filterwarnings("ignore:The following device_map keys")
def test_accelerate_runs_it():
    accelerate = pytest.importorskip("accelerate")
    model, problem = net(OFFLOAD)
    words = torch.randint(20, (2, 5))
    expected = model(words)
    rules = {"blocks.1": "cpu", "blocks.2.inner": "cpu", "": "cuda:0"}
    found = device_map(model, problem, placed(problem, rules, weights_only=True))
    ran = accelerate.dispatch_model(model, dict(found.entries))(words.to("cuda:0"))
    torch.testing.assert_close(ran.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_without_the_model_ties_are_found_and_all_is_covered():
    model, problem = net(TWO)
    placement = placed(problem, {"blocks.2": "cuda:1", "": "cuda:0"})
    with_model, without = (
        device_map(model, problem, placement),
        device_map(None, problem, placement),
    )
    assert without.entries == with_model.entries
    assert without.entries["out"] == without.entries["words"]
    assert without.step_time == with_model.step_time


def test_what_a_device_map_cannot_say():
    model, problem = net(TWO)
    training = roost.estimate(
        roost.capture(model, torch.zeros(2, 5, dtype=torch.int64), train=True, loss=torch.sum), TWO
    )
    with pytest.raises(InputError, match="exports are for inference"):
        device_map(model, training, placed(training, {"": "cuda:0"}))
    for names, message in (
        (("cpu:0", "cpu:1"), "accelerate knows but one cpu"),
        (("tpu:0", "cpu"), "does not know device 'tpu:0' of kind 'tpu'"),
    ):
        other = roost.estimate(problem.graph, cluster(*names))
        with pytest.raises(InputError, match=message):
            device_map(model, other, placed(other, {"blocks.1": names[1], "": names[0]}))
    offload = roost.estimate(problem.graph, OFFLOAD)
    with pytest.raises(InputError, match="not of this model: the model has no"):
        device_map(nn.Linear(2, 2), offload, placed(offload, {"": "cuda:0"}))


def test_a_block_is_a_module_whose_own_code_combines_its_input_with_a_part():
    builder = GraphBuilder()
    builder.add("x", phase="input")
    builder.add("before", inputs=["x"], module="net")  # one input from outside: no block
    builder.add("first", inputs=["before"], module="net.first")
    builder.add("inner", inputs=["first"], module="net.second.inner")
    builder.add("sum", inputs=["first", "inner"], module="net.second")
    modules = Modules(builder.freeze())
    assert [path for path, is_block in modules.is_block.items() if is_block] == ["net.second"]
    assert modules.unit_of_module("net.first") == "net.first"
    assert modules.unit_of_module("net.second.inner") == "net.second"


def test_residual_connections_of_the_model_itself_cannot_be_split():
    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            return x + self.second(x)

    model = Loose()
    problem = roost.estimate(roost.capture(model, torch.zeros(2, 8)), TWO)
    with pytest.raises(InputError, match=r"'first' and 'second' meet in op 'add' of the model"):
        device_map(model, problem, placed(problem, {"second": "cuda:1", "": "cuda:0"}))


def test_every_weight_offloaded_is_no_map():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    problem = roost.estimate(roost.capture(model, torch.zeros(2, 4)), OFFLOAD)
    with pytest.raises(InputError, match="cpu_offload"):
        device_map(model, problem, problem.placement(np.where(problem.graph.is_parameter, 0, 1)))


def test_a_map_that_does_not_fit_says_so():
    small = cluster("cpu", "cuda:0", "cuda:1", memory=1000)
    model, problem = net(small)
    found = device_map(model, problem, placed(problem, {"blocks.2": "cuda:1", "": "cuda:0"}))
    assert not found.feasible
    assert "does not fit: lacks" in str(found)


# ---------------------------------------------------------------------- pipelines


def test_stages_of_a_pipeline():
    model, problem = net(TWO)
    model.out.weight = nn.Parameter(torch.zeros(20, 8))
    problem = roost.estimate(roost.capture(model, torch.zeros(2, 5, dtype=torch.int64)), TWO)
    placement = placed(
        problem, {"blocks.0": "cuda:0", "blocks": "cuda:1", "out": "cuda:1", "": "cuda:0"}
    )
    for known in (model, None):
        found = split_spec(known, problem, placement)
        assert found.points == {"blocks.1": "BEGINNING"}
        assert found.devices == ("cuda:0", "cuda:1")
        assert found.agreement == 1.0
    assert json.loads(found.text()) == {
        "split_spec": {"blocks.1": "BEGINNING"},
        "devices": ["cuda:0", "cuda:1"],
    }


def test_a_pipeline_tells_what_whole_modules_cost():
    model, problem = net(TWO)
    model.out.weight = nn.Parameter(torch.zeros(20, 8))
    problem = roost.estimate(roost.capture(model, torch.zeros(2, 5, dtype=torch.int64)), TWO)
    rules = {"blocks.0": "cuda:0", "blocks": "cuda:1", "out": "cuda:1", "": "cuda:0"}
    whole = placed(problem, rules)
    assert split_spec(model, problem, whole).cost == 1.0
    # Most of the block is on cuda:1 all the same.
    torn = placed(problem, {"blocks.1.norm": "cuda:0", **rules})
    found = split_spec(model, problem, torn)
    assert found.points == {"blocks.1": "BEGINNING"}
    assert found.agreement < 1.0
    assert found.step_time == roost.simulate(problem, whole).step_time
    assert found.placed_time == roost.simulate(problem, torn).step_time
    assert f"takes {found.cost:.2f} times as long" in str(found)


def test_a_placement_in_and_out_of_modules_is_no_pipeline():
    """Every block partly on each of two devices would be one stage, and nobody would know."""
    model, problem = net(TWO)
    with pytest.raises(
        InputError,
        match=r"cuda:1 computes \d+% of the step, but most of no module: .* is in 'blocks.0'",
    ):
        split_spec(
            model,
            problem,
            placed(problem, {f"blocks.{n}.act": "cuda:1" for n in range(3)} | {"": "cuda:0"}),
        )
    found = split_spec(model, problem, placed(problem, {"": "cuda:0"}))
    assert (found.points, found.devices) == ({}, ("cuda:0",))
    assert str(found).startswith("one stage, on cuda:0: there is nothing to split; 100.0% of")


@pytest.mark.filterwarnings("ignore")
def test_pytorch_splits_there():
    from torch.distributed.pipelining import SplitPoint, pipeline

    model, _ = net(TWO)
    model.out.weight = nn.Parameter(torch.zeros(20, 8))
    words = torch.zeros(2, 5, dtype=torch.int64)
    problem = roost.estimate(roost.capture(model, words), TWO)
    placement = placed(problem, {"blocks.2": "cuda:1", "out": "cuda:1", "": "cuda:0"})
    points = split_spec(model, problem, placement).points
    pipe = pipeline(
        model,
        mb_args=(words,),
        split_spec={name: SplitPoint[point] for name, point in points.items()},
    )
    assert pipe.num_stages == 2
    assert "blocks.2.inner.weight" in dict(pipe.get_stage_module(1).named_parameters())
    assert "blocks.1.inner.weight" in dict(pipe.get_stage_module(0).named_parameters())


def test_what_a_pipeline_cannot_do():
    model, problem = net(TWO)
    with pytest.raises(InputError, match=r"module 'blocks\.2' goes back to cuda:0 after cuda:1"):
        split_spec(model, problem, placed(problem, {"blocks.1": "cuda:1", "": "cuda:0"}))
    with pytest.raises(
        InputError, match=r"'words\.weight' and 'out\.weight' are one weight, used on"
    ):
        split_spec(model, problem, placed(problem, {"out": "cuda:1", "": "cuda:0"}))
    offload = roost.estimate(problem.graph, OFFLOAD)
    with pytest.raises(
        InputError, match=r"weights of module 'blocks\.1' lie on cpu while it computes on cuda:0"
    ):
        split_spec(
            model, offload, placed(offload, {"blocks.1": "cpu", "": "cuda:0"}, weights_only=True)
        )
    bare = GraphBuilder("bare")
    bare.add("a", flop=1.0)
    with pytest.raises(InputError, match="no modules to split at"):
        split_spec(None, roost.estimate(bare.freeze(), TWO), roost.Placement(np.zeros(1, int)))


# ---------------------------------------------------------------------- llama.cpp

PARTS = [
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
]


def llama(layers, on, parts=PARTS):
    builder = GraphBuilder("llama")
    builder.parameter("model.embed_tokens.weight", 100)
    for layer in range(layers):
        for part in parts:
            builder.parameter(f"model.layers.{layer}.{part}", 100)
    builder.parameter("model.rotary_emb.inv_freq", 10)
    builder.parameter("model.norm.weight", 100)
    builder.parameter("lm_head.weight", 100)
    builder.add("logits", inputs=["lm_head.weight"], flop=1.0)
    return roost.estimate(builder.freeze(), on)


def test_layers_on_the_cpu():
    problem = llama(32, OFFLOAD)
    late = [
        bool(re.match(r"model\.layers\.(2[4-9]|3[01])\.", name)) for name in problem.graph.op_names
    ]
    late[0] = True
    found = llama_cpp(problem, problem.placement(np.where(late, 0, 1)))
    assert found.line == r'-ngl 33 -ot "^blk\.(2[4-9]|3[01])\.=CPU"'
    assert found.text() == found.line + "\n"


def test_feed_forward_parts_on_the_cpu():
    problem = llama(12, OFFLOAD)
    parts = ["mlp" in name or "embed" in name for name in problem.graph.op_names]
    found = llama_cpp(problem, problem.placement(np.where(parts, 0, 1)))
    assert found.line == r'-ngl 13 -ot "^blk\.([0-9]|1[01])\.ffn_(down|gate|up)\.weight=CPU"'


def test_no_gpu_needs_no_rules():
    problem = llama(2, OFFLOAD)
    assert (
        llama_cpp(problem, problem.placement(np.zeros(problem.graph.num_ops, int))).line == "-ngl 0"
    )


@settings(deadline=None, max_examples=40)
@given(st.randoms(use_true_random=False), st.booleans())
def test_every_tensor_is_where_it_should_be(random, several):
    problem = llama(13, TWO if several else OFFLOAD)
    device = [random.randrange(3 if several else 2) for _ in range(problem.graph.num_ops)]
    found = llama_cpp(problem, problem.placement(np.array(device)))
    assert len(found.tensors) == 13 * 9 + 3
    nowhere = "CPU" if found.num_gpu_layers == 0 else None if several else "CUDA0"
    for tensor, buffer in found.tensors.items():
        assert (
            buffer_of(found, tensor) or ("CPU" if tensor == "token_embd.weight" else nowhere)
        ) == buffer
    assert not re.search("[$,=]", "".join(regex for regex, _ in found.rules))


@settings(deadline=None)
@given(st.sets(st.integers(0, 130), min_size=1))
def test_numbers_as_a_regex(numbers):
    regex = whole_numbers(numbers)
    assert {n for n in range(1300) if re.fullmatch(regex, str(n))} == numbers


def test_experts_are_one_tensor():
    parts = [
        f"block_sparse_moe.experts.{expert}.{w}.weight"
        for expert in range(4)
        for w in ("w1", "w2", "w3")
    ]
    problem = llama(2, OFFLOAD, [*PARTS[:6], "block_sparse_moe.gate.weight", *parts])
    experts = ["experts" in name or "embed" in name for name in problem.graph.op_names]
    found = llama_cpp(problem, problem.placement(np.where(experts, 0, 1)))
    assert found.line == r'-ngl 3 -ot "^blk\.[01]\.ffn_(down|gate|up)_exps\.weight=CPU"'
    assert found.agreement == 1.0
    assert gguf_names("model.layers.3.mlp.experts.gate_up_proj") == (
        "blk.3.ffn_gate_exps.weight",
        "blk.3.ffn_up_exps.weight",
    )
    assert gguf_names("model.layers.3.mlp.experts.7.down_proj.weight") == (
        "blk.3.ffn_down_exps.weight",
    )
    assert gguf_names("model.layers.3.mlp.gate.weight") == ("blk.3.ffn_gate_inp.weight",)


def test_what_llama_cpp_cannot_do():
    _, problem = net(TWO)
    with pytest.raises(InputError, match=r"'words\.weight' is no weight of a Llama"):
        llama_cpp(problem, placed(problem, {"": "cuda:0"}))
    other = llama(2, cluster("tpu:0"))
    with pytest.raises(InputError, match="device 'tpu:0' is of kind 'tpu'"):
        llama_cpp(other, other.placement(np.zeros(other.graph.num_ops, int)))
    bare = GraphBuilder("bare")
    bare.add("a", flop=1.0)
    with pytest.raises(InputError, match="no layers of a Llama"):
        llama_cpp(roost.estimate(bare.freeze(), TWO), roost.Placement(np.zeros(1, int)))


def test_a_placement_for_another_graph_is_refused():
    model, problem = net(TWO)
    other = roost.Placement(np.zeros(problem.graph.num_ops, int), graph="0123456789abcdef")
    for export in (device_map, split_spec):
        with pytest.raises(
            InputError, match=f"made for graph 0123456789abcdef; .* is {problem.graph.digest}"
        ):
            export(model, problem, other)
    with pytest.raises(InputError, match="made for graph 0123456789abcdef"):
        llama_cpp(problem, other)


@pytest.mark.filterwarnings("ignore")
def test_a_llama_of_transformers():
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
    config = transformers.LlamaConfig(
        num_hidden_layers=4, num_key_value_heads=2, use_cache=False, **sizes
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros((1, 8), dtype=torch.int64)
    graph = roost.capture(model, {"input_ids": tokens})
    problem = roost.estimate(graph, TWO)
    rules = {
        "model.layers.2": "cuda:1",
        "model.layers.3": "cuda:1",
        "model.norm": "cuda:1",
        "lm_head": "cuda:1",
        "": "cuda:0",
    }
    placement = placed(problem, rules)
    early = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.layers.1"], 0)
    late = dict.fromkeys(["model.layers.2", "model.layers.3", "model.norm"], 1)
    found = device_map(model, problem, placement)
    assert found.entries == early | late | {"model.rotary_emb": 0, "lm_head": 1}
    assert split_spec(model, problem, placement).points == {"model.layers.2": "BEGINNING"}
    overrides = llama_cpp(problem, placement)
    assert buffer_of(overrides, "blk.2.ffn_gate.weight") == "CUDA1"
    assert buffer_of(overrides, "blk.1.attn_norm.weight") == "CUDA0"
    assert len(overrides.rules) == 5
    inputs = problem.graph.phase == INPUT
    assert (found.placement.device[inputs] == placement.device[inputs]).all()


class Counts(nn.Module):
    """Writes into a buffer each time it is called, in inference too."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.outer(self.inner(x)) * self.calls


def test_a_model_that_writes_a_buffer_is_no_training_step():
    model = Counts().eval()
    problem = roost.estimate(roost.capture(model, torch.ones(2, 8)), TWO)
    assert (problem.graph.phase == UPDATE).any()
    assert device_map(model, problem, placed(problem, {"": "cuda:0"})).entries == {"": 0}
