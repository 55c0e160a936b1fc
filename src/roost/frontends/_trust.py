"""The refusal of model files that run code when their framework opens them."""

from __future__ import annotations

from pathlib import Path

from roost.errors import InputError


def check_trust(path: Path, trust: bool, reason: str) -> None:
    """Raise InputError unless the caller trusts the author of this file."""
    if not trust:
        raise InputError(
            f"{path}: opening it can run code of its author: {reason}. If you trust the author, "
            "add --trust (in Python: trust=True); otherwise capture the model from its source"
        )
