"""2048 the usual way: a list of lists, written from the rules alone.  Slow, and independent of the program's engine.

Its random stream is the public reference's: `random.Random(seed)`; a spawn is a `choice` over the empty cells in
row-major order, then a 4 if `random() < 0.1`, else a 2; two spawns at the start.
"""

from __future__ import annotations

import random

Grid = list[list[int]]


def _slide_left(row: list[int]) -> tuple[list[int], int]:
    """One row after a move to the left, and the points that it gains."""
    tiles = [tile for tile in row if tile]
    slid: list[int] = []
    gain = i = 0
    while i < len(tiles):
        if i + 1 < len(tiles) and tiles[i] == tiles[i + 1]:
            slid.append(2 * tiles[i])
            gain += slid[-1]
            i += 2
        else:
            slid.append(tiles[i])
            i += 1
    return slid + [0] * (len(row) - len(slid)), gain


def _transposed(grid: Grid) -> Grid:
    return [list(column) for column in zip(*grid, strict=True)]


def _mirrored(grid: Grid) -> Grid:
    return [row[::-1] for row in grid]


def slide(grid: Grid, direction: str) -> tuple[Grid, int]:
    """The grid after a move, before any spawn, and the points that it gains."""
    if direction in ("up", "down"):
        grid = _transposed(grid)
    if direction in ("right", "down"):
        grid = _mirrored(grid)
    rows = [_slide_left(row) for row in grid]
    grid, gain = [row for row, _ in rows], sum(gain for _, gain in rows)
    if direction in ("right", "down"):
        grid = _mirrored(grid)
    if direction in ("up", "down"):
        grid = _transposed(grid)
    return grid, gain


def can_move(grid: Grid) -> bool:
    """Whether any move would change the grid."""
    size = len(grid)
    for i in range(size):
        for j in range(size):
            if grid[i][j] == 0:
                return True
            if j + 1 < size and grid[i][j] == grid[i][j + 1]:
                return True
            if i + 1 < size and grid[i][j] == grid[i + 1][j]:
                return True
    return False


class ListBoard:
    """One game, played by the names of directions."""

    def __init__(self, size: int, seed: int, target: int = 2048) -> None:
        self.size, self.target = size, target
        self.random = random.Random(seed)
        self.grid: Grid = [[0] * size for _ in range(size)]
        self.score = 0
        self.state = "ongoing"
        self._spawn()
        self._spawn()
        self._judge()

    def _spawn(self) -> None:
        empty = [(i, j) for i in range(self.size) for j in range(self.size) if self.grid[i][j] == 0]
        i, j = self.random.choice(empty)
        self.grid[i][j] = 4 if self.random.random() < 0.1 else 2

    def _judge(self) -> None:
        if any(tile >= self.target for row in self.grid for tile in row):
            self.state = "success"
        elif not can_move(self.grid):
            self.state = "failed"

    def move(self, direction: str) -> bool:
        """Play one move; True if it changed the grid."""
        if self.state != "ongoing":
            return False
        grid, gain = slide(self.grid, direction)
        if grid == self.grid:
            return False
        self.grid = grid
        self.score += gain
        self._spawn()
        self._judge()
        return True
