"""Files that survive a kill, and folders that may be someone else's."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any

from toolkit import UsageError


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turn any error that a damaged file causes into a UsageError that names the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        raise UsageError(f"{file} is damaged: restore it, or use another folder") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file.  Raises UsageError if the file is damaged."""
    with naming(file):
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError
        return found


def check_whole(folder: Path, *needed: str) -> None:
    """Raise UsageError if a file of a model's folder is cut short, or if a part of its weights or of `needed` is not
    there.  Of weights it reads the list of tensors, which says how long the file must be."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    with naming(index):
        named = read_json(index).get("weight_map", {}).values()
        if any(Path(name).name != name for name in named):  # it could lead out of the folder
            raise ValueError
        parts = {folder / name for name in (*named, *needed)}
    for file in sorted({*folder.glob("*.json"), *folder.glob("*.safetensors"), *parts}):
        try:
            if not file.is_file():  # a pipe would never end
                raise FileNotFoundError
            safe_open(file, "np") if file.suffix == ".safetensors" else json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError, SafetensorError):
            raise UsageError(f"{file} is missing or damaged: restore it, or use another folder") from None


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_link(path: str | Path, flags: int) -> int:
    """An opener for `open`.  It refuses a link, which in a strange folder can lead anywhere, and waits at no pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: after a kill the old content is still there.  A link is replaced and not followed."""
    content = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.unfinished")
    aside.unlink(missing_ok=True)
    try:
        with open(aside, "xb", opener=no_link) as file:
            file.write(content)
        flush(aside)
        aside.replace(path)
    except OSError:  # half a file would keep a full disk full
        aside.unlink(missing_ok=True)
        raise


def check_links(run: Path) -> None:
    """Raise UsageError for a link in a run's folder, because training writes to where it points and an export reads
    from there; for a pipe, and for a folder that cannot be listed, which could hide them.

    This program makes one link, `best`.  wandb makes its own, anew in each run.
    """

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be listed ({error.strerror}): remove it, or change its mode")

    for folder, folders, files in os.walk(run, onerror=refuse):
        for path in (Path(folder, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            if path != run / "best" and run / "wandb" not in path.parents and not (S_ISREG(mode) or S_ISDIR(mode)):
                kind = "link" if S_ISLNK(mode) else "special file"
                raise UsageError(f"{path} is a {kind}: remove it, because a run's folder holds its own files alone")


def point(link: Path, name: str) -> None:
    """Make a symbolic link to a neighbour, or redirect an existing one."""
    aside = link.with_name(f".{link.name}-{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    aside.replace(link)
