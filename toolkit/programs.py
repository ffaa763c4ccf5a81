"""Source of programs that play: all four moves of a board, and the controls that a result has to beat."""

from __future__ import annotations

_SIMULATED_MOVES = """    def move(k):
        turn, order = k in "{vertical}", -1 if k in "{backwards}" else 1
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

    after = {{k: move(k) for k in "{keys}"}}
    moves = [k for k in after if after[k] != board]
"""


def moves_source(keys: str, order: str) -> str:
    """Source that computes the moves of a `board`: `moves` are the legal keys, `after` the boards they lead to.

    `keys` are those for up, down, left and right; `order` is the order in which they are tried.
    """
    return _SIMULATED_MOVES.format(vertical=keys[:2], backwards=keys[1] + keys[3], keys=order)


def controls(keys: str) -> dict[str, str]:
    """Random legal moves, and greedy on empty cells; `keys` as above."""
    moves = moves_source(keys, keys)
    return {
        "random": f"import random\ndef strategy(board):\n{moves}    return random.choice(moves)\n",
        "greedy": f"def strategy(board):\n{moves}"
        "    return max(moves, key=lambda k: sum(row.count(0) for row in after[k]))\n",
    }
