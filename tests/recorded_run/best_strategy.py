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
        "u": tuple(zip(*map(back, columns))),
        "é": tuple(zip(*map(slide, columns))),
    }
    return {key: b for key, b in after.items() if b != board}
@cache
def worth(row):
    ranks = [x.bit_length() for x in row]
    pairs = list(zip(ranks, ranks[1:]))
    return  - 100 * (ranks == sorted(ranks)) - 200 * ranks[-1] - 500 * len(set(row))
def value(board):
    return sum(map(worth, zip(*board))) + 200 * board[0][0]
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
