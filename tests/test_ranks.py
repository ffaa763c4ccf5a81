"""torchrun: two processes train one adapter, on whole groups each, and leave one log, one checkpoint and one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.helpers import ROOT, alive, cmdline, descendants, wait_until
from tests.preloaded import call

RANKS, STEPS, GENERATIONS, BATCH = 2, 2, 4, 8


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The program in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS),
               str(ROOT / "gpt_2048_rl.py"), *map(str, arguments)]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


@dataclass(frozen=True)
class Run:
    """What such a run left behind."""

    folder: Path
    result: dict[str, Any]
    stdout: str
    stderr: str
    steps: list[dict[str, Any]]


@pytest.fixture(scope="module")
def together(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps; a rank has two groups of each."""
    out = tmp_path_factory.mktemp("ranks")
    numbers = {"steps": STEPS, "generations": GENERATIONS, "batch-size": BATCH, "accumulation": 1, "boards": 2,
               "save-steps": 1, "games": 4, "size": 4, "target": 128, "max-new-tokens": 96}  # fmt: skip
    flags = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    done = torchrun("--model", "tiny", "--output-dir", out, "--run-name", "two", "--json", *flags)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (out / "two" / "rollouts.jsonl").read_text().splitlines()]
    return Run(out / "two", json.loads(done.stdout.splitlines()[-1]), done.stdout, done.stderr, steps)


@pytest.mark.slow
def test_one_of_them_speaks(together: Run) -> None:
    assert together.result["ranks"] == RANKS
    assert len(together.stdout.splitlines()) == 1
    assert [line.split()[1] for line in together.stderr.splitlines() if line.startswith("step ")] == ["1/2", "2/2"]


@pytest.mark.slow
def test_a_step_has_the_groups_of_both(together: Run) -> None:
    """Whole ones, no two with the same boards: a rank that went its own way would play those of the other."""
    assert [len(step["completions"]) for step in together.steps] == [RANKS * BATCH] * STEPS
    boards = []
    for step in together.steps:
        played = [tuple(game["seed"] for game in row["results"]) for row in step["completions"]]
        groups = [set(played[i : i + GENERATIONS]) for i in range(0, len(played), GENERATIONS)]
        assert all(len(group) == 1 for group in groups)
        boards += [group.pop() for group in groups]
    assert len(set(boards)) == len(boards) == STEPS * RANKS * BATCH // GENERATIONS


@pytest.mark.slow
def test_they_sample_different_programs(together: Run) -> None:
    texts = [row["text"] for row in together.steps[0]["completions"]]
    assert texts[:BATCH] != texts[BATCH:]


@pytest.mark.slow
def test_there_is_one_checkpoint_a_step_and_one_adapter(together: Run) -> None:
    """That both ended with the same adapter, the program itself has checked."""
    names = {path.name for path in together.folder.iterdir()}
    assert {"checkpoint-1", "checkpoint-2", "adapter", "result.json"} <= names
    assert sum(name.startswith("events.out") for name in names) == 2  # of the steps, and of the best program


def check_the_digest(base: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
    before = program.adapter_digest(model)
    assert program.adapter_digest(model) == before
    next(weights for name, weights in model.named_parameters() if "lora_B" in name).data[0, 0] += 1e-6
    assert program.adapter_digest(model) != before


def test_the_digest_tells_adapters_apart(base: Path) -> None:
    call(check_the_digest, base)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (5, 8)])
def test_ranks_share_out_the_cores(rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert (
        program.own_cores(range(6))
        == {(0, 1): [0, 1, 2, 3, 4, 5], (0, 2): [0, 2, 4], (1, 2): [1, 3, 5], (5, 8): [5]}[rank, ranks]
    )


@pytest.mark.slow
def test_commands_other_than_train_refuse_it(tmp_path: Path) -> None:
    done = torchrun("eval", "tiny")
    assert done.returncode != 0
    assert "eval runs in one process: start it with python, without torchrun" in done.stderr


@pytest.mark.slow
def test_nothing_is_left_of_them(together: Run) -> None:
    ours = [pid for pid in descendants(os.getpid()) if str(together.folder.parent).encode() in cmdline(pid)]
    assert wait_until(lambda: not any(map(alive, ours)), 5)
