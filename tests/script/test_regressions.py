"""Fixed bugs.  Each test tells the story of one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import gpt_2048_rl as program
from tests.helpers import HELD_OUT, descendants, wait_until, without_seconds
from toolkit import UsageError
from toolkit.games.evaluation import board_key
from toolkit.referee.extract import extract_function

FORESEES = """
import collections
P = collections._sys.modules["__main__"]
def strategy(board):
    for seed in P.board_seeds(64, held_out=True):
        if P.GameBoard(16, seed).board() == board:
            raise ValueError("found it")
    return "a"
"""
TELLS_SEEDS = """
import collections
def strategy(board):
    frame, found = collections._sys._getframe(), []
    while frame:
        found += [value.seeds for value in frame.f_locals.values()
                  if hasattr(value, "seeds") and not isinstance(value, type)]
        frame = frame.f_back
    raise ValueError(str(found))
"""
SLOW_IN_SOME_GAMES = """
import random
ROUNDS = random.choice((0, 10 ** 6))
def strategy(board):
    for _ in range(ROUNDS): pass
    return random.choice("éuai")
"""
CODE = 'def strategy(board):\n    return "a"'


def test_no_rule_leads_from_the_program_to_a_board(pool: program.Pool) -> None:
    """Seeds were public hashes, and a player's memory holds the program: 15 lines foresaw every held-out tile."""
    seeds = program.board_seeds(3, held_out=True)
    results = program.execute_strategies([FORESEES], seeds, size=16, pool=pool)[0]
    assert {result.outcome for result in results} <= {"stuck", "error"}
    assert sum("found it" in result.detail for result in results) < 2  # one of 64 boards can begin so by chance


def test_the_key_of_the_boards_is_kept_and_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    board_key.cache_clear()
    try:
        first = program.board_seeds(2, held_out=True)
        board_key.cache_clear()
        assert program.board_seeds(2, held_out=True) == first
        file = tmp_path / "gpt_2048_rl" / "board_key"
        assert (len(file.read_text()), file.stat().st_mode & 0o777) == (32, 0o600)
        file.write_text("0123456789abcdef" * 2 + "\n")  # another machine's
        board_key.cache_clear()
        assert program.board_seeds(2, held_out=True) != first
    finally:
        board_key.cache_clear()


@pytest.mark.parametrize(
    ("key", "mode", "said"),
    [
        ("", 0o600, "holds no key: remove it"),  # as after a full disk
        ("0", 0o600, "holds no key: remove it"),
        ("\ud800" * 32, 0o600, "holds no key: remove it"),
        ("0123456789abcdef" * 2, 0o644, "others may read or change .*: chmod 600 it"),
        ("0123456789abcdef" * 2, 0o620, "others may read or change .*: chmod 600 it"),
    ],
)
def test_a_key_that_others_may_know_is_refused(
    key: str, mode: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can guess or read it knows every board, and so every tile to come."""
    file = tmp_path / "gpt_2048_rl" / "board_key"
    file.parent.mkdir()
    file.write_text(key, errors="surrogatepass")
    file.chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    board_key.cache_clear()
    with pytest.raises(UsageError, match=said):
        program.board_seeds(2)


def test_no_player_is_forked_from_a_process_that_knows_seeds() -> None:
    """A worker whose zygote had died forked a new one with a job on its stack: its players could read the seeds."""
    with program.Pool(workers=1) as pool:
        worker = pool._workers[0]._process.pid
        (zygote,) = descendants(worker)
        os.kill(zygote, signal.SIGKILL)
        assert wait_until(lambda: not descendants(worker))
        (result,) = program.execute_strategies([TELLS_SEEDS], [123456789], pool=pool)[0]
        assert result.detail == "ValueError: []"


def test_a_game_has_the_same_cpu_limit_beside_others(pool: program.Pool) -> None:
    """The limit was pooled: what timed out alone won beside quick games."""
    seeds = [1, 2, 3, 4]
    together = program.execute_strategies([SLOW_IN_SOME_GAMES], seeds, timeout=0.2, pool=pool)[0]
    alone = [program.execute_strategies([SLOW_IN_SOME_GAMES], [seed], timeout=0.2, pool=pool)[0][0] for seed in seeds]
    assert [result.outcome for result in together] == [result.outcome for result in alone]
    assert {result.outcome for result in alone} == {"timeout", "success"}


@pytest.mark.parametrize(
    "text",
    [
        f"Sure! ```python\n{CODE}\n```",
        f"assistantfinal```python\n{CODE}\n```",
        f"````python\n{CODE}\n````",
        f"```python\n{CODE}\n```This goes left.",
        f"{CODE}\n```",
        f"```python\n{CODE}\n```\nUse it so:\n```python\nstrategy(board)\n```",
    ],
)
def test_a_complete_program_is_found_in_a_careless_fence(text: str) -> None:
    assert extract_function(text) == CODE


@pytest.mark.parametrize(
    "text",
    [f"```python\n{CODE}\n```python\n{CODE}", f"```python\ndef strategy(board):\n```python\n{CODE}\n    return ("],
)
def test_a_second_opening_fence_closes_nothing(text: str) -> None:
    """The part that was cut off behind it counted as code outside fences."""
    assert extract_function(text) is None


def test_a_line_of_backticks_is_read_in_linear_time() -> None:
    """Time grew with the square of the text's length: hours for this one."""
    assert extract_function("`" * 300_000 + "!" + " " * 300_000 + "!") is None


def test_a_fence_inside_a_docstring_is_part_of_the_program() -> None:
    code = 'def strategy(board):\n    """Such as\n    ```\n    2 2\n    ```\n    """\n    return "a"'
    assert extract_function(f"```python\n{code}\n```") == code


@pytest.mark.parametrize(
    "code",
    ['W = {}\nW.update(a=1)\ndef strategy(board):\n    return list(W)[0]',
     "def strategy(board):\n    return KEYS[0]\nKEYS = 'ai'"],
)  # fmt: skip
def test_what_a_strategy_needs_is_kept(code: str) -> None:
    assert extract_function(f"```python\n{code}\n```") == code


@pytest.mark.parametrize(
    "source",
    ["from re import compile\np = compile('a')", "class open: pass\nopen()", "class A:\n    __slots__ = ('x',)"],
)
def test_honest_names_are_no_cheating(source: str) -> None:
    assert program.find_cheating(f"{source}\n{CODE}") == ""


@pytest.mark.parametrize(
    "body",
    ["int(statistics.NormalDist().samples(1)[0] * 1000)", "decimal.getcontext().prec + decimal.getcontext().Emax"],
)
def test_a_game_repeats_and_stands_alone(body: str, pool: program.Pool) -> None:
    """statistics drew from the system's entropy; decimal's precision leaked from game to game."""
    source = f"""
import decimal, statistics
def strategy(board):
    decimal.getcontext().prec += 1
    return "éuai"[({body}) % 4]"""
    alone = [program.execute_strategies([source], [seed], pool=pool)[0][0] for seed in (1, 2)]
    again = [program.execute_strategies([source], [seed], pool=pool)[0][0] for seed in (1, 2)]
    assert without_seconds(again) == without_seconds(alone)
    if "decimal" in body:
        assert without_seconds(program.execute_strategies([source], [1, 2], pool=pool)[0]) == without_seconds(alone)


def test_an_unjailed_pool_does_not_serve_those_who_ask_for_the_jail(pool: program.Pool) -> None:
    assert program.shared_pool(jailed=False).jailed is False
    assert program.shared_pool().jailed is False  # it is the one that was asked for
    assert program.shared_pool(jailed=True).jailed is True


def test_a_file_without_a_strategy_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def strategi(board):\n    return 'a'\n")
    assert program.main(["eval", str(path), "--games", "2"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "broken.py does not load: no function strategy(board)" in said


def test_names_are_not_read_as_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("[bold].py").write_text("\ufeff" + CODE, encoding="utf-8")  # with a byte order mark, as some editors write it
    assert program.main(["eval", "[bold].py", "--games", "1", *HELD_OUT]) == 0
    assert "[bold].py" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--loss-type", "foo"], ["--scale-rewards", "foo"], ["--run-name", ".."], ["--model", "tests"]]
)
def test_what_cannot_be_is_refused_at_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
