"""Forward and backward of an exported program, traced into one program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx.traceback as node_meta
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_unflatten

from roost.errors import InputError
from roost.frontends.tracing import attention, own_functions
from roost.frontends.tracing.exported_inputs import Residents, drop_flags, user_inputs
from roost.frontends.tracing.fake_model import fake_tensors
from roost.frontends.tracing.program import BACKWARD, Program
from roost.frontends.tracing.refusals import line_of_stack, refusal

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
# Values that the step leaves changed. Nobody reads a changed input afterwards.
_CHANGES = (
    OutputKind.BUFFER_MUTATION,
    getattr(OutputKind, "PARAMETER_MUTATION", OutputKind.BUFFER_MUTATION),
)


def joint_program(exported: ExportedProgram, mode: FakeTensorMode, train: bool) -> Program:
    """Trace the exported graph, and its backward when training, into one program."""
    _drop_assertions(exported.graph_module)
    residents = Residents(exported)
    learns = [index for index, learn in enumerate(residents.trainable) if learn and train]
    kinds = [spec.kind for spec in exported.graph_signature.output_specs]
    interpreter = _StepInterpreter(exported.graph_module, mark=train)

    def step(*flat: Tensor) -> tuple[list[Any], list[Any], list[Any]]:
        values = list(flat)
        for index in learns:
            values[index] = values[index].detach().requires_grad_()
        placed = [values[slot] for slot in residents.slots]
        with torch.set_grad_enabled(train):
            returned = interpreter.run(*placed, enable_io_processing=False)
        pairs = list(zip(returned, kinds, strict=True))
        outputs = [value for value, kind in pairs if kind == OutputKind.USER_OUTPUT]
        changed = [value for value, kind in pairs if kind in _CHANGES]
        gradients: list[Any] = []
        if train:
            loss = _loss(exported, outputs)
            learned = [values[index] for index in learns]
            node_meta.current_meta.clear()
            if learned:
                gradients = list(torch.autograd.grad(loss, learned, allow_unused=True))
            node_meta.current_meta.clear()
        # A result or a new value may be an input itself: detach gives it a node of its own.
        return list(map(_detached, outputs)), gradients, list(map(_detached, changed))

    def again(*flat: Tensor) -> Any:
        return fx.Interpreter(module).run(*flat, enable_io_processing=False)

    # The export made its fake tensors in another mode.
    given = [node.meta.get("val") for node in user_inputs(exported)]
    fakes = fake_tensors([*residents.fakes, *given], mode)
    options: dict[str, Any] = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    with mode, node_meta.preserve_node_meta():
        try:
            module = make_fx(step, **options)(*fakes)
        except InputError:
            raise
        except Exception as error:
            raise refusal(error, interpreter.line or None) from error
        if any(_writes(node) for node in module.graph.nodes):
            functional = torch.func.functionalize(again, remove="mutations")
            module = make_fx(functional, **options)(*fakes)
    own_functions.check_given(module)
    return _assembled(module, exported, residents, learns)


class _StepInterpreter(fx.Interpreter):
    """Runs an exported graph while it is traced.

    It keeps attention whole, and marks the autograd nodes of each op with the op's module.
    """

    def __init__(self, module: fx.GraphModule, mark: bool) -> None:
        super().__init__(module)
        self.mark = mark
        self.marked = set[Any]()
        self.line = ""  # of the model, for the op that runs now

    def run_node(self, node: fx.Node) -> Any:
        self.line = line_of_stack(node.stack_trace or "")
        value = self._attend(node) if node.target is _ATTENTION else super().run_node(node)
        if self.mark:
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    self._mark(tensor.grad_fn, node.meta.get("nn_module_stack"))
        return value

    def _mark(self, function: Any, modules: Any) -> None:
        """Note the module on all new autograd nodes up to this one, for when they run."""
        stack = [function]
        backward_modules = {**(modules or {}), BACKWARD: (BACKWARD, "")}
        line = self.line

        def note(gradients: Any) -> None:
            node_meta.current_meta["nn_module_stack"] = backward_modules
            self.line = line

        while stack:
            function = stack.pop()
            if function is None or function in self.marked:
                continue
            self.marked.add(function)
            function.register_prehook(note)
            stack.extend(before for before, _ in function.next_functions)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten.copy.default:
            # A write into a slice becomes this op, for which PyTorch has no derivative.
            destination, source = args[:2]
            return source.to(destination.dtype).expand(destination.shape).clone()
        if target is torch.ops.roost.own_function.default:
            return own_functions.run_noted(*args)
        return super().call_function(target, args, kwargs)

    def _attend(self, node: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        # The views that follow were traced for this layout.
        layout = attention.layout_of(node.meta["val"].stride())
        with node_meta.set_current_meta(node):
            return _attend(layout, *args, **kwargs)


def _attend(
    layout: list[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p > 0.0 or (attn_mask is not None and attn_mask.requires_grad):
        # With dropout, or a mask that learns, PyTorch itself multiplies out the scores.
        settings = {"scale": scale, "enable_gqa": enable_gqa}
        out = _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **settings)
        return attention.laid_out(out, layout)
    return torch.ops.roost.attention(
        query, key, value, attn_mask, is_causal, scale, enable_gqa, layout
    )


def _drop_assertions(module: fx.GraphModule) -> None:
    """Remove checks of values, and the reads that only serve them: they decide nothing."""
    assertions = [node for node in module.graph.nodes if _is_assertion(node)]
    for node in assertions:
        module.graph.erase_node(node)
    if assertions:
        module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        module.recompile()


def _is_assertion(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    checks = ("_assert", "sym_constrain_range", "_check")
    return node.op == "call_function" and not node.users and name.startswith(checks)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _writes(node: fx.Node) -> bool:
    """Tell whether an op writes in place, as LSTM gates and dropout masks do."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _loss(exported: ExportedProgram, outputs: list[Any]) -> Tensor:
    """The loss in a model's output: the only output, the one called loss, or the first."""
    output = tree_unflatten(outputs, exported.call_spec.out_spec)
    loss = output if isinstance(output, Tensor) else None
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(output).__name__
        raise InputError(
            f"training needs a model that returns its loss, one number; this one returned {shape}. "
            "Return the loss, or give loss=a function of the output"
        )
    return loss


def _assembled(
    module: fx.GraphModule, exported: ExportedProgram, residents: Residents, learns: list[int]
) -> Program:
    """The traced module as a Program: one flat list of outputs, and no dead code."""
    _remove_dead_code(module)
    output = next(node for node in module.graph.nodes if node.op == "output")
    results, gradients, changed = output.args[0]
    names = residents.names
    inputs, flags = drop_flags(module, exported, len(names))
    specs = exported.graph_signature.output_specs
    buffers = [str(spec.target) for spec in specs if spec.kind in _CHANGES]
    learned = zip(learns, gradients, strict=True)
    gradient_of = {names[index]: node for index, node in learned if node is not None}
    new_values = {
        residents.tied.get(name, name): node for name, node in zip(buffers, changed, strict=True)
    }
    results = [node for node in results if isinstance(node, fx.Node)]
    output.args = ([*results, *gradient_of.values(), *new_values.values()],)
    _remove_dead_code(module)
    return Program(
        module=module,
        residents=tuple(names),
        trainable=tuple(residents.trainable),
        tied=residents.tied,
        constants=residents.constants,
        inputs=inputs,
        results=tuple(results),
        gradients=gradient_of,
        new_values=new_values,
        flags=flags,
    )


def _remove_dead_code(module: fx.GraphModule) -> None:
    module.graph.eliminate_dead_code()
    module.recompile()
