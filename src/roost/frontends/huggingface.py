"""Hugging Face: a model's `config.json` to a Graph; its random weights take no memory.

A config is data: it cannot name code to run, and nothing is downloaded for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.core import files
from roost.core.graph import Graph
from roost.errors import InputError, MissingExtra, UnsupportedOp

# `auto_map` names code in the repository of a model.
_NAMES_CODE = ("auto_map", "trust_remote_code")
_IMPLEMENTATION = re.compile(r"_implementation(_internal)?$")
# Other names of an implementation may be kernels that transformers would download and run.
_OWN_IMPLEMENTATIONS = ("eager", "sdpa", "grouped_mm", "batched_mm")
# One module for each of them: a huge number would never end.
_COUNT = re.compile(r"(layers?|blocks?|depths?|stages?|experts?|heads?)$")
_MOST_MODULES = 100_000


@dataclass(frozen=True)
class Huggingface:
    """Reads a `config.json`, or a folder that holds one, and no other file."""

    suffixes = ("config.json",)

    def read(
        self,
        source: str | Path,
        *,
        train: bool = False,
        optimizer: str = "sgd",
        batch: int = 1,
        length: int = 512,
        name: str | None = None,
    ) -> Graph:
        """The graph of a config's language model on `batch` texts of `length` tokens."""
        try:
            import transformers
        except ImportError:
            raise MissingExtra("transformers", "hf") from None
        import torch

        from roost.frontends.torch import capture

        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        config = self._config(path, transformers)
        config.use_cache = False
        has_encoder = getattr(config, "is_encoder_decoder", False)
        if has_encoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0  # any token gives the same graph
        if batch < 1 or length < 1:
            raise InputError(f"batch {batch} and length {length} must be at least 1")
        try:
            with torch.device("meta"):
                model = self._model(transformers, config)
                tokens = torch.zeros((batch, length), dtype=torch.int64)
        except UnsupportedOp as error:
            raise UnsupportedOp(f"{path}: {error}") from None
        except Exception as error:
            raise InputError(f"{path}: transformers cannot build this model: {error}") from error
        inputs = {"input_ids": tokens}
        if train:
            inputs["labels"] = tokens
        elif has_encoder:
            inputs["decoder_input_ids"] = tokens
        name = name or config.model_type
        return capture(model, inputs, train=train, optimizer=optimizer, name=name)

    def _config(self, path: Path, transformers: Any) -> Any:
        try:
            content = json.loads(files.read_bytes(path))
        except RecursionError:
            raise InputError(f"{path}: is nested too deep") from None
        except ValueError as error:  # also a number of thousands of digits
            raise InputError(f"{path}: is not JSON: {error}") from None
        kind = content.get("model_type") if isinstance(content, dict) else None
        if not isinstance(kind, str):
            raise InputError(f"{path}: model_type is missing; a Hugging Face config has one")
        try:
            settings = _data_alone(content)
            del settings["model_type"]
            with _offline():
                return transformers.AutoConfig.for_model(kind, **settings)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        except Exception as error:
            raise InputError(f"{path}: model_type {kind!r}: {str(error)[:200]}") from error

    def _model(self, transformers: Any, config: Any) -> Any:
        with _offline():
            return self._built(transformers, config)

    def _built(self, transformers: Any, config: Any) -> Any:
        for name in getattr(config, "architectures", None) or []:
            architecture: Any = getattr(transformers, name, None)
            if hasattr(architecture, "_from_config"):
                return architecture._from_config(config)
        families = [transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM]
        if getattr(config, "is_encoder_decoder", False):
            families = [transformers.AutoModelForSeq2SeqLM]
        elif getattr(config, "is_decoder", False):
            families.reverse()
        for family in families:
            if type(config) in family._model_mapping:
                return family.from_config(config)
        raise UnsupportedOp(
            f"{config.model_type} is no language model; build it in Python and use "
            "roost.capture(model, inputs)"
        )


def _data_alone(value: Any, key: str = "") -> Any:
    """A value of a config without the fields that name code. Raises InputError for a bad value."""
    if isinstance(value, dict):
        return {
            name: _data_alone(inner, key if _IMPLEMENTATION.search(key) else name)
            for name, inner in value.items()
            if name not in _NAMES_CODE
        }
    if isinstance(value, list):
        return [_data_alone(inner, key) for inner in value]
    if _IMPLEMENTATION.search(key) and value is not None and value not in _OWN_IMPLEMENTATIONS:
        known = ", ".join(_OWN_IMPLEMENTATIONS)
        raise InputError(f"{key}: {value!r} can be code from the internet; known are {known}")
    if isinstance(value, int):
        most = _MOST_MODULES if _COUNT.search(key) else 2**63 - 1
        if abs(value) > most:
            raise InputError(f"{key}: is larger than {most}, the most that Roost builds")
    return value


@contextmanager
def _offline() -> Iterator[None]:
    """Let transformers download nothing: a config can name weights, kernels and other configs."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
