"""Progress bars: what takes long shows them on a terminal, and nowhere else."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from toolkit.base import bars


@pytest.fixture(autouse=True)
def no_console() -> Iterator[None]:
    """Other tests get no bars."""
    yield
    bars.consoles.clear()


def shown(terminal: bool, quiet: bool = False) -> str:
    """What a screen gets while ten items are done in parts of four."""
    screen = io.StringIO()
    bars.show_on(Console(file=screen, force_terminal=terminal, quiet=quiet, width=80))
    assert [list(part) for part in bars.in_parts(range(10), "playing", 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    return screen.getvalue()


def test_a_terminal_gets_a_bar_with_its_name() -> None:
    assert "playing" in shown(terminal=True)


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, True)])
def test_a_file_and_quiet_get_none(terminal: bool, quiet: bool) -> None:
    assert shown(terminal, quiet) == ""
