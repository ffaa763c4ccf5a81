"""The game: held against an independent engine, move by move; its keys, its arguments, its rendering, its prompt."""

from __future__ import annotations

import random
import re
import unicodedata
from typing import get_args

import pytest

import gpt_2048_rl as program
from gpt_2048_rl import DIRECTIONS, LAYOUTS, GameBoard, Layout
from tests.list_engine import ListBoard, slide
from toolkit.referee.extract import extract_function
from toolkit.run.watch import render

CASES = [  # size, target, layout
    *((size, 2048, layout) for size, layout in zip(range(2, 9), list(LAYOUTS) * 2, strict=False)),
    *((3, target, "wasd") for target in (2, 4, 8, 16, 32, 1 << 20)),
    (4, 64, "zqsd"),
    (6, 128, "bepo"),
]


@pytest.mark.parametrize("seed", [0, 1, 3407, -5, 2**63])
@pytest.mark.parametrize(("size", "target", "layout"), CASES)
def test_plays_the_same_game_as_the_list_engine(size: int, target: int, layout: str, seed: int) -> None:
    """Board, score, state, every spawn: after each of up to 400 random moves both engines agree."""
    ours = GameBoard(size, seed, target, layout)
    theirs = ListBoard(size, seed, target)
    player = random.Random(seed + size)
    for _ in range(400):
        assert (ours.board(), ours.score(), ours.state()) == (theirs.grid, theirs.score, theirs.state)
        assert ours.max_tile() == max(map(max, theirs.grid))
        direction = player.randrange(4)
        assert ours.do_action(LAYOUTS[layout][direction]) is theirs.move(DIRECTIONS[direction])


@pytest.mark.parametrize(("size", "target"), [(2, 32), (3, 32), (2, 4)])
def test_plays_to_the_same_end_as_the_list_engine(size: int, target: int) -> None:
    """Small boards fill up quickly: whole games, over many seeds, end at the same move and in the same state.

    With target 4 a new tile can end a game.
    """
    ends = set()
    for seed in range(200):
        ours, theirs = GameBoard(size, seed, target), ListBoard(size, seed, target)
        player = random.Random(seed)
        while theirs.state == "ongoing":
            direction = player.randrange(4)
            assert ours.move(direction) is theirs.move(DIRECTIONS[direction])
            assert (ours.state(), ours.board()) == (theirs.state, theirs.grid)
        ends.add(ours.state())
    assert ends == {(2, 32): {"failed"}, (3, 32): {"failed", "success"}, (2, 4): {"success"}}[size, target]


def test_uses_the_random_stream_of_the_reference() -> None:
    """After a game the stream stands where the list engine's stands, so that no draw was added or left out."""
    ours, theirs = GameBoard(4, 7), ListBoard(4, 7)
    for step in range(300):
        ours.move(step % 4)
        theirs.move(DIRECTIONS[step % 4])
    assert ours._random() == theirs.random.random()


def test_agrees_on_lines_with_more_tiles_than_play_reaches() -> None:
    """Random lines of up to 16 cells with large tiles slide as in the list engine."""
    rng = random.Random(1)
    for _ in range(2000):
        exponents = [rng.choice([0, 0, 1, 1, 2, 2, 3, 40]) for _ in range(rng.randint(2, 16))]
        line = bytes(exponents)
        grid = [[1 << e if e else 0 for e in exponents]]
        for lookup, direction in ((program._TOWARDS_START, "left"), (program._TOWARDS_END, "right")):
            after, gain = lookup(line)
            assert ([[1 << e if e else 0 for e in after]], gain) == slide(grid, direction)


def test_forgets_lines_when_its_memo_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memo of lines is bounded: the results stay right when it is emptied in the middle of a game."""
    monkeypatch.setattr(program._LineMemo, "LIMIT", 5)
    ours, theirs = GameBoard(5, 2), ListBoard(5, 2)
    for step in range(200):
        assert ours.move(step % 4) is theirs.move(DIRECTIONS[step % 4])
        assert ours.board() == theirs.grid
    assert len(program._TOWARDS_START.__self__) < 20  # type: ignore[attr-defined]


def test_a_move_that_changes_nothing_spawns_nothing() -> None:
    """Pushing twice against the same wall leaves board, score and stream alone once nothing slides any more."""
    game = GameBoard(4, 0)
    while game.move(2):
        pass
    before = (game.board(), game.score(), game.state())
    assert game.move(2) is False
    assert (game.board(), game.score(), game.state()) == before


def test_an_ended_game_does_not_move() -> None:
    """Nothing happens after success."""
    game = GameBoard(3, 0, target=2)
    assert game.state() == "success"
    before = game.board()
    assert not any(game.do_action(key) for key in "éuaiq")
    assert (game.board(), game.state()) == (before, "success")


def test_board_is_a_fresh_copy() -> None:
    """Writing into what board() returns does not change the game."""
    game = GameBoard(4, 0)
    game.board()[0][0] = 2048
    assert max(map(max, game.board())) <= 4


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", value) for value in (0, 1, -3, 17, 2.0, "6", None, True)]
    + [("target", value) for value in (0, 1, 3, 2047, -2048, 1 << 65, 2048.0, "2048", None)]
    + [("keys", value) for value in ("qwerty", "", "BEPO")],
)
def test_refuses_an_argument_out_of_range_by_its_name(name: str, value: object) -> None:
    """A ValueError in one line that says which argument, and what it was."""
    with pytest.raises(ValueError, match=rf"^{name} .*{re.escape(repr(value))}$"):
        GameBoard(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 16])
def test_accepts_the_extreme_sizes(size: int) -> None:
    """The largest board has 256 cells, of which any number may be empty."""
    game = GameBoard(size, 0, 1 << 64)
    for step in range(50):
        game.move(step % 4)
    assert len(game.board()) == len(game.board()[0]) == size


def test_the_command_line_has_every_layout() -> None:
    assert get_args(Layout) == tuple(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_moves_up_down_left_right(layout: str) -> None:
    """The four keys of a layout slide towards the four sides, in the order of DIRECTIONS."""
    for direction, key in enumerate(LAYOUTS[layout]):
        by_key, by_direction = GameBoard(4, 3, keys=layout), GameBoard(4, 3)
        by_key.do_action(key)
        by_direction.move(direction)
        assert by_key.board() == by_direction.board()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_and_blanks_around_a_key_do_not_matter(layout: str) -> None:
    """Every accepted spelling, in capitals and with blanks around it, is the same direction."""
    table = program.key_table(layout)
    for key, direction in table.items():
        for spelling in (key, key.upper(), f" {key}", f"{key}\n", f"\t{key.upper()} \r\n"):
            assert program.direction_of(spelling, table) == direction


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
@pytest.mark.parametrize("key", ["é", "É"])
def test_e_acute_counts_composed_and_decomposed(key: str, form: str) -> None:
    """Both normal forms of "é" are up, because tokenizers and editors decide which one is written."""
    assert program.direction_of(unicodedata.normalize(form, key), program.key_table("bepo")) == 0  # type: ignore[arg-type]


LOOK_ALIKES = [
    "\N{CYRILLIC SMALL LETTER A}",
    "\N{CYRILLIC SMALL LETTER BYELORUSSIAN-UKRAINIAN I}",
    "\N{GREEK SMALL LETTER ALPHA}",
    "\N{GREEK SMALL LETTER IOTA}",
    "\N{LATIN SMALL LETTER DOTLESS I}",
    "\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}",
    "\N{FULLWIDTH LATIN SMALL LETTER A}",
    "\N{FULLWIDTH LATIN SMALL LETTER U}",
    "\N{MATHEMATICAL ITALIC SMALL A}",
    "\N{LATIN SMALL LETTER E WITH GRAVE}",
    "e\N{COMBINING GRAVE ACCENT}",
    "\N{CYRILLIC SMALL LETTER IE}\N{COMBINING ACUTE ACCENT}",
    "\N{GREEK SMALL LETTER UPSILON}",
    "\N{FULLWIDTH LATIN SMALL LETTER W}",
    "\N{LATIN SMALL LETTER LONG S}",
    "\N{CYRILLIC SMALL LETTER DZE}",
    "\N{UPWARDS DOUBLE ARROW}",
    "\N{LEFTWARDS ARROW FROM BAR}",
]


@pytest.mark.parametrize("key", LOOK_ALIKES, ids=[ascii(key) for key in LOOK_ALIKES])
def test_refuses_look_alikes_of_other_scripts(key: str) -> None:
    """A letter that only looks like a key is a wrong key, in every layout."""
    assert [program.direction_of(key, program.key_table(layout)) for layout in LAYOUTS] == [None] * len(LAYOUTS)


@pytest.mark.parametrize("key", ["", " ", "e", "aa", "a i", "a\0", "left", "éé", None, 0, 2, b"a", ["a"], ("a",), True])
def test_a_wrong_key_ends_the_game_as_failed(key: object) -> None:
    """On the bépo layout none of these is a key; the board stays as it is."""
    game = GameBoard(4, 0)
    before = game.board()
    assert game.do_action(key) is False
    assert (game.state(), game.board()) == ("failed", before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_q_gives_up_where_it_is_no_key(layout: str) -> None:
    """On zqsd "q" is the key for left; everywhere else it ends the game."""
    game = GameBoard(4, 0, keys=layout)
    game.do_action("q")
    assert game.state() == ("ongoing" if layout == "zqsd" else "failed")


def test_a_str_subclass_is_read_by_its_real_characters() -> None:
    """A strategy may return a str subclass with lying methods.  Its text counts."""

    class Liar(str):
        __slots__ = ()

        def strip(self, chars: str | None = None, /) -> str:
            return "a"

        def lower(self) -> str:
            return "a"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return hash("a")

    table = program.key_table("bepo")
    assert program.direction_of(Liar("x"), table) is None
    assert program.direction_of(Liar(" U "), table) == DIRECTIONS.index("down")


def test_an_object_that_claims_to_be_a_str_is_a_wrong_key() -> None:
    """isinstance() believes `__class__`: such an object made do_action raise a TypeError instead of ending the game."""

    class Pretender:
        __class__ = str  # type: ignore[assignment]

    game = GameBoard(4, 0)
    game.do_action(Pretender())
    assert game.state() == "failed"


def test_key_tables_do_not_depend_on_each_other() -> None:
    """A key of one layout is not taken on another."""
    for layout, keys in LAYOUTS.items():
        for other in LAYOUTS:
            table = program.key_table(other)
            assert {key for key in keys if key in table} <= set(LAYOUTS[other]), (layout, other)


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("size", [2, 4, 6])
def test_rendering_shows_every_tile_in_its_place(size: int) -> None:
    """Without its colours the rendering reads as the board does, with a dot for an empty cell."""
    game = GameBoard(size, 5)
    for step in range(40):
        game.move(step % 4)
    shown = visible(render(game.board()))
    rows = [[0 if cell == "·" else int(cell) for cell in line.split()] for line in shown.split("\n")]
    assert rows == game.board()


def test_rendering_is_aligned_and_switches_its_colours_off() -> None:
    """All lines are equally wide, and each ends with the reset sequence."""
    game = GameBoard(5, 1)
    for step in range(200):
        game.move(step % 4)
    lines = render(game.board()).split("\n")
    assert len({len(visible(line)) for line in lines}) == 1
    assert all(line.endswith("\x1b[0m") for line in lines)


def test_rendering_has_a_colour_for_every_tile() -> None:
    """Tiles far above 2048 take the last colour."""
    game = GameBoard(3, 0)
    game._flat = bytes([0, 1, 11, 12, 13, 40, 64, 100, 255])
    assert str(1 << 255) in render(game.board())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompt_and_engine_agree_on_the_keys(layout: str) -> None:
    """The prompt's key for each direction is the engine's."""
    table = program.key_table(layout)
    named = re.findall(r'"(\S+?)" for (up|down|left|right)', program.build_prompt(keys=layout))
    assert [name for _, name in named] == list(DIRECTIONS)
    assert [program.direction_of(key, table) for key, _ in named] == [0, 1, 2, 3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_prompts_example_is_a_strategy_of_its_layout(layout: str) -> None:
    """The fenced block in the prompt can be extracted, and the key that it returns is one of the layout's."""
    source = extract_function(program.build_prompt(keys=layout))
    assert source is not None
    (key,) = re.findall(r'return "(\S+)"', source)
    assert program.direction_of(key, program.key_table(layout)) is not None


@pytest.mark.parametrize("wording", range(len(program.WORDINGS)))
def test_prompt_names_size_and_target_in_every_wording(wording: int) -> None:
    """Unusual numbers, so that a default left in the text shows."""
    prompt = program.build_prompt(7, 8192, "wasd", wording)
    task = prompt.split("\n")[0]
    assert ("7" in task, "8192" in task) == (True, True)
    assert [text for text in ("2048 tile", "6", "{") if text in prompt] == []


def test_prompt_names_every_allowed_module() -> None:
    """The list in the rules is the list that the jail and the static look read."""
    assert ", ".join(program.ALLOWED_MODULES) in program.build_prompt()


def test_prompt_asks_for_one_short_native_function_in_a_fence() -> None:
    """The rules stand in every wording's prompt."""
    for wording in range(len(program.WORDINGS)):
        prompt = program.build_prompt(wording=wording)
        rules = ("native Python only", "any board size", "one short function", "```python\ndef strategy(board):")
        assert [rule for rule in rules if rule not in prompt] == []


def test_all_wordings_differ() -> None:
    """The last wording is for evaluation, so it differs from all others."""
    assert len({wording.casefold() for wording in program.WORDINGS}) == len(program.WORDINGS) > 1
