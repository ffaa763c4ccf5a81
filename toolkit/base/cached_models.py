"""Models that are made on this machine once and kept in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from toolkit import UsageError
from toolkit.base.files import check_whole


def is_whole(folder: Path) -> bool:
    """Whether a model is in a folder, and no file of it is cut short."""
    with contextlib.suppress(UsageError):
        check_whole(folder, "model.safetensors", "config.json", "tokenizer.json")
        return True
    return False


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Until it ends, other processes that ask for the same folder wait; not where the file system knows no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def made_once(folder: Path, make: Callable[[Path], object], whole: Callable[[Path], bool] = is_whole) -> Path:
    """A model's folder, which `make` fills unless it is there already and `whole`.

    It is filled next to its final place and then renamed, so it is never incomplete.  Other processes wait meanwhile;
    what a killed one left is removed.
    """
    from safetensors import SafetensorError

    if whole(folder):
        return folder
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(folder.parent):
            if whole(folder):
                return folder
            for left in filter(Path.exists, (folder, unfinished)):
                shutil.rmtree(left)
            unfinished.mkdir()
            try:
                make(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{folder.parent} cannot be written ({reason}): free some space, or set XDG_CACHE_HOME to another folder"
        ) from None
    return folder
