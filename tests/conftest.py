"""What the tests share: one pool of jailed players, the embedded model, and a short training run for all processes."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

import gpt_2048_rl as program
from tests import preloaded
from tests.helpers import HELD_OUT
from toolkit.model import machine, tiny

# The short run: on a small board, where good programs soon come to an end.
STEPS, GENERATIONS, SIZE, TARGET = 4, 4, 4, 128
NUMBERS = {"model": "tiny", "steps": STEPS, "generations": GENERATIONS, "batch-size": GENERATIONS, "accumulation": 1,
           "boards": 2, "learning-rate": 1e-3, "save-steps": 1, "keep": 50, "games": 4, "race-games": 16,
           "best-of": 0, "ladder": f"{SIZE}:{TARGET}", "max-new-tokens": 48}  # fmt: skip

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes of tests have two cores; torch's threads only contend

# Their imports of transformers and peft take as long as their tests: one process has them all.
LIBRARIES = (
    "mini/test_runs.py",
    "mini/test_model.py",
    "around/test_benchmarks.py",
    "model/test_memory.py",
    "model/test_loading.py",
    "model/test_doctor.py",
    "serve/test_export.py",
    "serve/test_gguf.py",
    "model/test_families.py",
    "model/test_cpu_speed.py",
    "model/test_decoding.py",
)
# Files that take longest come first, so that both processes end together; those that read the short run come after it.
FIRST = (
    "model/test_gpu.py",
    "script/test_pool.py",
    "referee/test_jail.py",
    "mini/test_chess_commands.py",
    "mini/test_grpo.py",
    *LIBRARIES,
    "script/test_hostile.py",
    "run/test_cluster.py",
    "run/test_resilience.py",
    "base/test_ranks.py",
    "around/test_notebook.py",
    "mini/test_cpp.py",
    "script/test_train.py",
    "run/test_report.py",
)

ON_X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of the x86-64 system calls")
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")


# Libraries and tests stay to the end: searching them for garbage took nearly half of the time of collecting the tests.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on only what tests make is searched."""
    gc.freeze()
    gc.enable()


def file_of(nodeid: str) -> str:
    """A test's file, below the tests' folder."""
    return nodeid.partition("::")[0].removeprefix("tests/")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files in order.  What needs a browser is optional."""
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(file_of(item.nodeid), len(order)))
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.optional)
            item.add_marker(pytest.mark.browser)


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """All tests of a file go to one process, and so do all files of LIBRARIES."""

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return "libraries" if file in LIBRARIES else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


@pytest.fixture(scope="module")
def pool() -> program.Pool:
    """The program's own shared pool, so that the rewards use it too.  A test of another module may have replaced it."""
    return program.shared_pool(jailed=True)


@pytest.fixture
def lone() -> Iterator[program.Pool]:
    """A pool of one worker, for tests that kill parts of it."""
    with program.Pool(1) as pool:
        yield pool


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, result, stderr and rollouts."""

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
    """Hold a lock, so that only one process makes what all need."""
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def embedded_model(common: Path) -> Path:
    """The embedded model, in the user's cache."""
    machine.prepare_environment(offline=True)
    with one_after_the_other(common, "base"):
        return tiny.warm_start(program.game_spec())


@pytest.fixture(scope="session")
def base(common: Path) -> Path:
    """The embedded model's folder."""
    return embedded_model(common)


def flags(**changes: object) -> list[str]:
    """The command line of the short run, with some numbers replaced; None is the program's default."""
    numbers = NUMBERS | {name.replace("_", "-"): value for name, value in changes.items()}
    given = {name: value for name, value in numbers.items() if value is not None}
    return [*HELD_OUT, *(text for name, value in given.items() for text in (f"--{name}", str(value)))]


def begin_training(common: Path) -> Path:
    """Begin the short run, with a best of N, unless it has been begun.  Returns the folder of its output."""
    embedded_model(common)
    out = common / "runs"
    out.mkdir(exist_ok=True)
    preloaded.begin(*flags(output_dir=out, run_name="run", best_of=None), "--json", folder=out)
    return out


@pytest.fixture(scope="session", autouse=True)
def early(request: pytest.FixtureRequest, common: Path) -> None:
    """The short run goes on beside the first tests, which do not need it."""
    if any("trained" in getattr(item, "fixturenames", ()) for item in request.session.items):
        begin_training(common)


@pytest.fixture(scope="session")
def trained(common: Path) -> Run:
    """A few steps of training through the command line, shared by all tests that only read a run's files."""
    out = begin_training(common)
    done = preloaded.finished(out)
    assert done.returncode == 0, done.stderr
    folder = out / "run"
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    return Run(folder, json.loads(done.stdout.splitlines()[-1]), done.stderr, rollouts)
