"""benchmarks/bench_mini_text.py: what it measures is all there, and its table shows what it was told."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mini.text import STEPS
from tests.mini.helpers import ROOT

SCRIPT = ROOT / "benchmarks" / "bench_mini_text.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_mini_text", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["bench_mini_text"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_every_algorithm_is_held_against_the_plain_loop() -> None:
    command = [sys.executable, str(SCRIPT), "--repetitions", "2", "--batch", "2", "--horizon", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    speed = json.loads(done.stdout.splitlines()[-1])["speed"]
    assert {"plain loop", *STEPS, "grpo, free", "ppo, free"} == speed.keys()
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in speed.values())


@pytest.mark.long
def test_a_run_is_not_made_again_unless_its_words_change(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat; " * 40)
    monkeypatch.setattr(bench, "SHAPE", "--n-layer 1 --n-head 2 --n-embd 16 --horizon 8 --held-out 4")
    started: list[list[str]] = []
    whole = subprocess.run

    def count(words: list[str], **how: Any) -> Any:
        started.append(words)
        return whole(words, **how)

    monkeypatch.setattr(bench.subprocess, "run", count)
    args = bench.Args(data=tmp_path / "text.txt", output_dir=tmp_path)
    results = []
    for options in ("--steps 1", "--steps 1", "--steps 2"):
        monkeypatch.setitem(bench.RUNS, "supervised", options)
        results.append(bench.run(args, "supervised", 1))
    assert [result["steps"] for result in results] == [1, 1, 2]
    assert len(started) == 2


def test_the_table_has_medians_and_ranges_of_the_seeds(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(bits: float) -> dict[str, float]:
        return {"bits": bits, "right": 0.5, "p_right": 0.25}

    def run(args: object, row: str, seed: int) -> dict[str, object]:
        baselines = {"commonest": told(5), "bigram": told(4), "supervised": told(3 + seed)}
        after = told(2 + seed * seed)
        return {"before": told(6), "after": after, "baselines": baselines, "train_seconds": 100 + seed}

    monkeypatch.setattr(bench, "run", run)
    bench.runs(bench.Args())
    lines = capsys.readouterr().out.splitlines()
    columns = {line.count("|") for line in lines}
    assert len(columns) == 1
    row = next(line for line in lines if line.startswith("| GRPO from scratch |"))
    assert row.startswith("| GRPO from scratch | 6.00 → 6.000 (3.000 to 11.000) | 0.50 → 0.500 (0.500 to 0.500) |")
    assert "| 5.000 (4.000 to 6.000) | 0.500 (0.500 to 0.500) | 0.250 (0.250 to 0.250) | 101 to 103 | `--algo" in row
    assert [line.count("bigram, beside") for line in lines[-4:]] == [0, 1, 0, 1]
