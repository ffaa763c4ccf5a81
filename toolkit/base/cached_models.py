"""Models that are made on this machine once and kept in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
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
def removing_leftovers(folder: Path, pattern: str) -> Iterator[None]:
    """Before something is made in a folder, remove what killed processes left there.

    Whoever makes something holds a lock, so that nothing is removed meanwhile; nor where the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_NB | fcntl.LOCK_EX)
            for left in folder.glob(pattern):
                shutil.rmtree(left)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def made_once(folder: Path, make: Callable[[Path], object], whole: Callable[[Path], bool] = is_whole) -> Path:
    """A model's folder, which `make` fills unless it is there already and `whole`.

    It is filled next to its final place and then renamed, so it is never incomplete.
    """
    from safetensors import SafetensorError

    if whole(folder):
        return folder
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with removing_leftovers(folder.parent, f".{folder.name}-*"):
            unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                make(unfinished)
                unfinished.chmod(0o755)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if not whole(folder):  # otherwise another run was faster, and its model is the same
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"{folder.parent} cannot be written ({reason}): free some space, or set XDG_CACHE_HOME to "
                "another folder"
            ) from None
    return folder
