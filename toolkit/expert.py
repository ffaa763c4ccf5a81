"""The expert among the controls: expectimax over its move, the next new tile, and its best answer.  Any board size.

    python gpt_2048_rl.py play toolkit/expert.py

A line's worth, with its numbers, is that of nneonneo's 2048-ai (https://github.com/nneonneo/2048-ai).
"""

import math
from functools import lru_cache
from itertools import pairwise

KEYS = "éuai"  # up, down, left, right
CELLS = 8  # at most so many empty cells are tried for the new tile, which bounds the time on large boards
Line = tuple[int, ...]


@lru_cache(1 << 16)
def slide(line: Line) -> Line:
    """A line after a slide towards its start."""
    slid: list[int] = []
    merges = False  # whether the last tile may still merge
    for tile in filter(None, line):
        merges = merges and slid[-1] == tile
        slid[-1:] = [2 * tile] if merges else [*slid[-1:], tile]
        merges = not merges
    return (*slid, *[0] * (len(line) - len(slid)))


@lru_cache(1 << 16)
def worth(line: Line) -> float:
    """Empty cells and merges count for a line; large tiles and a mixed order count against it."""
    ranks = [tile.bit_length() - 1 if tile else 0 for tile in line]
    steps = [a**4 - b**4 for a, b in pairwise(ranks)]
    mixed = min(sum(max(0, step) for step in steps), sum(max(0, -step) for step in steps))
    merges = sum(a == b > 0 for a, b in pairwise(ranks))
    large = sum(math.pow(rank, 3.5) for rank in ranks)
    return 200_000 + 270 * ranks.count(0) + 1_400 * merges - 47 * mixed - 11 * large


def moves(rows: list[Line]) -> dict[str, list[Line]]:
    """The board after each legal move.  After "up" and "down" its columns stand as rows: that changes no worth."""
    columns = list(zip(*rows, strict=True))
    after = {}
    for key, lines, way in zip(KEYS, (columns, columns, rows, rows), (1, -1, 1, -1), strict=True):
        slid = [slide(line[::way])[::way] for line in lines]
        if slid != lines:
            after[key] = slid
    return after


def value(rows: list[Line]) -> float:
    """The mean over new tiles (2 in nine of ten cases, else 4) of the worth after the best answer."""
    empty = [(y, x) for y, row in enumerate(rows) for x, tile in enumerate(row) if not tile]
    tried = empty[:: -(-len(empty) // CELLS)]
    total = 0.0
    for y, x in tried:
        for tile, share in ((2, 0.9), (4, 0.1)):
            row = (*rows[y][:x], tile, *rows[y][x + 1 :])
            answers = moves([*rows[:y], row, *rows[y + 1 :]]).values()
            total += share * max((sum(map(worth, (*b, *zip(*b, strict=True)))) for b in answers), default=0.0)
    return total / len(tried)


def strategy(board: list[list[int]]) -> str:
    after = moves([tuple(row) for row in board])
    return max(after, key=lambda key: value(after[key]))
