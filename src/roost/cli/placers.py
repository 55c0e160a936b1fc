"""`roost placers`: a list of all placers, or one with its settings."""

from __future__ import annotations

import ast
import re
from typing import Annotated, Any

import typer

from roost import catalog
from roost.cli import _console
from roost.cli._text import styled


def placers(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Show the description and the settings of this placer."
        ),
    ] = None,
    as_json: _console.AsJson = False,
) -> None:
    """List the placers, or show one with its settings."""
    if name is not None:
        detail = _detail(name)
        _console.show_json(detail) if as_json else _show(detail)
        return
    known = {each: first_sentence(each) for each in catalog.names("placers")}
    if as_json:
        _console.show_json(
            {"placers": [{"name": each, "purpose": text} for each, text in known.items()]}
        )
        return
    rows = _console.table(["placer", "what it does"])
    for each, text in known.items():
        rows.add_row(each, text)
    _console.show(rows)


def first_sentence(name: str) -> str:
    """The first sentence of a placer's docstring, or of the package that brings the placer."""
    path = catalog.ROOT / "placers" / f"{name}.py"
    if not path.exists():
        packages = [p.dist for p in catalog.entry_points("placers") if p.name == name]
        summaries = [f"{each.metadata['Summary']} ({each.name})" for each in packages if each]
        return "; ".join(summaries)
    text = ast.get_docstring(ast.parse(path.read_text())) or ""  # read, not run
    # a sentence ends before a capital letter, not in `et al. 2017`
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


def _detail(name: str) -> dict[str, Any]:
    import dataclasses
    import inspect
    import sys

    from roost.search.solve import named_placer

    chosen = named_placer(name)
    placer: type[Any] = type(chosen)
    is_ours = ":" not in name
    text = inspect.getdoc(sys.modules[placer.__module__]) if is_ours else inspect.getdoc(placer)
    fields = dataclasses.fields(placer) if dataclasses.is_dataclass(placer) else ()
    return {
        "name": name,
        "about": text or "",
        "settings": {field.name: getattr(chosen, field.name) for field in fields},
    }


def _show(detail: dict[str, Any]) -> None:

    _console.show(styled(detail["name"], "bold"), _joined(detail["about"]))
    if not detail["settings"]:
        _console.show("", "It has no settings.")
        return
    rows = _console.table(["setting", "default"])
    for key, value in detail["settings"].items():
        rows.add_row(key, _default(value))
    _console.show("", rows)


def _joined(text: str) -> str:
    """A line for each paragraph, to be folded; paragraphs with lists or code keep their lines."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        p if re.search(r"^(\s|[-*|>])", p, re.M) else " ".join(p.split()) for p in paragraphs
    )


def _default(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
