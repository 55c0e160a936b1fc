"""`roost zoo`: the models that come with Roost."""

from __future__ import annotations

from typing import Annotated

import typer

from roost.cli import _console
from roost.cli._text import show_count


def zoo(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show the settings of this model.")
    ] = None,
    as_json: _console.AsJson = False,
) -> None:
    """List the models of the zoo, or the settings of one."""
    if name is None:
        _list(as_json)
    else:
        _show(name, as_json)


def _list(as_json: bool) -> None:
    from roost import zoo as models

    known = models.figures()
    rows = {name: known.get(name, {}) for name in models.names()}
    if as_json:
        _console.show_json(rows)
        return
    headings = ("model", "parameters", "ops", "FLOP", "ops of a step", "FLOP of a step")
    table = _console.table(headings, headings[1:])
    for model, facts in rows.items():
        table.add_row(
            model,
            show_count(facts["parameters"]) if facts else "?",
            *(
                text
                for way in ("inference", "train")
                for text in (
                    (str(facts[way]["ops"]), show_count(facts[way]["flop"]))
                    if facts
                    else ("?", "?")
                )
            ),
        )
    _console.show(table)
    _console.note(
        "at the default settings; a step is forward, loss, backward and the update by SGD"
    )


def _show(name: str, as_json: bool) -> None:
    import dataclasses

    from roost import zoo as models

    chosen = models.settings(name)
    fields = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(chosen)}
    if as_json:
        _console.show_json(fields)
        return
    table = _console.table(["setting", "default"], ["default"])
    for key, value in fields.items():
        table.add_row(key, str(value))
    _console.show((type(chosen).__doc__ or name).strip().splitlines()[0], table)
