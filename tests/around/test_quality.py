"""The checkers that the project is written for, and the weight of importing it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpt_2048_rl as program
from tests import mutants
from tests.helpers import ROOT, cmdline, run, run_python

HEAVY = ("torch", "trl", "transformers", "unsloth", "datasets", "numpy", "tyro", "rich")


@pytest.mark.parametrize("words", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing(words: list[str]) -> None:
    """As configured in pyproject.toml, over the whole project.  mypy is a step of .ci/run."""
    if not importlib.util.find_spec("ruff"):
        pytest.fail("ruff is not installed; ./setup.sh installs it")
    command = [sys.executable, "-m", "ruff", *words, "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_program_imports_nothing_heavy() -> None:
    """`--help`, the game and the jailed players start without the libraries of the trainer."""
    done = run_python("import sys, gpt_2048_rl; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert sorted(set(HEAVY) & {name.partition(".")[0] for name in done.stdout.split()}) == []


FILES = sorted(path for path in (ROOT / "toolkit").rglob("*.py") if path.stem != "__init__")
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES]
# What each room of the toolkit may import, besides itself and toolkit/__init__.py.
ROOMS = {
    "referee": set[str](),
    "base": set[str](),
    "games": {"base"},
    "model": {"base", "games"},
    "run": {"base", "games", "model"},
    "serve": {"base", "games", "model", "run"},
    "cli": {"base", "model", "run", "serve"},
}


IMPORT_EACH = """
import os, sys
for name in sys.argv[1:]:
    if not os.fork():
        __import__(name)
        print(name, *sys.modules)
        break
    os.wait()
"""


@functools.cache
def imported_with() -> dict[str, set[str]]:
    """The top-level packages that each of MODULES imports, in a process of its own."""
    done = run_python(IMPORT_EACH, *MODULES)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: {other.partition(".")[0] for other in others} for name, *others in lines}


@pytest.mark.parametrize("name", MODULES)
def test_the_toolkit_imports_neither_the_script_nor_heavy_libraries(name: str) -> None:
    """The script runs as __main__: imported once more it would have a second pool of players."""
    assert sorted({*HEAVY, "gpt_2048_rl"} & imported_with()[name]) == []
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("gpt_2048_rl" in ast.unparse(node) for node in imports)
    room = name.split(".")[1]
    named = [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    used = {module.split(".")[1] for module in named if module.startswith("toolkit.")}
    assert used <= ROOMS[room] | {room}


@pytest.mark.parametrize("path", ["gpt_2048_rl.py", *(str(path.relative_to(ROOT)) for path in FILES)])
def test_no_name_is_used_above_its_definition(path: str) -> None:
    """The files read from top to bottom, function bodies and annotations included."""
    tree = ast.parse((ROOT / path).read_text())
    lines: dict[str, int] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [name.id for target in targets for name in ast.walk(target or ast.Pass()) if isinstance(name, ast.Name)]
        for name in (*names, getattr(node, "name", None)):
            lines.setdefault(name or "", node.lineno)
    early = [f"{name.id} in line {name.lineno}" for name in ast.walk(tree)
             if isinstance(name, ast.Name) and name.lineno < lines.get(name.id, 0)]  # fmt: skip
    assert early == []


def test_the_workers_import_only_the_standard_library() -> None:
    """A referee needs no package: it runs without site-packages, so that none can be planted there either."""
    with program.Pool(1) as pool:
        (worker,) = pool._workers
        arguments = cmdline(worker._process.pid).split(b"\0")
    assert {b"-P", b"-s", b"-S"} <= set(arguments)


def test_a_worker_takes_nothing_from_the_scripts_folder_but_the_toolkit(tmp_path: Path) -> None:
    """A file there that has the name of a module of the library would otherwise play for it."""
    copy = Path(shutil.copy(ROOT / "gpt_2048_rl.py", tmp_path))
    shutil.copytree(ROOT / "toolkit", tmp_path / "toolkit")
    (tmp_path / "heapq.py").write_text("raise SystemExit('taken from the folder')\n")
    command = [sys.executable, "-P", "-s", "-S", str(copy), "worker", "0", "1"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ('{"refusal": ""}\n', "")


def test_every_fault_of_the_mutants_still_stands_in_one_place() -> None:
    """A fault whose line has changed says nothing about the tests."""
    found = [mutants.find(fault, ROOT) for fault in mutants.FAULTS]  # raises unless a piece stands in one place
    assert sum(text != file.read_text() for file, text in found) == 40


def test_a_copy_without_the_toolkit_says_what_is_missing(tmp_path: Path) -> None:
    copy = shutil.copy(ROOT / "gpt_2048_rl.py", tmp_path / "my-run.py")
    done = run("--help", script=copy, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "toolkit/" in done.stderr


def test_a_broken_toolkit_is_not_a_missing_one(tmp_path: Path) -> None:
    """A bad import in one of its files once made the program train without checkpoints."""
    copy = shutil.copy(ROOT / "gpt_2048_rl.py", tmp_path / "my-run.py")
    shutil.copytree(ROOT / "toolkit", tmp_path / "toolkit")
    (tmp_path / "toolkit" / "run" / "watch.py").write_text("import nothing_of_this_name\n")
    done = run("--help", script=copy, cwd=tmp_path)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in done.stderr
