"""Jailed games: they repeat, each stands alone, they follow the engine's rules, and allowed modules work in them."""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap

import pytest

import gpt_2048_rl as program
from gpt_2048_rl import GameResult, Pool, execute_strategies
from tests.helpers import HONEST, play, without_seconds

# ---------------------------------------------------------------------------------------------------------------------
# Repeatable games


GAMES = {
    "random moves": HONEST,
    "a constant": """
def strategy(board):
    return "a"
""",
    "state in a global": """
n = 0
def strategy(board):
    global n
    n += 1
    return 'auié'[n % 4]""",
    "state in a mutable default": """
def strategy(board, n=[]):
    n.append(0)
    return 'auié'[len(n) % 4]""",
    "state in an attribute of the function": """
def strategy(board):
    strategy.n = getattr(strategy, "n", 0) + 1
    return "auié"[strategy.n // 3 % 4]""",
    "state in a module": """
import math, collections
def strategy(board):
    math.n = getattr(math, "n", 0) + 1
    return "auié"[math.n // 2 % 4]""",
    "state in the builtins": """
def strategy(board):
    __builtins__["n"] = __builtins__.get("n", 0) + 1
    return "auié"[n // 2 % 4]""",
    "state in a class": """
class A:
    n = 0
def strategy(board):
    A.n += 1
    return "auié"[A.n // 2 % 4]""",
    "state in a closure and a cache": """
import functools, itertools
count = itertools.count()
@functools.cache
def of(cell):
    return next(count)
def strategy(board):
    return "auié"[of(board[0][0] + 3 * board[5][5]) % 4]""",
    "reseeds random": """
import random
def strategy(board):
    random.seed(sum(map(sum, board)))
    return random.choice('auié')""",
    "a patched random": """
import random
def strategy(board):
    random.n = getattr(random, "n", 0) + 1
    random.random = lambda: random.n % 7 / 7
    return "auié"[int(random.random() * 4)]""",
    "Random of its own": """
import random
r = random.Random(7)
def strategy(board):
    return r.choice('auié')""",
    "Random without a seed": """
import random
r = random.Random()
def strategy(board):
    return r.choice('auié')""",
    "seed() without a seed": """
import random
random.seed()
def strategy(board):
    return random.choice('auié')""",
    "from random import": """
from random import choice, shuffle
def strategy(board):
    return choice('auié')""",
    "order of a set": """
def strategy(board):
    return next(iter({'a', 'u', 'i', 'é'} - {'auié'[sum(map(sum, board)) // 2 % 4]}))""",
    "writes into the board": """
def strategy(board):
    k = 'auié'[board[0][0] % 3]
    board[0][0] = 2048
    board.clear()
    return k""",
    "raises with the board in it": """
def strategy(board):
    if board[2][2]: raise ValueError(str(board))
    return 'a' if board[0][1] else 'u'""",
    "a wrong key with the board in it": """
def strategy(board):
    return str(board) if board[3][3] else 'aiué'[board[0][0] % 4]""",
    "ends the process on one board": """
import random
def strategy(board):
    if board[1][1]: random._os._exit(3)
    return random.choice('auié')""",
    "kills the stack on one board": """
import random
def strategy(board):
    if board[1][2] > 2:
        random._os.sys.setrecursionlimit(10 ** 9)
        f = lambda x: sorted([x], key=f)
        f(0)
    return random.choice("auié")""",
    "eats memory on one board": """
def strategy(board):
    if board[1][1]: x = [0] * 10 ** 9
    return 'auié'[sum(map(sum, board)) // 2 % 4]""",
    "breaks the protocol on one board": """
import random
def strategy(board):
    if board[1][1]:
        random._os.closerange(0, 9)
        for fd in range(9):
            try: random._os.write(fd, b"")
            except OSError: pass
    return random.choice("auié")""",
}


@pytest.mark.parametrize("source", GAMES.values(), ids=GAMES.keys())
def test_games_of_one_job_equal_games_played_alone(pool: Pool, source: str) -> None:
    """No game sees what a strategy did in another, and the text of its errors is the same."""

    def comparable(results: list[GameResult]) -> list[GameResult]:
        # Python adds where the stack ended, " while calling a Python object", or from 3.14 on " (used 8160 kB)"
        return [
            dataclasses.replace(r, detail=re.split(r" while | \(used ", r.detail)[0]) for r in without_seconds(results)
        ]

    seeds = (0, 1, 2, 3, 10, 11)
    alone = [play(pool, source, seed)[0] for seed in seeds]
    assert comparable(play(pool, source, *seeds)) == comparable(alone)


RANDOM = {
    "SystemRandom": "random.SystemRandom().choice('éuai')",
    "SystemRandom kept": "system.choice('éuai')",
    "os.urandom": "'éuai'[random._os.urandom(1)[0] % 4]",
    "os.getrandom": "'éuai'[random._os.getrandom(1)[0] % 4]",
    "posix.urandom": "'éuai'[random._os.sys.modules['posix'].urandom(1)[0] % 4]",
    "Random without a seed": "random.Random().choice('éuai')",
    "seed without a seed": "(random.seed(), random.choice('éuai'))[1]",
    "Random, seeded again": "(system.seed(), system.choice('éuai'))[1]",
    "a subclass": "Own().choice('éuai')",
    "the inherited method": "'éuai'[int(random.Random.random(system) * 4)]",
    "getrandbits": "'éuai'[random.SystemRandom().getrandbits(2)]",
    "shuffle": "(order := list('éuai'), random.SystemRandom().shuffle(order))[0][0]",
    "sample": "random.SystemRandom().sample('éuai', 1)[0]",
    "statistics": "'éuai'[int(abs(statistics.NormalDist().samples(1)[0]) * 9) % 4]",
}


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM.keys())
def test_luck_is_the_boards_own(pool: Pool, draw: str) -> None:
    """SystemRandom drew from the kernel, so no score could be repeated."""
    source = f"""
import random, statistics
class Own(random.Random): pass
system = random.SystemRandom()
def strategy(board):
    return {draw}"""
    first, again = (without_seconds(play(pool, source, 1, 2)) for _ in range(2))
    assert first == again
    assert {result.outcome for result in first} <= {"success", "lost"}


@pytest.mark.parametrize("source", [GAMES["random moves"], GAMES["Random without a seed"], GAMES["order of a set"]])
def test_the_same_board_gives_the_same_result_in_every_pool(pool: Pool, lone: Pool, source: str) -> None:
    """A strategy's random numbers and the order of its sets are fixed, so rewards can be computed again."""
    assert without_seconds(play(pool, source, 1, 2, 3)) == without_seconds(play(lone, source, 1, 2, 3))


def test_every_board_has_random_numbers_of_its_own(pool: Pool) -> None:
    """Different first boards, different streams."""
    source = "import random\ndef strategy(board):\n    raise ValueError(random.random())"
    details = {result.detail for result in play(pool, source, *range(10))}
    assert len(details) == 10


def test_random_numbers_tell_nothing_of_the_boards_seed(pool: Pool) -> None:
    """They come from the first board, which the player sees.

    They came from a hash of the seed: by trying all small numbers a strategy could find the seed, and with it every
    tile to come.
    """
    source = "import random\ndef strategy(board):\n    raise ValueError((board, random.random()))"
    details = {result.detail for result in execute_strategies([source], range(200), 2, pool=pool)[0]}
    boards = {program.GameBoard(2, seed).flat() for seed in range(200)}
    assert len(details) == len(boards) < 60


# ---------------------------------------------------------------------------------------------------------------------
# Rules


@pytest.mark.parametrize(
    ("size", "target", "keys"), [(2, 16, "wasd"), (3, 64, "zqsd"), (4, 128, "arrows"), (6, 32, "bepo"), (16, 8, "bepo")]
)
def test_games_are_what_the_engine_says(pool: Pool, size: int, target: int, keys: str) -> None:
    """A strategy that needs nothing but the board, played here by hand: same steps, tile, score and outcome."""
    letters = program.LAYOUTS[keys]
    source = f"def strategy(board):\n    return {letters!r}[sum(i * c for i, c in enumerate(sum(board, []))) // 2 % 4]"
    expected = []
    for seed in range(8):
        game, steps, idle = program.GameBoard(size, seed, target, keys=keys), 0, 0
        while game.state() == "ongoing" and idle < program.LIMITS.idle_moves:
            key = letters[sum(i * c for i, c in enumerate(itertools.chain(*game.board()))) // 2 % 4]
            idle = 0 if game.do_action(key) else idle + 1
            steps += 1
        outcome = {"success": "success", "failed": "lost", "ongoing": "stuck"}[game.state()]
        expected.append((seed, outcome, steps, game.max_tile(), game.score()))
    results = execute_strategies([source], range(8), size, target, keys, pool=pool)[0]
    assert [(r.seed, r.outcome, r.steps, r.max_tile, r.score) for r in results] == expected


TRIES_EACH_KEY_OFTEN = """
last, idle = None, 0
def strategy(board):
    global last, idle
    last, idle = board, idle + 1 if board == last else 0
    return "éuai"[idle // 16 % 4]
"""


def test_only_moves_in_a_row_that_change_nothing_end_a_game(pool: Pool) -> None:
    """Here at most 48 of them come between two moves that change something."""
    (result,) = execute_strategies([TRIES_EACH_KEY_OFTEN], [1], target=64, record=True, pool=pool)[0]
    game = program.GameBoard(6, 1, 64)
    wasted = sum(not game.move(int(direction)) for direction in result.moves)
    assert wasted > 2 * program.LIMITS.idle_moves
    assert (result.outcome, game.state()) == ("success", "success")


def test_a_board_that_is_won_at_the_start(pool: Pool) -> None:
    """The strategy is not called."""
    (result,) = execute_strategies([HONEST], (0,), target=2, pool=pool)[0]
    assert (result.outcome, result.steps) == ("success", 0)


# ---------------------------------------------------------------------------------------------------------------------
# Modules


MODULES = {
    "math": """
assert math.log2(8) == 3
assert math.isqrt(10) == 3
assert math.inf > 1""",
    "random": """
assert 0 <= random.random() < 1
assert random.randint(1, 3) in (1, 2, 3)
random.shuffle([1, 2])
assert random.choices('ab', [1, 0]) == ['a']
assert random.sample(range(9), 9)
assert random.gauss(0, 1) < 99""",
    "itertools": """
assert list(itertools.accumulate([1, 2])) == [1, 3]
assert len(list(itertools.product('ab', repeat=3))) == 8""",
    "functools": """
@functools.lru_cache(maxsize=9)
def f(x): return x + 1
assert f(1) == f(1) == 2
assert f.cache_info().hits
@functools.singledispatch
def g(x): return 0
@g.register
def _(x: int): return 1
assert (g(1), g('')) == (1, 0)
class A:
    @functools.cached_property
    def x(self): return 3
assert A().x == 3
assert functools.reduce(max, [1, 2]) == 2
assert functools.partial(max, 3)(2) == 3""",
    "collections": """
assert collections.Counter('aab').most_common(1) == [('a', 2)]
P = collections.namedtuple('P', 'x y', defaults=[0])
assert P(1)._replace(y=2) == (1, 2)
assert collections.deque([1], maxlen=1)
assert collections.defaultdict(list)[0] == []
assert collections.OrderedDict(a=1)""",
    "collections.abc": "assert isinstance([], collections.abc.Sequence)",
    "heapq": """
h = [3, 1]
heapq.heapify(h)
heapq.heappush(h, 0)
assert heapq.heappop(h) == 0
assert heapq.nlargest(1, h) == [3]
assert list(heapq.merge([1], [0])) == [0, 1]""",
    "copy": """
class A: pass
a = A()
a.x = [[1]]
b = copy.deepcopy(a)
b.x[0][0] = 2
assert a.x == [[1]]
assert copy.copy(a).x is a.x""",
    "operator": """
assert operator.itemgetter(1)([1, 2]) == 2
assert operator.mul(2, 3) == 6
assert operator.methodcaller('upper')('a') == 'A'""",
    "statistics": """
assert statistics.mean([1, 2]) == 1.5
assert statistics.median([3, 1, 2]) == 2
assert statistics.pstdev([1, 1]) == 0
assert statistics.NormalDist(0, 1).cdf(0) == 0.5
assert statistics.quantiles([1, 2, 3])""",
    "string": """
assert string.ascii_lowercase[0] == 'a'
assert string.Template('$x').substitute(x=1) == '1'
assert string.Formatter().format('{0:>3}', 1) == '  1'""",
    "re": """
assert re.findall('(?P<x>\\\\d+)', 'a1b22') == ['1', '22']
assert re.sub('a', 'b', 'aa', flags=re.I) == 'bb'
assert re.compile('é')""",
    "typing": """
class P(typing.NamedTuple):
    x: int
    y: typing.Optional[int] = None
assert P(1) == (1, None)
T = typing.TypeVar('T')
class G(typing.Generic[T]): pass
G[int]()
class D(typing.TypedDict):
    x: int
assert D(x=1)
assert typing.get_type_hints(P)
assert typing.cast(int, 1)
class Q(typing.Protocol): pass""",
    "dataclasses": """
@dataclasses.dataclass(order=True, frozen=True, slots=True)
class P:
    x: int
    y: list = dataclasses.field(default_factory=list)
assert P(1) < P(2)
assert dataclasses.replace(P(1), x=3).x == 3
assert dataclasses.asdict(P(1)) == {'x': 1, 'y': []}
assert dataclasses.make_dataclass('Q', ['a'])(1).a == 1""",
    "bisect": """
a = [1, 3]
bisect.insort(a, 2)
assert a == [1, 2, 3]
assert bisect.bisect_left(a, 2) == 1""",
    "enum": """
class M(enum.Enum):
    UP = 'é'
    DOWN = 'u'
assert M('é') is M.UP
assert M['UP'].value == 'é'
assert len(M) == 2
class F(enum.IntFlag):
    A = enum.auto()
    B = enum.auto()
assert F.A | F.B == 3""",
    "abc": """
class A(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
class B(A):
    def f(self): return 1
assert B().f() == 1""",
    "numbers": """
assert isinstance(1, numbers.Integral)
assert isinstance(1.5, numbers.Real)""",
    "fractions": "assert fractions.Fraction(1, 3) + fractions.Fraction('1/6') == fractions.Fraction(1, 2)",
    "decimal": """
assert decimal.Decimal('0.1') * 3 == decimal.Decimal('0.3')
with decimal.localcontext() as c:
    c.prec = 5
    assert str(decimal.Decimal(2).sqrt()) == '1.4142'""",
}


def test_modules_are_all_tried() -> None:
    """One entry for each allowed module."""
    assert set(MODULES) == {*program.ALLOWED_MODULES, "collections.abc"}


@pytest.mark.parametrize("where", ["above", "inside", "future annotations"])
@pytest.mark.parametrize("module", MODULES)
def test_an_allowed_module_does_its_work(pool: Pool, module: str, where: str) -> None:
    """Imported and put to typical use, in a process that can open no file: at loading, within the function, and where
    annotations are strings (for which dataclasses wants the strategy's module to exist, and raised without it)."""
    use = f"import {module}\n{MODULES[module]}\n"
    if where == "inside":
        source = f"def strategy(board):\n{textwrap.indent(use, '    ')}\n    return 'a'"
    else:
        source = f"{use}\ndef strategy(board):\n    return 'a'"
    if where == "future annotations":
        source = f"from __future__ import annotations\n{source}"
    (result,) = play(pool, source)
    assert (result.outcome, result.detail) == ("stuck", "64 moves in a row changed nothing")


@pytest.mark.parametrize("use", ["clé = 1", "x = '\\N{SNOWMAN}'", "x = re.compile('(?i)É').match('é').group()"])
def test_what_python_itself_imports_is_there(pool: Pool, use: str) -> None:
    """The compiler asks for unicodedata at a name with an accent; in the jail it cannot be read from disk any more, and
    such a strategy counted as one that does not parse."""
    (result,) = play(pool, f"import re\ndef strategy(board):\n    {use}\n    return 'a'")
    assert (result.outcome, result.detail) == ("stuck", "64 moves in a row changed nothing")


@pytest.mark.parametrize("name", ["os", "sys", "time", "socket", "threading", "ctypes", "builtins", "gc", "numpy"])
def test_other_modules_cannot_be_imported(pool: Pool, name: str) -> None:
    """Not even those that the player's process has loaded."""
    (result,) = play(pool, f"def strategy(board):\n    import {name}\n    return 'a'")
    assert result.outcome == "error"
    assert result.detail.startswith(f"ImportError: {name} may not be imported here")
