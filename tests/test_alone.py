"""The script copied without its toolkit, under another name: it plays, judges and trains; the rest says what it needs.

Workers used to import the script by its name: a copy called `my-run.py` died with a SyntaxError that blamed the jail.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers import HONEST, ROOT, run

TINY_RUN = {"steps": 1, "generations": 4, "batch-size": 4, "accumulation": 1, "boards": 1, "ladder": "4:64",
            "max-new-tokens": 48}  # fmt: skip


@pytest.fixture(params=["my-run.py", "my run"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copy(ROOT / "gpt_2048_rl.py", tmp_path / request.param))


def test_a_copy_plays(copy: Path) -> None:
    strategy = copy.with_name("strategy.py")
    strategy.write_text(HONEST)
    done = run("play", strategy, "--seeds", 3, "--target", 64, script=copy, cwd=copy.parent)
    assert done.returncode == 0, done.stderr
    assert "success" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "a", "b"],
        ["eval", "tiny"],
        ["doctor"],
        ["--model", "tiny"],
        ["--model", "a", "--resume"],
        ["--model", "a", "--loader", "transformers"],
        ["--model", "a", "--objective", "entropic"],
        ["--model", "a", "--archive", "4"],
        ["play", "a.py", "--watch"],
        ["play", "--model", "a"],
    ],
)
def test_what_needs_the_toolkit_says_so_in_one_line(command: list[str], tmp_path: Path) -> None:
    copy = shutil.copy(ROOT / "gpt_2048_rl.py", tmp_path / "my-run.py")
    done = run(*command, script=copy, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")
    assert "needs the folder toolkit/" in done.stderr


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["play", "a.py", "--timeout", "0"], "--timeout"),
        (["--model", "a", "--generations", "0"], "--generations"),
        (["--model", "a", "--run-name", "../b"], "--run-name"),
    ],
)
def test_bad_input_gets_one_line_without_the_toolkit_too(command: list[str], named: str, tmp_path: Path) -> None:
    copy = shutil.copy(ROOT / "gpt_2048_rl.py", tmp_path / "my-run.py")
    done = run(*command, script=copy, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert named in done.stderr


@pytest.mark.slow
def test_a_copy_trains_a_model_from_a_folder(base: Path, tmp_path: Path) -> None:
    copy = shutil.copy(ROOT / "gpt_2048_rl.py", tmp_path / "my-run.py")
    flags = [text for name, value in TINY_RUN.items() for text in (f"--{name}", str(value))]
    done = run("--model", base, "--run-name", "alone", *flags, script=copy, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "alone"
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    (step,) = map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines())
    assert len(step["completions"]) == 4
