"""Files that are there whole or not at all: written under another name, flushed to the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mini.config import UsageError


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have a file written by a function that is handed it open.  Raises UsageError where that cannot be done."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)  # the new name is on the disk when the folder is
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
