"""The end of a run: how it goes on after an error, and the best of N."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.conftest import Run
from tests.helpers import HELD_OUT
from tests.preloaded import call, run
from toolkit import OutOfMemory, ServerFailed, UsageError
from toolkit.games import duration, evaluation, programs
from toolkit.run import results


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ServerFailed("it ended"), ""),
        (OutOfMemory("the model was updated", "--batch-size 2", resume_with="--batch-size 2"), " --batch-size 2"),
        (OutOfMemory("the policy was measured", "fewer --max-new-tokens"), None),  # a resumed run may not change it
    ],
    ids=["server", "other options", "none"],
)
def test_a_run_that_breaks_off_says_how_it_goes_on_if_it_can(
    error: UsageError, options: str | None, tmp_path: Path
) -> None:
    said: list[str] = []
    with pytest.raises(type(error)), results.saying_how_to_go_on(tmp_path / "run", program.TrainConfig(), said.append):
        raise error
    command = f"to resume: python gpt_2048_rl.py --output-dir {tmp_path} --run-name run"
    assert said[1:] == ([] if options is None else [command + options])


def test_the_untrained_model_plays_the_boards_that_the_others_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that went on with another key, or in a copied folder, set its scores of old boards beside those of new."""
    there, played = SimpleNamespace(size=4, held_out_seeds=[1, 3]), list[int]()
    games: Any = SimpleNamespace(evaluators={"4x4": there}, boards=2)
    model = SimpleNamespace(disable_adapter=contextlib.nullcontext)

    def evaluate(*_: Any) -> dict[str, evaluation.Score]:
        played.append(there.held_out_seeds[0])
        return {"4x4": evaluation.score([16, there.held_out_seeds[0]], 128)}

    monkeypatch.setattr(results, "evaluate_model", evaluate)
    for seeds in ([1, 3], [1, 3], [5, 7]):
        there.held_out_seeds = seeds
        scores = results.score_untrained(tmp_path, games, model, None, print)
        assert scores["4x4"].tiles == (16, seeds[0])
    assert played == [1, 5]


# ---------------------------------------------------------------------------------------------------------------------
# The best of N


def test_the_best_of_n_is_kept_with_those_behind_it(trained: Run) -> None:
    """As many answers as training judged, and a race like that of the run's own programs."""
    best = json.loads((trained.folder / "best_of_n.json").read_text())
    assert (trained.folder / "best_of_n.py").read_text().partition("\n")[2] == best[0] + "\n"
    race = trained.result["races"]["best_of_n"]
    assert race["sampled"] == sum(len(step["completions"]) for step in trained.rollouts) + duration.SURE
    assert len(best) == min(100, race["played"])
    assert 0 < trained.result["races"]["best"]["played"] <= race["sampled"]


def check_the_untrained_model() -> None:
    config = program.train_defaults("tiny", "stable", "none")
    config.games, config.max_new_tokens = 8, 64
    model, tokenizer = program.load_model("tiny", config, lambda _: None)
    evaluator = program.Evaluator(config, 4, 128)
    start = evaluator.answers(model, tokenizer, 12, range(2))
    model = program.add_adapters(model, config)
    for name, weights in model.named_parameters():
        if "lora_B" in name:
            weights.data.normal_(std=0.1)
    assert evaluator.answers(model, tokenizer, 12, range(2)) != start
    with model.disable_adapter():
        assert evaluator.answers(model, tokenizer, 12, range(2)) == start


def test_the_best_of_n_is_written_by_the_untrained_model(base: Path) -> None:
    """An adapter that was trained changes the answers; switched off, it does not."""
    call(check_the_untrained_model)


def check_the_wordings() -> None:
    config = program.train_defaults("tiny", "stable", "none")
    model, tokenizer = program.load_model("tiny", config, lambda _: None)
    plays = "def strategy(board):\n    return 'a'"
    answers = [plays, "no program", f"import os\n{plays}", f"x = 1 / 0\n{plays}"] * 3

    def sample(model: Any, tokenizer: Any, prompts: Sequence[str], config: Any) -> list[str]:
        assert prompts == [program.build_prompt(4, 128, wording=n % 8) for n in range(12)]
        assert config.temperature == 0.4
        return answers

    program.sample_completions = sample
    evaluator, adapted = program.Evaluator(config, 4, 128), program.add_adapters(model, config)
    assert programs.sampled_programs(evaluator, adapted, tokenizer, 12, temperature=0.4) == [plays]


def test_programs_are_asked_for_in_the_wordings_of_training(base: Path) -> None:
    """For the best of N, and at a lower temperature for the race.  Those that cheat or do not load take no part."""
    call(check_the_wordings)


def test_eval_of_a_run_shows_its_best_of_n(trained: Run) -> None:
    done = run("eval", trained.folder, "--games", 4, *HELD_OUT, "--max-new-tokens", 48, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])["scores"]
    assert {name: stage["controls"] for name, stage in told.items()} == {
        name: stage["controls"] for name, stage in trained.result["scores"].items()}  # fmt: skip
