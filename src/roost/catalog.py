"""Names to plug-ins: the folder is the registry.

A bare name is a file of ours (`roofline` in `cost_models/` is `cost_models/roofline.py`, class
`Roofline`); `package.module:Class` is anyone else's. Listing a folder imports nothing.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from roost.errors import InputError, UnknownName

ROOT = Path(__file__).parent


def names(folder: str, suffix: str = ".py") -> list[str]:
    """The plug-ins in a folder of the package, sorted; private files are not plug-ins."""
    return sorted(
        path.name.removesuffix(suffix)
        for path in (ROOT / folder).glob(f"*{suffix}")
        if not path.name.startswith("_")
    )


def find(folder: str, name: str) -> type[Any]:
    """The class that a name stands for."""
    if ":" in name:
        return _outside(folder, name)
    if name not in (known := names(folder)):
        # Letters that changed places.
        swapped = [each for each in known if sorted(each) == sorted(name)]
        raise UnknownName(_noun(folder), name, swapped or known)
    module = importlib.import_module(f"roost.{folder}.{name}")
    found = getattr(module, class_name(name))
    assert isinstance(found, type)
    return found


def class_name(name: str) -> str:
    """The class in file `beam_search.py` is `BeamSearch`."""
    return "".join(part.capitalize() for part in name.split("_"))


def file_name(name: str) -> str:
    """The file of class `BeamSearch` is `beam_search`, whether it is ours or said as
    `package.module:BeamSearch`."""
    _, _, name = name.rpartition(":")
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _outside(folder: str, name: str) -> type[Any]:
    try:
        found = imported(name)
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        raise InputError(f"cannot load the {_noun(folder)} {name!r}: {error}") from error
    if not isinstance(found, type):
        raise InputError(f"the {_noun(folder)} {name!r} is not a class")
    return found


def imported(name: str) -> Any:
    """What `package.module:attribute` stands for; the working folder is looked in too, as `python
    -m` does."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    return getattr(importlib.import_module(module), attribute)


def _noun(folder: str) -> str:
    return folder.removesuffix("s").replace("_", " ")
