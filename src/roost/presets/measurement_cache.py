"""Files of measurements of this machine, kept in a folder; a damaged file is ignored."""

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
_warned: set[tuple[object, ...]] = set()


def folder() -> Path:
    """`roost` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "roost"


def _warn(about: Path | str, text: str, *values: object) -> None:
    """Warn once for each file or folder, since it is read many times."""
    if (about, text) not in _warned:
        _warned.add((about, text))
        _log.warning(text, *values)


def path_of(what: str, key: dict[str, Any]) -> Path:
    """The file of a kind of measurement and a key."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{what}-{name}.json"


def read(what: str, key: dict[str, Any]) -> dict[str, Any]:
    """The measurements kept under a key; empty if there are none, or none that can be read."""
    path = Path(what)
    try:
        path = path_of(what, key)
        if not path.exists():
            return {}
        _check_own(path)
        content = json.loads(files.read_bytes(path))
        if content["key"] == key and isinstance(content["found"], dict):
            return content["found"]
    except (OSError, RuntimeError) as error:  # no access, or no home folder
        if isinstance(error, RecursionError):
            _warn(path, "%s is damaged and not used: %s", path, "it is nested too deeply")
        else:
            _warn("", "kept measurements cannot be read, so they are made again: %s", error)
    except (InputError, ValueError, TypeError, KeyError) as error:
        _warn(path, "%s is damaged and not used: %s", path, error)
    return {}


def _check_own(path: Path) -> None:
    """Raise unless a file is plain and ours: a link may lead elsewhere, and a pipe would block."""
    state = path.lstat()
    if not stat.S_ISREG(state.st_mode) or (hasattr(os, "getuid") and state.st_uid != os.getuid()):
        raise InputError(f"{path} is not a plain file of this user; remove it")
    if state.st_size > _MOST_BYTES:
        raise InputError(f"{path} is larger than any kept measurement; remove it")


def write(what: str, key: dict[str, Any], measured: dict[str, Any]) -> None:
    """Keep measurements; warn if that fails, since they can be measured again."""
    try:
        path = path_of(what, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.exists():
            _check_own(path)
        files.write_bytes(path, json.dumps({"key": key, "found": measured}, indent=1).encode())
    except (InputError, OSError, RuntimeError) as error:
        text = "measurements cannot be kept: %s; XDG_CACHE_HOME can name another folder"
        _warn("", text, error)
