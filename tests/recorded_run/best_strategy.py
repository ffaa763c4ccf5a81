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
        "a": tuple(map(slide, board)),
        "i": tuple(map(back, board)),
        "é": tuple(zip(*map(slide, columns))),
        "u": tuple(zip(*map(back, columns))),
    }
    return {key: b for key, b in after.items() if b != board}
@cache
def worth(row):
    ranks = [x.bit_length() for x in row]
    pairs = list(zip(ranks, ranks[1:]))
    return sum(x * x for x in row) * 200
def value(board):
    return sum(map(worth, board)) + sum(map(worth, zip(*board)))
def best(board):
    return max(map(value, moves(board).values()), default=-10)
def expected(board):
    boards = [
        board[:i] + (row[:j] + (2,) + row[j + 1 :],) + board[i + 1 :]
        for i, row in enumerate(board) for j, x in enumerate(row) if not x
    ]
    boards = boards[:: len(boards) // 2 + 1]
    return sum(map(best, boards)) / len(boards)
def strategy(board):
    after = moves(tuple(map(tuple, board)))
    return max(after, key=lambda key: expected(after[key]))
