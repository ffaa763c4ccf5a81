"""What the tests share: one pool of jailed players, started once and closed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import gpt_2048_rl as program


@pytest.fixture(scope="session")
def pool() -> Iterator[program.Pool]:
    """The program's own shared pool, so that the rewards use it too."""
    shared = program.shared_pool()
    yield shared
    shared.close()
