"""Hugging Face: a model's `config.json`, built with random weights that take no memory, to a
Graph."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.core import files
from roost.core.graph import Graph
from roost.errors import InputError, MissingExtra, UnsupportedOp


@dataclass(frozen=True)
class Huggingface:
    """Reads a `config.json`, or a folder that holds one. Weights, tokenizers and remote code are
    never touched."""

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
        """The graph of the language model that a config describes, on `batch` texts of `length`
        tokens."""
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
        if (
            getattr(config, "is_encoder_decoder", False)
            and getattr(config, "decoder_start_token_id", None) is None
        ):
            config.decoder_start_token_id = 0  # which token it is makes no difference to the graph
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
        inputs: dict[str, Any] = (
            {"input_ids": tokens, "labels": tokens} if train else {"input_ids": tokens}
        )
        if getattr(config, "is_encoder_decoder", False) and not train:
            inputs["decoder_input_ids"] = tokens
        return capture(
            model, inputs, train=train, optimizer=optimizer, name=name or config.model_type
        )

    def _config(self, path: Path, transformers: Any) -> Any:
        try:
            content = json.loads(files.read_bytes(path))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(f"{path}: is not JSON: {error}") from None
        kind = content.get("model_type") if isinstance(content, dict) else None
        if not isinstance(kind, str):
            raise InputError(f"{path}: model_type is missing; a Hugging Face config has one")
        try:
            settings = {
                key: value
                for key, value in content.items()
                if key not in ("model_type", "auto_map")
            }
            return transformers.AutoConfig.for_model(kind, **settings)
        except Exception as error:
            raise InputError(f"{path}: model_type {kind!r}: {str(error)[:200]}") from error

    def _model(self, transformers: Any, config: Any) -> Any:
        named = [
            getattr(transformers, name, None)
            for name in getattr(config, "architectures", None) or []
        ]
        for architecture in named:
            if architecture is not None and hasattr(architecture, "_from_config"):
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
