"""Named models, one file each, with random weights; and families of random models.

A model is a dataclass of its settings. `model()` builds it on PyTorch's current device,
`inputs(train)` makes inputs for it, `small()` is a tiny instance for tests. Names are listed
without importing PyTorch. The file `llama.py` holds `Llama`; `families/ptb.py` holds `PtbFamily`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from typing import TYPE_CHECKING, Any

from roost import catalog
from roost.errors import InputError, UnknownName

if TYPE_CHECKING:
    from torch import Tensor, nn

    from roost.core.graph import Graph
    from roost.zoo._settings import ModelSettings
    from roost.zoo.families._random_model import RandomModel


def names() -> list[str]:
    """The models, sorted."""
    return catalog.names("zoo")


def figures() -> dict[str, Any]:
    """Op counts, parameters and FLOP of the models at their default settings.

    `benchmarks/zoo_table.py` writes the file.
    """
    path = catalog.ROOT / "zoo" / "figures.json"
    figures_of: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return figures_of


def settings(name: str, **overrides: Any) -> ModelSettings:
    """The settings of a model, with some overridden; `size` names a published size to start from.

    Raises UnknownName for a model, a size or a setting that does not exist, and InputError for a
    value that is not allowed.
    """
    if ":" not in name and name not in (known := names()):
        raise UnknownName("model", name, known)  # `catalog.find` would call it a zoo
    kind = catalog.find("zoo", name)
    if not dataclasses.is_dataclass(kind):
        raise InputError(f"the model {name!r} is not a dataclass of settings")
    base = _sized(name, kind, overrides)
    fields = [field.name for field in dataclasses.fields(kind)]
    for key in overrides:
        if key not in fields:
            raise UnknownName(f"setting of {name}", key, fields)
    return dataclasses.replace(base, **overrides)  # type: ignore[no-any-return]


def model(name: str, train: bool = True, **overrides: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and inputs for it, with targets when training, on PyTorch's current device."""
    chosen = settings(name, **overrides)
    return chosen.model().train(train), chosen.inputs(train)


def build(name: str, train: bool = True, optimizer: str = "sgd", **overrides: Any) -> Graph:
    """The graph of a training step, or of inference; weights and inputs take no memory."""
    return _capture(settings(name, **overrides), name, train, optimizer)


def family_names() -> list[str]:
    """The families of random models, sorted."""
    return catalog.names("zoo/families")


def family_models(name: str, count: int, seed: int) -> list[RandomModel]:
    """The first `count` members of a family; the same seed gives the same members."""
    import numpy as np

    if name not in (known := family_names()):
        raise UnknownName("family", name, known)
    if count < 0 or seed < 0:
        raise InputError(f"count is {count} and seed is {seed}; neither may be negative")
    module = importlib.import_module(f"roost.zoo.families.{name}")
    kind: type[RandomModel] = getattr(module, f"{catalog.class_name(name)}Family")
    return [kind.draw(np.random.default_rng([seed, index])) for index in range(count)]


def family(
    name: str, count: int, seed: int, train: bool = True, optimizer: str = "sgd"
) -> list[Graph]:
    """The graphs of the first `count` members of a family."""
    models = enumerate(family_models(name, count, seed))
    return [_capture(model, _member_name(name, seed, i), train, optimizer) for i, model in models]


def member(name: str, index: int, seed: int, train: bool = True, optimizer: str = "sgd") -> Graph:
    """The graph of one member of a family."""
    model = family_models(name, index + 1, seed)[index]
    return _capture(model, _member_name(name, seed, index), train, optimizer)


def _member_name(name: str, seed: int, index: int) -> str:
    return f"{name}_{seed}_{index:03d}"


def _sized(name: str, kind: type[Any], overrides: dict[str, Any]) -> Any:
    """The settings to start from; takes `size` out of the overrides."""
    size = overrides.pop("size", None)
    if size is None:
        return kind()
    if not getattr(kind, "SIZES", None):
        raise InputError(f"size is {size!r}; {name} has no named sizes")
    return kind.size(str(size))


def _capture(chosen: ModelSettings, name: str, train: bool, optimizer: str) -> Graph:
    import torch

    from roost.frontends.torch import capture

    try:
        with torch.device("meta"):
            built = chosen.model()
            inputs = chosen.inputs(train)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise InputError(
            f"{name} cannot be built with {chosen}: {str(error).splitlines()[0]}"
        ) from error
    return capture(built, inputs, train=train, optimizer=optimizer, name=name)
