"""Models that are made on this machine once and kept in the cache."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from toolkit import UsageError
from toolkit.base.files import check_whole


def is_whole(folder: Path) -> bool:
    """Whether a model is in a folder, and no file of it is cut short."""
    with contextlib.suppress(UsageError):
        check_whole(folder, "model.safetensors", "config.json", "tokenizer.json")
        return True
    return False


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """A model's folder, which `make` fills unless it is there already, undamaged.

    It is filled next to its final place and then renamed, so it is never incomplete.
    """
    from safetensors import SafetensorError

    if is_whole(folder):
        return folder
    unfinished = None
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        make(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except (OSError, SafetensorError) as error:
        if not is_whole(folder):  # otherwise another run was faster, and its model is the same
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"{folder.parent} cannot be written ({reason}): free some space, or set XDG_CACHE_HOME to "
                "another folder"
            ) from None
    finally:
        if unfinished:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder
