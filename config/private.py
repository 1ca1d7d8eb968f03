"""Files that hold a secret or a key: those that others than their owner may open are refused, before they are used."""

import os
import stat
from pathlib import Path
from typing import Final

from .errors import ConfigError

OTHERS: Final = 0o077
MOST: Final = 1 << 16  # bytes


def read_private(field: str, path: Path) -> bytes:
    """The file's content without the white space around it.

    ConfigError, which names the setting `field`, where it cannot be read, is open to others or holds something else.
    """
    try:
        with path.open("rb") as file:
            _refuse_open(field, path, os.fstat(file.fileno()))
            content = file.read(MOST + 1)
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read: {error.strerror}") from error
    if len(content) > MOST:
        raise ConfigError(f"{field}: {path} holds more than {MOST} bytes")
    return content.strip()


def check_private(field: str, path: Path) -> None:
    """As `read_private`, for a file that something else reads."""
    try:
        _refuse_open(field, path, path.stat())
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read: {error.strerror}") from error


def _refuse_open(field: str, path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & OTHERS:
        raise ConfigError(f"{field}: {path} is open to others (mode {mode:04o}): chmod 600 {path}")
