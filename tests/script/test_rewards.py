"""Rewards: their values worked out by hand, one verdict for all of them, and an order among programs of known worth."""

from __future__ import annotations

import math
from typing import Any

import pytest

import gpt_2048_rl as program
from gpt_2048_rl import REWARDS, GameResult, function_works, game_reward, no_cheating, strategy_succeeds
from toolkit.run.steps import OUTCOMES


def fenced(source: str) -> str:
    return f"```python\n{source}\n```"


LEFT = fenced('def strategy(board):\n    return "a"')
RANDOM_SOURCE = 'import random\ndef strategy(board):\n    return random.choice("éuai")'
RANDOM = fenced(RANDOM_SOURCE)


def rewards(completion: Any, **columns: Any) -> list[float]:
    """The rewards of one completion; a column is given as its one entry."""
    lists = {name: [value] for name, value in {"seeds": [1, 2], **columns}.items()}
    return [reward([completion], **lists)[0] for reward in REWARDS]


def result(outcome: str, max_tile: int = 64) -> GameResult:
    return GameResult(0, outcome, 10, max_tile, 100, 0.1)


@pytest.mark.parametrize(
    ("outcome", "max_tile", "target", "value", "flat"),
    [
        ("success", 2048, 2048, 20.0, 20.0),
        ("success", 128, 128, 20.0, 20.0),
        ("lost", 1024, 2048, 2 + 8 * 1020 / 2044, 2.0),
        ("lost", 64, 2048, 2 + 8 * 60 / 2044, 2.0),
        ("lost", 2, 2048, 2.0, 2.0),
        ("lost", 64, 128, 2 + 8 * 60 / 124, 2.0),
        ("stuck", 64, 2048, 2 + 8 * 60 / 2044 - 3 / 4, 2.0),
        ("stuck", 1024, 2048, 2 + 8 * 1020 / 2044 - 3 / 64, 2.0),
        ("timeout", 4, 2048, -1.0, -1.0),
        ("timeout", 1024, 2048, 2 + 8 * 1020 / 2044 - 3 / 64, -1.0),
        ("invalid_move", 1024, 2048, 2 + 8 * 1020 / 2044 - 5 / 64, -3.0),
        ("error", 2, 2048, -3.0, -3.0),
        ("error", 4, 2048, -3.0, -3.0),
        ("error", 64, 128, 2 + 8 * 60 / 124 - 5 / 4, -3.0),
        ("no_function", 2, 2048, 0.0, 0.0),
    ],
)
def test_value_of_a_game(outcome: str, max_tile: int, target: int, value: float, flat: float) -> None:
    """Worked out by hand from the rules: progress is the largest tile as a share of the target, both from 4 on.

    What a broken-off game costs falls from 3 or 5 at 16, in inverse proportion to the tile.
    """
    assert game_reward(result(outcome, max_tile), target) == pytest.approx(value)
    assert game_reward(result(outcome, max_tile), target, flat=True) == flat


def test_every_outcome_has_a_value() -> None:
    """Each outcome has its own value, and a larger tile is never worth less."""
    for outcome in OUTCOMES:
        values = [game_reward(result(outcome, 1 << exponent), 2048) for exponent in range(1, 12)]
        assert values == sorted(values)
        assert all(map(math.isfinite, values))


@pytest.mark.parametrize("exponent", range(1, 17))
def test_breaking_off_is_worth_less_than_losing(exponent: int) -> None:
    """With the same tile, at any target.  No outcome is worth less than at its first move."""
    for tile in (1 << n for n in range(1, exponent)):
        lost, *stopped = (game_reward(result(outcome, tile), 1 << exponent) for outcome in program.LOST)
        assert lost > max(stopped)
        assert all(least <= reward for least, reward in zip(program.LOST.values(), [lost, *stopped], strict=True))


@pytest.mark.parametrize("target", [2, 4])
def test_progress_is_bounded(target: int) -> None:
    """A tile above the target is not more than a whole progress, and the smallest targets divide by nothing."""
    assert game_reward(result("lost", 4), target) == 2.0
    assert game_reward(result("lost", 16), target) == 10.0


COMPLETIONS = {  # completion -> function_works, no_cheating, and strategy_succeeds where it does not depend on play
    "loads": (LEFT, 1.0, 1.0, None),
    "nothing": ("", -2.0, -1.0, 0.0),
    "prose": ("I would go left.", -2.0, -1.0, 0.0),
    "does not parse": (fenced("def strategy(board)\n    return 'a'"), -2.0, -1.0, 0.0),
    "truncated": ("```python\ndef strategy(board):\n    return 'a", -2.0, -1.0, 0.0),
    "async": (fenced("async def strategy(board):\n    return 'a'"), -2.0, -1.0, 0.0),
    "parses, but does not compile": (fenced("def strategy(board):\n    break"), -2.0, -1.0, 0.0),
    "fails to load": (fenced("x = 1 / 0\ndef strategy(board):\n    return 'a'"), -0.5, 1.0, -3.0),
    "never loads": (fenced("while True:\n    pass\ndef strategy(board):\n    return 'a'"), -0.5, 1.0, -1.0),
    "cheats": (fenced("import os\ndef strategy(board):\n    return 'a'"), -0.5, -20.0, 0.0),
    "cheats, but does not compile": (fenced("import os\ndef strategy(board):\n    break"), -2.0, -20.0, 0.0),
    "cheats, but loads": (fenced("def strategy(board):\n    return eval('\"a\"')"), 1.0, -20.0, 0.0),
    "raises": (fenced("def strategy(board):\n    return best(board)"), 1.0, 1.0, -3.0),
    "wrong key": (fenced("def strategy(board):\n    return 'left'"), 1.0, 1.0, -3.0),
    "never answers": (fenced("def strategy(board):\n    while True: pass"), 1.0, 1.0, -1.0),
}


@pytest.mark.parametrize(("completion", "works", "clean", "succeeds"), COMPLETIONS.values(), ids=COMPLETIONS.keys())
def test_rewards_of_a_completion(
    pool: program.Pool, completion: str, works: float, clean: float, succeeds: float | None
) -> None:
    """The three tell apart whether a program loads, whether it cheats, and how far it gets."""
    values = rewards(completion, seeds=[1], timeout=0.3)
    assert values[:2] == [works, clean]
    assert succeeds is None or values[2] == succeeds


def test_success_is_the_mean_over_the_boards(pool: program.Pool) -> None:
    """The number that strategy_succeeds gives is the mean of what the verdict's games are worth."""
    (verdict,) = program.judge([RANDOM], seeds=[[1, 2, 3, 4, 5]], size=[4], target=[128])
    assert {game.outcome for game in verdict.results} > {"success"}
    mean = sum(game_reward(game, 128) for game in verdict.results) / 5
    assert strategy_succeeds([RANDOM], seeds=[[1, 2, 3, 4, 5]], size=[4], target=[128]) == [pytest.approx(mean)]


def test_flat_scheme_is_a_column(pool: program.Pool) -> None:
    """The published scheme per row: 20 for a win and 2 for anything else that played to an end."""
    columns = {"seeds": [[1, 2]] * 2, "size": [4] * 2, "target": [2048] * 2}
    graded, flat = strategy_succeeds([LEFT, LEFT], flat_reward=[False, True], **columns)
    assert flat == 2.0
    assert -1.0 <= graded < 2.0


def test_message_lists_and_strings_are_the_same(pool: program.Pool) -> None:
    """TRL hands over lists of messages for conversational data, strings for plain data."""
    messages = [{"role": "assistant", "content": LEFT}]
    assert rewards(messages) == rewards(LEFT)


def test_messages_without_content_are_empty(pool: program.Pool) -> None:
    """A message whose content is None, or a completion of no messages at all."""
    nothing = [-2.0, -1.0, 0.0]
    assert [rewards([{"role": "assistant", "content": None}]), rewards([]), rewards([{}])] == [nothing] * 3


class Counted:
    """Counts the jobs that reach the workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[program.Job] = []
        judge = program._Worker.judge

        def counting(worker: program._Worker, job: program.Job) -> program.Verdict:
            self.jobs.append(job)
            return judge(worker, job)

        monkeypatch.setattr(program._Worker, "judge", counting)
        program._judge_batch.cache_clear()


def test_one_judgement_for_all_three_rewards(pool: program.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer calls the functions in turn; the first call judges the completions."""
    counted = Counted(monkeypatch)
    batch = [LEFT, RANDOM, "prose"]
    for reward in REWARDS:
        reward(batch, seeds=[[7, 8]] * 3, prompts=["p"] * 3, completion_ids=[[1]] * 3, trainer_state=None)
    assert len(counted.jobs) == 3


def test_equal_completions_are_judged_once(pool: program.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that says the same thing eight times costs one game per board."""
    counted = Counted(monkeypatch)
    assert len(set(strategy_succeeds([LEFT] * 8, seeds=[[7, 8]] * 8))) == 1
    assert len(counted.jobs) == 1


def test_equal_completions_on_other_boards_are_judged_again(
    pool: program.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new step brings new boards."""
    counted = Counted(monkeypatch)
    for seeds in ([7, 8], [9, 10]):
        strategy_succeeds([LEFT], seeds=[seeds])
    assert [job.seeds for job in counted.jobs] == [(7, 8), (9, 10)]


def test_a_cheat_does_not_play(pool: program.Pool) -> None:
    """It is loaded for function_works, and makes no move.  "import os" counted as loaded without being tried."""
    for name, works in (("cheats, but loads", "load"), ("cheats", "fail")):
        (verdict,) = program.judge([COMPLETIONS[name][0]], seeds=[[1, 2, 3]])
        assert (verdict.works, {game.steps for game in verdict.results}) == (works, {0})


def test_columns_are_read_per_row(pool: program.Pool) -> None:
    """Rows of one batch may differ in boards, size, target and keys."""
    wasd = fenced('def strategy(board):\n    return "wasd"[sum(map(sum, board)) // 2 % 4]')
    verdicts = program.judge(
        [wasd, wasd, wasd],
        seeds=[[1], [2, 3], [4]],
        size=[3, 4, 6],
        target=[8, 16, 8],
        keys=["wasd", "wasd", "bepo"],
    )
    assert [[game.seed for game in verdict.results] for verdict in verdicts] == [[1], [2, 3], [4]]
    assert [verdict.results[0].outcome == "invalid_move" for verdict in verdicts] == [False, False, True]
    assert {game.max_tile for game in verdicts[1].results if game.outcome == "success"} <= {16}


def test_the_target_of_a_row_counts_for_its_reward(pool: program.Pool) -> None:
    """The same failed game is worth more at a nearer target."""
    near, far = strategy_succeeds([LEFT, LEFT], seeds=[[1], [1]], target=[64, 2048])
    assert near == pytest.approx(-1 + 8 * 4 / 60)  # the largest tile is 8
    assert far == pytest.approx(-1 + 8 * 4 / 2044)


def test_an_answer_that_the_limit_cuts_off_costs_something() -> None:
    """Text after the closing fence cost nothing: one run's answers grew from 19 tokens to the limit of 200."""
    assert program.ends_in_time(["x"] * 3, completion_ids=[[1], [1] * 8, [1] * 7], max_new_tokens=[8] * 3) == [0, -1, 0]


def test_what_is_logged_and_saved_holds_no_escape_sequence(pool: program.Pool) -> None:
    """Everything shown comes from the verdict: the source is rewritten, and the rewritten one is played."""
    hostile = fenced("def strategy(board):\n    x = '\x1b]0;owned\a\x1b[2J'  # \u202e\n    return 'a'")
    (verdict,) = program.judge([hostile], seeds=[[1]])
    assert verdict.source == "def strategy(board):\n    x = '\\x1b]0;owned\\x07\\x1b[2J'\n    return 'a'"
    assert verdict.results[0].outcome == "stuck"


def test_the_program_that_is_shown_is_the_one_that_played(pool: program.Pool) -> None:
    """Rewritten, it exceeded the size that a player reads: a cut one was played, or the worker died."""
    hostile = "def strategy(board):\n    return 'i'\ndef f():\n    X = '{}'\ndef strategy(board):\n    return 'a'"
    for bells in (17_000, 60_000):
        (verdict,) = program.judge([fenced(hostile.format("\a" * bells))], seeds=[[3]])
        assert (verdict.source, verdict.works, verdict.results[0].outcome) == (None, "fail", "error")
        assert "longer than" in verdict.results[0].detail


def test_a_reason_is_short(pool: program.Pool) -> None:
    (verdict,) = program.judge([fenced(f"import {'x' * 5000}\ndef strategy(board):\n    return 'a'")], seeds=[[3]])
    assert len(verdict.cheating) <= program.LIMITS.detail_chars


def test_without_columns_the_default_boards_are_played(pool: program.Pool) -> None:
    """As a reader would call it by hand."""
    assert [game.seed for game in program.judge([LEFT])[0].results] == list(program.BOARDS)
    assert function_works([LEFT]) == no_cheating([LEFT]) == [1.0]


def test_rewards_of_an_empty_batch() -> None:
    """Nothing to judge."""
    assert [reward([]) for reward in REWARDS] == [[], [], []]


BAD = {
    "no body": "def strategy(board):\n    ...",
    "one direction": "def strategy(board):\n    return 'a'",
    "two directions": "n = [0]\ndef strategy(board):\n    n[0] += 1\n    return 'ai'[n[0] % 2]",
    "returns None": "def strategy(board):\n    if board[0][0] > 4096:\n        return 'a'",
    "undefined helper": "def strategy(board):\n    return find_best_move(board)",
    "a brace": 'def strategy(board):\n    return "{"',
    "asks the user": "def strategy(board):\n    return input()",
    "never answers": "def strategy(board):\n    while True:\n        pass",
}
GREEDY = """
def strategy(board):
    def slide(row):
        tiles = [t for t in row if t]
        out = []
        while tiles:
            t = tiles.pop(0)
            if tiles and tiles[0] == t:
                t += tiles.pop(0)
            out.append(t)
        return out + [0] * (len(row) - len(out))
    columns = [list(c) for c in zip(*board)]
    after = {
        "a": [slide(r) for r in board], "i": [slide(r[::-1])[::-1] for r in board],
        "é": [slide(c) for c in columns], "u": [slide(c[::-1])[::-1] for c in columns],
    }
    legal = [k for k in after if after[k] != (board if k in "ai" else columns)]
    return max(legal, key=lambda k: sum(r.count(0) for r in after[k]))
"""


def total(source: str, boards: int = 2) -> float:
    """The sum of the rewards on 4x4 boards with a far target: random play is far from winning there."""
    return sum(rewards(fenced(source), seeds=list(range(boards)), size=4, target=1024, timeout=0.3))


@pytest.mark.parametrize("source", BAD.values(), ids=BAD.keys())
def test_a_bad_program_is_worth_less_than_random_play(pool: program.Pool, source: str) -> None:
    """Programs that models are known to write when they have given up."""
    assert total(source) < total(RANDOM_SOURCE)


def test_greedy_play_is_worth_more_than_random_play(pool: program.Pool) -> None:
    """One step of search, by the number of empty cells, over the same boards."""
    assert total(GREEDY, boards=24) > total(RANDOM_SOURCE, boards=24)
