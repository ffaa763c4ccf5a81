"""What the tests share: one pool of jailed players, the embedded model, and a short training run."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.helpers import run

STEPS, GENERATIONS, SIZE, TARGET = 2, 8, 4, 128  # of the short run


@pytest.fixture(scope="session")
def pool() -> Iterator[program.Pool]:
    """The program's own shared pool, so that the rewards use it too."""
    shared = program.shared_pool()
    yield shared
    shared.close()


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    folder: Path
    result: dict[str, Any]
    stderr: str
    rollouts: list[dict[str, Any]]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model: from the user's cache, or warm-started, which takes about a minute."""
    program.prepare_environment(offline=True)
    with (tmp_path_factory.getbasetemp().parent / "base").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two processes one makes it
        return program.warm_start()


@pytest.fixture(scope="session")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of training through the command line, on a small board, where good programs soon come to an end."""
    out = tmp_path_factory.mktemp("runs")
    numbers = {"steps": STEPS, "generations": GENERATIONS, "batch-size": GENERATIONS, "accumulation": 1, "boards": 2,
               "learning-rate": 1e-3, "save-steps": 1, "games": 4, "size": SIZE, "target": TARGET,
               "max-new-tokens": 96}  # fmt: skip
    flags = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    done = run("--model", "tiny", "--output-dir", out, "--run-name", "two-steps", "--json", *flags)
    assert done.returncode == 0, done.stderr
    folder = out / "two-steps"
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    return Run(folder, json.loads(done.stdout.splitlines()[-1]), done.stderr, rollouts)
