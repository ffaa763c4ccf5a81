def strategy(board):
    def move(k):
        turn, order = k in "éu", -1 if k in "ui" else 1
        rows = []
        for row in zip(*board) if turn else board:
            slid, last = [], 0
            for x in row[::order]:
                if x and x == last:
                    slid[-1], last = x + x, 0
                elif x:
                    slid.append(x)
                    last = x
            rows.append((slid + [0] * (len(row) - len(slid)))[::order])
        return [list(r) for r in zip(*rows)] if turn else rows

    after = {k: move(k) for k in "iéua"}
    moves = [k for k in after if after[k] != board]

    def score(k):
        board = after[k]
        flat = sum(board, [])
        return 50 * flat.count(0) + 1 * sum(r == sorted(r) for r in board)

    return max(moves, key=score)
