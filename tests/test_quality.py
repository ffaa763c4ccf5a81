"""The checkers that the project is written for, and the weight of importing it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.helpers import ROOT, run_python

HEAVY = ("torch", "trl", "transformers", "unsloth", "datasets", "numpy", "tyro", "rich")


@pytest.mark.parametrize(
    "command",
    [pytest.param(["ruff", "check", "."], id="ruff"), pytest.param(["mypy"], id="mypy", marks=pytest.mark.slow)],
)
def test_checker_finds_nothing(command: list[str]) -> None:
    """As configured in pyproject.toml, over the whole project."""
    if not importlib.util.find_spec(command[0]):
        pytest.fail(f"{command[0]} is not installed; ./setup.sh installs it")
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_program_imports_nothing_heavy() -> None:
    """`--help`, the game and the jailed players start without the libraries of the trainer."""
    done = run_python("import sys, gpt_2048_rl; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert sorted(set(HEAVY) & {name.partition(".")[0] for name in done.stdout.split()}) == []


def test_pages_are_made_without_the_program() -> None:
    """It runs as __main__: imported once more it would have a second pool of players, and a second of everything."""
    done = run_python("import sys, report; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert sorted({*HEAVY, "gpt_2048_rl"} & {name.partition(".")[0] for name in done.stdout.split()}) == []


def test_the_workers_import_only_the_standard_library() -> None:
    """A referee needs no package: it runs without site-packages, so that none can be planted there either."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gpt_2048_rl; print('site' in sys.modules)"
    command = [sys.executable, "-P", "-s", "-S", "-c", code, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr
