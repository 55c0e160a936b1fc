"""Bytes in and out of files: whole or not at all, compressed by suffix, with errors that name the file."""

from __future__ import annotations

import gzip
import os
import secrets
import stat
import zlib
from pathlib import Path

from roost.errors import InputError

# A small .gz can hold a huge file: what comes from outside is read up to here.
MOST_BYTES = 4 * 2**30


def read_bytes(path: Path) -> bytes:
    """The content of a file, decompressed where the name ends in `.gz`."""
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; name a file in it") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: damaged gzip file ({error}); save it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL byte in the name
        raise InputError(f"{str(path)!r}: cannot be read: {error}") from error
    if len(data) > MOST_BYTES:
        raise InputError(f"{path}: unpacks to more than {MOST_BYTES} bytes; give it unpacked")
    return data


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: to a temporary file beside it, then renamed over it."""
    if path.suffix == ".gz":
        # No name and no time in the header: the same content gives the same bytes.
        data = gzip.compress(data, compresslevel=6, mtime=0)
    try:
        if path.is_symlink():
            path = path.resolve()
        if path.exists() and not path.is_dir() and not path.is_file():
            path.write_bytes(data)  # a pipe or /dev/stdout cannot be renamed over
        else:
            _replace(path, data)
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; name a file in it") from None
    except FileNotFoundError:
        raise InputError(f"{path}: cannot be written: folder {path.parent} does not exist") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{str(path)!r}: cannot be written: {error}") from error


def _replace(path: Path, data: bytes) -> None:
    if path.is_dir():
        raise IsADirectoryError(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
