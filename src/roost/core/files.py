"""Reading and writing bytes: whole or not at all, compressed by suffix, with clear errors."""

from __future__ import annotations

import errno
import gzip
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roost.errors import InputError

# A small .gz can hold a huge file. Roost unpacks up to so many times its size, and a few bytes more
# of a small one. Graphs unpack to 10 to 40 times their size.
MOST_BYTES = 2 * 2**30
_MOST_UNPACKED, _SMALL_BYTES = 100, 64 * 2**20


def read_bytes(path: Path) -> bytes:
    """The content of a plain file, decompressed if the name ends in `.gz`.

    Raises InputError for a pipe, whose end might never come, and for more than `MOST_BYTES`.
    """
    most = MOST_BYTES
    try:
        if is_special(path):
            raise InputError(f"{path}: is no plain file; copy its content to one, and name that")
        if path.suffix == ".gz":
            most = min(most, max(_SMALL_BYTES, _MOST_UNPACKED * path.stat().st_size))
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(most + 1)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; name a file in it") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: damaged gzip file ({error}); save it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except MemoryError:
        raise InputError(f"{path}: does not fit into this machine's memory") from None
    except ValueError as error:  # a NUL byte in the name
        raise InputError(f"{str(path)!r}: cannot be read: {error}") from error
    if len(data) > most:
        raise InputError(f"{path}: holds more than {most} bytes, the limit for a file of its size")
    return bytes(data)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: to a temporary file beside it, then renamed over it."""
    if path.suffix == ".gz":
        # No name and no time in the header: the same content gives the same bytes.
        data = gzip.compress(data, compresslevel=6, mtime=0)
    with _clear_errors(path):
        if _is_stream(path):
            with path.open("ab") as file:
                file.write(data)
        else:
            _replace(_target(path), data)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary file for large contents; at the end it is renamed over the path."""
    with _clear_errors(path):
        target = _target(path)
        if target.is_dir():
            raise IsADirectoryError(target)
        temporary = target.with_name(f".roost-{secrets.token_hex(6)}.tmp")
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise the error that writing this file would raise, as far as it is known before."""
    with _clear_errors(path):
        folder = _target(path).parent
        if path.is_dir():
            raise IsADirectoryError
        if not folder.is_dir():
            raise FileNotFoundError
        if not os.access(path if _is_stream(path) else folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    """Turn errors of writing a file into InputError."""
    try:
        yield
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; name a file in it") from None
    except FileNotFoundError:
        folder = _target(path).parent
        raise InputError(f"{path}: cannot be written: folder {folder} does not exist") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    # A NUL byte in the name; links that lead in a circle.
    except (ValueError, RuntimeError) as error:
        raise InputError(f"{str(path)!r}: cannot be written: {error}") from error


def check_plain(path: Path) -> None:
    """Raise if a path is no plain file that can be read."""
    if path.is_dir():
        raise InputError(f"{path}: is a directory; name a file in it")
    if is_special(path):
        raise InputError(f"{path}: is no plain file; copy its content to one, and name that")
    if not path.exists():
        raise InputError(f"{path}: no such file")


def is_special(path: Path) -> bool:
    """True for a path that exists and is neither a plain file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _is_stream(path: Path) -> bool:
    """True for a path that cannot be renamed over, such as a pipe or /dev/stdout."""
    return path.parts[:2] in (("/", "dev"), ("/", "proc")) or is_special(path)


def _target(path: Path) -> Path:
    return path.resolve() if path.is_symlink() else path


def _replace(path: Path, data: bytes) -> None:
    if path.is_dir():
        raise IsADirectoryError(path)
    temporary = path.with_name(f".roost-{secrets.token_hex(6)}.tmp")
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
