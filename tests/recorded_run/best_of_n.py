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
        "é": tuple(zip(*map(slide, columns))),
        "u": tuple(zip(*map(back, columns))),
        "a": tuple(map(slide, board)),
    }
    return {key: b for key, b in after.items() if b != board}
@cache
def worth(row):
    ranks = [x.bit_length() for x in row]
    pairs = list(zip(ranks, ranks[1:]))
    return min(sum(a**2 - b**2 for a, b in pairs if a > b), sum(b**2 - a**2 for a, b in pairs if a < b)) * -200 + sum(abs(a - b) == 1 for a, b in pairs) * 500 + sum(x * x for x in row) * 200 + ranks[-1] * -2 + (max(ranks) in (ranks[0], ranks[-1])) * -1000
def value(board):
    return sum(map(worth, board)) + sum(map(worth, zip(*board)))
def best(board):
    return max(map(value, moves(board).values()), default=-100)
def expected(board):
    boards = [
        board[:i] + (row[:j] + (2,) + row[j + 1 :],) + board[i + 1 :]
        for i, row in enumerate(board) for j, x in enumerate(row) if not x
    ]
    boards = boards[:: len(boards) // 4 + 1]
    return sum(map(best, boards)) / len(boards)
def strategy(board):
    after = moves(tuple(map(tuple, board)))
    return max(after, key=lambda key: expected(after[key]))
