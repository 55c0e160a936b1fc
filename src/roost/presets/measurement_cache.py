"""What was measured on this machine, kept in a folder for the next time. A damaged file is as good
as none."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

from roost.core import files
from roost.errors import InputError

_log = logging.getLogger(__name__)

_MOST_BYTES = 64 * 2**20
_said: set[tuple[object, ...]] = set()


def folder() -> Path:
    """`roost` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "roost"


def _warn(about: Path | str, text: str, *values: object) -> None:
    """Say it once of each file or folder: what is kept is looked at many times."""
    if (about, text) not in _said:
        _said.add((about, text))
        _log.warning(text, *values)


def path_of(what: str, key: dict[str, Any]) -> Path:
    """A file for each kind of measurement and each key."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{what}-{name}.json"


def read(what: str, key: dict[str, Any]) -> dict[str, Any]:
    """What was kept under this key; nothing where there is none, or none that can be read."""
    path = Path(what)
    try:
        path = path_of(what, key)
        if not path.exists():
            return {}
        _check_own(path)
        found = json.loads(files.read_bytes(path))
        if found["key"] == key and isinstance(found["found"], dict):
            return found["found"]
    except (OSError, RuntimeError) as error:  # no way to it, or no home
        if isinstance(error, RecursionError):
            _warn(path, "%s is damaged and not used: %s", path, "it is nested too deeply")
        else:
            _warn("", "what was measured before cannot be read, and is measured again: %s", error)
    except (InputError, ValueError, TypeError, KeyError) as error:
        _warn(path, "%s is damaged and not used: %s", path, error)
    return {}


def _check_own(path: Path) -> None:
    """Only plain files of ours are read and replaced: no links to elsewhere, and no pipes that
    would be waited for."""
    state = path.lstat()
    if not stat.S_ISREG(state.st_mode) or (hasattr(os, "getuid") and state.st_uid != os.getuid()):
        raise InputError(f"{path} is no plain file of this user; remove it")
    if state.st_size > _MOST_BYTES:
        raise InputError(f"{path} is larger than anything that is kept; remove it")


def write(what: str, key: dict[str, Any], found: dict[str, Any]) -> None:
    """Keep it; where that cannot be done, measuring again is all it costs."""
    try:
        path = path_of(what, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.exists():
            _check_own(path)
        files.write_bytes(path, json.dumps({"key": key, "found": found}, indent=1).encode())
    except (InputError, OSError, RuntimeError) as error:
        _warn(
            "",
            "what was measured cannot be kept: %s; XDG_CACHE_HOME can name another folder",
            error,
        )
