"""The archive: which programs the training prompt shows, and when."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.preloaded import call
from tests.script.test_train import loaded
from toolkit.run.archive import Archive
from toolkit.run.steps import rewind

SOURCE = "def strategy(board):\n    return {!r}"


def words(text: str) -> dict[str, list[str]]:
    """A tokenizer."""
    return {"input_ids": text.split()}


def archive(count: int = 2, **changes: Any) -> Archive:
    return Archive(program.TrainConfig(archive=count, **changes), words)


def step(number: int, size: int = 4, **programs: float) -> dict[str, Any]:
    """A line of rollouts.jsonl: the reward of each program, by the key that it returns."""
    completions = [
        {"source": SOURCE.format(key), "works": "load", "cheating": "", "reward": reward,
         "results": [{"outcome": "success" if reward == 20 else "lost", "max_tile": 64 if reward == 20 else 16}]}
        for key, reward in programs.items()]  # fmt: skip
    return {"step": number, "size": size, "target": 64, "completions": completions}


def shown(programs: Archive, number: int, groups: int = 50) -> set[str]:
    """The keys of the programs that a step's groups see; the first step is 0."""
    return {text.rpartition("return ")[2][1:2] for i in range(groups) if (text := programs.example(number, i))}


def test_the_best_programs_are_kept_each_once() -> None:
    """By their mean reward over all of the stage's steps, so a lucky game does not last."""
    programs = archive(count=2)
    programs.add(step(1, a=20, b=9, c=3))
    programs.add(step(2, a=2, b=9, d=10))
    assert shown(programs, 2) == {"a", "b"}
    assert shown(programs, 3) == {"a", "d"}
    programs.add(step(3, a=2))
    assert shown(programs, 4) == {"d", "b"}


@pytest.mark.parametrize("newer", ["a", "b"])
def test_of_equals_the_shorter_is_better_and_then_the_newer(newer: str) -> None:
    programs = archive(count=1)
    programs.add(step(1, a=9, longer=9, b=9))
    programs.add(step(2, **{newer: 9}))
    programs.add(step(3, longer=9))
    assert shown(programs, 4) == {newer}


def test_an_example_tells_what_its_program_reached() -> None:
    programs = archive()
    programs.add(step(1, a=20))
    programs.add(step(2, a=9))
    assert programs.example(3, 0) == (
        "\nA program that did well so far: it won 50% of 2 games of 4x4 64, and its mean tile was 40.\n"
        "```python\ndef strategy(board):\n    return 'a'\n```")  # fmt: skip


def test_the_data_loader_makes_rows_before_the_last_step_is_known() -> None:
    programs = archive()
    programs.add(step(1, a=9))
    assert [shown(programs, number) for number in range(4)] == [set(), set(), {"a"}, {"a"}]


def test_a_new_stage_begins_with_the_programs_of_the_last_one() -> None:
    programs = archive()
    programs.add(step(1, size=5, a=20))
    programs.add(step(2, b=3))
    assert "5x5" in programs.example(2, 0)
    assert "4x4" in programs.example(3, 0)
    assert shown(programs, 3) == {"b"}


def test_what_did_not_play_is_left_out() -> None:
    row = step(1, a=9, b=20, c=20)
    row["completions"][1]["cheating"] = "reads the board's seed"
    row["completions"][2]["works"] = "fail"
    programs = archive(count=9)
    programs.add(row)
    assert shown(programs, 2) == {"a"}


@pytest.mark.parametrize("source", ["# " + "word " * 200, 'x = """```"""', 'x = "<|end|>"'])
def test_what_does_not_fit_is_left_out(source: str) -> None:
    """A program longer than an answer, or one whose text could end its fence or the user's message."""
    row = step(1, a=9, b=20)
    row["completions"][1]["source"] += "\n" + source
    programs = archive(count=9, max_new_tokens=50)
    programs.add(row)
    assert shown(programs, 2) == {"a"}


def test_groups_and_seeds_see_different_programs() -> None:
    row = step(1, a=9, b=9, c=9, d=9)
    one, other = archive(count=4, seed=1), archive(count=4, seed=2)
    for programs in (one, other):
        programs.add(row)
    assert len(shown(one, 2)) == 4
    texts = [[programs.example(2, i) for i in range(20)] for programs in (one, one, other)]
    assert texts[0] == texts[1] != texts[2]


def test_the_sequence_has_room_for_an_example() -> None:
    configs = [program.parse_arguments(["--model", "tiny", *more]) for more in ([], ["--archive", "4"])]
    assert [config.max_seq_length for config in configs] == [632, 696]


def check_the_prompts() -> None:
    config = program.TrainConfig(steps=4, generations=16, archive=0)
    ladder = program.Ladder([program.Stage(6, 2048)])
    empty = Archive(config, words)
    empty.add(step(1, a=20))
    rows, without = program.training_set(config, ladder, empty), program.training_set(config, ladder)
    assert [rows[i] for i in range(8)] == [without[i] for i in range(8)]
    assert rows[5]["prompt"][0]["content"] == program.build_prompt(wording=5)


def test_without_an_archive_the_prompt_is_the_task_alone() -> None:
    call(check_the_prompts)


def prompts_of(config: program.TrainConfig, programs: Archive) -> Iterator[str]:
    """The prompts of a run's groups."""
    rows = program.training_set(config, program.Ladder([program.Stage(4, 64)]), programs)
    return (rows[i]["prompt"][0]["content"] for i in range(len(rows)))


def check_a_real_run(folder: str) -> None:
    model, tokenizer = loaded()
    config = dataclasses.replace(program.train_defaults("tiny"), archive=3, steps=4, generations=4, batch_size=8)
    file, ladder = Path(folder) / "rollouts.jsonl", program.Ladder([program.Stage(4, 64)])
    programs = Archive(config, tokenizer)
    rollouts = program.Rollouts(file, config, ladder, programs)
    rows = program.training_set(config, ladder, programs)
    trainer = program.make_trainer(model, tokenizer, config, Path(folder), rollouts, rows)
    seen = list[list[str]]()
    generate = trainer._generate_and_score_completions

    def noting(inputs: Any) -> dict[str, Any]:
        seen.append([row["prompt"][0]["content"] for row in inputs])
        batch: dict[str, Any] = generate(inputs)
        return batch

    trainer._generate_and_score_completions = noting
    trainer.train()
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    assert [len(step) for step in seen] == [8] * 4
    for number, prompts in enumerate(seen):
        earlier = {done["source"] for step in steps[: max(0, number - 1)] for done in step["completions"]}
        for prompt in prompts:
            task, found, source = prompt.partition("\nA program that did well so far")
            assert bool(found) == (number >= 2)
            assert task in {program.build_prompt(4, 64, wording=i) for i in range(8)}
            assert not found or source.partition("```python\n")[2].removesuffix("\n```") in earlier
    check_the_resumed(config, tokenizer, file, seen)


def check_the_resumed(config: program.TrainConfig, tokenizer: Any, file: Path, seen: list[list[str]]) -> None:
    """A run that goes on after a checkpoint at any step."""
    for done in (3, 2, 1):
        programs = Archive(config, tokenizer)
        rollouts = program.Rollouts(file, config, program.Ladder([program.Stage(4, 64)]), programs)
        for row in rewind(file, done):
            rollouts.add(row)
        prompts = list(prompts_of(config, programs))
        assert [prompts[2 * done], prompts[2 * done + 1]] == [seen[done][0], seen[done][4]]


def test_a_runs_prompts_hold_programs_of_earlier_steps_also_after_a_resume(base: Path, tmp_path: Path) -> None:
    """Groups of the third step on.  A resumed run reads the archive from rollouts.jsonl."""
    call(check_a_real_run, tmp_path)
