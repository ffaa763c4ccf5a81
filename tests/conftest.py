"""What the tests share: one pool of jailed players, the embedded model, and a short training run for all processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.helpers import run
from toolkit import machine, tiny

STEPS, GENERATIONS, SIZE, TARGET = 2, 8, 4, 128  # of the short run

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes of tests have two cores; torch's threads only contend

LONGEST = ("test_cluster.py", "test_export.py", "test_gpu.py", "test_hostile.py", "test_resilience.py", "test_train.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a browser is optional.  Files that take longest come first, so that both processes end together."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.optional)


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
def common(worker_id: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of these tests have in common."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@contextlib.contextmanager
def one_after_the_other(folder: Path, name: str) -> Iterator[None]:
    """Of two processes one makes what both need, and the other waits for it."""
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def base(common: Path) -> Path:
    """The embedded model: from the user's cache, or warm-started, which takes about a minute."""
    machine.prepare_environment(offline=True)
    with one_after_the_other(common, "base"):
        return tiny.warm_start(program.tiny_task())


@pytest.fixture(scope="session")
def trained(base: Path, common: Path) -> Run:
    """Two steps of training through the command line, on a small board, where good programs soon come to an end."""
    out = common / "runs"
    with one_after_the_other(common, "trained"):
        if not (out / "stdout").exists():
            train(out)
    folder = out / "two-steps"
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    said, stderr = ((out / name).read_text() for name in ("stdout", "stderr"))
    return Run(folder, json.loads(said.splitlines()[-1]), stderr, rollouts)


def train(out: Path) -> None:
    """The short run, in a process of its own, and what it says."""
    numbers = {"steps": STEPS, "generations": GENERATIONS, "batch-size": GENERATIONS, "accumulation": 1, "boards": 2,
               "learning-rate": 1e-3, "save-steps": 1, "games": 4, "size": SIZE, "target": TARGET,
               "max-new-tokens": 96}  # fmt: skip
    flags = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    done = run("--model", "tiny", "--output-dir", out, "--run-name", "two-steps", "--json", *flags)
    assert done.returncode == 0, done.stderr
    (out / "stderr").write_text(done.stderr)
    (out / "stdout").write_text(done.stdout)
