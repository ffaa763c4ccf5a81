"""Two real steps of GRPO on the embedded model: Unsloth's loader, LoRA, TRL's trainer, the jailed players."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import gpt_2048_rl as program
from tests.conftest import GENERATIONS, SIZE, STEPS, TARGET, Run, flags
from tests.helpers import HELD_OUT
from tests.preloaded import call, run
from toolkit import stage_name
from toolkit.games import programs
from toolkit.games.evaluation import board_name
from toolkit.run import results
from toolkit.run.reading import read_curves
from toolkit.run.steps import OUTCOMES


def check_the_channel(base: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    asked = [{"role": "user", "content": "x"}]
    for reasoning, end in (("none", "<|channel|>final<|message|>"), ("low", "")) * 2:
        for _ in range(2):
            program.open_channel(tokenizer, reasoning)
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert text == f"<|start|>user<|message|>x<|end|><|start|>assistant{end}"


def test_the_prompt_opens_the_final_channel(base: Path) -> None:
    """Without it a harmony model spends the tokens of the limit on an analysis; with an effort it is meant to.

    An adapter keeps its template, so the opening may be there already: once is enough, and it can be taken off again.
    """
    call(check_the_channel, base)


def test_the_result_has_the_promised_fields(trained: Run) -> None:
    assert {"scores", "races", "steps", "seconds", "run"} <= trained.result.keys()
    assert trained.result["steps"] == STEPS
    assert trained.result["run"] == str(trained.folder)
    for stage in trained.result["scores"].values():
        assert stage["controls"].keys() == {"random", "rotation", "greedy", "expert", "best_of_n"}
        for score in (stage["before"], stage["after"], stage["best"], *stage["controls"].values()):
            assert 0 <= score["won_low"] <= score["won"] <= score["won_high"] <= 1
            assert score["largest_tile_median"] >= 2


def test_people_get_a_line_per_step_on_stderr(trained: Run) -> None:
    assert [line.split()[1] for line in trained.stderr.splitlines() if line.startswith("step ")] == [
        f"{step}/{STEPS}" for step in range(1, STEPS + 1)
    ]
    assert "greedy on empty cells" in trained.stderr


def test_a_group_shares_its_boards_and_a_new_step_brings_new_ones(trained: Run) -> None:
    groups = [step["completions"] for step in trained.rollouts]
    boards = [{tuple(game["board"] for game in row["results"]) for row in group} for group in groups]
    assert [len(step["completions"]) for step in trained.rollouts] == [GENERATIONS] * STEPS
    assert all(len(step) == 1 for step in boards)
    assert len(set.union(*boards)) == STEPS
    held_out = {board_name(SIZE, seed) for seed in program.board_seeds(4, held_out=True)}
    assert not {board for step in boards for group in step for board in group} & held_out


def test_the_log_holds_no_seed(trained: Run) -> None:
    """With the seeds of a copied or published log, anyone could search for the moves that win its boards."""
    config = json.loads((trained.folder / "config.json").read_text())
    seeds = [program.board_seeds(config["boards"], config["seed"], step) for step in range(STEPS)]
    log = (trained.folder / "rollouts.jsonl").read_text()
    assert not {str(seed) for step in seeds for seed in step} & set(re.findall(r"\d+", log))
    names = [{game["board"] for row in step["completions"] for game in row["results"]} for step in trained.rollouts]
    assert names == [{board_name(SIZE, seed) for seed in step} for step in seeds]


def test_the_log_holds_sources_and_rewards_that_can_be_checked(trained: Run, pool: program.Pool) -> None:
    """Judging a logged completion again gives the logged reward."""
    rows = [(step["step"], row) for step in trained.rollouts for row in step["completions"]]
    step, row = max(rows, key=lambda pair: float(pair[1]["reward"]))
    config = json.loads((trained.folder / "config.json").read_text())
    seeds = program.board_seeds(config["boards"], config["seed"], step - 1)
    columns = {"seeds": [seeds], "size": [SIZE], "target": [TARGET]}
    rewards = [reward([row["text"]], **columns)[0] for reward in program.REWARDS]  # this answer was not cut off
    assert sum(rewards) == pytest.approx(row["reward"], abs=1e-4)  # logged with four digits


def test_the_log_and_the_curves_show_one_reward(trained: Run) -> None:
    """The log and the terminal had one of four rewards, TensorBoard their sum."""
    curve = read_curves(trained.folder)["reward"]
    means = {step["step"]: statistics.fmean(row["reward"] for row in step["completions"]) for step in trained.rollouts}
    assert curve == pytest.approx(means, abs=1e-3)
    assert f"reward {means[1]:5.2f}" in trained.stderr


def test_checkpoints_curves_and_adapter_are_written(trained: Run) -> None:
    names = {path.name for path in trained.folder.iterdir()}
    assert {"checkpoint-1", f"checkpoint-{STEPS}", "adapter", "config.json", "result.json", "rollouts.jsonl"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert json.loads((trained.folder / "config.json").read_text())["generations"] == GENERATIONS


@pytest.mark.slow
def test_a_run_can_be_resumed_from_its_first_step_on(tmp_path: Path) -> None:
    """A run whose terminal closed at step 3 had no checkpoint, and began again.  Without a third step there is one."""
    done = run(*flags(steps=2, save_steps=20, output_dir=tmp_path, run_name="run", best_of=4))
    assert done.returncode == 0, done.stderr
    kept = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert kept == {"checkpoint-1", "checkpoint-2"}


@pytest.fixture(scope="session")
def curves(trained: Run) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's curves: (step, value) pairs by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.folder))
    events.Reload()
    return {
        tag.removeprefix("train/"): [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.parametrize(
    "name",
    ["reward", "rewards/strategy_succeeds/mean", "games/won", "games/distinct", "games/target", "games/random_won",
     "outcomes/lost", "outcomes/timeout", "reached/64", "reached/2048", "frac_reward_zero_std", "entropy",
     "completions/mean_length", "completions/clipped_ratio", "at a glance/reward", "at a glance/games won",
     "at a glance/distinct programs", "at a glance/tokens of an answer",
     "seconds/generate", "seconds/score", "seconds/update"],
)  # fmt: skip
def test_there_is_a_curve_with_a_point_for_every_step(curves: dict[str, list[tuple[int, float]]], name: str) -> None:
    assert [step for step, _ in curves[name]] == list(range(1, STEPS + 1))


def test_divergence_and_entropy_are_sampled(curves: dict[str, list[tuple[int, float]]]) -> None:
    """For the first and every tenth step.  An untrained adapter has a KL of 0."""
    assert [step for step, _ in curves["sampled/kl"]] == [1]
    assert curves["sampled/kl"][0][1] == pytest.approx(0.0, abs=1e-6)
    assert curves["sampled/entropy"][0][1] == pytest.approx(curves["entropy"][0][1], rel=0.5)


def test_shares_of_games_add_up(curves: dict[str, list[tuple[int, float]]]) -> None:
    assert sum(curves[f"outcomes/{outcome}"][0][1] for outcome in OUTCOMES) == pytest.approx(1.0)


def loaded() -> tuple[Any, Any]:
    """Model and tokenizer as train has them."""
    config = program.train_defaults("tiny", "stable", "none")
    model, tokenizer = program.load_model("tiny", config, lambda _: None)
    return program.add_adapters(model, config), tokenizer


def trainer_of(model: Any, tokenizer: Any, config: program.TrainConfig, folder: Path) -> Any:
    """The trainer of a config."""
    ladder = program.Ladder([program.Stage(6, 2048)])
    rollouts = program.Rollouts(folder / "rollouts.jsonl", config, ladder)
    return program.make_trainer(model, tokenizer, config, folder, rollouts, program.training_set(config, ladder))


def check_the_rewards(folder: str) -> None:
    model, tokenizer = loaded()
    configs = program.TrainConfig(), program.TrainConfig(cut_off_price=3.0), program.TrainConfig(**program.PUBLISHED)
    for config, price in zip(configs, (1.0, 3.0, 0.0), strict=True):
        trainer = trainer_of(model, tokenizer, config, Path(folder))
        weights = dict(zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True))
        assert weights == {
            "function_works": 1.0,
            "no_cheating": 1.0,
            "strategy_succeeds": 1.0,
            "ends_in_time": price,
        }


def test_the_rewards_have_their_weights(base: Path, tmp_path: Path) -> None:
    """The published recipe has no penalty for a cut-off answer.  A weight of 0 in every recipe failed no test."""
    call(check_the_rewards, tmp_path)


def check_the_effort(folder: str) -> None:
    model, tokenizer = loaded()
    for reasoning, effort in (("none", "low"), ("high", "high")):
        config = program.TrainConfig(reasoning=reasoning, max_new_tokens=1)  # type: ignore[arg-type]
        trainer = trainer_of(model, tokenizer, config, Path(folder))
        assert trainer.args.chat_template_kwargs["reasoning_effort"] == effort
        before, tokenizer.chat_template = tokenizer.chat_template, "<|channel|>{{ raise_exception(reasoning_effort) }}"
        with pytest.raises(Exception, match=effort):
            program.sample_completions(model, tokenizer, ["x"], config)
        tokenizer.chat_template = before


def test_the_effort_reaches_the_chat_template(base: Path, tmp_path: Path) -> None:
    """In training and in evaluation.  Where there is no analysis it is named low: gpt-oss would be told medium."""
    call(check_the_effort, tmp_path)


def check_the_wording() -> None:
    model, tokenizer = loaded()
    tokenizer.chat_template = "{{ raise_exception(messages[0].content) }}"
    evaluator = program.Evaluator(program.EvalConfig(model="tiny"), 4, 128)
    with pytest.raises(Exception, match="128") as asked:
        programs.evaluate_model({"4x4": evaluator}, model, tokenizer)
    assert str(asked.value) == program.build_prompt(4, 128, wording=-1)


def test_a_model_is_evaluated_in_the_wording_kept_back(base: Path) -> None:
    """Training never shows it, so no model is judged on a prompt that it was trained on."""
    call(check_the_wording)


LEARNED_BY_HEART = """
KNOWN = {known}
moves = []
def strategy(board):
    moves.append(board)
    return "éuai"[len(moves) % 4] if moves[0] in KNOWN and len(moves) < 200 else ""
"""
TWENTY_MOVES = """
moves = []
def strategy(board):
    moves.append(board)
    return "éuai"[len(moves) % 4] if len(moves) < 20 else ""
"""


def check_the_best_program(folder: str) -> None:
    config, run = program.TrainConfig(games=4), Path(folder)
    evaluator = program.Evaluator(config, 16, 2048)
    by_heart = LEARNED_BY_HEART.format(known=[program.GameBoard(16, seed).board() for seed in evaluator.held_out_seeds])
    sources = (by_heart, TWENTY_MOVES)
    scores = [sum(game.score for game in games) for games in evaluator.play(sources, evaluator.held_out_seeds)]
    assert scores[0] > scores[1] > 0
    row = {"reward": 0.0, "works": "load", "cheating": "", "results": [{"max_tile": 64}]}
    completions = [row | {"source": source} for source in sources]
    step = {"step": 1, "size": 16, "target": 64, "completions": completions}
    (run / "rollouts.jsonl").write_text(json.dumps(step) + "\n")
    assert results.choose_best(evaluator, run, games=64).ranking[0] == TWENTY_MOVES
    assert (run / "best_strategy.py").read_text().endswith(TWENTY_MOVES + "\n")


def test_the_best_program_is_not_chosen_on_the_held_out_boards(tmp_path: Path) -> None:
    """A program that plays only there loses to one that plays everywhere.  A choice made there would flatter it."""
    call(check_the_best_program, tmp_path)


def test_training_changes_the_adapter(trained: Run) -> None:
    """LoRA's B matrices start at zero: what is not zero was learned, on attention and on experts alike."""
    weights = load_file(trained.folder / "adapter" / "adapter_model.safetensors")
    learned = {name for name, tensor in weights.items() if "lora_B" in name and tensor.any()}
    assert any("self_attn" in name for name in learned)
    assert any("experts" in name for name in learned)


@pytest.mark.slow
def test_groups_of_a_step_and_stages_that_climb(base: Path, tmp_path: Path) -> None:
    """Two groups, gathered over four forward passes.  Games that are won by any key lead to the next stages: another
    board, then a larger target."""
    numbers = {"steps": 7, "generations": 4, "batch-size": 2, "accumulation": 4, "games": 2, "save-steps": 7,
               "learning-rate": 1e-5, "curriculum-groups": 4, "curriculum-bar": 0.3,
               "race-games": 16, "best-of": 8, "max-new-tokens": 48}  # fmt: skip
    flags = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    done = run("--model", "tiny", "--output-dir", tmp_path, "--run-name", "climbs", "--json", *flags, *HELD_OUT,
               "--ladder", "5:8", "4:8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "climbs"
    steps = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    stages = list(dict.fromkeys((step["size"], step["target"]) for step in steps))
    assert stages == [(5, 8), (4, 8), (4, 16)][: len(stages)]
    assert len(steps) == 7
    assert len(stages) >= 2
    names = [stage_name(*stage) for stage in stages]
    assert [f"the stage is {name}: random legal moves win" in done.stderr for name in names] == [True] * len(names)
    assert f"at {names[-1]} " in done.stderr
    assert json.loads(done.stdout)["stage"] == names[-1]
    assert [name for name in names if name not in (folder / "report.html").read_text()] == []
    sizes = read_curves(folder)["games/size"]
    for step in steps:
        assert sizes[step["step"]] == step["size"]
        boards = [tuple(game["board"] for game in row["results"]) for row in step["completions"]]
        assert [len(set(boards[:4])), len(set(boards[4:])), len(set(boards))] == [1, 1, 2]
        for row in step["completions"]:
            for game in row["results"]:
                assert (game["outcome"] == "success") == (game["max_tile"] >= step["target"])


def test_a_damaged_adapter_gets_one_line(trained: Run, tmp_path: Path) -> None:
    folder = shutil.copytree(trained.folder / "adapter", tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = run("eval", folder, "--games", "4")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {weights} is missing or damaged")


def test_the_trained_adapter_can_be_evaluated(trained: Run) -> None:
    done = run("eval", trained.folder / "adapter", "--games", 4, *HELD_OUT, "--max-new-tokens", 48, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["scores"]["3x3"]["model"]["games"] == 4
