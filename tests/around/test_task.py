"""The task for other trainers: questions, the dataset, its rewards for TRL and verl, and what an author is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import gpt_2048_rl as program
from integrations import dataset, task
from tests.helpers import ALWAYS_UP, HONEST, ROOT, run_python

BAD, GOOD = f"```python\n{ALWAYS_UP}```", f"Here it is:\n```python\n{HONEST}```"


def question(index: int = 0, split: str = "train") -> task.Question:
    """A short game, which random moves win."""
    return task.Question.read({"size": 5, "target": 32, "keys": "bepo", "boards": 2, "timeout": 1.0,
                               "index": index, "split": split})  # fmt: skip


def export(folder: Path, *flags: str) -> int:
    """The exit code of the command."""
    argv = ["--output-dir", str(folder / "dataset"), "--train", "20", "--test", "3", *flags]
    return task.start(dataset.Args, dataset.export, "python -m integrations.dataset", argv)


def test_the_files_hold_prompts_and_games_but_no_seed(tmp_path: Path) -> None:
    assert export(tmp_path, "--format", "jsonl", "--keys", "wasd") == 0
    text = (tmp_path / "dataset" / "train.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 20
    assert {"data_source", "ability", "reward_model", "extra_info"} < rows[0].keys()
    asked = [task.Question.read(row["extra_info"]) for row in rows]
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": q.prompt}] for q in asked]
    assert len({q.seeds for q in asked}) == 20
    assert not {str(seed) for q in asked for seed in q.seeds} & set(re.findall(r"\d+", text))


def test_parquet_is_what_the_datasets_library_reads_back(tmp_path: Path) -> None:
    from datasets import load_dataset

    assert export(tmp_path) == 0
    read = load_dataset(str(tmp_path / "dataset"), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in read.items()} == {"train": 20, "test": 3}
    assert task.Question.read(read["test"][2]["extra_info"]) == task.Question(index=2, split="test")


def test_evaluation_has_boards_and_a_wording_of_its_own() -> None:
    train, test = ([question(i, split) for i in range(20)] for split in ("train", "test"))
    assert not {seed for q in train for seed in q.seeds} & {seed for q in test for seed in q.seeds}
    assert not {q.prompt for q in train} & {q.prompt for q in test}
    assert len({q.prompt for q in train}) == len(program.WORDINGS) - 1


def test_trl_and_verl_get_the_rewards_of_training() -> None:
    answers, row = [BAD, GOOD, "no idea"], vars(question())
    messages = [[{"role": "assistant", "content": answer}] for answer in answers]
    ours = [getattr(dataset, reward.__name__) for reward in program.REWARDS]
    of_trl = [reward(messages, extra_info=[row] * 3, prompts=[], trainer_state=None) for reward in ours]
    of_verl = [dataset.compute_score("gpt_2048", answer, "32", {**row, "num_turns": None}) for answer in answers]
    columns = {"seeds": [question().seeds] * 3, "size": [5] * 3, "target": [32] * 3, "timeout": [1.0] * 3}
    assert of_trl == [reward(answers, **columns) for reward in program.REWARDS]
    assert [score["score"] for score in of_verl] == list(map(sum, zip(*of_trl, strict=True)))
    assert of_verl[0]["score"] < of_verl[1]["score"] == program.WORKS["load"] + program.CLEAN + program.SUCCESS


def test_trl_logs_each_reward_under_its_name() -> None:
    names = [reward.__name__ for reward in program.REWARDS]
    assert [getattr(dataset, name).__name__ for name in names] == names


REMEMBERS = """```python
import random
LUCKY = {lucky}
def strategy(board):
    if str(board) in LUCKY: return LUCKY[str(board)]
    raise ValueError(board)
```"""


def test_feedback_is_on_other_boards_than_those_that_are_paid() -> None:
    """A fixed policy kept each game's good moves from turn to turn and drew the rest again: tiles of 512 to 1024, with
    no more skill on new boards.  What it learns by heart in practice is worth nothing in the end.
    """
    asked, lucky = question(), dict[str, str]()
    for _ in range(40):
        answer = REMEMBERS.format(lucky=lucky)
        for result in task.practise(asked, answer).results:
            lucky[result.detail.removeprefix("ValueError: ")] = "éuai"[len(lucky) % 4]
    learned = task.practise(asked, answer).results
    assert min(result.steps for result in learned) > 10
    assert max(result.steps for result in task.judge(asked, answer)[0].results) < 5  # two games can begin alike
    assert not set(asked.seeds) & set(asked.practice)


def test_feedback_shows_the_position_in_which_the_worst_game_ended() -> None:
    verdict = task.practise(question(), BAD)
    told = task.feedback(question(), verdict)
    worst = min(verdict.results, key=lambda result: result.max_tile)
    rows = [json.loads(line) for line in told.splitlines() if line.startswith("[")]
    assert f"Board 1: stuck, largest tile {verdict.results[0].max_tile}, {verdict.results[0].steps} moves" in told
    assert max(map(max, rows)) == worst.max_tile
    for column in zip(*rows, strict=True):  # nothing can go up
        tiles = [tile for tile in column if tile]
        assert list(column[: len(tiles)]) == tiles
        assert all(one != next_one for one, next_one in pairwise(tiles))


def test_feedback_says_why_nothing_played() -> None:
    verdict = task.practise(question(), "```python\ndef strategy(board)\n    return 'é'\n```")
    assert task.feedback(question(), verdict).startswith("Your program did not play: ")
    assert not task.is_final(verdict)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--keys", "qwerty"], "--keys is one of bepo, wasd, zqsd, arrows, not 'qwerty'"),
        (["--size", "99"], "size must be a whole number from 2 to 16, not 99"),
        (["--target", "1000"], "target must be a power of two"),
        (["--boards", "0"], "error: boards must lie between 1 and 64, not 0"),
        (["--timeout", "-1"], "timeout must be a positive number of seconds"),
        (["--train", "0"], "train must lie between 1 and"),
    ],
)
def test_bad_input_gets_one_line(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(tmp_path, *flags) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("error: ")
    assert said in printed
    assert list(tmp_path.iterdir()) == []


def test_an_older_dataset_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dataset").mkdir()
    assert export(tmp_path) == 2
    assert "cannot be made: File exists" in capsys.readouterr().err


def test_the_server_without_its_library_says_what_to_install() -> None:
    """It ended in a traceback."""
    module = "runpy.run_module('integrations.openenv_2048', run_name='__main__')"
    done = run_python(f"import runpy, sys; sys.modules['uvicorn'] = None; {module}")
    assert done.returncode == 2
    assert done.stderr == "error: the library uvicorn is not installed: run ./setup.sh --with openenv\n"


@pytest.mark.long
def test_trl_script_trains_with_the_dataset_and_its_rewards(tmp_path: Path, base: Path) -> None:
    assert export(tmp_path, "--size", "4", "--target", "64", "--boards", "1") == 0
    numbers = {"max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 24,
               "logging_steps": 1, "router_aux_loss_coef": 0, "report_to": "none", "bf16": False, "use_cpu": True,
               "gradient_checkpointing": False, "save_strategy": "no", "dataset_name": tmp_path / "dataset",
               "model_name_or_path": base, "output_dir": tmp_path / "trained"}  # fmt: skip
    command = [str(Path(sys.executable).with_name("trl")), "grpo",
               *(text for name, value in numbers.items() for text in (f"--{name}", str(value))), "--reward_funcs",
               *(f"integrations.dataset.{reward.__name__}" for reward in program.REWARDS)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for reward in program.REWARDS:
        assert done.stdout.count(f"rewards/{reward.__name__}/mean") == 2
    assert (tmp_path / "trained" / "model.safetensors").is_file()


MANY = """
import os
from pathlib import Path
from integrations import task
def used():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
question, before = task.Question(index=1), used()
for i in range(8):
    verdict, rewards = task.judge(question, str(i) * 100_000_000)
    assert verdict.works == "none" and rewards["function_works"] == -2, verdict
print(used() - before)
"""


def test_answers_that_are_too_long_do_not_stay_in_memory() -> None:
    """Each of 100 MB stayed in the cache: eight of them took 700 MiB."""
    done = run_python(MANY)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100
