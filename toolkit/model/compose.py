"""The programs that the embedded model imitates in its warm start: composed of parts, of very different quality.

The parts are what a large model writes for 2048: evaluation terms with weights, look-ahead of different depth, rules by
state, counters kept between calls.  All choices are independent, so most combinations never appear in the warm start.
In the templates `¦` stands between two choices; the tokenizer makes a token of each part.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.games.programs import AFTER, moves_source

WORTH = """
@cache
def worth(row):
    ranks = [x.bit_length() for x in row]
    pairs = list(zip(ranks, ranks[1:]))
    return ¦{terms}¦

def value(board):
    return ¦{lines}¦{place}¦
"""
BEST = """
def best(board):
    return max(map(value, moves(board).values()), default=-¦{dead}¦)¦
"""
EXPECTED = """
def expected(board, look=best, cells=¦{cells}¦):
    boards = [
        board[:i] + (row[:j] + (2,) + row[j + 1 :],) + board[i + 1 :]
        for i, row in enumerate(board) for j, x in enumerate(row) if not x
    ]
    boards = boards[:: len(boards) // cells + 1]
    return ¦{pooled}¦
"""
FURTHER = """
def further(board):
    two = sorted(moves(board).values(), key=value)[-2:]
    return max([expected(b, cells=2) for b in two] or [best(board)])
"""
TERMS = {  # of a row, all on one scale, with the sign of a weight that makes sense
    "10 * row.count(0)": 1,
    "10 * sum(a == b > 0 for a, b in pairs)": 1,
    "10 * len(set(row))": -1,
    "10 * max(ranks)": 1,
    "3 * sum(ranks)": -1,
    "sum(a * a for a in ranks)": -1,
    "sum(a**3 for a in ranks) // 10": -1,
    "3 * sum(abs(a - b) for a, b in pairs)": -1,
    "10 * sum(abs(a - b) == 1 for a, b in pairs)": 1,
    "10 * min(sum(a - b for a, b in pairs if a > b), sum(b - a for a, b in pairs if a < b))": -1,
    "min(sum(a**2 - b**2 for a, b in pairs if a > b), sum(b**2 - a**2 for a, b in pairs if a < b))": -1,
    "min(sum(a**4 - b**4 for a, b in pairs if a > b), sum(b**4 - a**4 for a, b in pairs if a < b)) // 10": -1,
    "10 * ranks[0]": 1,
    "10 * ranks[-1]": -1,
    "100 * (ranks == sorted(ranks))": 1,
    "100 * (max(ranks) in (ranks[0], ranks[-1]))": 1,
}
WEIGHTS = (1, 3, 10, 30, 100)
SIGNS = {1: 3, -1: 1}  # how often a weight has the sign that makes sense, or the other one
STATES = ("flat.count(0)", "len(set(flat))", "max(flat)", "board[0][0]", "board[-1][-1]", "sum(board[0])",
          "sum(board[-1])", "sum(r[0] for r in board)", "sum(r == sorted(r) for r in board)")  # fmt: skip

# Choices, and how often each is composed.
KINDS = {"constant": 6, "cycle": 18, "turns": 4, "draw2": 16, "draw3": 2, "draw4": 1, "first": 8, "search": 33}
# The next board, the best one two moves on, with a tile between, and where few cells are empty a move and a tile more
SEARCHES = {"value": 64, "best": 15, "expected": 18, "further": 3}
RULES = {1: 4, 2: 1}
LIMITS = (1, 2, 4, 8, 16, 32, 64)  # of the state that decides between two rules
KEY_COUNTS = (2, 3, 4)  # how many keys a cycle has
FACTORS = (1, 2, 3, 5)  # of the state that chooses among them
TERM_COUNTS = {2: 2, 3: 2, 4: 1}
LINE_VALUES = ("sum(map(worth, board)) + sum(map(worth, zip(*board)))", "sum(map(worth, board))",
               "sum(map(worth, zip(*board)))")  # fmt: skip
PLACES = {
    "": 6,
    "10 * board[0][0].bit_length()": 1,
    "10 * board[-1][-1].bit_length()": 1,
    "10 * max(board[0]).bit_length()": 1,
    "sum(x >> 2 * i for i, x in enumerate(map(sum, board)))": 1,
}
DEAD = (0, 10**4, 10**8)
CELLS = (1, 6)  # how many empty cells the next tile is tried on, at most
POOLED = {"sum(map(look, boards)) / len(boards)": 3, "min(map(look, boards))": 1, "max(map(look, boards))": 1}


def pick(rng: random.Random, table: Mapping[Any, int]) -> Any:
    """One of a table's keys, as often as its value says."""
    return rng.choices(list(table), list(table.values()))[0]


def weight(rng: random.Random) -> int:
    """A weight, more often positive."""
    return int(pick(rng, SIGNS)) * rng.choice(WEIGHTS)


def weighted_sum(rng: random.Random, count: int) -> str:
    """An expression: the sum of `count` TERMS of a row in their order, each with a weight."""
    terms = sorted(rng.sample(list(TERMS), count), key=list(TERMS).index)
    return "¦ + ¦".join(f"{term}¦ * ¦{TERMS[term] * weight(rng)}" for term in terms)


def some_keys(rng: random.Random, keys: str, count: int) -> str:
    """`count` different keys in random order."""
    return "¦".join(rng.sample(keys, count))


def key_expression(rng: random.Random, kind: str, keys: str) -> str:
    """An expression for the next key; `kind` is one of KINDS, or one of SEARCHES."""
    if kind == "constant":
        return f'"¦{rng.choice(keys)}¦"'
    if kind == "first":
        return rng.choice(("[*after][0]", "[*after][0]", "[*after][-1]"))
    if kind == "further":
        return "max(after, key=lambda key: expected(after[key], further if tight else best))"
    if kind in SEARCHES:
        return f"max(after, key=lambda key: {kind}(after[key]))"
    count = int(kind[-1]) if kind.startswith("draw") else rng.choice(KEY_COUNTS)
    index = {
        "cycle": f"{rng.choice(FACTORS)}¦ * {rng.choice(STATES)}¦ % {count}",
        "turns": f"len(turns) % {count}",
    }.get(kind, f"random.randrange({count})")
    return f'"¦{some_keys(rng, keys, count)}¦"[¦{index}]'


def helpers(rng: random.Random, kinds: Sequence[str], keys: str) -> str:
    """The functions above `strategy` that its choices of a key need."""
    searches, source = set(kinds) & set(SEARCHES), ""
    if "first" in kinds:  # the order of the moves is a choice
        source += moves_source((f"¦{key}¦" for key in keys), rng.sample(range(4), 4)) + "¦"
    elif searches:
        source += moves_source(keys) + "¦"
    if searches:
        terms, place = weighted_sum(rng, pick(rng, TERM_COUNTS)), pick(rng, PLACES)
        place = place and f" + ¦{place}¦ * ¦{weight(rng)}"
        source += WORTH.format(terms=terms, lines=rng.choice(LINE_VALUES), place=place)
    if searches - {"value"}:
        source += BEST.format(dead=rng.choice(DEAD))
    if searches & {"expected", "further"}:
        source += EXPECTED.format(cells=rng.choice(CELLS), pooled=pick(rng, POOLED))
    if "further" in searches:
        source += FURTHER
    return source


def marked_strategy(rng: random.Random, keys: str) -> str:
    """A random strategy with ¦ between its choices; `keys` are those for up, down, left and right.

    It chooses its key in one or two of the KINDS; a test of the board decides between two.
    """
    kinds = [pick(rng, KINDS) for _ in range(pick(rng, RULES))]
    kinds = [pick(rng, SEARCHES) if kind == "search" else kind for kind in kinds]
    choices = [key_expression(rng, kind, keys) for kind in kinds]
    body = f"¦    return {choices[-1]}\n"
    if len(choices) == 2:
        body = f"¦    if {rng.choice(STATES)} > ¦{rng.choice(LIMITS)}¦:\n        return {choices[0]}\n{body}"
    before = "    flat = sum(board, [])\n" if "flat" in body else ""
    before += "    turns.append(0)\n" if "turns" in kinds else ""
    before += "    tight = sum(row.count(0) for row in board) < 4\n" if "further" in kinds else ""
    above = helpers(rng, kinds, keys)
    before += AFTER if above else ""
    imports = "import random\n" if "random." in body else ""
    counter = ", turns=[]" if "turns" in kinds else ""
    gap = "\n" if imports or above else ""
    return f"{imports}{above}¦{gap}def strategy(board{counter}):\n{before}{body}"


def strategy(rng: random.Random, keys: str) -> str:
    """The source of a random strategy."""
    return marked_strategy(rng, keys).replace("¦", "")
