"""Atomic writes: a file is written under another name, flushed to disk, then renamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from toolkit import UsageError
from toolkit.runs import bring_to_disk


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically; `write` gets it open.  Raises UsageError if it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            write(file)
        bring_to_disk(part)
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
