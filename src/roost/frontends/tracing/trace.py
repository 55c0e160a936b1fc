"""A PyTorch module as one functional program: forward, and for training also loss, backward and
gradients.

Nothing is computed and no weight is copied: everything is traced on fake tensors. In the program
every value is made once and never changed, so any op may run on any device. The route, each step
for a reason:

1. A copy of the module with fake tensors in place of its own; weights that are tied stay one. 2.
`torch.export`, not strict: runs the model's Python once. What depends on data fails here, and says
at which line. 3. `run_decompositions({})`: BatchNorm and other updates of buffers become outputs.
Without this they would be changed behind the graph's back. 4. `make_fx` over that graph and
`torch.autograd.grad` of its loss. Hooks on the autograd nodes tell which module a backward op
belongs to. 5. If an op still writes in place (LSTM gates, masks of dropout), the same once more
with functionalisation.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback as node_meta
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from roost.errors import InputError, UnsupportedOp
from roost.frontends.tracing import attention
from roost.frontends.tracing.hooked import refuse_dispatched

BACKWARD = "@roost_backward"  # a mark among the modules of a node: it was made by the backward pass
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
# What the step leaves changed behind. A change to an input is of no use to anyone afterwards.
_CHANGES = (
    OutputKind.BUFFER_MUTATION,
    getattr(OutputKind, "PARAMETER_MUTATION", OutputKind.BUFFER_MUTATION),
)


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step. Placeholders are the residents, in this order, then the inputs."""

    module: fx.GraphModule
    # [residents] names of parameters, buffers and constants, each tensor once.
    residents: tuple[str, ...]
    trainable: tuple[bool, ...]  # [residents]
    tied: Mapping[str, str]  # other names of residents -> the name in `residents`
    constants: Mapping[str, Tensor]  # values of residents that belong to no module
    inputs: tuple[str, ...]  # [inputs]
    results: tuple[fx.Node, ...]  # what the model returns
    gradients: Mapping[str, fx.Node]  # resident -> its gradient
    new_values: Mapping[str, fx.Node]  # resident -> the value it has after the step (buffers)
    # Inputs that are no tensors -> what they were, and are.
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    def run(
        self, residents: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[list[Any], dict[str, Tensor]]:
        """Execute on one device: the results, and gradients and new values of buffers by
        resident."""
        with torch.no_grad():
            found = iter(self.module(*residents, *inputs))
        results = [next(found) for _ in self.results]
        changed = {f"gradient of {name}": next(found) for name in self.gradients}
        return results, changed | {name: next(found) for name in self.new_values}


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = False,
    loss: Callable[..., Tensor] | None = None,
) -> Program:
    """Trace a module on example inputs; their values and those of the weights are never looked at.

    A model of transformers is traced without its cache of keys and values, which is no tensor and
    part of no graph.
    """
    _check_model(model, train)
    with without_cache(model):
        return _traced(model, args, kwargs, train, loss)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """A model of transformers that returns no cache; others as they are."""
    every: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in every if getattr(config, "use_cache", None) is True}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def _traced(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    train: bool,
    loss: Callable[..., Tensor] | None,
) -> Program:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = _fake_copy(model, mode).train(train)
    if loss is not None:
        module.forward = _with_loss(module.forward, loss)
    fake_args, fake_kwargs = _fake_inputs(mode, args), _fake_inputs(mode, dict(kwargs or {}))
    with _quiet(), mode:
        exported = _export(module, fake_args, fake_kwargs, train)
    program = _joint(exported, mode, train)
    loose = {
        name: value for name, value in _loose_tensors(model).items() if name in program.residents
    }
    return replace(program, constants={**program.constants, **loose})


def _with_loss(forward: Callable[..., Any], loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward that returns the loss, under the names of the model itself."""

    @functools.wraps(forward)
    def with_loss(*args: Any, **kwargs: Any) -> Tensor:
        output = forward(*args, **kwargs)
        try:
            return loss(output)
        except TypeError as error:
            raise InputError(
                f"loss cannot be called with the model's output alone: {error}. Where it needs "
                "labels, let the model take them as inputs and return its loss"
            ) from error

    return with_loss


def _check_model(model: Any, train: bool) -> None:
    """Refuse what would be traced wrong, or not at all."""
    if not isinstance(model, nn.Module):
        what = model.__name__ if isinstance(model, type) else type(model).__name__
        raise InputError(
            f"a torch.nn.Module is needed, not {what}; wrap a function in a module, call a class "
            "to make one"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "a scripted module cannot be captured; give the module it was scripted from"
        )
    refuse_dispatched(model)
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise InputError(
                f"parameter {name!r} has no shape yet; run the model once on real inputs first"
            )
    for name, module in model.named_modules():
        if train and (module._backward_hooks or module._backward_pre_hooks):
            raise UnsupportedOp(
                f"module {name or type(model).__name__!r} has a backward hook, which a graph "
                "cannot hold; remove it"
            )


class _Gradients(TorchFunctionMode):
    """Keeps, or refuses, what a model does to its gradients, which an export would drop without a
    word.

    Values made under `torch.no_grad` are detached; `.data` is `.detach()`. A derivative of the
    user's own, or a hook on a gradient, is refused while training.
    """

    def __init__(self, train: bool) -> None:
        super().__init__()
        self.train, self.apply = train, vars(torch.autograd.Function)["apply"]

    def __enter__(self) -> Any:
        if self.train:

            def refuse(function: Any, *args: Any, **kwargs: Any) -> Any:
                raise UnsupportedOp(
                    f"{function.__name__} is a torch.autograd.Function with a derivative of its "
                    "own, which cannot be captured for training; write it with ordinary ops, or "
                    "as a torch.library.custom_op"
                )

            torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment, method-assign]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *details: Any) -> None:
        torch.autograd.Function.apply = self.apply  # type: ignore[method-assign]
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if (
            function in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
            and self.train
        ):
            raise UnsupportedOp("a hook on a gradient cannot be captured for training; remove it")
        value = function(*args, **(kwargs or {}))
        if not self.train or torch.is_grad_enabled():
            return value
        return tree_map_only(Tensor, _cut, value)


def _cut(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.is_floating_point() or tensor.is_complex() else tensor


def _fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The module with fake tensors on the CPU for its own: a deep copy that finds each tensor
    already copied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers(), *_loose_tensors(model).values()):
        with mode:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(f"the model cannot be copied for capture: {error}") from error
    for name in _loose_tensors(copied):
        # As a buffer it is traced like any other; as a plain attribute its value would be asked
        # for, and is fake.
        path, _, attribute = name.rpartition(".")
        module = copied.get_submodule(path)
        value = vars(module).pop(attribute)
        module.register_buffer(attribute, value, persistent=False)
    return copied


def _loose_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that are plain attributes of a module, by name."""
    return {
        f"{path}.{attribute}".removeprefix("."): value
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _fake_inputs(mode: FakeTensorMode, inputs: Any) -> Any:
    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")

    return torch.utils._pytree.tree_map(fake, inputs)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's warnings about its own insides, and without oneDNN's LSTM, which cannot be
    looked into."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool
) -> torch.export.ExportedProgram:
    try:
        with _Gradients(train):
            exported = torch.export.export(module, args, kwargs, strict=False)
        decomposed: torch.export.ExportedProgram = exported.run_decompositions({})
        return decomposed
    except InputError:
        raise
    except Exception as error:
        where = _line_of_model(error)
        if isinstance(error, TypeError) and where is None:
            raise InputError(
                f"the example inputs do not fit the model's forward: {error}"
            ) from error
        raise _refusal(error, where) from error


def _refusal(error: Exception, where: str | None) -> InputError:
    """What to tell the user of an error while tracing, and where in the model it came from."""
    text = str(error).strip().split("\n")[0][:300]
    at = f" at {where}" if where else ""
    if _depends_on_data(error):
        return UnsupportedOp(
            f"the model decides by the values of a tensor{at}: {text}. A placement needs one "
            "fixed graph: decide by shapes or settings, use torch.where or a fixed number of "
            "steps, or capture the part before"
        )
    return InputError(f"the model cannot be captured{at}: {type(error).__name__}: {text}")


def _depends_on_data(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if (
            type(seen).__name__.startswith(("DataDependent", "DynamicOutputShape"))
            or "data-dependent" in str(seen).lower()
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _line_of_model(error: BaseException) -> str | None:
    """`file:line (text)` of the innermost frame that is neither PyTorch's nor ours."""
    own = (
        str(Path(torch.__file__).parent),
        str(Path(__file__).parent),
        sysconfig.get_path("stdlib"),
    )
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        name = frame.filename
        standard = name.startswith(own[2]) and "site-packages" not in name
        if not (standard or name.startswith((*own[:2], "<"))):
            found = f"{name}:{frame.lineno} ({(frame.line or '').strip()})"
    return found


def _last_line(stack: str) -> str:
    """`file:line (text)` of the innermost frame in a stack as text."""
    found = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', stack)
    return f"{found[-1][0]}:{found[-1][1]} ({found[-1][2]})" if found else ""


class _Runner(fx.Interpreter):
    """Runs an exported graph while it is traced, attention whole, and marks the autograd nodes of
    each op."""

    def __init__(self, module: fx.GraphModule, mark: bool) -> None:
        super().__init__(module)
        self.mark, self.seen = mark, set[Any]()
        self.line = ""  # of the model, that made the op at hand

    def run_node(self, node: fx.Node) -> Any:
        self.line = _last_line(node.stack_trace or "")
        value = self._attend(node) if node.target is ATTENTION else super().run_node(node)
        if self.mark:
            for tensor in torch.utils._pytree.tree_leaves(value):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    self._mark(tensor.grad_fn, node.meta.get("nn_module_stack"))
        return value

    def _mark(self, function: Any, modules: Any) -> None:
        """Have this and all autograd nodes before it that are new say whose they are, when they run
        backwards."""
        stack = [function]
        marked = {**(modules or {}), BACKWARD: (BACKWARD, "")}
        line = self.line

        def say(gradients: Any) -> None:
            node_meta.current_meta["nn_module_stack"] = marked
            self.line = line

        while stack:
            function = stack.pop()
            if function is None or function in self.seen:
                continue
            self.seen.add(function)
            function.register_prehook(say)
            stack.extend(before for before, _ in function.next_functions)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten.copy.default:
            # What writing into a slice has become. It has no derivative of its own in PyTorch; this
            # has.
            destination, source = args[:2]
            return source.to(destination.dtype).expand(destination.shape).clone()
        return super().call_function(target, args, kwargs)

    def _attend(self, node: fx.Node) -> Any:
        def attend(
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
            # The views that follow were traced for this layout.
            layout = attention.layout_of(node.meta["val"].stride())
            if dropout_p > 0.0 or (attn_mask is not None and attn_mask.requires_grad):
                # With dropout, or a mask that learns, PyTorch itself multiplies out the scores.
                settings = {"scale": scale, "enable_gqa": enable_gqa}
                out = ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **settings)
                return attention.laid_out(out, layout)
            return torch.ops.roost.attention(
                query, key, value, attn_mask, is_causal, scale, enable_gqa, layout
            )

        args, kwargs = self.fetch_args_kwargs_from_env(node)
        with node_meta.set_current_meta(node):
            return attend(*args, **kwargs)


def _joint(exported: torch.export.ExportedProgram, mode: FakeTensorMode, train: bool) -> Program:
    """Trace the exported graph, and its backward, into one program."""
    residents = _Residents(exported)
    kinds = [spec.kind for spec in exported.graph_signature.output_specs]
    learns = (
        [index for index, trainable in enumerate(residents.trainable) if trainable] if train else []
    )

    runner = _Runner(exported.graph_module, mark=train)

    def step(*flat: Tensor) -> tuple[list[Any], list[Any], list[Any]]:
        values = list(flat)
        for index in learns:
            values[index] = values[index].detach().requires_grad_()
        placed = [values[slot] for slot in residents.slots]
        with torch.set_grad_enabled(train):
            found = runner.run(*placed, enable_io_processing=False)
        outputs = [
            value
            for value, kind in zip(found, kinds, strict=True)
            if kind == OutputKind.USER_OUTPUT
        ]
        mutated = [value for value, kind in zip(found, kinds, strict=True) if kind in _CHANGES]
        gradients: list[Any] = []
        if train:
            loss = _loss(exported, outputs)
            node_meta.current_meta.clear()
            asked = [values[index] for index in learns]
            gradients = list(torch.autograd.grad(loss, asked, allow_unused=True)) if asked else []
            node_meta.current_meta.clear()
        # Results and new values may be inputs as they came: give them a name of their own.
        return [_detached(o) for o in outputs], gradients, [_detached(m) for m in mutated]

    def again(*flat: Tensor) -> Any:
        return fx.Interpreter(module).run(*flat, enable_io_processing=False)

    # The export made fake tensors in a mode of its own: make them anew in ours.
    fakes = _fake_inputs(mode, [*residents.fakes, *_input_fakes(exported)])
    with _quiet(), mode, node_meta.preserve_node_meta():
        try:
            module = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
        except InputError:
            raise
        except Exception as error:
            raise _refusal(error, runner.line or None) from error
        if any(_writes(node) for node in module.graph.nodes):
            functional = torch.func.functionalize(again, remove="mutations")
            module = make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    return _program(module, exported, residents, learns)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _loss(exported: torch.export.ExportedProgram, outputs: list[Any]) -> Tensor:
    """The loss among what the model returned: its only output, or the one it calls loss."""
    structure = torch.utils._pytree.tree_unflatten(outputs, exported.call_spec.out_spec)
    found = structure if isinstance(structure, Tensor) else None
    if found is None and isinstance(structure, Mapping):
        found = structure.get("loss")
    if found is None:
        found = getattr(structure, "loss", None)
    if found is None and isinstance(structure, tuple | list) and structure:
        found = structure[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = list(found.shape) if isinstance(found, Tensor) else type(structure).__name__
        raise InputError(
            "training needs a model that returns its loss, one number; this one returned "
            f"{shape}. Return the loss, or give loss=a function of the output"
        )
    return found


class _Residents:
    """The tensors of an exported program that stay from step to step, each once, however many names
    it has."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        signature = exported.graph_signature
        owned = signature.inputs_to_parameters | signature.inputs_to_buffers
        lifted = signature.inputs_to_lifted_tensor_constants
        self.names: list[str] = []
        self.fakes: list[Tensor] = []
        self.trainable: list[bool] = []
        self.tied: dict[str, str] = {}
        self.constants: dict[str, Tensor] = {}
        # [placeholders of the exported graph] index among residents, then inputs.
        self.slots: list[int] = []
        index: dict[int, int] = {}
        inputs = 0
        holders = [node for node in exported.graph.nodes if node.op == "placeholder"]
        tensors = {**dict(exported.named_parameters()), **dict(exported.named_buffers())}
        for node in holders:
            name = owned.get(node.name) or lifted.get(node.name)
            if name is None:
                self.slots.append(-1 - inputs)
                inputs += 1
                continue
            tensor = (
                exported.constants[name]
                if node.name in lifted or name not in tensors
                else tensors[name]
            )
            if id(tensor) in index:
                self.tied[name] = self.names[index[id(tensor)]]
            else:
                index[id(tensor)] = len(self.names)
                self.names.append(name)
                self.fakes.append(node.meta["val"])
                self.trainable.append(
                    node.name in signature.inputs_to_parameters and tensor.requires_grad
                )
                if node.name in lifted:
                    self.constants[name] = tensor
            self.slots.append(index[id(tensor)])
        self.slots = [slot if slot >= 0 else len(self.names) - 1 - slot for slot in self.slots]


def _input_holders(exported: torch.export.ExportedProgram) -> list[fx.Node]:
    signature = exported.graph_signature
    kept = {
        *signature.inputs_to_parameters,
        *signature.inputs_to_buffers,
        *signature.inputs_to_lifted_tensor_constants,
    }
    return [
        node for node in exported.graph.nodes if node.op == "placeholder" and node.name not in kept
    ]


def _input_fakes(exported: torch.export.ExportedProgram) -> list[Any]:
    return [node.meta.get("val") for node in _input_holders(exported)]


def _program(
    module: fx.GraphModule,
    exported: torch.export.ExportedProgram,
    residents: _Residents,
    learns: list[int],
) -> Program:
    module.graph.eliminate_dead_code()
    module.recompile()
    output = next(node for node in module.graph.nodes if node.op == "output")
    results, gradients, mutated = output.args[0]
    names = residents.names
    inputs, flags = _inputs(module, exported, len(names))
    specs = exported.graph_signature.output_specs
    buffers = [str(spec.target) for spec in specs if spec.kind in _CHANGES]
    found = {
        names[index]: node
        for index, node in zip(learns, gradients, strict=True)
        if node is not None
    }
    new_values = {
        residents.tied.get(name, name): node for name, node in zip(buffers, mutated, strict=True)
    }
    # One flat list, so that the module returns what `run` expects.
    kept = [node for node in results if isinstance(node, fx.Node)]
    output.args = ([*kept, *found.values(), *new_values.values()],)
    module.graph.eliminate_dead_code()
    module.recompile()
    return Program(
        module=module,
        residents=tuple(names),
        trainable=tuple(residents.trainable),
        tied=residents.tied,
        constants=residents.constants,
        inputs=inputs,
        results=tuple(kept),
        gradients=found,
        new_values=new_values,
        flags=flags,
    )


def _inputs(
    module: fx.GraphModule, exported: torch.export.ExportedProgram, num_residents: int
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The inputs that are tensors. Others, such as a flag, were looked at when the step was traced,
    and never again."""
    holders = [node for node in module.graph.nodes if node.op == "placeholder"][num_residents:]
    names, flags = [], {}
    for node, holder in zip(holders, _input_holders(exported), strict=True):
        if isinstance(holder.meta.get("val"), Tensor):
            names.append(holder.name)
        elif not node.users:
            module.graph.erase_node(node)
            flags[holder.name] = holder.meta.get("val")
        else:
            raise InputError(
                f"input {holder.name!r} is no tensor, and the model computes with it; make it a "
                "tensor"
            )
    return tuple(names), flags


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def trace_exported(exported: torch.export.ExportedProgram, *, train: bool = False) -> Program:
    """Trace a program that was exported, and perhaps saved, before."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for node in exported.graph.nodes:
        shape = getattr(node.meta.get("val"), "shape", ())
        if node.op == "placeholder" and not all(isinstance(size, int) for size in shape):
            raise InputError(
                f"input {node.name!r} has the dynamic shape {list(shape)}; export with fixed shapes"
            )
    with _quiet():
        exported = exported.run_decompositions({})
    return _joint(exported, mode, train)
