"""That there is something to learn, and that the way it is learned is right: skill, stages, prompts, groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.preloaded import call
from tests.programs import PROGRAMS, REWARD_BOARDS, SKILL_BOARDS, recorded_games, refereed, wrongly_paid
from tests.script.test_rewards import fenced
from toolkit.run import watcher

BOARDS = tuple(range(101, 109))


COLLAPSES = {  # what models ended with, in public
    "...": "def strategy(board):\n    ...",
    "constant move": 'def strategy(board):\n    return "a"',
    "parity of tile counts": 'def strategy(board):\n    n = sum(map(bool, sum(board, [])))\n    return "ai"[n % 2]',
    "adjacent pairs, else None": "def strategy(board):\n    for r in board:\n        for x, y in zip(r, r[1:]):\n"
    '            if x and x == y:\n                return "a"',
    "undefined helper": "def strategy(board):\n    return find_best_move(board)",
    "a brace": 'def strategy(board):\n    return "{"',
    "input()": "def strategy(board):\n    return input()",
    "while True": "def strategy(board):\n    while True:\n        pass",
}
BETTER = ("random two keys", "random keys", "first legal", "random legal", "most empty", "squares")


def games(sources: Sequence[str], **columns: Any) -> list[program.Verdict]:
    """The verdicts on some programs, all on the same boards."""
    lists = {name: [value] * len(sources) for name, value in {"seeds": BOARDS, **columns}.items()}
    return program.judge([fenced(source) for source in sources], **lists)


def rewards(sources: Sequence[str], **columns: Any) -> list[float]:
    """The sum of all rewards for each program of a group, which plays the same boards."""
    lists = {name: [value] * len(sources) for name, value in {"seeds": BOARDS, **columns}.items()}
    each = [reward([fenced(source) for source in sources], **lists) for reward in program.REWARDS]
    return [sum(values) for values in zip(*each, strict=True)]


@pytest.mark.parametrize("target", [256, 1024, 4096, 16384, 65536])
@pytest.mark.parametrize("size", [4, 6])
def test_rewards_rank_like_skill(size: int, target: int) -> None:
    """78 programs, blind, slow and broken ones among them: in at most 3% of the pairs the worse one is paid as much.

    A timeout was worth -1 whatever had been reached: at 32768 a search that makes 65536 was paid like one that hangs.
    """
    wrong, pairs = wrongly_paid(size, target)
    assert pairs > 400
    assert len(wrong) <= 0.03 * pairs


SURE = ("left", "rotation", "first legal", "first legal, corner", "most empty", "squares", "two ahead, empty")


@pytest.mark.parametrize("name", SURE)
def test_a_recorded_game_is_what_the_referee_sees(pool: program.Pool, name: str) -> None:
    """Programs without chance play as they did when they were recorded: outcome, moves and tile, on both boards."""
    games = [game for game in recorded_games(4)[name] if game[0] in (SKILL_BOARDS[0], REWARD_BOARDS[0])]
    results = program.execute_strategies([PROGRAMS[name]], [game[0] for game in games], 4, 512, pool=pool)[0]
    expected = [refereed(game, program.Job("", (), 4, 512)) for game in games]
    assert [(r.outcome, r.steps, r.max_tile) for r in results] == [(r.outcome, r.steps, r.max_tile) for r in expected]


@cache
def rewards_of_all(size: int, target: int) -> dict[str, float]:
    """What collapsed and better programs get in a group."""
    sources = COLLAPSES | {name: PROGRAMS[name] for name in BETTER}
    values = rewards(list(sources.values()), seeds=BOARDS[:2], timeout=0.5, size=size, target=target)
    return dict(zip(sources, values, strict=True))


@pytest.mark.parametrize(("size", "target"), [(6, 2048), pytest.param(4, 16384, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COLLAPSES)
def test_a_collapse_ranks_below_every_program_that_plays_better(
    pool: program.Pool, name: str, size: int, target: int
) -> None:
    """In a group with better programs it has the least reward, so its advantage is never positive."""
    values = rewards_of_all(size, target)
    assert values[name] < min(values[better] for better in BETTER)


@pytest.mark.parametrize("name", COLLAPSES)
def test_the_watcher_names_each_collapse(pool: program.Pool, name: str) -> None:
    """One group holds only that program; in the other, one completion still plays."""
    sources = [COLLAPSES[name]] * 8
    assert "collapsed" in look(sources)
    assert "collapsed" not in look([*sources, PROGRAMS["random legal"]])


def look(sources: list[str]) -> str:
    """What the watcher says of a step with this one group."""
    columns = {"seeds": BOARDS[:2], "timeout": 0.2}
    totals = rewards(sources, **columns)
    rows = [{"text": source, "reward": total, **dataclasses.asdict(verdict)}
            for source, total, verdict in zip(sources, totals, games(sources, **columns), strict=True)]  # fmt: skip
    row = {"size": 6, "target": 2048, "completions": rows}
    summary = watcher.StepSummary.of(row, program.flat_groups(totals, len(rows)), 1.0)
    return watcher.Watcher(program.TrainConfig(curriculum=False)).look(summary, {})


def test_equal_rewards_are_flat_whatever_their_last_digit() -> None:
    """TRL's own share of groups without spread took rounding for spread: half of all collapses would not be seen."""
    import torch

    totals = [2 + (-1 + 3 * i / 11 - 1 + 3 * j / 11) / 2 for i in range(1, 8) for j in range(1, 8)]
    assert any(torch.tensor([total] * 32).std() > 0 for total in totals)
    assert all(program.flat_groups([total] * 32, 32) == [True] for total in totals)
    assert program.flat_groups([1.0] * 4 + [1.0, 1.1] * 2, 4) == [True, False]


def ladder_of(*stages: str, bar: float = 0.9, groups: int = 8) -> program.Ladder:
    """A ladder with these stages."""
    return program.Ladder([program.Stage.read(stage) for stage in stages], bar, groups)


def climbed(ladder: program.Ladder, steps: int) -> list[tuple[int, int]]:
    """The stages of so many steps, each of which wins all its games."""
    for step in range(steps):
        ladder.record(step, ladder.at(step), 1.0)
    return [ladder.at(step) for step in range(steps)]


def test_a_stage_is_a_board_and_a_target() -> None:
    assert program.Stage.read("4:2048") == (4, 2048)


@pytest.mark.parametrize("text", ["", "4", "4:", ":2048", "4x2048", "4:2048:1", "4:-2", "1:2048", "4:1000", "a:2048"])
def test_what_is_no_stage_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the command line's test reads the message
        program.Stage.read(text)


def test_the_next_stage_begins_when_nine_in_ten_games_are_won() -> None:
    ladder = ladder_of("6:2048", "4:256", "4:512")
    for won in (*[1.0] * 7, 0.1, *[1.0] * 7):
        ladder.record(0, program.Stage(6, 2048), won)
        assert len(ladder.since) == 1
    ladder.record(0, program.Stage(6, 2048), 1.0)
    assert ladder.since == [(0, (6, 2048)), (2, (4, 256))]
    for _ in range(9):  # groups under way when it began do not count
        ladder.record(0, program.Stage(6, 2048), 1.0)
    assert len(ladder.since) == 2
    for _ in range(8):
        ladder.record(9, program.Stage(4, 256), 0.95)
    assert ladder.since[-1] == (11, (4, 512))


def test_stages_come_in_order_and_then_the_target_doubles() -> None:
    stages = climbed(ladder_of("6:64", "5:64", "4:32", groups=1), 12)
    assert list(dict.fromkeys(stages)) == [(6, 64), (5, 64), (4, 32), (4, 64), (4, 128), (4, 256)]


def test_the_default_ladder_leads_from_the_large_board_to_the_original_game() -> None:
    config = program.train_defaults("tiny")
    stages = [program.Stage.read(stage) for stage in config.ladder]
    assert [stages[0], stages[-2]] == [(6, 2048), (4, 2048)]
    assert stages == sorted(stages, key=lambda stage: (-stage.size, stage.target))


def test_without_a_curriculum_the_first_stage_stays() -> None:
    assert set(climbed(ladder_of("6:2048", "4:256", bar=1.0), 12)) == {(6, 2048)}


def test_a_new_stage_holds_from_the_step_after_the_next_on() -> None:
    """The loader already has the next step's groups, so a resumed run must give them the same stage."""
    assert climbed(ladder_of("6:2048", "4:256"), 12) == [(6, 2048)] * 9 + [(4, 256)] * 3


def check_prompts() -> None:
    ladder = ladder_of("6:2048", "4:256")
    rows = program.training_set(program.TrainConfig(steps=40, generations=16), ladder)
    prompts = [rows[i]["prompt"][0]["content"] for i in range(16)]
    assert len(set(prompts)) == len(program.WORDINGS) - 1 >= 8
    assert all("2048x2048" not in prompt and "6" in prompt and "2048" in prompt for prompt in prompts)
    assert program.build_prompt(wording=-1) not in prompts
    assert len({tuple(rows[i]["seeds"]) for i in range(16)}) == 16
    ladder.since.append((5, program.Stage(4, 256)))  # a step has two groups
    assert [(rows[i]["size"], rows[i]["target"]) for i in (9, 10)] == [(6, 2048), (4, 256)]
    assert rows[10]["prompt"][0]["content"] == program.build_prompt(4, 256, wording=2)


def test_prompts_follow_the_ladder_and_vary() -> None:
    """Eight wordings in turns, board and target of the moment, other boards for every group; never the wording kept
    back."""
    call(check_prompts)


def check_the_published_recipe() -> None:
    config = program.train_defaults("tiny", "published", "none")
    rows = program.training_set(config, ladder_of(*config.ladder))
    assert len({rows[i]["prompt"][0]["content"] for i in range(20)}) == 1
    assert (config.generations, config.learning_rate, config.accumulation, config.flat_reward) == (2, 5e-5, 4, True)
    assert (config.ladder, config.curriculum, config.entropy_coef) == (("6:2048",), False, 0.0)


def test_the_published_recipe_has_one_prompt() -> None:
    call(check_the_published_recipe)


@pytest.mark.parametrize("by_token", [False, True])
def test_groups_without_spread_do_not_thin_out_the_others(by_token: bool) -> None:
    """The loss of a batch with two flat groups is that of the third group alone, by completions and by tokens."""
    import torch

    mask = torch.tensor([[1, 1, 1]] * 4 + [[1, 0, 0], [1, 1, 0]])
    advantages = torch.tensor([1e-7, 1e-7, 0.0, 0.0, 1.0, -1.0])

    def loss(advantages: torch.Tensor, mask: torch.Tensor) -> float:
        by_row = (mask * advantages[:, None] * torch.tensor([1.0, 2.0, 3.0])).sum()
        return (by_row / (mask.sum() if by_token else len(mask))).item()

    batch = {"advantages": advantages, "completion_mask": mask}
    kept = program.without_flat_groups(batch, [True, True, False], by_token)
    assert loss(kept["advantages"], mask) == pytest.approx(loss(advantages[4:], mask[4:]))


@pytest.mark.parametrize("flat", [[True, True], [False, False]])
def test_a_batch_of_one_kind_stays_as_it_is(flat: list[bool]) -> None:
    batch: dict[str, Any] = {"advantages": None}
    assert program.without_flat_groups(batch, flat, by_token=False) is batch


@pytest.mark.parametrize("command", [["--model"], ["eval"], ["play", "--model"]])
@pytest.mark.parametrize(("effort", "tokens"), [("none", 768), ("low", 1024), ("medium", 2048), ("high", 4096)])
def test_reasoning_raises_the_limits(command: list[str], effort: str, tokens: int) -> None:
    asked = [*command, "unsloth/gpt-oss-20b", "--reasoning", effort]
    config = program.parse_arguments(asked)
    assert (config.max_new_tokens, config.max_seq_length) == (tokens, 568 + tokens)
    assert program.parse_arguments([*asked, "--max-new-tokens", "900"]).max_new_tokens == 900


@pytest.mark.parametrize(
    ("model", "recipe", "effort", "tokens"),
    [("openai/gpt-oss-20b", "published", "none", 200), ("openai/gpt-oss-20b", "published", "low", 1024),
     ("tiny", "stable", "none", 64), ("tiny", "published", "none", 64), ("smollm2", "published", "none", 96)],
)  # fmt: skip
def test_the_published_limit_is_for_models_without_their_own(model: str, recipe: str, effort: str, tokens: int) -> None:
    assert program.train_defaults(model, recipe, effort).max_new_tokens == tokens


@pytest.mark.parametrize("command", [["--model"], ["eval"], ["play", "--model"]])
def test_an_answer_fits_the_positions_of_a_small_model(command: list[str], tmp_path: Path) -> None:
    """As in a folder of the embedded model, which has 1,024.  A limit that is asked for stays."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    assert program.parse_arguments([*command, str(tmp_path)]).max_new_tokens == 1024 - 568
    assert program.parse_arguments([*command, str(tmp_path), "--max-new-tokens", "900"]).max_new_tokens == 900
    assert program.parse_arguments([*command, "tiny"]).max_new_tokens == 64


def test_the_ladder_of_gpt_oss_begins_where_its_programs_differ() -> None:
    """With 64 on 4x4: docs/recipes.md.  The embedded model's measured figures belong to a ladder of its own."""
    assert program.train_defaults("unsloth/gpt-oss-20b").ladder == ("4:64", "4:256", "4:512")
    assert program.train_defaults("tiny").ladder == ("6:2048", "4:512", "4:2048", "4:4096")


def test_more_tokens_also_fit_the_sequence() -> None:
    """The limit of prompt and completion together stayed that of the defaults."""
    config = program.parse_arguments(["--model", "tiny", "--max-new-tokens", "400"])
    assert config.max_seq_length == 968


def test_a_number_on_the_command_line_wins_over_the_recipe() -> None:
    config = program.parse_arguments(["--model=tiny", "--recipe", "published", "--generations", "4"])
    assert isinstance(config, program.TrainConfig)
    assert (config.generations, config.learning_rate, config.lora_rank) == (4, 5e-5, 32)
