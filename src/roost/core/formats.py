"""Reading and writing the files of the nouns.

Each file names its format and version. Files are JSON, TOML, or `.npz` without objects for costs:
reading one never runs code. An error names the file, the field and the value expected there.
"""

from __future__ import annotations

import difflib
import importlib
import io
import re
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from roost.core import files, rows, saved
from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.core.trial import Result, Trial
from roost.errors import InputError


@dataclass(frozen=True)
class Format:
    """The format of a noun: the fields of its file, and the functions that convert."""

    noun: type[Any]
    file: type[Any]
    to_file: Callable[[Any], Any]
    from_file: Callable[[Any], Any]
    version: int = 1


FORMATS = {
    "roost.graph": Format(Graph, rows.GraphFile, rows.graph_file, rows.graph_from),
    "roost.cluster": Format(Cluster, rows.ClusterFile, rows.cluster_file, rows.cluster_from),
    "roost.problem": Format(Problem, rows.ProblemFile, rows.problem_file, rows.problem_from),
    "roost.placement": Format(
        Placement, rows.PlacementFile, rows.placement_file, rows.placement_from
    ),
    "roost.timeline": Format(Timeline, rows.TimelineFile, rows.timeline_file, rows.timeline_from),
    "roost.trial": Format(Trial, rows.TrialRow, rows.trial_row, rows.trial_from),
    "roost.result": Format(Result, rows.ResultFile, rows.result_file, rows.result_from),
}

# Formats of nouns outside of core, and the modules that add them to `FORMATS` when one is read.
_LATER = {"roost.plan": "roost.plan.files"}


def save(noun: object, path: str | Path) -> None:
    """Write a noun to a file, whole or not at all."""
    path = Path(path)
    if isinstance(noun, Costs):
        return _save_costs(noun, path)
    _check_suffix(type(noun), path)
    try:
        data = encode(noun)
    except UnicodeEncodeError as error:
        raise InputError(f"{path}: a name cannot be written as UTF-8: {error}") from None
    files.write_bytes(path, data)


saved.register(save)


def check_path(noun: type[Any], path: str | Path) -> None:
    """Raise InputError if a noun of this type cannot be saved there."""
    _check_suffix(noun, Path(path))
    files.check_writable(Path(path))


def _check_suffix(noun: type[Any], path: Path) -> None:
    suffix = ".toml" if issubclass(noun, Cluster) else ".json"
    if not path.name.endswith((suffix, f"{suffix}.gz")) and path.parts[:2] != ("/", "dev"):
        raise InputError(f"{path}: a {noun.__name__.lower()} is saved as {suffix} or {suffix}.gz")


def encode(noun: object) -> bytes:
    """The bytes of a noun's file: TOML for a cluster, else JSON. Equal nouns give equal bytes."""
    for form in FORMATS.values():
        if form.noun is type(noun):
            file = form.to_file(noun)
            break
    else:
        raise InputError(f"a {type(noun).__name__} cannot be saved; it has no file format")
    if isinstance(file, rows.ClusterFile):
        return msgspec.toml.encode(file)
    return _json_lines(file)


def _json_lines(file: rows.File) -> bytes:
    """JSON with one line for each row of a list: people can read, search and compare it."""
    encoder = msgspec.json.Encoder()
    parts = []
    for key, value in msgspec.structs.asdict(file).items():
        if isinstance(value, list) and value and isinstance(value[0], rows.File):
            lines = b",\n".join(map(encoder.encode, value))
            parts.append(encoder.encode(key) + b": [\n" + lines + b"\n]")
        elif isinstance(value, rows.File) and not isinstance(value, rows.TrialRow):
            parts.append(encoder.encode(key) + b": " + _json_lines(value).rstrip())
        else:
            parts.append(encoder.encode(key) + b": " + encoder.encode(value))
    config = file.__struct_config__
    if config.tag is not None:
        parts.insert(0, encoder.encode(config.tag_field) + b": " + encoder.encode(config.tag))
    return b"{\n" + b",\n".join(parts) + b"\n}\n"


def load(path: str | Path) -> Any:
    """The noun in a file, of the type that the file names."""
    path = Path(path)
    if path.suffix == ".npz":
        return _load_costs(path)
    return decode(files.read_bytes(path), str(path), toml=path.name.endswith((".toml", ".toml.gz")))


def load_as(noun: type[Any], path: str | Path) -> Any:
    """The noun in a file. Raises InputError if it is of another type."""
    loaded = load(path)
    if not isinstance(loaded, noun):
        held = type(loaded).__name__.lower()
        raise InputError(f"{path}: is a {held} file; a {noun.__name__.lower()} file is needed here")
    return loaded


def decode(data: bytes, where: str, *, toml: bool = False) -> Any:
    """The noun in these bytes; `where` names them in errors."""
    try:
        if toml:
            table = tomllib.loads(data.decode())
            form = _format(msgspec.convert(table, _Header))
            return form.from_file(msgspec.convert(table, form.file))
        form = _format(msgspec.json.decode(data, type=_Header))
        return form.from_file(msgspec.json.decode(data, type=form.file))
    except UnicodeDecodeError as error:
        wrong = f"is not UTF-8 text (byte {error.start})"
        raise InputError(f"{where}: {wrong}; save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {_field_first(str(error))}{_meant(str(error))}") from None
    except msgspec.DecodeError as error:
        raise InputError(f"{where}: is not whole JSON: {error}; save it again") from None
    except RecursionError:
        raise InputError(f"{where}: is nested too deeply to be one of our files") from None
    except InputError as error:
        # Keep the type (GraphError, UnknownName): add the file in front.
        error.args = (f"{where}: {error}",)
        raise
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{where}: {error}") from None


class _Header(msgspec.Struct):
    format: str
    version: int


def _format(header: _Header) -> Format:
    known = [*FORMATS, *(name for name in _LATER if name not in FORMATS)]
    if header.format not in known:
        raise InputError(f"format: {header.format!r} is none of {', '.join(known)}")
    if header.format not in FORMATS:
        importlib.import_module(_LATER[header.format])
    form = FORMATS[header.format]
    if header.version != form.version:
        raise InputError(
            f"version: {header.format} {header.version} is not known; this Roost reads version "
            f"{form.version}"
        )
    return form


def _field_first(message: str) -> str:
    """`Expected int - at $.ops[3].flop` with the field in front: `ops[3].flop: Expected int`."""
    text, _, place = message.partition(" - at ")
    field = place.strip("`").removeprefix("$").removeprefix(".")
    text = text.replace("`", "")
    return f"{field}: {text}" if field else text


def _meant(message: str) -> str:
    """A suggestion for an unknown field: the nearest field of any file."""
    odd = re.search(r"unknown field `(.+?)`", message)
    if odd is None or len(odd[1]) > 100:
        return ""
    known = {
        name for form in FORMATS.values() for name in _names_in(msgspec.json.schema(form.file))
    }
    near = difflib.get_close_matches(odd[1], sorted(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _names_in(schema: Any) -> Iterator[str]:
    """All fields that a schema names."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _names_in(part)


def _save_costs(costs: Costs, path: Path) -> None:
    if path.suffix != ".npz":
        raise InputError(f"{path}: costs are saved as .npz")
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, format="roost.costs", version=1, op_time=costs.op_time, source=costs.source
    )
    files.write_bytes(path, buffer.getvalue())


def _load_costs(path: Path) -> Costs:
    data = files.read_bytes(path)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(member.file_size for member in archive.infolist()) > files.MOST_BYTES:
                raise InputError(f"{path}: unpacks to more than {files.MOST_BYTES} bytes")
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("format", "version", "op_time", "source")}
    except KeyError as error:
        raise InputError(
            f"{path}: {error.args[0]}; costs have format, version, op_time, source"
        ) from None
    except InputError:
        raise
    except Exception as error:  # zipfile and numpy raise many kinds on damaged data
        raise InputError(f"{path}: is not a costs file: {error}") from error
    if str(arrays["format"]) != "roost.costs" or str(arrays["version"]) != "1":
        raise InputError(
            f"{path}: format {arrays['format']} {arrays['version']} is not roost.costs 1"
        )
    try:
        return Costs(arrays["op_time"], source=str(arrays["source"]))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema of every file format, by format."""
    for module in _LATER.values():
        importlib.import_module(module)
    return {
        name: {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"{name} 1"}
        | msgspec.json.schema(form.file)
        for name, form in FORMATS.items()
    }
