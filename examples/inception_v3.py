"""One training step of Inception-V3 as a graph, with the placement published for it: no
deep-learning framework needed.

The model is Szegedy et al., arXiv 1512.00567, as commonly trained: 299 x 299 x 3 images, 1000
classes, float32. `python examples/inception_v3.py OUT_DIR` writes OUT_DIR/inception_v3.json.gz and
prints, for a batch of 32,

    585 ops, 1134 edges, 23,834,568 parameters, 11.45 GFLOP forward per image (11.43 in conv2d and
    linear)

and the FLOP of the whole step, 1.10 T. A multiply and an add are two FLOP.

Differs in: no auxiliary head, dropout or labels. A convolution, its batch norm and its relu are one
op with one output, and their backward is folded likewise, so the tensor between convolution and
batch norm is neither held nor moved.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from roost.core.graph import FORWARD, Graph, GraphBuilder
from roost.errors import InputError
from roost.placers.published import published_gpus

NUMBER = 4  # bytes of a float32


@dataclass(frozen=True)
class Tensor:
    """The output of an op: a batch of square maps."""

    path: str  # of the layer; its ops are called path/forward, path/backward, ...
    op: str
    channels: int
    side: int


class TrainingStep:
    """Adds layers forward, notes how each runs backward, then adds that in reverse, and the
    updates."""

    def __init__(self, name: str, batch: int) -> None:
        self.builder = GraphBuilder(name)
        self.batch = batch
        self.size: dict[str, int] = {}  # op -> bytes of its output
        self.tape: list[Callable[[], None]] = []
        # Op -> gradients of its output, one for each use.
        self.gradients: dict[str, list[str]] = defaultdict(list)
        self.updates: list[tuple[str, str]] = []  # parameter and its gradient

    def images(self, channels: int, side: int) -> Tensor:
        size = NUMBER * self.batch * channels * side**2
        op = self.builder.add(
            "images/input", "input", output_bytes=size, phase="input", module="images"
        )
        self.size[op] = size
        return Tensor("images", op, channels, side)

    def conv(
        self,
        path: str,
        x: Tensor,
        channels: int,
        kernel: tuple[int, int],
        stride: int = 1,
        padded: bool = True,
    ) -> Tensor:
        """Convolution, batch norm, relu. A stride of 2 is never padded in this model."""
        side = x.side if padded and stride == 1 else (x.side - kernel[0]) // stride + 1
        weights = x.channels * channels * kernel[0] * kernel[1]
        # Relu and batch norm run backward from their own output, so it is saved as well.
        return self._weighted(
            path, "conv2d", x, channels, side, weights, 2 * channels, saves_output=True
        )

    def linear(self, path: str, x: Tensor, channels: int) -> Tensor:
        return self._weighted(
            path, "linear", x, channels, 1, x.channels * channels, channels, saves_output=False
        )

    def pool(
        self, path: str, x: Tensor, kind: str, window: int, stride: int = 1, padded: bool = False
    ) -> Tensor:
        side = x.side if padded else (x.side - window) // stride + 1
        flop = float(self.batch * x.channels * side**2 * window**2)
        y = self._forward(path, kind, [x.op], x.channels, side, flop)
        saved = [x.op, y.op] if kind == "max_pool" else []

        def backward() -> None:
            self._backward_to(
                x, f"{path}/backward", f"{kind}_backward", [self._gradient(y), *saved], flop
            )

        self.tape.append(backward)
        return y

    def concat(self, path: str, parts: Sequence[Tensor]) -> Tensor:
        channels = sum(part.channels for part in parts)
        y = self._forward(path, "concat", [part.op for part in parts], channels, parts[0].side)

        def backward() -> None:
            gradient = self._gradient(y)
            for part in parts:
                name, size = f"{path}/backward_{part.path.split('/')[-1]}", self.size[part.op]
                self._add(name, "split", [gradient], size, "backward", bytes_read=size)
                self.gradients[part.op].append(name)

        self.tape.append(backward)
        return y

    def loss(self, path: str, x: Tensor) -> None:
        """Softmax and cross entropy; it starts the backward pass."""
        flop = 3.0 * self.batch * x.channels
        op = self._add(f"{path}/forward", "cross_entropy", [x.op], NUMBER, "forward", flop)
        self.tape.append(
            lambda: self._backward_to(
                x, f"{path}/backward", "cross_entropy_backward", [x.op, op], flop
            )
        )

    def freeze(self) -> Graph:
        for backward in reversed(self.tape):
            backward()
        # In the order of the layers, as optimizers go.
        for parameter, gradient in reversed(self.updates):
            size = self.size[parameter]
            name = parameter.replace("/weight", "/update")
            self._add(
                name,
                "sgd",
                [parameter, gradient],
                0,
                "update",
                2.0 * size / NUMBER,
                bytes_written=size,
            )
        return self.builder.freeze()

    def _weighted(
        self,
        path: str,
        kind: str,
        x: Tensor,
        channels: int,
        side: int,
        weights: int,
        extra: int,
        saves_output: bool,
    ) -> Tensor:
        """A layer that multiplies by `weights` at each place of its output and adds or scales by
        `extra` others."""
        size = NUMBER * (weights + extra)
        weight = self.builder.parameter(f"{path}/weight", size, module=path.replace("/", "."))
        self.size[weight] = size
        flop = 2.0 * self.batch * side**2 * weights
        y = self._forward(path, kind, [x.op, weight], channels, side, flop)
        saved = [y.op] if saves_output else []

        def backward() -> None:
            gradient = self._gradient(y)
            if x.path != "images":
                name, inputs = f"{path}/backward_input", [gradient, *saved, weight]
                self._backward_to(x, name, f"{kind}_backward_input", inputs, flop)
            name, inputs = f"{path}/backward_weight", [gradient, *saved, x.op]
            self._add(name, f"{kind}_backward_weight", inputs, size, "backward", flop)
            self.updates.append((weight, name))

        self.tape.append(backward)
        return y

    def _forward(
        self,
        path: str,
        kind: str,
        inputs: Sequence[str],
        channels: int,
        side: int,
        flop: float = 0.0,
    ) -> Tensor:
        size = NUMBER * self.batch * channels * side**2
        return Tensor(
            path, self._add(f"{path}/forward", kind, inputs, size, "forward", flop), channels, side
        )

    def _backward_to(
        self, x: Tensor, name: str, kind: str, inputs: Sequence[str], flop: float
    ) -> None:
        self.gradients[x.op].append(
            self._add(name, kind, inputs, self.size[x.op], "backward", flop)
        )

    def _gradient(self, y: Tensor) -> str:
        """The op that gives the gradient of a tensor: the sum where several ops took it."""
        gradients = self.gradients[y.op]
        if len(gradients) == 1:
            return gradients[0]
        size = self.size[y.op]
        flop = (len(gradients) - 1) * size / NUMBER
        return self._add(f"{y.path}/backward_add", "add", gradients, size, "backward", flop)

    def _add(
        self,
        name: str,
        kind: str,
        inputs: Sequence[str],
        size: int,
        phase: str,
        flop: float = 0.0,
        bytes_read: int | None = None,
        bytes_written: int | None = None,
    ) -> str:
        """Add an op that reads all its inputs and writes its output, unless told otherwise."""
        self.size[name] = size
        return self.builder.add(
            name,
            kind,
            inputs,
            flop=flop,
            output_bytes=size,
            bytes_read=sum(self.size[op] for op in inputs) if bytes_read is None else bytes_read,
            bytes_written=size if bytes_written is None else bytes_written,
            phase=phase,
            module=name.rpartition("/")[0].replace("/", "."),
        )


def _branch(step: TrainingStep, path: str, x: Tensor, *layers: str) -> Tensor:
    """Convolutions one after another, each written as "name kernel channels", with "/2" for a
    stride of 2."""
    for layer in layers:
        name, shape, channels = layer.split()
        kernel, _, stride = shape.partition("/")
        height, width = kernel.split("x")
        x = step.conv(
            f"{path}/{name}", x, int(channels), (int(height), int(width)), int(stride or 1)
        )
    return x


def _pooled(step: TrainingStep, path: str, x: Tensor, channels: int) -> Tensor:
    x = step.pool(f"{path}/pool", x, "avg_pool", 3, padded=True)
    return _branch(step, path, x, f"pool_conv 1x1 {channels}")


def _fork(step: TrainingStep, path: str, x: Tensor, name: str, number: int) -> Tensor:
    a = _branch(step, path, x, f"{name}_{number}a 1x3 384")
    b = _branch(step, path, x, f"{name}_{number}b 3x1 384")
    return step.concat(f"{path}/{name}_concat", [a, b])


def _mixed_35(step: TrainingStep, path: str, x: Tensor, pooled: int) -> Tensor:
    one = _branch(step, path, x, "b1x1 1x1 64")
    five = _branch(step, path, x, "b5x5_1 1x1 48", "b5x5_2 5x5 64")
    double = _branch(step, path, x, "b3x3dbl_1 1x1 64", "b3x3dbl_2 3x3 96", "b3x3dbl_3 3x3 96")
    return step.concat(f"{path}/concat", [one, five, double, _pooled(step, path, x, pooled)])


def _reduced_17(step: TrainingStep, path: str, x: Tensor) -> Tensor:
    three = _branch(step, path, x, "b3x3 3x3/2 384")
    double = _branch(step, path, x, "b3x3dbl_1 1x1 64", "b3x3dbl_2 3x3 96", "b3x3dbl_3 3x3/2 96")
    return step.concat(
        f"{path}/concat", [three, double, step.pool(f"{path}/pool", x, "max_pool", 3, stride=2)]
    )


def _mixed_17(step: TrainingStep, path: str, x: Tensor, n: int) -> Tensor:
    one = _branch(step, path, x, "b1x1 1x1 192")
    seven = _branch(step, path, x, f"b7x7_1 1x1 {n}", f"b7x7_2 1x7 {n}", "b7x7_3 7x1 192")
    double = _branch(
        step, path, x, f"b7x7dbl_1 1x1 {n}", f"b7x7dbl_2 7x1 {n}", f"b7x7dbl_3 1x7 {n}"
    )
    double = _branch(step, path, double, f"b7x7dbl_4 7x1 {n}", "b7x7dbl_5 1x7 192")
    return step.concat(f"{path}/concat", [one, seven, double, _pooled(step, path, x, 192)])


def _reduced_8(step: TrainingStep, path: str, x: Tensor) -> Tensor:
    three = _branch(step, path, x, "b3x3_1 1x1 192", "b3x3_2 3x3/2 320")
    seven = _branch(step, path, x, "b7x7x3_1 1x1 192", "b7x7x3_2 1x7 192", "b7x7x3_3 7x1 192")
    seven = _branch(step, path, seven, "b7x7x3_4 3x3/2 192")
    return step.concat(
        f"{path}/concat", [three, seven, step.pool(f"{path}/pool", x, "max_pool", 3, stride=2)]
    )


def _mixed_8(step: TrainingStep, path: str, x: Tensor) -> Tensor:
    one = _branch(step, path, x, "b1x1 1x1 320")
    three = _fork(step, path, _branch(step, path, x, "b3x3_1 1x1 384"), "b3x3", 2)
    double = _branch(step, path, x, "b3x3dbl_1 1x1 448", "b3x3dbl_2 3x3 384")
    double = _fork(step, path, double, "b3x3dbl", 3)
    return step.concat(f"{path}/concat", [one, three, double, _pooled(step, path, x, 192)])


def build(batch: int = 32) -> Graph:
    """The forward pass, the backward pass and one SGD update for each parameter."""
    step = TrainingStep("inception_v3", batch)
    x = step.images(3, 299)
    x = step.conv("Conv2d_1a_3x3", x, 32, (3, 3), stride=2)
    x = step.conv("Conv2d_2a_3x3", x, 32, (3, 3), padded=False)
    x = step.conv("Conv2d_2b_3x3", x, 64, (3, 3))
    x = step.pool("maxpool1", x, "max_pool", 3, stride=2)
    x = step.conv("Conv2d_3b_1x1", x, 80, (1, 1))
    x = step.conv("Conv2d_4a_3x3", x, 192, (3, 3), padded=False)
    x = step.pool("maxpool2", x, "max_pool", 3, stride=2)
    for block, pooled in (("5b", 32), ("5c", 64), ("5d", 64)):
        x = _mixed_35(step, f"Mixed_{block}", x, pooled)
    x = _reduced_17(step, "Mixed_6a", x)
    for block, width in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        x = _mixed_17(step, f"Mixed_{block}", x, width)
    x = _reduced_8(step, "Mixed_7a", x)
    for block in ("7b", "7c"):
        x = _mixed_8(step, f"Mixed_{block}", x)
    x = step.pool("avgpool", x, "avg_pool", x.side)
    step.loss("loss", step.linear("fc", x, 1000))
    return step.freeze()


def published_placement(graph: Graph) -> npt.NDArray[np.int32]:  # [ops] GPU 0 to 3
    """The published placement, from `roost.placers.published`; all other ops go with their forward
    op."""
    return published_gpus(graph)


def contiguous(graph: Graph, parts: int) -> npt.NDArray[np.int32]:  # [ops] part 0 to parts - 1
    """Parts of about equal forward FLOP, cut in program order; all other ops go with their forward
    op.

    A layer belongs to the part that holds its middle; with 18 parts or more, some are empty.
    """
    if parts < 1:
        raise InputError(f"parts is {parts}; it must be at least 1")
    flop = dict.fromkeys(_modules(graph), 0.0)
    for op in np.flatnonzero(graph.phase == FORWARD):
        flop[graph.modules[op]] += float(graph.flop[op])
    each = np.array(list(flop.values()))
    middle = (np.cumsum(each) - each / 2) / each.sum()
    return _by_module(graph, np.minimum(middle * parts, parts - 1).astype(int).tolist())


def _modules(graph: Graph) -> list[str]:
    """Each module once, in program order; it has one forward op, or is the input."""
    return list(dict.fromkeys(graph.modules))


def _by_module(graph: Graph, numbers: Sequence[int]) -> npt.NDArray[np.int32]:
    number_of = dict(zip(_modules(graph), numbers, strict=True))
    return np.array([number_of[module] for module in graph.modules], dtype=np.int32)


def main(folder: str) -> None:
    batch = 32
    graph = build(batch)
    path = Path(folder) / "inception_v3.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    graph.save(path)
    forward = graph.phase == FORWARD
    layers = forward & np.isin(graph.kinds, ("conv2d", "linear"))
    parameters = graph.output_bytes[graph.is_parameter].sum() // NUMBER
    print(path)
    print(
        f"{graph.num_ops} ops, {graph.num_edges} edges, {parameters:,} parameters, "
        f"{graph.flop[forward].sum() / batch / 1e9:.2f} GFLOP forward per image "
        f"({graph.flop[layers].sum() / batch / 1e9:.2f} in conv2d and linear), "
        f"{graph.flop.sum() / 1e12:.2f} TFLOP in the step"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/inception_v3.py OUT_DIR")
    main(sys.argv[1])
