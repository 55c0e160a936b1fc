"""A model as PyTorch has it, built from what the command line names: with weights to run it, or on
`meta` without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from torch import nn

    from roost.cli._problem import Model
    from roost.frontends.tracing.captured_step import CapturedStep


@dataclass(frozen=True)
class Built:
    """A module and inputs for it."""

    chosen: Model
    module: nn.Module
    inputs: Any
    name: str  # of its graph, as `roost capture` would say

    def described(self) -> CapturedStep:
        """The step as `roost capture` captures it, with what is needed to run it."""
        from roost.frontends.torch import step_of

        train, optimizer = self.chosen.train, self.chosen.optimizer
        return step_of(self.module, self.inputs, train=train, optimizer=optimizer, name=self.name)


def made(chosen: Model) -> tuple[nn.Module, Any]:
    """The module and its inputs, for a process that measures."""
    built = build(chosen, "cpu")
    return built.module, built.inputs


def build(chosen: Model, device: str, seed: int = 0) -> Built:
    """Raises InputError for what is no module of PyTorch: files of graphs, ONNX, TensorFlow."""
    import torch

    if chosen.shapes:
        raise InputError(
            "--input is for files; a model that is built takes --set, such as --set batch=8"
        )
    torch.manual_seed(seed)
    if chosen.in_zoo:
        from roost import zoo

        settings = zoo.settings(chosen.source, **dict(chosen.settings))
        with torch.device(device):
            return Built(chosen, settings.model(), settings.inputs(chosen.train), chosen.source)
    if ":" in chosen.source:
        return _called(chosen)
    if chosen.is_config:
        return _configured(chosen, device)
    raise InputError(
        f"{chosen.source}: cannot be built here; name a model of the zoo, "
        f"package.module:callable, or a config.json"
    )


def _called(chosen: Model) -> Built:
    """What package.module:callable returns; it decides on the device by itself."""
    from roost import catalog
    from roost.frontends.torch import load_model

    if not chosen.settings:
        module, inputs = load_model(chosen.source)
        return Built(chosen, module, inputs, type(module).__name__)
    try:
        made = catalog.imported(chosen.source)(**dict(chosen.settings))
        module, inputs = made if isinstance(made, tuple) else (made, made.example_inputs)
        inputs = inputs() if callable(inputs) else inputs
    except (Exception, SystemExit) as error:  # it is the user's code: anything may happen in it
        given = ", ".join(f"{key}={value!r}" for key, value in chosen.settings)
        raise InputError(
            f"{chosen.source!r} with {given}: {type(error).__name__}: {error}"
        ) from error
    return Built(chosen, module, inputs, type(module).__name__)


def _configured(chosen: Model, device: str) -> Built:
    """The language model of a Hugging Face config, as the front-end builds it."""
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    import torch

    from roost.frontends.huggingface import Huggingface

    settings = {"batch": 1, "length": 512} | dict(chosen.settings)
    if set(settings) != {"batch", "length"}:
        raise InputError(f"{chosen.source}: a config takes --set batch=N and --set length=N alone")
    reader, path = Huggingface(), Path(chosen.source)
    path = path / "config.json" if path.is_dir() else path
    config = reader._config(path, transformers)
    config.use_cache = False
    encodes = getattr(config, "is_encoder_decoder", False)
    if encodes and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    with torch.device(device):
        try:
            module = reader._model(transformers, config)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{path}: transformers cannot build this model: {error}") from error
        tokens = torch.randint(config.vocab_size, (settings["batch"], settings["length"]))
    inputs = {"input_ids": tokens, "labels": tokens} if chosen.train else {"input_ids": tokens}
    if encodes and not chosen.train:
        inputs["decoder_input_ids"] = tokens
    return Built(chosen, module, inputs, config.model_type)
