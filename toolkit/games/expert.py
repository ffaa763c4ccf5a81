"""The expert that learned programs have to beat: expectimax over the next tile, with a published evaluation.

Tiles are worth most along a snake: from cell to cell a fourth of what they would be worth before
(https://github.com/nancy-l-l/2048AI).  Of three published evaluations it played best one tile ahead.  With fewer than
five empty cells it looks a move and a tile further, after the two moves that lead to the best boards.
"""

from functools import cache


def slide(row):
    tiles, last = [], 0
    for x in row:
        if x and x == last:
            tiles[-1], last = x + x, 0
        elif x:
            tiles.append(x)
            last = x
    return tuple(tiles + [0] * (len(row) - len(tiles)))


@cache
def both(row):
    return slide(row), slide(row[::-1])[::-1]


@cache
def worth(i, row):
    return sum(x * 4.0 ** -(i * len(row) + j) for j, x in enumerate(row[:: (-1) ** i]))


def moves(board):
    left, right = zip(*map(both, board))
    up, down = zip(*map(both, zip(*board)))
    after = zip("éuai", (tuple(zip(*up)), tuple(zip(*down)), left, right))
    return {key: rows for key, rows in after if rows != board}


def value(board):
    return sum(map(worth, range(len(board)), board))


@cache
def best(board):
    return max(map(value, moves(board).values()), default=0)


@cache
def expected(board, look, cells):
    empty = [(i, j) for i, row in enumerate(board) for j, x in enumerate(row) if not x]
    empty = empty[:: -(-len(empty) // cells)]
    boards = (board[:i] + (board[i][:j] + (2,) + board[i][j + 1 :],) + board[i + 1 :] for i, j in empty)
    return sum(map(look, boards)) / len(empty)


def further(board):
    return max((expected(after, best, 2) for after in sorted(moves(board).values(), key=value)[-2:]), default=0)


def strategy(board):
    best.cache_clear()
    expected.cache_clear()
    after = moves(tuple(map(tuple, board)))
    look = further if sum(row.count(0) for row in board) < 5 else best
    return max(after, key=lambda key: expected(after[key], look, 6))
