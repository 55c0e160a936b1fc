"""The plug-ins of Roost by name.

The folder is the registry: `roofline` in `cost_models/` is the class `Roofline` in
`cost_models/roofline.py`. An installed package adds plug-ins by entry points. A name such as
`package.module:Class` needs no registration. Listing names imports no plug-in.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.errors import InputError, UnknownName

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ROOT = Path(__file__).parent
# Folder -> the group of entry points under which an installed package adds to it.
ENTRY_POINTS = {
    "placers": "roost.placers",
    "frontends": "roost.frontends",
    "cost_models": "roost.cost_models",
    "report/exports": "roost.exporters",
}
_NOUNS = {"report/exports": "exporter", "frontends": "front-end"}


def names(folder: str, suffix: str = ".py") -> list[str]:
    """The names of all plug-ins of a kind, sorted: those of Roost and those of other packages."""
    return sorted({*own_names(folder, suffix), *(point.name for point in entry_points(folder))})


def own_names(folder: str, suffix: str = ".py") -> list[str]:
    """The plug-ins in a folder of Roost, sorted. A file whose name begins with `_` is private."""
    return sorted(
        path.name.removesuffix(suffix)
        for path in (ROOT / folder).glob(f"*{suffix}")
        if not path.name.startswith("_")
    )


def entry_points(folder: str) -> list[EntryPoint]:
    """The plug-ins of installed packages, without those whose name Roost has itself."""
    if folder not in ENTRY_POINTS:
        return []
    from importlib import metadata  # slow, and most names are our own

    own = own_names(folder)
    installed = metadata.entry_points(group=ENTRY_POINTS[folder])
    return [point for point in installed if point.name not in own]


def find(folder: str, name: str) -> type[Any]:
    """The class with this name. Raises InputError or UnknownName."""
    if ":" in name:
        return _loaded(folder, name, name)
    if name in own_names(folder):
        module = importlib.import_module(f"roost.{folder.replace('/', '.')}.{name}")
        found = getattr(module, class_name(name))
        assert isinstance(found, type)
        return found
    values = {point.value for point in entry_points(folder) if point.name == name}
    if len(values) > 1:
        raise InputError(
            f"installed packages have {len(values)} {_noun(folder)}s called {name!r}; "
            f"name one of them as {' or '.join(sorted(values))}"
        )
    if values:
        return _loaded(folder, name, *values)
    known = names(folder)
    swapped = [each for each in known if sorted(each) == sorted(name)]  # letters changed places
    raise UnknownName(_noun(folder), name, swapped or known)


def class_name(name: str) -> str:
    """The class in file `beam_search.py` is `BeamSearch`."""
    return "".join(part.capitalize() for part in name.split("_"))


def file_name(name: str) -> str:
    """The file of class `BeamSearch` is `beam_search`; `package.module:BeamSearch` works too."""
    _, _, name = name.rpartition(":")
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def _loaded(folder: str, name: str, value: str) -> type[Any]:
    """The class at `package.module:Class`."""
    try:
        found = imported(value)
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        raise InputError(f"cannot load the {_noun(folder)} {name!r}: {error}") from error
    if not isinstance(found, type):
        raise InputError(f"the {_noun(folder)} {name!r} is not a class")
    return found


def imported(name: str) -> Any:
    """The object at `package.module:attribute`. The working folder is searched too."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    return getattr(importlib.import_module(module), attribute)


def _noun(folder: str) -> str:
    return _NOUNS.get(folder, folder.removesuffix("s").replace("_", " "))
