"""The embedded model, and two real steps of GRPO on it: Unsloth's loader, LoRA, TRL's trainer, the jailed players."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.helpers import descendants
from tests.test_cli import run

STEPS, GENERATIONS = 2, 8


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    folder: Path
    result: dict[str, Any]
    stderr: str
    rollouts: list[dict[str, Any]]


@pytest.fixture(scope="session")
def base() -> Path:
    """The embedded model: from the user's cache, or warm-started, which takes about a minute."""
    program.prepare_environment(offline=True)
    return program.warm_start()


@pytest.fixture(scope="session")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of training through the command line."""
    out = tmp_path_factory.mktemp("runs")
    numbers = {"steps": STEPS, "generations": GENERATIONS, "batch-size": GENERATIONS, "accumulation": 1, "boards": 2,
               "learning-rate": 1e-3, "save-steps": 1, "games": 4, "target": 512, "max-new-tokens": 96}  # fmt: skip
    flags = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    done = run("--model", "tiny", "--output-dir", out, "--run-name", "two-steps", "--json", *flags)
    assert done.returncode == 0, done.stderr
    folder = out / "two-steps"
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    return Run(folder, json.loads(done.stdout.splitlines()[-1]), done.stderr, rollouts)


@pytest.mark.parametrize("keys", list(program.LAYOUTS))
def test_composed_strategies_load_and_answer_with_keys(keys: str, pool: program.Pool) -> None:
    """Every program that the warm start imitates is legal: it loads, and never returns what is no key."""
    rng = random.Random(1)
    sources = [program.compose_strategy(rng, program.LAYOUTS[keys]) for _ in range(40)]
    results = program.execute_strategies(sources, [1], target=64, keys=keys)
    assert {game.outcome for games in results for game in games} <= {"success", "lost", "stuck"}
    assert not any(program.find_cheating(source) for source in sources)


def test_composed_strategies_are_of_very_different_quality(pool: program.Pool) -> None:
    rng = random.Random(2)
    sources = [program.compose_strategy(rng, program.LAYOUTS["bepo"]) for _ in range(60)]
    tiles = [games[0].max_tile for games in program.execute_strategies(sources, [1])]
    assert min(tiles) <= 64
    assert max(tiles) == 2048
    assert sum(tile == 2048 for tile in tiles) < 0.45 * len(tiles)


def test_warm_start_gives_the_same_weights_for_the_same_seed(tmp_path: Path) -> None:
    config = program.TinyConfig(steps=2, batch=4, corpus=50)
    weights = [
        (program.warm_start(tmp_path / name, seed=5, config=config) / "model.safetensors").read_bytes() for name in "ab"
    ]
    assert weights[0] == weights[1]


def test_an_interrupted_warm_start_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    config = program.TinyConfig(steps=2, batch=4, corpus=50)
    with pytest.raises(KeyboardInterrupt):
        program.warm_start(tmp_path / "tiny", config=config, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_the_prompt_opens_the_final_channel(base: Path) -> None:
    """Without it a harmony model spends the tokens of the limit on an analysis."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    for _ in range(2):  # once is enough, and twice does no more
        program.answer_at_once(tokenizer)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|start|>user<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>"


def test_the_result_has_the_promised_fields(trained: Run) -> None:
    assert {"before", "after", "controls", "steps", "seconds", "run"} <= trained.result.keys()
    assert trained.result["steps"] == STEPS
    assert trained.result["run"] == str(trained.folder)
    scores = [trained.result[name] for name in ("before", "after")] + list(trained.result["controls"].values())
    for score in scores:
        assert 0 <= score["won_low"] <= score["won"] <= score["won_high"] <= 1
        assert score["largest_tile_median"] >= 2


def test_people_get_a_line_per_step_on_stderr(trained: Run) -> None:
    assert [line.split()[1] for line in trained.stderr.splitlines() if line.startswith("step ")] == ["1/2", "2/2"]
    assert "greedy on empty cells" in trained.stderr


def test_a_group_shares_its_boards_and_a_new_step_brings_new_ones(trained: Run) -> None:
    groups = [step["completions"] for step in trained.rollouts]
    boards = [{tuple(game["seed"] for game in row["results"]) for row in group} for group in groups]
    assert [len(step["completions"]) for step in trained.rollouts] == [GENERATIONS] * STEPS
    assert all(len(step) == 1 for step in boards)
    assert boards[0].isdisjoint(boards[1])
    assert not {s for step in boards for group in step for s in group} & set(program.board_seeds(4, held_out=True))


def test_the_log_holds_sources_and_rewards_that_can_be_checked(trained: Run, pool: program.Pool) -> None:
    """Judging a logged completion again gives the logged reward."""
    row = max((row for step in trained.rollouts for row in step["completions"]), key=lambda row: float(row["reward"]))
    seeds = [game["seed"] for game in row["results"]]
    rewards = program.strategy_succeeds([row["text"]], seeds=[seeds], target=[512])
    assert rewards == [pytest.approx(row["reward"])]


def test_checkpoints_curves_and_adapter_are_written(trained: Run) -> None:
    names = {path.name for path in trained.folder.iterdir()}
    assert {"checkpoint-1", "checkpoint-2", "adapter", "config.json", "result.json", "rollouts.jsonl"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert json.loads((trained.folder / "config.json").read_text())["generations"] == GENERATIONS


def test_curves_hold_rewards_and_games(trained: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.folder))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/games/won", "train/games/distinct", "train/reward", "train/rewards/strategy_succeeds/mean"} <= tags
    assert [event.step for event in events.Scalars("train/games/won")] == [1, 2]


def test_training_changes_the_adapter(trained: Run) -> None:
    """LoRA's B matrices start at zero: what is not zero was learned, on attention and on experts alike."""
    from safetensors.torch import load_file

    weights = load_file(trained.folder / "adapter" / "adapter_model.safetensors")
    learned = {name for name, tensor in weights.items() if "lora_B" in name and tensor.abs().max() > 0}
    assert any("self_attn" in name for name in learned)
    assert any("experts" in name for name in learned)


def test_the_trained_adapter_can_be_evaluated(trained: Run) -> None:
    done = run("eval", trained.folder / "adapter", "--games", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["games"] == 4


def test_training_leaves_no_process(trained: Run) -> None:
    """Only what these tests themselves started is left."""
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())]
    assert not any(str(trained.folder.parent).encode() in command for command in commands)
