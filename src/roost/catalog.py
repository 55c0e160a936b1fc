"""Names to plug-ins: the folder is the registry.

A bare name is a file of ours (`roofline` in `cost_models/` is `cost_models/roofline.py`, class `Roofline`);
`package.module:Class` is anyone else's. Listing a folder imports nothing.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from roost.errors import InputError, UnknownName

ROOT = Path(__file__).parent


def names(folder: str, suffix: str = ".py") -> list[str]:
    """The plug-ins in a folder of the package, sorted; private files are not plug-ins."""
    return sorted(
        path.name.removesuffix(suffix) for path in (ROOT / folder).glob(f"*{suffix}") if not path.name.startswith("_")
    )


def find(folder: str, name: str) -> type[Any]:
    """The class that a name stands for."""
    if ":" in name:
        return _outside(folder, name)
    if name not in (known := names(folder)):
        raise UnknownName(_noun(folder), name, known)
    module = importlib.import_module(f"roost.{folder}.{name}")
    found = getattr(module, class_name(name))
    assert isinstance(found, type)
    return found


def class_name(name: str) -> str:
    """The class in file `beam_search.py` is `BeamSearch`."""
    return "".join(part.capitalize() for part in name.split("_"))


def _outside(folder: str, name: str) -> type[Any]:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(f"cannot load the {_noun(folder)} {name!r}: {error}") from error
    if not isinstance(found, type):
        raise InputError(f"the {_noun(folder)} {name!r} is not a class")
    return found


def _noun(folder: str) -> str:
    return folder.removesuffix("s").replace("_", " ")
