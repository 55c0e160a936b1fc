"""TensorFlow models to graphs.

TensorFlow itself is never imported here: one script, in a process of its own, builds the models and
traces the functions, and the tests look at what it wrote.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import roost
from roost.core.graph import BACKWARD, FORWARD, UPDATE
from roost.errors import InputError, MissingExtra, UnsupportedOp
from roost.frontends.tensorflow import Tensorflow

SCRIPT = """
import keras, tensorflow as tf
from keras import layers
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
from roost.errors import InputError, UnsupportedOp
from roost.frontends.tensorflow import capture_function

# Files
keras.applications.ResNet50(weights=None).export("resnet50", verbose=False)
lstm = keras.Sequential([layers.Input((5, 8)), layers.LSTM(16), layers.Dense(2)])
lstm.export("looped", verbose=False)

class Signatures(tf.Module):
    def __init__(self):
        self.w = tf.Variable(tf.zeros((4, 3)), name="w")
    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="x")])
    def apply(self, x):
        return {"y": x @ self.w}
    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="x")])
    def twice(self, x):
        return {"y": tf.nn.relu(tf.concat([self.apply(x)["y"], self.apply(x + 1.0)["y"]], axis=1))}

module = Signatures()
tf.saved_model.save(module, "signatures", signatures={"apply": module.apply, "twice": module.twice})
frozen = convert_variables_to_constants_v2(module.twice.get_concrete_function())
tf.io.write_graph(frozen.graph, ".", "frozen.pb", as_text=False)

# A file that writes another one when it is loaded
from tensorflow.python.trackable.resource import TrackableResource

class Writes(TrackableResource):
    def _create_resource(self):
        return tf.raw_ops.MutableHashTableV2(key_dtype=tf.string, value_dtype=tf.int64)
    def _initialize(self):
        tf.io.write_file("initialised", "")

hostile = Signatures()
hostile.resource = Writes()
hostile.resource.resource_handle
tf.saved_model.save(hostile, "hostile", signatures={"apply": hostile.apply})
tf.io.gfile.exists("initialised") and tf.io.gfile.remove("initialised")

# Functions
def step_of(model, optimizer):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss
    return step

def save(name, function, *examples):
    capture_function(function, *examples, name=name).save(f"{name}.json")

image, label = tf.zeros((4, 16, 16, 3)), tf.zeros((4,), tf.int32)
cnn = keras.Sequential([
    layers.Input((16, 16, 3)), layers.Conv2D(8, 3, padding="same", name="conv"), layers.BatchNormalization(name="norm"),
    layers.ReLU(), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10, name="dense"),
], name="net")
save("sgd", step_of(cnn, keras.optimizers.SGD(0.1)), image, label)
save("adam", step_of(cnn, keras.optimizers.Adam()), image, label)
unrolled = keras.Sequential([layers.Input((5, 8)), layers.LSTM(16, unroll=True), layers.Dense(2)])
save("unrolled", lambda x: unrolled(x), tf.zeros((3, 5, 8)))
save("unrolled_step", step_of(unrolled, keras.optimizers.SGD(0.1)), tf.zeros((3, 5, 8)), tf.zeros((3,), tf.int32))

@tf.function
def colocated(x):
    h = tf.nn.relu(x, name="h")
    with tf.compat.v1.colocate_with(h):
        y = tf.tanh(h, name="y")
    return tf.exp(y, name="z")
save("colocated", colocated, tf.zeros((4,)))

var, m, v, rate = (tf.Variable(tf.zeros(s), name=n) for s, n in (((6,), "var"), ((6,), "m"), ((6,), "v"), ((), "rate")))
def adam(g):
    tf.raw_ops.ResourceApplyAdam(
        var=var.handle, m=m.handle, v=v.handle, beta1_power=0.9, beta2_power=0.9, lr=rate, beta1=0.9, beta2=0.9,
        epsilon=1e-7, grad=g)
    return var * 2.0
save("fused_adam", adam, tf.zeros((6,)))

n = tf.nn
zeros = lambda *shape: tf.zeros(shape)
for name, function, *examples in (
    ("matmul", lambda a, b: tf.matmul(a, b, transpose_a=True), zeros(5, 4), zeros(5, 6)),
    ("batch_matmul", lambda a, b: tf.matmul(a, b, transpose_b=True), zeros(3, 4, 5), zeros(3, 6, 5)),
    ("conv", lambda x, w: n.conv2d(x, w, 2, "VALID"), zeros(1, 9, 9, 4), zeros(3, 3, 4, 6)),
    ("grouped", lambda x, w: n.conv2d(x, w, 1, "SAME"), zeros(1, 9, 9, 4), zeros(3, 3, 2, 6)),
    ("conv3d", lambda x, w: n.conv3d(x, w, [1] * 5, "VALID"), zeros(1, 3, 4, 5, 2), zeros(2, 2, 2, 2, 7)),
    ("depthwise", lambda x, w: n.depthwise_conv2d(x, w, [1] * 4, "VALID"), zeros(1, 9, 9, 4), zeros(3, 3, 4, 2)),
    ("max_pool", lambda x: n.max_pool2d(x, 2, 2, "VALID"), zeros(1, 8, 8, 3)),
    ("einsum", lambda a, b: tf.einsum("bij,bjk->bik", a, b), zeros(2, 3, 4), zeros(2, 4, 5)),
    ("batch_norm", lambda x, s: tf.compat.v1.nn.fused_batch_norm(x, s, s)[0], zeros(1, 8, 8, 3), zeros(3)),
    ("softmax", n.softmax, zeros(2, 10)),
    ("add", tf.add, zeros(2, 1), zeros(1, 3)),
    ("reduced", tf.reduce_sum, zeros(4, 5)),
    ("gather", lambda x: tf.gather(x, [1, 2]), zeros(100, 8)),
):
    save(name, function, *examples)

for name, function, *examples in (
    ("choice", tf.function(lambda x: tf.cond(x > 0, lambda: x + 1, lambda: x - 1)), tf.zeros(())),
    ("broken", lambda x: x @ x, zeros(2, 3)),
):
    try:
        capture_function(function, *examples)
    except InputError as error:
        open(f"{name}.txt", "w").write(f"{type(error).__name__}: {error}")
"""

needs_tensorflow = [
    pytest.mark.tf,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs the tf extra"),
]


def tf_test(test):
    for mark in needs_tensorflow:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder in which the script has run."""
    folder = tmp_path_factory.mktemp("tensorflow")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | quiet, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def graph(made):
    return lambda name: roost.load(made / f"{name}.json")


def op(graph, name):
    """One op, by name."""
    i = graph.index_of(name)
    return SimpleNamespace(
        kind=graph.kinds[i],
        inputs=[graph.op_names[j] for j in graph.inputs_of(i)],
        flop=graph.flop[i],
        read=graph.bytes_read[i],
        written=graph.bytes_written[i],
        output=graph.output_bytes[i],
        phase=graph.phase[i],
        module=graph.modules[i],
        group=graph.group[i],
    )


def flop(graph, *kinds):
    return graph.flop[np.isin(graph.kinds, kinds)].sum()


@tf_test
def test_resnet50_has_the_published_flop_and_parameters(made):
    graph = Tensorflow().read(
        made / "resnet50", trust=True, inputs={"keras_tensor": (1, 224, 224, 3)}
    )
    assert graph.name == "resnet50"
    assert flop(graph, "conv2d", "matmul") == pytest.approx(2 * 3.858e9, rel=1e-3)
    assert graph.flop.sum() == pytest.approx(7.7e9, rel=0.01)
    # 25,636,712 in the documentation of Keras, moving averages included.
    assert graph.output_bytes[graph.is_parameter].sum() == 4 * 25_636_712
    assert "conv5_block3_3_conv/kernel" in graph.op_names
    assert not set(graph.kinds) & {
        "readvariableop",
        "identity",
        "reshape",
        "statefulpartitionedcall",
        "const",
    }
    conv = op(graph, "resnet50_1/conv1_conv_1/convolution")
    assert conv.inputs == ["resnet50_1/conv1_pad_1/Pad", "conv1_conv/kernel"]
    assert conv.flop == 2 * 112 * 112 * 64 * 7 * 7 * 3
    assert conv.module == "resnet50_1.conv1_conv_1"


@tf_test
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"signatures: .*not fixed: x \[\?, 4\]; .*--input x=1,4"),
        ({"x": (1, 5)}, r"input 'x' is declared \[\?, 4\]; \[1, 5\] does not fit"),
        ({"xs": (1, 4)}, "called 'xs'; did you mean 'x'"),
    ],
)
def test_an_open_batch_must_be_given(made, inputs, message):
    with pytest.raises(InputError, match=message):
        Tensorflow().read(made / "signatures", trust=True, signature="apply", inputs=inputs)


@tf_test
def test_functions_called_twice_are_inlined_twice(made):
    graph = Tensorflow().read(
        made / "signatures", trust=True, signature="twice", inputs={"x": (2, 4)}
    )
    assert sorted(graph.kinds) == [
        "addv2",
        "concatv2",
        "input",
        "matmul",
        "matmul",
        "parameter",
        "relu",
    ]
    assert graph.flop.sum() == 2 * (2 * 2 * 4 * 3) + 8 + 12
    weight = graph.index_of("w")
    assert len(graph.consumers_of(weight)) == 2  # one parameter, read by both
    again = Tensorflow().read(
        made / "signatures" / "saved_model.pb",
        trust=True,
        signature="twice",
        inputs={"x": (2, 4)},
    )
    assert again.digest == graph.digest


@tf_test
def test_the_initialiser_of_a_saved_model_runs_with_trust_alone(made, tmp_path):
    command = [sys.executable, "-m", "roost", "capture", str(made / "hostile"), "-o", "graph.json"]
    command += ["--set", "signature=apply", "--input", "x=2,4"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "can run code of its author" in refused.stderr
    assert [*tmp_path.iterdir()] == []
    trusted = subprocess.run(
        [*command, "--trust"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert trusted.returncode == 0, trusted.stderr
    assert (tmp_path / "initialised").exists()  # so the file was hostile
    assert flop(roost.load(tmp_path / "graph.json"), "matmul") == 2 * (2 * 4 * 3)


@tf_test
def test_an_unknown_signature_gets_a_suggestion(made):
    with pytest.raises(
        InputError, match=r"no signature of .* called 'twize'; did you mean 'twice'"
    ):
        Tensorflow().read(made / "signatures", trust=True, signature="twize")


@tf_test
def test_a_frozen_graph_keeps_its_weights_as_parameters(made):
    graph = Tensorflow().read(made / "frozen.pb", inputs={"x": (2, 4)}, name="ice")
    assert graph.name == "ice"
    assert flop(graph, "matmul") == 2 * (2 * 2 * 4 * 3)
    assert set(graph.output_bytes[graph.is_parameter].tolist()) == {4 * 12}
    assert Tensorflow().coverage(made / "frozen.pb", inputs={"x": (2, 4)}).unknown_kinds == ()


@tf_test
def test_a_loop_is_refused_with_the_way_out(made):
    with pytest.raises(
        UnsupportedOp, match=r"looped: op '.*while' \(.*While\) is a loop.*unroll=True"
    ):
        Tensorflow().read(made / "looped", trust=True, inputs={"keras_tensor": (1, 5, 8)})


@tf_test
def test_what_cannot_be_traced_or_followed_is_refused(made):
    assert (
        (made / "choice.txt")
        .read_text()
        .startswith("UnsupportedOp: lambda: op 'cond' (StatelessIf) is control flow")
    )
    assert (
        (made / "broken.txt")
        .read_text()
        .startswith("InputError: lambda: TensorFlow cannot trace this function")
    )


@tf_test
def test_an_unrolled_lstm_multiplies_at_every_step(graph):
    inference = graph("unrolled")
    dense = 2 * 3 * 16 * 2
    assert flop(inference, "matmul") == 5 * 2 * 3 * (8 + 16) * 64 + dense
    step = graph("unrolled_step")
    forward, backward = (
        step.flop[(step.phase == phase) & np.isin(step.kinds, "matmul")].sum() for phase in (2, 3)
    )
    assert forward == flop(inference, "matmul")
    # Twice the forward pass, but for the gradients of the input and of the first state, which
    # nobody needs.
    assert backward == 2 * forward - 5 * 2 * 3 * 8 * 64 - 2 * 3 * 16 * 64


@tf_test
def test_the_phases_of_a_training_step(graph):
    step = graph("sgd")
    conv = 2 * (4 * 16 * 16 * 8) * 27
    forward = op(step, "net_1/conv_1/convolution")
    backward = op(step, "gradient_tape/net_1/conv_1/convolution/Conv2DBackpropFilter")
    assert (forward.flop, forward.phase, forward.module) == (conv, FORWARD, "net_1.conv_1")
    assert (backward.flop, backward.phase, backward.module) == (
        conv,
        BACKWARD,
        "net_1.conv_1.convolution",
    )
    assert "conv2dbackpropinput" not in step.kinds  # nobody needs the gradient of the images
    dense = 2 * 4 * (8 * 8 * 8) * 10
    assert flop(step, "matmul") == 3 * dense

    updates = np.flatnonzero(step.phase == UPDATE)
    written = {
        step.op_names[i]
        for update in updates
        for i in step.inputs_of(update)
        if step.is_parameter[i]
    }
    weights = {
        f"net/{name}"
        for name in ("conv/kernel", "conv/bias", "dense/kernel", "dense/bias", "norm/gamma")
    }
    assert written >= weights | {
        "net/norm/beta",
        "net/norm/moving_mean",
        "net/norm/moving_variance",
    }
    assert "sgd/learning_rate" not in written
    for update in updates:  # an op that changes a variable runs where the variable is
        for source in step.inputs_of(update):
            if step.is_parameter[source]:
                assert step.group[source] == step.group[update] >= 0


@tf_test
def test_a_variable_read_after_it_was_changed_waits_for_the_change(graph):
    step = graph("adam")
    reads = [i for i, kind in enumerate(step.kinds) if kind == "readvariableop"]
    assert reads
    for read in reads:
        variable, change = step.inputs_of(read)
        assert step.is_parameter[variable]
        assert step.phase[change] == UPDATE
        assert step.group[read] == step.group[variable] == step.group[change]


@tf_test
def test_a_training_step_simulates(graph):
    for name in ("sgd", "adam", "unrolled_step"):
        step = graph(name)
        problem = roost.estimate(step, roost.cluster("k80x2"))
        timeline = roost.simulate(problem, roost.Placement(np.full(step.num_ops, 1)))
        assert timeline.feasible
        assert timeline.step_time > 0


@tf_test
def test_colocated_ops_share_a_group(graph):
    colocated = graph("colocated")
    assert op(colocated, "h").group == op(colocated, "y").group >= 0
    assert op(colocated, "z").group == -1


@tf_test
def test_a_fused_update_changes_its_variables_only(graph):
    step = graph("fused_adam")
    update = step.index_of("ResourceApplyAdam")
    # A function lists only variables that it reads.
    changed = ["var", "ResourceApplyAdam/m", "ResourceApplyAdam/v"]
    assert [step.op_names[i] for i in step.inputs_of(update)] == [*changed, "rate/read", "g"]
    assert step.flop[update] == 12 * 6
    assert step.bytes_written[update] == 3 * 24
    group = step.group[update]
    assert [step.op_names[i] for i in np.flatnonzero(step.group == group)][:4] == [
        *changed,
        "ResourceApplyAdam",
    ]
    (read,) = op(step, "mul").inputs  # of the new value
    assert op(step, read).inputs == ["var", "ResourceApplyAdam"]


@tf_test
@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("matmul", "matmul", 2 * 4 * 5 * 6),
        ("batch_matmul", "batchmatmulv2", 2 * 3 * 4 * 5 * 6),
        ("conv", "conv2d", 2 * (16 * 6) * 9 * 4),
        ("grouped", "conv2d", 2 * (81 * 6) * 9 * 2),
        ("conv3d", "conv3d", 2 * (2 * 3 * 4 * 7) * 8 * 2),
        ("depthwise", "depthwiseconv2dnative", 2 * (49 * 8) * 9),
        ("max_pool", "maxpool", 16 * 3 * 4),
        ("einsum", "einsum", 2 * 2 * 3 * 4 * 5),
        ("batch_norm", "fusedbatchnormv3", 8 * 192),
        ("softmax", "softmax", 5 * 20),
        ("add", "addv2", 6),
        ("reduced", "sum", 20),
        ("gather", "gatherv2", 0),
    ],
)
def test_flop_by_hand(graph, name, kind, expected):
    found = graph(name)
    assert kind in found.kinds
    assert found.flop.sum() == expected


@tf_test
def test_a_gather_reads_only_the_rows_it_takes(graph):
    found = graph("gather")
    assert found.bytes_read[found.kinds.index("gatherv2")] < 100


@tf_test
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "text.pb",
            b"this is only text, and no graph",
            "text.pb: is not a GraphDef, or not a whole one",
        ),
        ("empty.pb", b"", r"empty.pb: is not a GraphDef, or not a whole one \(it has no nodes\)"),
    ],
)
def test_what_is_no_graph_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        Tensorflow().read(tmp_path / name)


@tf_test
def test_a_damaged_saved_model_is_refused(made, tmp_path):
    shutil.copytree(made / "signatures", tmp_path / "cut")
    file = tmp_path / "cut" / "saved_model.pb"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match="cut: TensorFlow cannot load this SavedModel"):
        Tensorflow().read(tmp_path / "cut", trust=True, signature="apply")


def test_paths_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such file or folder"):
        Tensorflow().read(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"has no saved_model\.pb; make one with model\.export"):
        Tensorflow().read(tmp_path)
    (tmp_path / "model.keras").write_bytes(b"")
    with pytest.raises(InputError, match=r"model\.keras: is a Keras file.*model\.export"):
        Tensorflow().read(tmp_path / "model.keras")


def test_without_tensorflow_the_error_names_the_extra(monkeypatch, tmp_path):
    (tmp_path / "model.pb").write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'roost\[tf\]'"):
        Tensorflow().read(tmp_path / "model.pb")


def test_importing_the_front_end_imports_neither_tensorflow_nor_torch():
    modules = "roost.frontends.tensorflow, roost.frontends._tensorflow_worker"
    code = f"import sys, {modules}; assert not {{'tensorflow', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
