"""Whether a captured step gives the numbers of the model it was captured from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roost.frontends.tracing.program import Program
from roost.frontends.tracing.trace import trace


def compare_with_eager(
    model: nn.Module, inputs: tuple[Any, ...], *, train: bool, program: Program | None = None
) -> dict[str, float]:
    """The largest difference in each result, gradient and changed buffer between the captured step
    and the model."""
    model = copy.deepcopy(model).train(train)
    program = program or trace(model, inputs, train=train)
    values = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    residents = [
        values[name] if name in values else program.constants[name] for name in program.residents
    ]
    # The model changes its buffers as it runs; the captured step must see them as they were.
    residents = [tensor.detach().clone() for tensor in residents]
    torch.manual_seed(0)
    results, changed = program.run(
        residents, [i for i in tree_leaves(inputs) if isinstance(i, Tensor)]
    )
    torch.manual_seed(0)
    expected = eager(model, inputs, train=train)
    found = _differences(program, results, changed, expected, values)
    if train:
        found |= _updates(program, residents, changed, model, values)
    return found


def _updates(
    program: Program,
    residents: list[Tensor],
    changed: Mapping[str, Tensor],
    model: nn.Module,
    values: Mapping[str, Tensor],
) -> dict[str, float]:
    """The difference in each parameter after a step of SGD: the update of the graph against the
    optimizer's."""
    rate = 0.1
    learning = [parameter for parameter in model.parameters() if parameter.grad is not None]
    torch.optim.SGD(learning, lr=rate, foreach=False).step()
    before = dict(zip(program.residents, residents, strict=True))
    return {
        f"updated {name}": distance(
            before[name].add(changed[f"gradient of {name}"], alpha=-rate), values[name]
        )
        for name in program.gradients
    }


def eager(model: nn.Module, inputs: tuple[Any, ...], *, train: bool) -> list[Any]:
    """What the model itself returns; with `train` its gradients are set."""
    with torch.set_grad_enabled(train):
        returned = model(*inputs)
        if train:
            tree_leaves(returned)[0].backward()
    return [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]


def _differences(
    program: Program,
    results: list[Any],
    changed: Mapping[str, Tensor],
    expected: list[Any],
    values: Mapping[str, Tensor],
) -> dict[str, float]:
    found = {
        f"result {i}": distance(ours, theirs)
        for i, (ours, theirs) in enumerate(zip(results, expected, strict=True))
    }
    for name, ours in changed.items():
        theirs = values[name.removeprefix("gradient of ")]
        if name.startswith("gradient of "):
            assert theirs.grad is not None, name
            theirs = theirs.grad
        found[name] = distance(ours, theirs)
    return found


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference between elements; 0 means the same to the last bit, infinity that one
    is not a number."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    difference = float((one.detach().double() - other.detach().double()).abs().max())
    return difference if difference == difference else float("inf")
