import random
from functools import cache
@cache
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
def back(row):
    return slide(row[::-1])[::-1]
def moves(board):
    columns = tuple(zip(*board))
    after = {
        "i": tuple(map(back, board)),
        "u": tuple(zip(*map(back, columns))),
        "a": tuple(map(slide, board)),
        "é": tuple(zip(*map(slide, columns))),
    }
    return {key: b for key, b in after.items() if b != board}
@cache
def worth(row):
    ranks = [x.bit_length() for x in row]
    pairs = list(zip(ranks, ranks[1:]))
    return  - 50 * min(sum(a**2 - b**2 for a, b in pairs if a > b), sum(b**2 - a**2 for a, b in pairs if a < b)) - 100 * len(set(row)) - 1000 * max(ranks) + 200 * len(set(row))
def value(board):
    return sum(map(worth, board)) + sum(map(worth, zip(*board)))
def strategy(board):
    after = moves(tuple(map(tuple, board)))
    return max(after, key=lambda key: value(after[key]))
