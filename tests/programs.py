"""Programs that play 2048, as a model may write them: blind, greedy, searching, slow and partly broken ones.

`PROGRAMS` maps a name to a source that defines `strategy(board)`, for boards of any size.  How they play with unlimited
time is recorded in `games.json`, from which rewards can be worked out for any target and time limit:

    python benchmarks/bench_reward.py --record
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import gpt_2048_rl as program

# ---------------------------------------------------------------------------------------------------------------------
# Building blocks

HEAD = "import collections, functools, heapq, itertools, math, operator, random, statistics\n"
MEMO = "@functools.lru_cache(maxsize=1 << 17)\n"
SLIDE = """def slide(row):
    out, last = [], 0
    for x in row:
        if x and x == last:
            out[-1], last = x + x, 0
        elif x:
            out.append(x)
            last = x
    return tuple(out + [0] * (len(row) - len(out)))
"""
MOVES = """def move(board, key):
    lines = zip(*board) if key in "éu" else board
    if key in "ui":
        lines = [slide(row[::-1])[::-1] for row in lines]
    else:
        lines = [slide(row) for row in lines]
    return tuple(zip(*lines) if key in "éu" else lines)
def moves(board, keys="{order}"):
    board = tuple(map(tuple, board))
    return {{key: b for key in keys if (b := move(board, key)) != board}}
"""
SPAWNS = """def spawns(b, count, tile=2):
    cells = [(y, x) for y, row in enumerate(b) for x, v in enumerate(row) if not v]
    for y, x in random.sample(cells, min(count, len(cells))):
        yield b[:y] + (b[y][:x] + (tile,) + b[y][x + 1:],) + b[y + 1:]
"""
SNAKE_WEIGHTS = """@functools.lru_cache
def snake(n):
    return [2.0 ** -(y * n + (n - 1 - x if y % 2 else x)) for y in range(n) for x in range(n)]
"""
LINE = """@functools.lru_cache(maxsize=1 << 17)
def line(r):
    ranks = [x.bit_length() for x in r]
    up = sum(max(0, y ** 4 - x ** 4) for x, y in zip(ranks, ranks[1:]))
    down = sum(max(0, x ** 4 - y ** 4) for x, y in zip(ranks, ranks[1:]))
    pairs = sum(x == y != 0 for x, y in zip(r, r[1:]))
    return 270 * r.count(0) + 700 * pairs - 47 * min(up, down) - 11 * sum(x ** 3.5 for x in ranks)
"""


def library(order: str = "éuai", memo: bool = False) -> str:
    """`moves(board)`: the legal keys in that order, each with the board after it, as tuples."""
    return HEAD + MEMO * memo + SLIDE + MOVES.format(order=order)


def blind(expression: str) -> str:
    """It answers an expression, in which `n` counts its calls from 0, and never looks at the board."""
    return f"import random\nn = -1\ndef strategy(board):\n    global n\n    n += 1\n    return {expression}\n"


def legal(expression: str, order: str = "éuai") -> str:
    """It chooses among `keys`, the list of legal ones."""
    body = f"def strategy(board):\n    keys = list(moves(board))\n    return {expression}\n"
    return library(order) + body


def evaluation(score: str) -> str:
    """`score(b)`: an expression in which `f` is the list of all cells and `lines` are all rows and columns of `b`."""
    head = LINE * ("line" in score) + SNAKE_WEIGHTS * ("snake" in score)
    head += "def score(b):\n"
    if "f)" in score or "f." in score or "f," in score:
        head += "    f = list(itertools.chain(*b))\n"
    if "lines" in score:
        head += "    lines = (*b, *zip(*b))\n"
    return head + f"    return {score}\n"


def greedy(score: str, order: str = "éuai", memo: bool = False, before: str = "") -> str:
    """The key with the best board right after it; `before` is a statement that comes first."""
    body = "def strategy(board):\n"
    body += f"    {before}\n" * bool(before)
    body += "    after = moves(board)\n    return max(after, key=lambda key: score(after[key]), default='a')\n"
    return library(order, memo) + evaluation(score) + body


def ahead(score: str, moves: int, memo: bool = True) -> str:
    """The best board after some moves, as if no tile appeared between them."""
    body = f"""def best(b, left):
    after = moves(b).values() if left else ()
    return max((best(c, left - 1) for c in after), default=score(b))
def strategy(board):
    after = moves(board)
    return max(after, key=lambda key: best(after[key], {moves - 1}), default="a")
"""
    return library(memo=memo) + evaluation(score) + body


def expectimax(score: str, cells: int, depth: str = "1", mean: str = "statistics.fmean", memo: bool = True) -> str:
    """The mean over some random cells for the next tile, `depth` times; `depth` may ask for the `board`.

    A lost board counts less than any other.
    """
    body = f"""def value(b, left):
    if not left:
        return score(b)
    best = [max((value(c, left - 1) for c in moves(t).values()), default=-1e12) for t in spawns(b, {cells})]
    return {mean}(best)
def strategy(board):
    after, depth = moves(board), {depth}
    return max(after, key=lambda key: value(after[key], depth), default="a")
"""
    return library(memo=memo) + SPAWNS + evaluation(score) + body


def monte_carlo(score: str, games: int, length: int, memo: bool = True) -> str:
    """The mean of a score at the end of some short games of random legal keys."""
    body = f"""def rollout(b):
    for _ in range({length}):
        b = next(spawns(b, 1))
        for key in random.sample("éuai", 4):
            if (c := move(b, key)) != b:
                break
        else:
            return -1e6
        b = c
    return score(b)
def strategy(board):
    after = moves(board)
    return max(after, key=lambda key: sum(rollout(after[key]) for _ in range({games})), default="a")
"""
    return library(memo=memo) + SPAWNS + evaluation(score) + body


def beam(score: str, width: int, steps: int) -> str:
    """It keeps the best few boards, lets a tile appear on each and moves all of them on; the first key of the best."""
    body = f"""def strategy(board):
    front = [(score(b), key, b) for key, b in moves(board).items()]
    best = max(front, default=(0, "a", ()))
    for _ in range({steps}):
        front = [(score(c), key, c) for _, key, b in heapq.nlargest({width}, front)
                 for t in spawns(b, 1) for c in moves(t).values()]
        best = max(front, default=best)
    return best[1]
"""
    return library(memo=True) + SPAWNS + evaluation(score) + body


def breaks(tile: int, end: str, rest: str) -> str:
    """A program that ends with a statement once there is a tile of that size."""
    check = f"def strategy(board):\n    if max(map(max, board)) >= {tile}:\n        {end}\n    return play(board)\n"
    return rest.replace("def strategy(", "def play(") + check


EMPTY = "f.count(0)"
SQUARES = "sum(map(operator.mul, f, f))"
SNAKE = "sum(map(operator.mul, f, snake(len(b))))"
PAIRS = "sum(x == y != 0 for r in lines for x, y in zip(r, r[1:]))"
SMOOTH = "-sum(abs(x - y) for r in lines for x, y in zip(r, r[1:]))"
SORTED = "sum(r == tuple(sorted(r)) for r in lines)"
LINES = "sum(map(line, lines))"
EMPTY_AND_PAIRS = f"2 * {EMPTY} + {PAIRS}"

# ---------------------------------------------------------------------------------------------------------------------
# The programs; on 6x6 the slow ones need 0.2 to 10 ms of CPU time a move

BLIND = {
    "left": blind('"a"'),
    "up": blind('"é"'),
    "two keys in turn": blind('"éa"[n % 2]'),
    "opposite keys in turn": blind('"ai"[n % 2]'),
    "three keys in turn": blind('"aéi"[n % 3]'),
    "rotation": blind('"aéiu"[n % 4]'),
    "zigzag": blind('"aiéu"[n % 4]'),
    "two keys, now and then others": blind('"éaéaéaéaiu"[n % 10]'),
    "long runs": blind('"aéiu"[n // 8 % 4]'),
    "random keys": blind('random.choice("éuai")'),
    "random two keys": blind('random.choice("éa")'),
    "random opposite keys": blind('random.choice("éu")'),
    "random three keys": blind('random.choice("éai")'),
    "parity of the tiles": 'def strategy(board):\n    return "éa"[sum(map(bool, sum(board, []))) % 2]\n',
}
LEGAL = {
    "first legal": legal("keys[0]"),
    "first legal, left": legal("keys[0]", "aiéu"),
    "first legal, corner": legal("keys[0]", "uaié"),
    "first legal, around": legal("keys[0]", "aéiu"),
    "random legal": legal("random.choice(keys)"),
    "one of the first two": legal("random.choice(keys[:2])", "uaié"),
    "half random": legal("keys[0] if random.random() < 0.5 else random.choice(keys)", "uaié"),
    "nearly always first": legal("keys[0] if random.random() < 0.95 else random.choice(keys)", "aéiu"),
    "mostly a wall": legal("random.choice(keys) if random.random() < 0.1 else keys[0]", "aiéu"),
}
GREEDY = {
    "most empty": greedy(EMPTY),
    "most empty, other order": greedy(EMPTY, "uaié", memo=True),
    "most empty, then any": greedy(f"{EMPTY} + random.random()"),
    "fewest empty": greedy(f"-{EMPTY}"),
    "squares": greedy(SQUARES),
    "smallest tiles": greedy(f"-{SQUARES}"),
    "squares and empty": greedy(f"{SQUARES} + 50 * {EMPTY}", memo=True),
    "corner": greedy("b[0][0]"),
    "first row": greedy("sum(b[0])"),
    "against the first row": greedy("-sum(b[0])"),
    "largest tile": greedy("max(map(max, b))"),
    "pairs": greedy(PAIRS),
    "empty and pairs": greedy(EMPTY_AND_PAIRS, memo=True),
    "sorted lines": greedy(SORTED),
    "smooth": greedy(SMOOTH),
    "different tiles": greedy("len(set(itertools.chain(*b))) + random.random()"),
    "snake": greedy(SNAKE, "éaiu"),
    "lines": greedy(LINES, memo=True),
    "remembers all boards": greedy(
        EMPTY, before="seen.append(board)\n    if seen.count(board) > 3: return random.choice('éuai')"
    ).replace("def score(b):", "seen = []\ndef score(b):"),
}
SLOW = {
    "two ahead, empty": ahead(EMPTY, 2, memo=False),
    "two ahead, snake": ahead(SNAKE, 2, memo=False),
    "two ahead, corner": ahead("b[0][0]", 2, memo=False),
    "three ahead, squares": ahead(SQUARES, 3),
    "three ahead, smallest tiles": ahead(f"-{SQUARES}", 3, memo=False),
    "four ahead, largest tile": ahead("max(map(max, b))", 4),
    "one cell, empty and pairs": expectimax(EMPTY_AND_PAIRS, 1),
    "one cell, lines": expectimax(LINES, 1),
    "two cells, snake": expectimax(SNAKE, 2),
    "two cells, chance": expectimax("random.random()", 2, memo=False),
    "four cells, empty": expectimax(EMPTY, 4, memo=False),
    "four cells, fewest empty": expectimax(f"-{EMPTY}", 4, memo=False),
    "worst of three cells, lines": expectimax(LINES, 3, mean="min"),
    "four cells, sorted lines": expectimax(SORTED, 4),
    "six cells, lines": expectimax(LINES, 6),
    "depth two, one cell, corner": expectimax("b[0][0]", 1, "2"),
    "depth two, one cell, lines": expectimax(LINES, 1, "2"),
    "depth two, two cells, lines": expectimax(LINES, 2, "2"),
    "depth two, four cells, different tiles": expectimax("len(set(itertools.chain(*b)))", 4, "2"),
    "deeper when crowded, lines": expectimax(LINES, 2, "sum(r.count(0) for r in board) < 2 * len(board)"),
    "monte carlo, 2 x 5, empty": monte_carlo(EMPTY, 2, 5),
    "monte carlo, 3 x 8, squares": monte_carlo(SQUARES, 3, 8),
    "monte carlo, 4 x 8, largest tile": monte_carlo("max(map(max, b))", 4, 8),
    "monte carlo, 4 x 2, chance": monte_carlo("random.random()", 4, 2, memo=False),
    "beam, lines": beam(LINES, 3, 3),
    "beam, first row": beam("sum(b[0])", 4, 4),
}
BROKEN = {
    "raises at 512": breaks(512, "return board[len(board)][0]", GREEDY["most empty"]),
    "raises at 4096": breaks(4096, "return board[len(board)][0]", GREEDY["lines"]),
    "None at 512": breaks(512, "return None", LEGAL["first legal, corner"]),
    "loops at 512": breaks(512, "while True: pass", GREEDY["squares and empty"]),
    "loops at 2048": breaks(2048, "while True: pass", SLOW["one cell, lines"]),
    "three legal keys": legal('keys[0] if keys else "a"', "aéi"),
    "random of three legal keys": legal('random.choice(keys or "a")', "uai"),
    "never down, most empty": greedy(EMPTY, "éai"),
    "never down, lines": greedy(LINES, "aéi", memo=True),
    "None without a pair": "def strategy(board):\n    for r in board:\n        for x, y in zip(r, r[1:]):\n"
    '            if x == y:\n                return "a"\n    for r in zip(*board):\n'
    '        for x, y in zip(r, r[1:]):\n            if x == y:\n                return "é"\n',
}
PROGRAMS: dict[str, str] = {**BLIND, **LEGAL, **GREEDY, **SLOW, **BROKEN}


# ---------------------------------------------------------------------------------------------------------------------
# The record

RECORD = Path(__file__).with_name("games.json")
SKILL_BOARDS, REWARD_BOARDS = range(1000, 2000), range(2000, 3000)  # numbers of boards

Milestone = tuple[int, int, float]  # exponent of a new largest tile, moves until then, CPU seconds until then
Game = tuple[int, list[Milestone], tuple[str, int, float]]  # board, milestones, (outcome, moves, CPU seconds)


def recorded_games(size: int) -> dict[str, list[Game]]:
    """Every program's games on boards of that size, played with unlimited time until they made 65536 or ended."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    return {row["program"]: row["games"] for row in rows if row["size"] == size}


def skill(games: list[Game], target: int) -> float:
    """Mean exponent of the largest tile with unlimited time, capped at the target."""
    wanted = target.bit_length() - 1
    return statistics.fmean(min(wanted, milestones[-1][0]) for _, milestones, _ in games)


def refereed(game: Game, job: program.Job) -> program.GameResult:
    """What the referee says of a recorded game under a job's target and time limit.

    CPU time between two milestones is taken as even.  All moves count, because programs that take longer than the
    first thousand moves allow play legal keys alone.
    """
    board, milestones, (outcome, moves, seconds) = game
    wanted, tile, last = job.target.bit_length() - 1, milestones[0][0], (0, 0.0)
    steps = [*milestones[1:], (0, moves, seconds)]
    for exponent, until, used in steps:
        for move in {*range(last[0], until, 50), until} if used > job.timeout else ():
            spent = last[1] + (used - last[1]) * (move - last[0]) / max(1, until - last[0])
            if spent > job.cpu_seconds(move):
                return program.GameResult(board, "timeout", move, 1 << tile, 0, spent)
        tile, last = max(tile, exponent), (until, used)
        if tile >= wanted:
            return program.GameResult(board, "success", until, 1 << tile, 0, used)
    return program.GameResult(board, outcome, moves, 1 << tile, 0, seconds)


def wrongly_paid(size: int, target: int) -> tuple[list[tuple[str, str]], int]:
    """The pairs (better, worse) of which the worse program is paid as much or more, and the number of pairs.

    Pairs are those whose skill differs by a factor of two or more.  On 4x4 skill and reward are of different boards; on
    6x6, where a game to 65536 takes minutes, of the same few.
    """
    job = program.Job("", (), size, target)
    skills, paid = {}, {}
    for name, games in recorded_games(size).items():
        shown, rewarded = ([g for g in games if g[0] in boards] for boards in (SKILL_BOARDS, REWARD_BOARDS))
        skills[name] = skill(games if size == 6 else shown, target)
        results = [refereed(game, job) for game in (games if size == 6 else rewarded)]
        paid[name] = statistics.fmean(program.game_reward(result, target) for result in results)
    pairs = [(a, b) for a in skills for b in skills if skills[a] >= skills[b] + 1]
    return [(a, b) for a, b in pairs if paid[a] <= paid[b]], len(pairs)
