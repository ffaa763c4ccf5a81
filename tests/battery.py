"""A battery of hostile, broken and strange strategies, each with its one right outcome on board 1.

`PWNED` in a source stands for a path that the strategy tries to write to.
"""

from __future__ import annotations

import sys

import gpt_2048_rl as program

LEFT = 'def strategy(board):\n    return "a"\n'  # ends as stuck: what a strategy returns that has done its harm
OS = "import random\nos = random._os\nsys = os.sys\n"  # every way to os is as good as this one


def always(*lines: str, before: str = "", result: str = '"a"') -> str:
    """A strategy that runs some lines at every move, with os and sys at hand, and goes left."""
    return f"{OS}{before}\ndef strategy(board):\n" + "".join(f"    {line}\n" for line in (*lines, f"return {result}"))


def returns(expression: str, before: str = "") -> str:
    return f"{before}\ndef strategy(board):\n    return {expression}\n"


def endless(handler: str) -> str:
    """`while True` around a try statement with some handler."""
    return f"def strategy(board):\n    while True:\n        try:\n            1 / 0\n        {handler}\n"


WHILE = "while True:\n            pass"
LIAR = """class Liar(str):
    def strip(self, *_): return "a"
    def lower(self): return "a"
    def __eq__(self, other): return True
    def __hash__(self): return hash("a")
    def __str__(self): return "a"
"""
FRAMES = """
def strategy(board):
    try:
        1 / 0
    except ZeroDivisionError as error:
        frame = error.__traceback__.tb_frame
        while frame:
            for scope in (frame.f_locals, frame.f_globals):
                {what}
            frame = frame.f_back
    return "a"
"""

TAMPERING = {
    "writes tiles into the board": (always("board[0][0] = board[5][5] = 2048"), "stuck"),
    "empties the board": (always("del board[:]"), "stuck"),
    "puts the board into itself": (always("board.append(board); board[0][0] = board"), "stuck"),
    "keeps every board": (always("kept.append(board)", before="kept = []"), "stuck"),
    "walks the frames": (
        FRAMES.format(what="scope.update(dict(message=b'', score=10 ** 9, games=[]))"),
        "stuck" if sys.version_info < (3, 13) else "error",  # from then on a frame's locals can be changed
    ),
    "patches the game in its callers' globals": (
        FRAMES.format(what="GB = scope.get('GameBoard'); GB and setattr(GB, 'state', lambda self: 'success')"),
        "stuck",
    ),
    "empties its callers' key tables": (
        FRAMES.format(what="isinstance(scope.get('table'), dict) and scope['table'].clear()"),
        "invalid_move",
    ),
    "writes into every dict that the collector knows": (
        always("for d in sys.modules['gc'].get_objects():", "    if type(d) is dict and 'games' in d: d['games'] = 9"),
        "stuck",
    ),
    "patches its builtins": (always("__builtins__['max'] = __builtins__['len'] = lambda *a: 2048"), "stuck"),
    "patches the real builtins": (always("sys.modules['builtins'].max = lambda *a: 2048"), "stuck"),
    "patches a builtin that its loop needs": (always("sys.modules['builtins'].map = lambda *a: 1 / 0"), "error"),
    "removes all builtins": (always("vars(sys.modules['builtins']).clear()"), "error"),
    "removes its own builtins": (always("__builtins__.clear()"), "stuck"),
    "removes all modules": (always("sys.modules.clear()"), "stuck"),
    "patches the way its answers go": (always("os.write = lambda *a: 0"), "stuck"),
    "patches random": (always("random.Random.random = lambda *a: 0.0"), "stuck"),
    "traces": (always("sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)"), "stuck"),
    "changes its own code": (always("strategy.__code__ = (lambda board: 'x').__code__"), "invalid_move"),
    "peeks at the random numbers": (always(f"raise ValueError({FRAMES!r}, random.getstate()[1][:3])"), "error"),
}

WAYS_OUT = {
    "import os": (f"import os\n{LEFT}", "error"),
    "import inside": ("def strategy(board):\n    import subprocess\n    return 'a'", "error"),
    "relative import": (f"from . import os\n{LEFT}", "error"),
    "__import__": (returns("__import__('os').getcwd()"), "error"),
    "eval of an import": (returns("eval('__import__(\"os\")')"), "error"),
    "exec of an import": (always("exec('import socket')"), "error"),
    "importlib": (always("sys.modules['importlib'].import_module('http.client')"), "error"),
    "reads a file": (returns("open('/etc/passwd').read()"), "error"),
    "reads its environment's memory": (always("open('/proc/self/mem', 'rb')"), "error"),
    "lists a folder": (always("os.listdir('/')"), "error"),
    "writes a file": (always("open('PWNED', 'w').write('x')"), "error"),
    "writes a file, and hides it": (always("try: open('PWNED', 'w')", "except OSError: pass"), "stuck"),
    "os.open": (always("os.open('PWNED', os.O_CREAT | os.O_WRONLY)"), "error"),
    "makes a folder": (always("os.mkdir('PWNED')"), "error"),
    "makes a link": (always("os.symlink('/etc/passwd', 'PWNED')"), "error"),
    "makes a pipe file": (always("os.mkfifo('PWNED')"), "error"),
    "removes the program": (always(f"os.remove({program.__file__!r})"), "error"),
    "renames": (always(f"os.rename({program.__file__!r}, 'PWNED')"), "error"),
    "writes to low descriptors": (
        always("for fd in (0, 1, 2, *range(4, 300)):", "    try: os.write(fd, b'x')", "    except OSError: pass"),
        "stuck",
    ),
    "os.system": (always("os.system('touch PWNED')"), "stuck"),
    "subclasses to os.system": (
        always(
            "for c in ().__class__.__base__.__subclasses__():",
            "    if c.__name__ == '_wrap_close': c.__init__.__globals__['system']('touch PWNED')",
        ),
        "stuck",
    ),
    "popen": (always("os.popen('touch PWNED').read()"), "error"),
    "subprocess": (always("sys.modules['subprocess'].run(['touch', 'PWNED'])"), "error"),
    "execv": (always("os.execv('/bin/sh', ['sh', '-c', 'touch PWNED'])"), "error"),
    "posix_spawn": (always("os.posix_spawn('/bin/sh', ['sh', '-c', 'touch PWNED'], {})"), "error"),
    "fork": (always("os.fork()"), "error"),
    "fork bomb": (always("while True:", "    try: os.fork()", "    except OSError: pass"), "timeout"),
    "thread": (always("sys.modules['threading'].Thread(target=print).start()"), "error"),
    "low-level thread": (always("sys.modules['_thread'].start_new_thread(print, ())"), "error"),
    "socket": (always("sys.modules['socket'].socket()"), "error"),
    "socket pair": (always("sys.modules['socket'].socketpair()"), "error"),
    "atexit": (always("sys.modules['atexit'].register(open, 'PWNED', 'w')"), "stuck"),
    "__del__": (
        "class A:\n    def __del__(self):\n        open('PWNED', 'w')\ndef strategy(board):\n    A()\n    return 'a'",
        "stuck",
    ),
    "a signal handler": (always("s = sys.modules['signal']; s.signal(s.SIGXCPU, s.SIG_IGN)"), "error"),
    "a timer": (always("sys.modules['signal'].setitimer(0, 0.01)"), "error"),
    "an alarm": (always("sys.modules['signal'].alarm(1)"), "stuck"),
    "kills its parent": (always("os.kill(os.getppid(), 9)"), "error"),
    "kills everybody": (always("os.kill(-1, 9)"), "error"),
    "raises its limits": (always("r = sys.modules['resource']; r.setrlimit(r.RLIMIT_AS, (-1, -1))"), "error"),
    "leaves its core": (always("os.sched_setaffinity(0, range(64))"), "error"),
    "becomes root": (always("os.setuid(0)"), "error"),
    "ctypes: system": (always("sys.modules['ctypes'].CDLL(None).system(b'touch PWNED')"), "stuck"),
    "ctypes: another filter": (always("sys.modules['ctypes'].CDLL(None).prctl(22, 0, 0, 0, 0)"), "stuck"),
    "ctypes: null pointer": (always("sys.modules['ctypes'].string_at(0)"), "error"),
    "ctypes: traces its parent": (always("sys.modules['ctypes'].CDLL(None).ptrace(16, 1, 0, 0)"), "stuck"),
}

PROTOCOL = {
    "forges moves": (always("os.write(3, bytes([3] * 100))"), "error"),
    "forges a word": (always("os.write(3, b'success')"), "error"),
    "forges a verdict": (always("""os.write(3, b'{"outcome": "success", "score": 1000000}')"""), "error"),
    "forges that it loaded": (f"{OS}os.write(3, b'load')\nwhile True: pass\n{LEFT}", "timeout"),
    "forges that it could not be jailed": (f"{OS}os.write(3, b'JailError: no jail')\n{LEFT}", "error"),
    "forges that there is no function": (f"{OS}os.write(3, b'none')\n{LEFT}", "no_function"),
    "forges an unknown claim": (f"{OS}os.write(3, b'\\xff' * 9)\n{LEFT}", "error"),
    "sends an empty message": (always("os.write(3, b'')"), "error"),
    "floods its socket": (always("while True: os.write(3, bytes(60000))"), "error"),
    "closes its socket": (always("os.close(3)"), "error"),
    "eats its own messages": (always("os.read(3, 100)"), "timeout"),
    "puts something else in its socket's place": (always("os.dup2(3, 0)"), "error"),
    "os._exit": (always("os._exit(0)"), "error"),
    "os._exit with a code": (always("os._exit(77)"), "error"),
    "os._exit at loading": (f"{OS}os._exit(0)\n{LEFT}", "error"),
    "abort": (always("os.abort()"), "error"),
}

EXCEPTIONS = {
    "SystemExit": (always("raise SystemExit"), "error"),
    "sys.exit": (always("sys.exit('bye')"), "error"),
    "exit()": (always("exit()"), "error"),
    "KeyboardInterrupt": (always("raise KeyboardInterrupt"), "error"),
    "GeneratorExit": (always("raise GeneratorExit"), "error"),
    "BaseException": (always("raise BaseException('b')"), "error"),
    "SystemExit at loading": (f"raise SystemExit\n{LEFT}", "error"),
    "KeyboardInterrupt at loading": (f"raise KeyboardInterrupt\n{LEFT}", "error"),
    "MemoryError": (always("raise MemoryError"), "error"),
    "__str__ raises": (always("raise E", before="class E(Exception):\n    def __str__(self): return 1 / 0"), "error"),
    "__str__ exits": (always("raise E", before="class E(Exception):\n    def __str__(self): exit()"), "error"),
    "__str__ gives no str": (always("raise E", before="class E(Exception):\n    def __str__(self): return 7"), "error"),
    "__str__ never ends": (
        always("raise E", before=f"class E(Exception):\n    def __str__(self):\n        {WHILE}"),
        "timeout",
    ),
    "__str__ is huge": (always("raise E('é' * 10 ** 7)", before="class E(Exception): pass"), "error"),
    "terminal codes in the message": (always(r"raise ValueError('\x1b[2J\r\n\0\ud800\u202e')"), "error"),
    "a name of 100,000 letters": (always("raise type('E' * 100_000, (BaseException,), {})"), "error"),
    "a group of exceptions": (always("raise BaseExceptionGroup('g', [SystemExit()])"), "error"),
    "a chain of 10,000 causes": (
        always("e = ValueError()", "for _ in range(10_000):", "    e, e.__cause__ = ValueError(), e", "raise e"),
        "error",
    ),
    "assertion": (always("assert False"), "error"),
    "missing helper": (returns("best_move(board)"), "error"),
    "index out of range": (returns("board[6][6]"), "error"),
}

RESOURCES = {
    "while True": (f"def strategy(board):\n        {WHILE}", "timeout"),
    "while True at loading": (f"{LEFT}\nwhile True: pass", "timeout"),
    "except Exception": (endless("except Exception: pass"), "timeout"),
    "except BaseException": (endless("except BaseException: pass"), "timeout"),
    "bare except": (endless("except: pass"), "timeout"),
    "finally continue": (endless("finally: continue"), "timeout"),
    "a loop after a board": (always(f"if board[0][0]:\n        {WHILE}"), "timeout"),
    "deep recursion": ("def strategy(board):\n    return strategy(board)", "error"),
    "recursion without its limit": (
        always("sys.setrecursionlimit(10 ** 9); f(0)", before="def f(x): return sorted([x], key=f)"),
        "error",
    ),
    "recursion that catches its end": (
        always("f()", before="def f():\n    try: f()\n    except RecursionError: f()\n    f()"),
        "timeout",
    ),
    "a power inside C": (returns("str(3 ** 10 ** 8)[0]"), "timeout"),
    "a shift without end": (returns("1 << 10 ** 12"), "error"),
    "a number too long to print": (returns("str(10 ** 5000)"), "error"),
    "a number of 24,000 digits": (
        always("int(str(3 ** 50_000))", before="sys.set_int_max_str_digits(0)"), "stuck",
    ),
    "sum of count": (returns("sum(itertools.count())", "import itertools"), "timeout"),
    "max of cycle": (returns("max(itertools.cycle([1]))", "import itertools"), "timeout"),
    "deque of repeat": (
        returns("collections.deque(itertools.repeat(0), 0)", "import collections, itertools"),
        "timeout",
    ),
    "search in repeat": (returns("0 in itertools.repeat(1)", "import itertools"), "timeout"),
    "permutations in C": (returns("max(itertools.permutations(range(20)))", "import itertools"), "timeout"),
    "catastrophic regex": (returns("re.match('(a+)+$', 'a' * 40 + 'b')", "import re"), "timeout"),
    "input()": (returns("input('move? ')"), "error"),
    "stdin": (returns("sys.stdin.read()", OS), "error"),
    "a list of a billion": (returns("[0] * 10 ** 9"), "error"),
    "a long string": (returns("'a' * 10 ** 10"), "error"),
    "bytes": (returns("bytearray(10 ** 9)"), "error"),
    "a list that doubles": (always("x = [0]", "while True: x += x"), "error"),
    "a list without end": (returns("list(map(bytes, itertools.repeat(1 << 20)))", "import itertools"), "error"),
    "a dict that grows": (always("d = {}", "while True: d[len(d)] = [0] * 99_999"), "error"),
    "memory at loading": (f"x = [0] * 10 ** 9\n{LEFT}", "error"),
    "memory again and again": (
        always("while True:", "    try: [0] * 10 ** 9", "    except MemoryError: pass"),
        "timeout",
    ),
    "endless printing": (always("while True: print('x' * 1000)"), "timeout"),
    "printing": (always("print('x' * 1000, file=sys.stderr, flush=True)"), "stuck"),
    "a huge compile": (always("compile('+'.join(['1'] * 10 ** 5), '', 'eval')"), "error"),
    "decimal with a billion digits": (
        returns("decimal.Decimal(2) ** 10 ** 9", "import decimal\ndecimal.getcontext().prec = 10 ** 7\n"
                "decimal.getcontext().Emax = 10 ** 10"),
        "timeout",
    ),
}  # fmt: skip

ANSWERS = {
    "...": ("def strategy(board):\n    ...", "invalid_move"),
    "pass": ("def strategy(board):\n    pass", "invalid_move"),
    **{f"returns {e[:40]}": (returns(e), "invalid_move") for e in (
        "None", "0", "True", "2.5", "b'a'", "['a']", "('a',)", "{'a'}", "''", "' '", "'x'", "'q'", "'left'", "'aa'",
        "'a i'", "'a\\0'", "strategy", "board", "10 ** 5000", "'a' * 10 ** 7", "'\\ud800'",
        "'\\N{CYRILLIC SMALL LETTER A}'",
        "object()", "iter('a')", "type", "Ellipsis", "float('nan')", "lambda: 'a'", "ValueError('a')")},
    **{f"returns {e!a}": (returns(e), "stuck") for e in (
        "'A'", "' a '", "'a\\n'", "'\\u2003a'", "str(b'a', 'ascii')", "''.join(['a'])")},
    "a generator": ("def strategy(board):\n    yield 'a'", "invalid_move"),
    "a coroutine": ("async def strategy(board):\n    return 'a'", "invalid_move"),
    "a str whose methods lie": (returns("Liar('x')", LIAR), "invalid_move"),
    "a str whose methods lie, but a key": (returns("Liar('a')", LIAR), "stuck"),
    "an object that claims to be a str": (returns("A()", "class A:\n    __class__ = str"), "invalid_move"),
    "__repr__ raises": (returns("A()", "class A:\n    def __repr__(self): raise SystemExit"), "invalid_move"),
    "__repr__ never ends": (returns("A()", f"class A:\n    def __repr__(self):\n        {WHILE}"), "timeout"),
    "__format__ and __len__ lie": (
        returns("A()", "class A(list):\n    def __format__(self, x): 1 / 0\n    def __len__(self): return -1"),
        "invalid_move",
    ),
    "an evil metaclass": (
        returns("A()", "class M(type):\n    def __getattribute__(self, n): exit()\nclass A(metaclass=M): pass"),
        "invalid_move",
    ),
    "a list in itself": ("def strategy(board):\n    board.append(board)\n    return board", "invalid_move"),
    "a list nested 100,000 deep": (
        "def strategy(board):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
        "invalid_move",
    ),
}  # fmt: skip

DEFINITIONS = {
    "decorator that removes it": (f"@print\n{LEFT}", "no_function"),
    "decorator that raises": (f"@len\n{LEFT}", "error"),
    "decorator that replaces it": (f"@lambda f: lambda board: 'x'\n{LEFT}", "invalid_move"),
    "decorator that never ends": (f"def d(f):\n        {WHILE}\n@d\n{LEFT}", "timeout"),
    "default that writes": ("def strategy(board, f=open('PWNED', 'w')):\n    return 'a'", "error"),
    "annotation that writes": (
        "def strategy(board: open('PWNED', 'w')) -> str:\n    return 'a'",
        "error" if sys.version_info < (3, 14) else "stuck",  # from then on nobody asks for its value
    ),
    "class body that writes": (f"class A:\n    open('PWNED', 'w')\n{LEFT}", "error"),
    "a lambda": ("strategy = lambda board: 'a'", "stuck"),
    "a partial": ("import functools\nstrategy = functools.partial(lambda k, board: k, 'a')", "stuck"),
    "an object that can be called": ("class A:\n    def __call__(self, board): return 'a'\nstrategy = A()", "stuck"),
    "a class": ("class strategy:\n    def __init__(self, board): pass", "invalid_move"),
    "a number": ("strategy = 5", "no_function"),
    "another name": ("def policy(board):\n    return 'a'", "no_function"),
    "only a method": ("class A:\n    def strategy(self, board): return 'a'", "no_function"),
    "only nested": ("def f():\n    def strategy(board): return 'a'", "no_function"),
    "deleted again": (f"{LEFT}del strategy", "no_function"),
    "no parameter": ("def strategy():\n    return 'a'", "error"),
    "two parameters": ("def strategy(board, score):\n    return 'a'", "error"),
    "only by keyword": ("def strategy(*, board):\n    return 'a'", "error"),
    "any parameters": ("def strategy(*args, **kwargs):\n    return 'a'", "stuck"),
    "a parameter with a default": ("def strategy(board, depth=3):\n    return 'a'", "stuck"),
    "defined twice": (f"def strategy(board): return 'x'\n{LEFT}", "stuck"),
    "an error after it": (f"{LEFT}1 / 0", "error"),
    "called at loading": (f"{LEFT}strategy([[0] * 6] * 6)", "stuck"),
    "a main guard": (f"{LEFT}if __name__ == '__main__':\n    1 / 0", "stuck"),
}

SYNTAX = {
    "50,000 minus signs": (returns("-" * 50_000 + "1"), "no_function"),
    "30,000 brackets": (returns("[" * 30_000 + "]" * 30_000), "no_function"),
    "20,000 nots": (returns("not " * 15_000 + "1"), "no_function"),
    "chain of attributes": (
        returns("board" + ".x" * 30_000),
        "no_function" if sys.version_info < (3, 14) else "error",  # from then on the compiler takes it
    ),
    "elif chain of 600 branches": (
        "def strategy(board):\n    n = board[0][0]\n    if n == -1: return 'x'\n"
        + "".join(f"    elif n == {-i}: return 'x'\n" for i in range(2, 602))
        + "    return 'a'",
        "stuck",
    ),
    "sum of 500 terms": (returns("'a'" + " + ''" * 500), "stuck"),
    "500 nested calls of helpers": (
        "".join(f"def f{i}(b): return {f'f{i - 1}(b)' if i else repr('a')}\n" for i in range(500))
        + returns("f499(board)"),
        "stuck",
    ),
    "null byte": (returns("'a\0'"), "no_function"),
    "lone surrogate": (returns("'\ud800'"), "no_function"),
    "source of 65 KB": (f"{LEFT}#{'x' * (64 << 10)}", "error"),
    "source of just 64 KB": (f"{LEFT}#".ljust(64 << 10, "x"), "stuck"),
    "one letter of three bytes too many": (f"{LEFT}#".ljust((64 << 10) - 1, "x") + "\N{EURO SIGN}", "error"),
    "far too many lines": (LEFT + "x = 1\n" * 60_000, "error"),
    "syntax error": ("def strategy(board)\n    return 'a'", "no_function"),
    "bad indentation": ("def strategy(board):\nreturn 'a'", "no_function"),
    "return outside of a function": (f"{LEFT}return 1", "no_function"),
    "truncated": ("def strategy(board):\n    return (", "no_function"),
    "prose": ("I would go left.", "no_function"),
    "a fence": (f"```python\n{LEFT}```", "no_function"),
    "empty": ("", "no_function"),
    "blank": ("\n \n\t\n", "no_function"),
    "a comment": ("# nothing", "no_function"),
    "byte order mark": (f"\ufeff{LEFT}", "no_function"),
    "tabs and form feeds": ("def strategy(board):\n\t\f\n\treturn 'a'", "stuck"),
    "carriage returns": (LEFT.replace("\n", "\r\n"), "stuck"),
    "encoding cookie": (f"# -*- coding: utf-7 -*-\n{LEFT}", "stuck"),
    "accents in names": ("def strategy(board):\n    clé = 'a'\n    return clé", "stuck"),
    "names in other scripts": ("def strategy(доска):\n    ключ = 'a'\n    return ключ", "stuck"),
    "future import that changes parsing": (f"from __future__ import barry_as_FLUFL\n{LEFT}", "stuck"),
    "invalid escape in a string": (returns(r"'\d' and 'a'"), "stuck"),
}

# A player that answers ahead and never reads filled its queue, and the referee's own send waited for ever.  An answer
# holds its board's token now: what is forged ends the game, and who forwards the token plays by the rules.
TOKEN = "sys._getframe(1).f_locals['message'][:4]"
AHEAD = {
    "answers ahead, for ever": (always("i = 0", "while True: os.write(3, bytes([i % 4] * 4)); i += 1"), "error"),
    "20 surplus answers at each call": (always("for i in range(20): os.write(3, bytes([i % 4] * 5))"), "error"),
    "surplus answers in one message": (always("os.write(3, bytes(5 * 64))"), "error"),
    "answers ahead at loading": (f"{OS}for i in range(99): os.write(3, bytes(5))\n{LEFT}", "error"),
    "answers twice with the right token": (always(f"os.write(3, {TOKEN} + b'\\2')"), "error"),
    "the right token, then for ever": (always(f"while True: os.write(3, {TOKEN} + b'\\2')"), "error"),
    "the token of the board before": (
        always("old.append(sys._getframe(1).f_locals['message'][:4])", "if old[1:]: os.write(3, old[-2] + b'\\2')",
               before="old = []"),
        "error",
    ),
    "guesses tokens": (always("for i in range(999): os.write(3, i.to_bytes(4, 'big') + b'\\2')"), "error"),
    "a token without an answer": (always(f"os.write(3, {TOKEN})"), "error"),
    "half a token": (always(f"os.write(3, {TOKEN}[:2])"), "error"),
    "a right answer of 60,000 bytes, then for ever": (
        always(f"while True: os.write(3, ({TOKEN} + b'\\2').ljust(60000))"), "error",
    ),
    "a direction that is none": (always(f"os.write(3, {TOKEN} + b'\\x07')", "while True: pass"), "error"),
    "plays by itself": (always("token = os.read(3, 512)[:4] if seen else " + TOKEN, "seen.append(0)",
                               "while True: os.write(3, token + b'\\2'); token = os.read(3, 512)[:4]",
                               before="seen = []"), "stuck"),
}  # fmt: skip

# Shared mappings outlive their unmapping by a page, and count neither for RLIMIT_AS nor RSS: 2.3 GB in 16 MB.
MAP = """
C = sys.modules['ctypes']
L = C.CDLL(None)
L.mmap.restype = L.mremap.restype = C.c_void_p
L.mmap.argtypes = [C.c_void_p, C.c_size_t, C.c_int, C.c_int, C.c_int, C.c_long]
L.mremap.argtypes = [C.c_void_p, C.c_size_t, C.c_size_t, C.c_int]
NO = 2 ** 64 - 1
def allowed(flags, protection=3): return L.mmap(None, 1 << 20, protection, flags, -1, 0) != NO
"""


def mapped(flags: str) -> str:
    """A strategy that returns a wrong key where it is given such a mapping."""
    return always(before=MAP, result=f"'mapped' if allowed({flags}) else 'a'")


MEMORY = {
    "a private mapping": (mapped("0x22"), "invalid_move"),  # the kernel's yes, which all others have to miss
    "a shared mapping": (mapped("0x21"), "stuck"),
    "a shared mapping, validated": (mapped("0x23"), "stuck"),
    "a shared mapping without reserve": (mapped("0x4021"), "stuck"),
    "a shared mapping without rights": (mapped("0x21, 0"), "stuck"),
    "a shared stack": (mapped("0x20021"), "stuck"),
    "a mapping of huge pages": (mapped("0x40022"), "stuck"),
    "a mapping in RAM at once": (mapped("0x8022"), "stuck"),
    "a locked mapping": (mapped("0x2022"), "stuck"),
    "a mapping that grows down": (mapped("0x122"), "stuck"),
    "a page at an address of its choice": (
        always(before=MAP, result="'mapped' if L.mmap(1 << 40, 4096, 3, 0x22, -1, 0) != NO else 'a'"), "stuck",
    ),
    "neither private nor shared": (mapped("0x20"), "stuck"),
    "copies a private mapping by moving none of it": (
        always("p = L.mmap(None, 1 << 20, 3, 0x22, -1, 0)", before=MAP,
               result="'mapped' if L.mremap(p, 0, 1 << 20, 1) != NO else 'a'"), "stuck",
    ),
    "a file in memory": (always("os.memfd_create('x')"), "error"),
    "System V's shared memory": (
        always(before=MAP, result="'mapped' if L.shmget(0, 1 << 20, 0o1600) != -1 else 'a'"), "stuck",
    ),
    "maps, touches, unmaps all but a page": (
        always("for i in range(9):", "    p = L.mmap(None, 1 << 26, 3, 0x22, -1, 0)", "    if p == NO: return 'a'",
               "    C.memset(p, 1, 1 << 16)", "    L.munmap(C.c_void_p(p + 4096), C.c_size_t((1 << 26) - 4096))",
               before=MAP), "stuck",
    ),
    "memory beyond its limit by brk": (
        always(before=MAP, result="'mapped' if L.sbrk(C.c_long(1 << 29)) not in (-1, 0xFFFFFFFF) else 'a'"), "stuck",
    ),
}  # fmt: skip

# Waits of 0.15 s passed as awake: 43 s for four boards, next to no CPU used.  No system call that a player has left can
# wait for a time; a lock that is taken ends the process.
TAKEN = "lock = sys.modules['_thread'].allocate_lock()", "lock.acquire()"
THREADING = "t = sys.modules['threading']"
ASLEEP = {
    "lock": (always(*TAKEN, "lock.acquire()"), "error"),
    "lock for 0.33 s": (always(*TAKEN, "lock.acquire(timeout=0.33)"), "error"),
    "lock for 0.15 s": (always(*TAKEN, "lock.acquire(timeout=0.15)"), "error"),
    "lock for hours": (always(*TAKEN, "lock.acquire(timeout=9e3)"), "error"),
    "a lock again and again": (always(*TAKEN, "while True: lock.acquire(timeout=0.01)"), "error"),
    "waits for a condition": (always(THREADING, "c = t.Condition()", "c.acquire()", "c.wait(0.3)"), "error"),
    "waits for an event": (always(THREADING, "t.Event().wait(0.3)"), "error"),
    "a semaphore of none": (always(THREADING, "t.Semaphore(0).acquire(timeout=0.3)"), "error"),
    "a barrier for two": (always(THREADING, "t.Barrier(2).wait(0.3)"), "error"),
    "an empty queue": (always("sys.modules['queue'].Queue().get(timeout=0.3)"), "error"),
    "sleep": (always("sys.modules['time'].sleep(0.3)"), "error"),
    "select": (always("sys.modules['select'].select([3], [], [], 0.3)"), "error"),
    "poll": (always("sys.modules['select'].poll().poll(300)"), "error"),
    "usleep": (always("sys.modules['ctypes'].CDLL(None).usleep(300000)"), "stuck"),
    "a futex of its own": (
        always("C = sys.modules['ctypes']", "C.CDLL(None).syscall(202, C.byref(C.c_int()), 0, 0, 0)"), "stuck",
    ),
    "waits for a signal": (always("sys.modules['signal'].pause()"), "stuck"),
    "waits for a child": (always("os.wait()"), "error"),
    "receives on its socket": (always("s = sys.modules['socket']", "s.socket(fileno=3).recv(9)"), "error"),
    "reads the next board first": (always("os.read(3, 512)"), "timeout"),
    "one long C call a move": (
        always("str(3 ** 400_000)", before="sys.set_int_max_str_digits(0)"), "timeout",
    ),
}  # fmt: skip

# Entropy gave each replay new luck.  What Python offers comes from the game's first board; the kernel's is refused.
LUCK = {
    "os.urandom": (always("os.urandom(4)"), "stuck"),
    "os.getrandom": (always("os.getrandom(4)"), "stuck"),
    "random's own urandom": (always("random._urandom(4)"), "stuck"),
    "reads /dev/urandom": (always("open('/dev/urandom', 'rb')"), "error"),
    "reads /dev/random": (always("os.open('/dev/random', 0)"), "error"),
    "uuid4": (always("sys.modules['uuid'].uuid4()"), "error"),
    "another process's clock": (always("sys.modules['time'].clock_gettime((~1 << 3) | 2)"), "error"),
    "getpid": (always("libc = sys.modules['ctypes'].CDLL(None)", result="'a' if libc.getppid() == -1 else 'x'"),
               "stuck"),
}  # fmt: skip


GROUPS = (TAMPERING, WAYS_OUT, PROTOCOL, EXCEPTIONS, RESOURCES, ANSWERS, DEFINITIONS, SYNTAX, AHEAD, MEMORY, ASLEEP,
          LUCK)  # fmt: skip
BATTERY = {name: case for group in GROUPS for name, case in group.items()}


def job(name: str, path: str) -> program.Job:
    """One case as the tests judge it.  Programs that only a limit of time ends get little of it, the others far more
    than they need: on a slow machine "a huge compile" once took its second of CPU, and the test failed."""
    source, outcome = BATTERY[name]
    return program.Job(source.replace("PWNED", path), (1,), timeout=0.05 if outcome == "timeout" else 5.0)
