"""The model that a command names: its options, its graph, and its module of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from torch import nn

    from roost.core.arrays import Array
    from roost.core.graph import Graph
    from roost.frontends.tracing.captured_step import CapturedStep

RunnableModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A zoo name (see roost zoo), package.module:callable, or a Hugging Face config.json.",
    ),
]
Train = Annotated[
    bool, typer.Option("--train", help="A whole training step of the model instead of inference.")
]
Optimizer = Annotated[
    str | None, typer.Option(help="sgd (the default), momentum, adam or adamw; with --train.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the model, such as batch=8; may be repeated.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=1,3,224,224",
        help="The shape of an input of a file; may be repeated. NAME==16000 or NAME==true is "
        "the value of a small tensor of an .onnx file, such as a condition or a number of steps.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Open a .pt2 file or a SavedModel folder, which can run code of its author.",
    ),
]

_WITH_LOSS = (
    "Name a callable (package.module:callable) whose module returns its loss, or capture it in "
    "Python: roost.capture(model, inputs, train=True, loss=...).save('graph.json')"
)
_FILES = (".onnx", ".pt2", ".pb")


@dataclass(frozen=True)
class ModelSpec:
    """A model as the command line names it, and the settings with which it is captured."""

    source: str
    train: bool = False
    optimizer: str = "sgd"
    settings: tuple[tuple[str, Any], ...] = ()
    shapes: tuple[tuple[str, list[int] | Array], ...] = ()
    trust: bool = False  # opening the file may run code of its author

    @classmethod
    def of(
        cls,
        source: str,
        train: bool,
        optimizer: str | None,
        settings: list[str] | None,
        shapes: list[str] | None = None,
        trust: bool = False,
    ) -> ModelSpec:
        """The model with the options of the command line."""
        pairs = [_pair(text, "--set") for text in settings or []]
        sized = [_pair(text, "--input") for text in shapes or []]
        return cls(
            source,
            train,
            optimizer or "sgd",
            tuple((key, _value(text)) for key, text in pairs),
            tuple((key, _shape(text)) for key, text in sized),
            trust,
        )

    @property
    def in_zoo(self) -> bool:
        return self.source.replace("_", "").isalnum() and not Path(self.source).exists()

    @property
    def is_config(self) -> bool:
        """True for a `config.json` of transformers, or a folder with one."""
        path = Path(self.source)
        return path.name == "config.json" or (path / "config.json").is_file()

    @property
    def is_callable(self) -> bool:
        return ":" in self.source

    @property
    def has_module(self) -> bool:
        """True if this is a model of PyTorch, not the file of a captured one."""
        is_file = self.source.endswith(_FILES)
        return not is_file and (self.in_zoo or self.is_callable or self.is_config)

    @property
    def batch(self) -> int | None:
        """The batch size, if the model has such a setting."""
        batch = dict(self.settings).get("batch")
        if batch is None and self.in_zoo:
            from roost import zoo

            batch = getattr(zoo.settings(self.source, **dict(self.settings)), "batch", None)
        return batch if isinstance(batch, int) else None

    def with_batch(self, batch: int) -> ModelSpec:
        kept = tuple((key, value) for key, value in self.settings if key != "batch")
        return replace(self, settings=(*kept, ("batch", batch)))

    def real(self) -> tuple[nn.Module, Any]:
        """The module with weights on the CPU, and its inputs."""
        built = self.build("cpu")
        module = built.module.train(self.train) if self.in_zoo else built.module
        return module, built.inputs

    def build(self, device: str, seed: int = 0) -> BuiltModel:
        """The module and its inputs on a device; without weights on `meta`.

        A callable chooses its device itself. Raises InputError for files, which hold no module.
        """
        import torch

        if self.shapes:
            raise InputError(
                "--input is for files; a model that is built takes --set, such as --set batch=8"
            )
        torch.manual_seed(seed)
        settings = dict(self.settings)
        if self.in_zoo:
            from roost import zoo

            chosen = zoo.settings(self.source, **settings)
            with torch.device(device):
                return BuiltModel(self, chosen.model(), chosen.inputs(self.train), self.source)
        if self.is_callable:
            from roost.frontends.torch import load_model

            module, inputs = load_model(self.source, settings)
            return BuiltModel(self, module, inputs, type(module).__name__)
        if self.is_config:
            return self._build_config(device)
        raise InputError(
            f"{self.source}: cannot be built here; name a model of the zoo, "
            "package.module:callable, or a config.json"
        )

    def _build_config(self, device: str) -> BuiltModel:
        """The language model of a Hugging Face config, as the front-end builds it."""
        try:
            import transformers
        except ImportError:
            raise MissingExtra("transformers", "hf") from None
        import torch

        from roost.frontends.huggingface import Huggingface

        settings = {"batch": 1, "length": 512} | dict(self.settings)
        if set(settings) != {"batch", "length"}:
            raise InputError(f"{self.source}: a config takes only --set batch=N and --set length=N")
        reader = Huggingface()
        path = Path(self.source)
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
                reason = f"transformers cannot build this model: {error}"
                raise InputError(f"{path}: {reason}") from error
            tokens = torch.randint(config.vocab_size, (settings["batch"], settings["length"]))
        inputs = {"input_ids": tokens, "labels": tokens} if self.train else {"input_ids": tokens}
        if encodes and not self.train:
            inputs["decoder_input_ids"] = tokens
        return BuiltModel(self, module, inputs, config.model_type)

    def describe(self) -> CapturedStep:
        """The captured step, with the program that its ops come from."""
        if self.shapes or not self.has_module:
            raise InputError(
                f"{self.source}: cannot be timed; give a zoo name, package.module:callable or a "
                "config.json, no --input"
            )
        try:
            return self.build("meta").described()
        except (RuntimeError, NotImplementedError, OverflowError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"{self.source}: cannot be captured: {reason}") from error
        except InputError as error:
            _advise(error)
            raise

    def capture(self) -> Graph:
        """The graph. An InputError says what to do on the command line."""
        try:
            return self._captured()
        except InputError as error:
            _advise(error)
            raise

    def _captured(self) -> Graph:
        from roost import frontends, zoo

        settings: dict[str, Any] = dict(self.settings)
        how: dict[str, Any] = {"train": self.train, "optimizer": self.optimizer}
        if self.in_zoo:
            if self.shapes:
                raise InputError(
                    "--input is for files; a model of the zoo takes --set, such as --set batch=8"
                )
            return zoo.build(self.source, **how, **settings)
        if settings and self.is_callable:
            from roost.frontends.torch import capture, load_model

            return capture(*load_model(self.source, settings), **how)
        if self.shapes:
            settings["inputs"] = dict(self.shapes)
        try:
            return frontends.read(self.source, trust=self.trust, **how, **settings)
        except TypeError as error:
            if "keyword argument" not in str(error):
                raise
            reason = str(error).partition("got ")[2]
            raise InputError(
                f"{self.source}: {reason}: this kind of file takes no such setting"
            ) from error


@dataclass(frozen=True)
class BuiltModel:
    """A module and its inputs."""

    spec: ModelSpec
    module: nn.Module
    inputs: Any
    name: str  # of its graph, as `roost capture` names it

    def described(self) -> CapturedStep:
        """The captured step, with the program that its ops come from."""
        from roost.frontends.torch import step_of

        train = self.spec.train
        optimizer = self.spec.optimizer
        return step_of(self.module, self.inputs, train=train, optimizer=optimizer, name=self.name)


def _advise(error: InputError) -> None:
    """Replace advice for Python by advice for the command line."""
    message, loss, _ = str(error).partition(" Return the loss, or give loss=")
    if loss:
        error.args = (f"{message} {_WITH_LOSS}",)


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"{option} {text!r}: write it as KEY=VALUE")
    return key, value


def _shape(text: str) -> list[int] | Array:
    """The shape in a text, or the value in a text such as "=16000"."""
    if text.startswith("="):
        return _array(text[1:])
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise InputError(f"--input shape {text!r}: write it as 1,3,224,224") from None


def _array(text: str) -> Array:
    """One number, true or false, or a list of them with a comma."""
    import numpy as np

    values = [_value(part) for part in text.removesuffix(",").split(",")]
    if any(isinstance(value, str) for value in values):
        raise InputError(f"--input value {text!r}: write numbers, true or false, such as ==1,2,3")
    return np.array(values if "," in text else values[0])


def _value(text: str) -> Any:
    """A number, true or false if the text reads as one, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
