"""Progress bars: `cli.main` names the console, and whoever takes long goes through its work `in_parts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")
consoles: list[Console] = []  # at most one; without it there are no bars


def show_on(console: Console) -> None:
    """From here on bars are shown on this console, if it is a terminal."""
    consoles[:] = [console] if console.is_terminal and not console.quiet else []


def in_parts(items: Sequence[Item], what: str, size: int) -> Iterator[Sequence[Item]]:
    """A sequence in parts of `size`.  A bar says how many are done, and goes when the last one is."""
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    if not consoles:
        return iter(parts)
    from rich.progress import track

    return iter(track(parts, what, console=consoles[0], transient=True))
