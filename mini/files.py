"""Atomic writes: a file is written under another name, flushed to disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mini.config import UsageError


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically; `write` gets it open.  Raises UsageError if it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)  # the rename is durable once the folder is flushed
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
