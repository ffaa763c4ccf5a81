#!/usr/bin/env python3
"""Reinforcement learning with verifiable rewards: a language model learns to write Python that plays 2048.

The model gets a prompt and answers with the source of `strategy(board)`.  Groups of answers play the same boards, in
another process that the kernel has locked in; what they reach is the reward, and GRPO makes the better answers of a
group likelier.  gpt-oss-20b trains where there is a CUDA GPU; elsewhere an embedded gpt-oss of about 1 M parameters
does, through the same code.

    ./setup.sh python gpt_2048_rl.py                    train, then compare with before and with two controls
    python gpt_2048_rl.py eval MODEL_OR_FILE.py         a model, adapter, checkpoint or strategy on held-out boards
    python gpt_2048_rl.py play FILE.py --watch          one strategy: outcomes, or a game in the terminal
    python gpt_2048_rl.py compare RUN RUN ...           several runs, with paired tests on their common boards
    python gpt_2048_rl.py export RUN --format lora      the adapter, or the whole model, for other programs
    python gpt_2048_rl.py doctor                        what this machine has, what is switched and why
    python gpt_2048_rl.py COMMAND --help                the options of train (the default), eval, play, compare, ...

The file reads from top to bottom: keys, game, prompt, jailed players, rewards, embedded model, configuration, model,
evaluation, training, export, commands.  It departs from the published gpt-oss notebook where that went wrong:
strategies run in a jail instead of in the trainer; losers are graded by what they reached; a group shares its boards;
answers start in the final channel; a target that is solved doubles; results are held against random and greedy play on
boards that training never saw.
"""

from __future__ import annotations

import _thread
import ast
import atexit
import builtins
import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import gc
import hashlib
import importlib.util
import inspect
import io
import json
import math
import os
import random
import re
import resource
import secrets
import select
import shutil
import signal
import socket
import statistics
import struct
import symtable
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache, partial, wraps
from itertools import islice, pairwise, takewhile
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

T = TypeVar("T")

# threading and what imports it are imported by the pool: threading's fork handler would cost each player 0.8 ms.
if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch
    from peft import PeftModel
    from rich.console import Console
    from rich.table import Table
    from transformers import GptOssForCausalLM, PreTrainedTokenizerFast

# ---------------------------------------------------------------------------------------------------------------------
# Keys

DIRECTIONS = ("up", "down", "left", "right")
LAYOUTS = MappingProxyType({"bepo": "éuai", "wasd": "wsad", "zqsd": "zsqd", "arrows": "↑↓←→"})  # in DIRECTIONS' order


@cache
def key_table(layout: str = "bepo") -> Mapping[str, int]:
    """Every accepted lower-case spelling of a layout's keys -> its index in DIRECTIONS."""
    if layout not in LAYOUTS:
        raise ValueError(f"keys must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    table = {key: direction for direction, key in enumerate(LAYOUTS[layout])}
    if layout == "bepo":
        table["e\N{COMBINING ACUTE ACCENT}"] = table["é"]
    if layout == "arrows":
        table |= {name: direction for direction, name in enumerate(DIRECTIONS)}
    return table


def direction_of(key: object, table: Mapping[str, int]) -> int | None:
    """The direction a key stands for, or None.  Case and surrounding blanks do not matter.

    The unbound methods read the real characters of a str subclass, whatever it overrides; and the type is asked for,
    because isinstance believes an object's `__class__`.
    """
    return table.get(str.lower(str.strip(key))) if issubclass(type(key), str) else None  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Game


@lru_cache(maxsize=1 << 16)
def _merge(tiles: bytes) -> tuple[bytes, int]:
    """Exponents without a gap -> the same after a slide towards their start, and the points gained."""
    slid, gain, i = bytearray(), 0, 0
    while i < len(tiles):
        merges = i + 1 < len(tiles) and tiles[i] == tiles[i + 1]
        slid.append(tiles[i] + merges)
        gain += (1 << slid[-1]) * merges
        i += 1 + merges
    return bytes(slid), gain


class _LineMemo(dict[bytes, tuple[bytes, int]]):
    """A line of exponents -> (the line after a slide, points gained), worked out once per line and kept."""

    LIMIT: ClassVar[int] = 1 << 17  # lines; about 25 MB

    def __init__(self, towards_end: bool) -> None:
        super().__init__()
        self.towards_end = towards_end

    def __missing__(self, line: bytes) -> tuple[bytes, int]:
        order = -1 if self.towards_end else 1
        slid, gain = _merge(line.replace(b"\0", b"")[::order])
        if len(self) >= self.LIMIT:
            self.clear()
        self[line] = after = slid.ljust(len(line), b"\0")[::order], gain
        return after


_TOWARDS_START = _LineMemo(towards_end=False).__getitem__
_TOWARDS_END = _LineMemo(towards_end=True).__getitem__
_TILES = [0, *(1 << exponent for exponent in range(1, 256))]  # a list: its __getitem__ is twice as fast as a tuple's


class GameBoard:
    """One game of 2048: a flat row-major `bytes` of exponents (0 is an empty cell, 11 the tile 2048).

    The random stream is the public reference's, so that games compare move by move: `random.Random(seed)`; a spawn is
    a `choice` over the empty cells in row-major order, then a 4 if `random() < probability_fours`, else a 2; two
    spawns at the start; a move that changes nothing spawns nothing.

    Raises ValueError that names the argument which is out of range.
    """

    __slots__ = ("_bits", "_columns", "_exponent", "_flat", "_keys", "_random", "_rows", "_score", "_state",
                 "probability_fours", "size", "target")  # fmt: skip

    def __init__(
        self, size: int = 6, seed: int = 0, target: int = 2048, probability_fours: float = 0.10, keys: str = "bepo"
    ) -> None:
        check_game(size, target, probability_fours)
        self.size, self.target, self.probability_fours = size, target, probability_fours
        self._keys = key_table(keys)
        rng = random.Random(seed)
        self._random, self._bits = rng.random, rng.getrandbits
        self._rows = itemgetter(*(slice(i * size, (i + 1) * size) for i in range(size)))  # every row in one C call
        self._columns = itemgetter(*(slice(i, None, size) for i in range(size)))
        self._exponent = target.bit_length() - 1
        self._score, self._state = 0, "ongoing"
        self._flat = bytes(size * size)
        self._spawn()
        self._spawn()
        if max(self._flat) >= self._exponent:
            self._state = "success"

    def board(self) -> list[list[int]]:
        """Tile values, row by row; 0 is an empty cell.  A fresh copy."""
        return [[_TILES[exponent] for exponent in row] for row in self._rows(self._flat)]

    def flat(self) -> bytes:
        """The exponents, row-major."""
        return self._flat

    def state(self) -> str:
        """ "ongoing", "success" (the target tile was made) or "failed" (no move left, or a wrong key)."""
        return self._state

    def score(self) -> int:
        """The sum of all tiles made by merging."""
        return self._score

    def max_tile(self) -> int:
        """The value of the largest tile."""
        return _TILES[max(self._flat)]

    def do_action(self, key: object) -> bool:
        """Play one key.  True if the board changed; a wrong key (or "q" where it is none) ends the game as failed."""
        direction = direction_of(key, self._keys)
        if direction is None and self._state == "ongoing":
            self._state = "failed"
        return direction is not None and self.move(direction)

    def move(self, direction: int) -> bool:
        """Slide towards DIRECTIONS[direction].  True if the board changed."""
        if self._state != "ongoing":
            return False
        flat = self._flat
        vertical, slide = direction < 2, _TOWARDS_END if direction & 1 else _TOWARDS_START
        lines, gains = zip(*map(slide, (self._columns if vertical else self._rows)(flat)))  # noqa: B905 - hot
        moved = b"".join(lines)
        if vertical:
            moved = b"".join(self._columns(moved))  # back from columns to rows
        if moved == flat:
            return False
        self._flat = moved
        empty = self._spawn()
        gain = sum(gains)
        self._score += gain
        if (gain >= self.target or self.target <= 4) and max(self._flat) >= self._exponent:
            self._state = "success"
        elif not empty and not any(
            _TOWARDS_START(line)[1] for line in self._rows(self._flat) + self._columns(self._flat)
        ):
            self._state = "failed"
        return True

    def _spawn(self) -> int:
        """Put one tile on a random empty cell; return how many cells are still empty."""
        flat = self._flat
        empty = flat.count(0)
        bits = empty.bit_length()
        nth = self._bits(bits)
        while nth >= empty:  # draws what Random.choice over the list of empty cells draws
            nth = self._bits(bits)
        cell = len(flat) - 1 - len(flat.split(b"\0", nth + 1)[-1])
        tile = b"\2" if self._random() < self.probability_fours else b"\1"
        self._flat = flat[:cell] + tile + flat[cell + 1 :]
        return empty - 1

    def render(self) -> str:
        """The board as text with ANSI colours, for a terminal."""
        width = len(str(self.max_tile())) + 2
        lines = []
        for row in self._rows(self._flat):
            cells = (f"\x1b[48;5;{_COLOURS[min(e, 12)]}m{_TILES[e] or '·':^{width}}\x1b[0m" for e in row)
            lines.append("".join(cells))
        return "\n".join(lines)


_COLOURS = (236, 240, 242, 94, 130, 166, 160, 178, 142, 106, 70, 35, 33)  # xterm-256 backgrounds, by exponent


def check_game(size: int, target: int, probability_fours: float = 0.10) -> None:
    """Raise ValueError, in one line, for an argument that no game can have."""
    if type(size) is not int or not 2 <= size <= 16:
        raise ValueError(f"size must be a whole number from 2 to 16, not {size!r}")
    if type(target) is not int or not 2 <= target <= 1 << 64 or target & (target - 1):
        raise ValueError(f"target must be a power of two from 2 to 2**64, not {target!r}")
    if not isinstance(probability_fours, (int, float)) or not 0.0 <= probability_fours <= 1.0:
        raise ValueError(f"probability_fours must lie in [0, 1], not {probability_fours!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Prompt

ALLOWED_MODULES = ("math", "random", "itertools", "functools", "collections", "heapq", "copy", "operator", "statistics",
                   "string", "re", "typing", "dataclasses", "bisect", "enum", "abc", "numbers", "fractions",
                   "decimal")  # fmt: skip
RULES = """
`board` is a list of {size} lists of {size} whole numbers; 0 is an empty cell. The function returns one key: \
"{up}" for up, "{down}" for down, "{left}" for left, "{right}" for right. Use native Python only, keep helper \
functions inside `strategy`, and import nothing but {modules}. Answer with one short function in a fenced block:
```python
def strategy(board):
    ...
    return "{left}"
```"""
WORDINGS = (
    "Write a Python function strategy(board) that plays 2048 on a {size}x{size} board and reaches the {target} tile.",
    "You play 2048 on a board of {size} by {size} cells. Give a short strategy(board) that makes the tile {target}.",
    "Create a new short 2048 strategy using only native Python code. The board is {size}x{size}, the goal is {target}.",
    "Implement strategy(board), called once per move of a {size}x{size} game of 2048, so that it gets to {target}.",
    "The game is 2048, the board {size}x{size}, the tile to reach {target}. Write the function that chooses each move.",
    "I need a small Python function that wins 2048: board of {size}x{size}, winning tile {target}, one key per call.",
    "Goal: a {target} tile on a {size}x{size} 2048 board. Program the player as strategy(board).",
    "Please code a 2048 bot. It sees the {size}x{size} board, returns one move, and must build the {target} tile.",
    "Devise a policy for 2048 ({size} rows, {size} columns) as Python code; it succeeds when {target} appears.",
)  # the last one is kept for evaluation: training never sees it


def build_prompt(size: int = 6, target: int = 2048, keys: str = "bepo", wording: int = 0) -> str:
    """The user's message: the task in one of the WORDINGS, then the rules."""
    up, down, left, right = tuple(LAYOUTS[keys])
    return (WORDINGS[wording] + RULES).format(
        size=size, target=target, up=up, down=down, left=left, right=right, modules=", ".join(ALLOWED_MODULES)
    )


_SPELLED_OUT = re.compile(r"(analysis|commentary|final)(?=[^\W_]|[\"'`*#<])")  # a channel's name, then its text at once
_SPELLED = re.compile(r"\s*(analysis|commentary|final)")
_FINAL_CHANNEL = re.compile(r"<\|channel\|>final[^<]*(?:<\|constrain\|>\w+)?<\|message\|>")
_END_MARKS = re.compile(r"<\|(?:return|end|call|start)\|>")
_NEXT_TURN = re.compile(r"<\|(?:return|end|call)\|>\s*<\|start\|>")


def final_channel(text: str, reasons: bool = False) -> str | None:
    """What a harmony model (gpt-oss) says to the user, with or without its special tokens; other text as it is.

    None where the text ends before the final channel begins: nothing inside an analysis counts.  Without special tokens
    an analysis is known by its first word, which prose may begin with too, unless the model `reasons` before answering.
    """
    if text.lstrip().startswith(("<|channel|>", "<|start|>")) or "<|start|>assistant<|channel|>" in text:
        final = _FINAL_CHANNEL.search(text)
        return _NEXT_TURN.split(text[final.end() :], maxsplit=1)[0] if final else None
    channel = (_SPELLED if reasons else _SPELLED_OUT).match(text)  # "analysisWe need...assistantfinalHere it is"
    if channel is None:
        return text
    if channel[1] == "final":
        return text[channel.end() :]
    _, found, answer = text.partition("assistantfinal")
    return answer if found else None


def parse(source: str) -> ast.Module | None:
    """The syntax tree, or None for anything that Python does not accept."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _program(code: str) -> str | None:
    """Of code that defines `strategy`: what it may need, and no example of its use; else None."""
    tree = parse(code)
    defined = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "strategy"] if tree else []
    if tree is None or not defined:
        return None
    lines, kept = code.split("\n"), set[int]()
    own = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    needs = _globals_of(code)[0] | own
    for node in reversed(tree.body):  # what comes later may need what comes before
        if _is_needed(node, node.lineno < defined[-1].lineno, needs):
            needs |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            decorators = getattr(node, "decorator_list", [])
            kept.update(range(min(n.lineno for n in (node, *decorators)), (node.end_lineno or node.lineno) + 1))
    return "\n".join(lines[i - 1] for i in sorted(kept))


def _is_needed(node: ast.stmt, above: bool, needs: set[str]) -> bool:
    """Whether a statement belongs to a program: above its function or below it, with the names that the rest reads."""
    if isinstance(node, _DEFINITIONS):
        return True
    nodes = list(ast.walk(node))
    calls = {getattr(n.func, "id", "") for n in nodes if isinstance(n, ast.Call)}
    if above:
        return not isinstance(node, ast.Expr) or (bool(calls) and "print" not in calls)
    return bool(_written(nodes) & needs) and not calls & {"strategy", "print", "input"}


def _written(nodes: Sequence[ast.AST]) -> set[str]:
    """The names that are assigned to, or whose attributes or items are."""
    targets = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    while any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets):
        targets = [t.value if isinstance(t, (ast.Attribute, ast.Subscript)) else t for t in targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _is_code(node: ast.stmt) -> bool:
    """Not prose that happens to parse, such as "Hello" or "Note: this"."""
    assigns = isinstance(node, ast.Assign) or (isinstance(node, ast.AnnAssign) and node.value is not None)
    return assigns or isinstance(node, _DEFINITIONS)


def _unfenced_program(lines: list[str]) -> str | None:
    """Collect the code among prose: paragraphs that start in column 0 and are definitions, imports, assignments."""
    paragraphs: list[list[str]] = []
    for line in lines:
        continues = not line.strip() or line[0] in " \t)]}#" or (paragraphs and paragraphs[-1][-1].startswith("@"))
        if continues and paragraphs:
            paragraphs[-1].append(line)
        else:
            paragraphs.append([line])
    code = []
    for paragraph in ("\n".join(p) for p in paragraphs):
        tree = parse(paragraph)
        if tree is None and re.match(r"(@|def strategy\b)", paragraph):
            return None  # truncated in the middle of a statement
        if tree and any(_is_code(node) for node in tree.body):
            code.append(paragraph)
    return _program("\n".join(code))


_FENCE_OPENS = re.compile(r"(.*?)(?<!`)`{3,}+[ \t]*+[\w+-]*+[ \t]*+$")  # prose may stand before: Sure! ```python
_FENCE_CLOSES = re.compile(r"[ \t]*`{3,}+(?![ \t]*[\w+-]+[ \t]*$)")  # ```python opens another and closes none
_FENCES = 16  # the last so many are looked at


def extract_function(text: str, reasons: bool = False) -> str | None:
    """The source of `def strategy(board)` in a completion, with its helpers and imports, or None.

    The last complete fenced block with a strategy in it is preferred; code outside of fences is accepted; prose,
    examples of use and anything cut off are not.  For gpt-oss only the final channel counts (`reasons`: final_channel).
    """
    answer = final_channel(text.replace("\r\n", "\n").replace("\r", "\n"), reasons)
    if answer is None or len(answer) > 8 * LIMITS.source_bytes:
        return None
    # An answer ends at harmony's end mark, unless the mark is part of the program: then a later end has to do.
    ends = [*(mark.start() for mark in islice(_END_MARKS.finditer(answer), _FENCES)), len(answer)]
    return next(filter(None, (_find_program(answer[:end].split("\n")) for end in ends)), None)


def _find_program(lines: list[str]) -> str | None:
    """The program in the lines of an answer, fenced or not."""
    opens = [i for i, line in enumerate(lines) if _FENCE_OPENS.match(line)][-_FENCES:]
    closes = [i for i, line in enumerate(lines) if _FENCE_CLOSES.match(line)][-_FENCES:]
    for end in reversed(closes):
        for start in reversed([i for i in opens if i < end]):  # the nearest is not the one if code contains a fence
            code = "\n".join(lines[start + 1 : end])
            if program := _program(code) or _program(textwrap.dedent(code)):
                return program
    outside: list[str] = []
    inside = False
    for line in lines:
        if inside:
            inside = not _FENCE_CLOSES.match(line)
        elif opening := _FENCE_OPENS.match(line):
            outside.append(opening[1])
            inside = True
        else:
            outside.append(line)
    return _unfenced_program(outside)


def visible_program(source: str) -> str | None:
    """The same program without a character that a terminal would act on, written anew from its syntax tree if need be.

    None where that cannot be done.  What is shown, logged and saved is then what was played.
    """
    if is_visible(source):
        return source
    tree = parse(source)
    try:
        anew = ast.unparse(tree) if tree else ""
    except (ValueError, RecursionError, MemoryError):
        return None
    return anew if anew and is_visible(anew) else None


def is_visible(source: str) -> bool:
    """Whether a program holds nothing but printable characters, line breaks and tabs."""
    return all(character.isprintable() or character in "\n\t" for character in source)


_INTERPRETER_NAMES = frozenset({"eval", "exec", "compile", "open", "input", "__import__"})
_WAYS_OUT = frozenset(f"__{name}__" for name in (
    "class", "bases", "base", "mro", "subclasses", "globals", "builtins", "dict", "code", "closure", "import", "loader",
    "spec", "getattribute", "reduce", "reduce_ex", "traceback", "self", "func", "wrapped", "file", "cached", "path",
    "module", "defaults", "kwdefaults", "annotations", "init_subclass", "set_name", "weakref"))  # fmt: skip


def _globals_of(source: str) -> tuple[set[str], set[str]]:
    """The names that a program's functions and classes read as globals; and those that it reads and binds nowhere.

    A scope's own names are its own alone: `lambda eval: 0` lends no other line an `eval`.
    """
    try:
        module = symtable.symtable(source, "<strategy>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(), set()
    tables, inside, read, bound = [module], set[str](), set[str](), set[str]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is module or symbol.is_global():
                read |= {symbol.get_name()} if symbol.is_referenced() else set()
                inside |= {symbol.get_name()} if symbol.is_referenced() and table is not module else set()
                bound |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
    return inside, read - bound


def find_cheating(source: str) -> str:
    """Why a source counts as cheating, or "".  A static look: it can be fooled without harm, for the jail holds.

    Raises nothing: source that does not parse is not cheating.
    """
    tree = parse(source)
    nodes = list(ast.walk(tree)) if tree else []  # iterative: long code cannot exhaust the stack
    for node in nodes:
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        for module in modules:
            if module.partition(".")[0] not in (*ALLOWED_MODULES, "__future__"):
                return f"imports {module}"
    names = _globals_of(source)[1] if tree else set()
    if used := sorted(names & _INTERPRETER_NAMES):
        return f"uses {used[0]}"
    names -= {"__class__"}  # super() reads it
    reached = sorted(_WAYS_OUT & (names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}))
    return f"reaches for {reached[0]}" if reached else ""


# ---------------------------------------------------------------------------------------------------------------------
# Jailed players
#
# trainer -> W workers (trusted referees: games, seeds, clock, score) -> a zygote each -> a jailed player for each game.
# A player only turns boards into keys.  Its first byte says that the jail holds; all that follows is a claim.
# It lives for one game, which is played once: no result depends on another game, and luck cannot be tried again.


@dataclass(frozen=True)
class Limits:
    """What a strategy may use."""

    move_seconds: float = 1.0  # CPU seconds for one move, and for loading
    paid_moves: int = 1 << 15  # moves that a game gets time for: a game to 65536 takes about 30,000
    wall_factor: float = 4.0  # the wall ceiling on a busy machine, in multiples of the CPU limit (plus 10 s)
    memory_bytes: int = 256 << 20  # address space of the player
    referee_bytes: int = 1 << 30  # the same of the process that parses answers
    source_bytes: int = 64 << 10
    parse_seconds: float = 3.0  # CPU seconds for reading an answer
    idle_moves: int = 64  # consecutive moves that change nothing end a game as "stuck"
    detail_chars: int = 200


LIMITS = Limits()
OUTCOMES = ("success", "lost", "stuck", "timeout", "error", "invalid_move", "no_function")


@dataclass(frozen=True)
class GameResult:
    """How one strategy fared on one board.  `detail` is bounded and printable, `seconds` CPU time of the player."""

    seed: int
    outcome: str  # one of OUTCOMES
    steps: int
    max_tile: int
    score: int
    seconds: float
    detail: str = ""
    moves: str = ""  # the indices in DIRECTIONS, one digit a move; only where the job asks for a record


class JailError(RuntimeError):
    """The jail does not hold on this machine, or a player could not be put into it."""


_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000  # SECCOMP_RET_*
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Nothing here can wait but read and write on the player's own socket: without futex a lock is no way to sleep.
SYSTEM_CALLS = {
    "x86_64": {"read": 0, "write": 1, "mmap": 9, "munmap": 11, "brk": 12, "rt_sigreturn": 15, "mremap": 25,
               "exit": 60, "gettimeofday": 96, "clock_gettime": 228, "exit_group": 231},
    "aarch64": {"read": 63, "write": 64, "mmap": 222, "munmap": 215, "brk": 214, "rt_sigreturn": 139, "mremap": 216,
                "exit": 93, "gettimeofday": 169, "clock_gettime": 113, "exit_group": 94},
}  # fmt: skip
_PROT_EXEC, _MAP_ANONYMOUS = 0x4, 0x20
_MAP_OTHER = 0xFFFFFFFF & ~(_MAP_ANONYMOUS | 0x2 | 0x4000 | 0x20000)  # all but MAP_PRIVATE, MAP_NORESERVE, MAP_STACK
# Call -> conditions: offset of half an argument in struct seccomp_data, mask, whether one of its bits has to be set.
# No address is chosen: pages far apart take page tables, which no limit counts.  RLIMIT_AS forgets shared memory once
# it is unmapped, the machine does not.  A negative clock is that of another process, by its number.
CONDITIONS = {
    "mmap": ((16, 0xFFFFFFFF, False), (20, 0xFFFFFFFF, False), (32, _PROT_EXEC, False), (40, _MAP_OTHER, False),
             (40, _MAP_ANONYMOUS, True)),
    "mremap": ((40, 0x2 | 0x4, False),),  # MREMAP_FIXED, MREMAP_DONTUNMAP
    "clock_gettime": ((16, 0x80000000, False),),
}  # fmt: skip


def seccomp_filter(machine: str) -> bytes:
    """The jail's filter as classic BPF (linux/filter.h: 8 bytes an instruction) over struct seccomp_data.

    Allows SYSTEM_CALLS under their CONDITIONS; the rest is EPERM, a foreign ABI is killed.
    """
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    code = [(load, 0, 0, 4), (equal, 1, 0, _AUDIT_ARCH[machine]), (give, 0, 0, _KILL), (load, 0, 0, 0)]
    if machine == "x86_64":  # the x32 ABI has the same architecture and a bit in its numbers
        code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, _KILL)]
    for name, number in SYSTEM_CALLS[machine].items():
        conditions = CONDITIONS.get(name, ())
        code.append((equal, 0, 2 * len(conditions) + 2 - (not conditions), number))
        for left, (offset, mask, wanted) in zip(range(len(conditions), 0, -1), conditions, strict=True):
            deny = 2 * left - 1  # from here to this call's refusal
            code += [(load, 0, 0, offset), (any_bit, 0, deny, mask) if wanted else (any_bit, deny, 0, mask)]
        code += [(give, 0, 0, _ALLOW), (give, 0, 0, _DENY)][: 2 if conditions else 1]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in [*code, (give, 0, 0, _DENY)])


class Jail:
    """An irreversible jail for the calling process: rlimits, another user, no new privileges, seccomp.

    Made in the zygote, where files may still be read; entered in each player.  Linux on x86-64 and aarch64.
    Raises JailError where this machine has no filter for it.
    """

    def __init__(self) -> None:
        machine = os.uname().machine
        if machine not in _AUDIT_ARCH:
            raise JailError(f"there is no seccomp filter for machine {machine}")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._capset = self._libc.capset  # looked up here, where it costs nothing
        code = seccomp_filter(machine)
        self._code = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(self._code))  # struct sock_fprog
        self._program = ctypes.create_string_buffer(program)

    def _prctl(self, option: int, value: int, pointer: int = 0) -> None:
        if self._libc.prctl(option, *map(ctypes.c_ulong, (value, pointer, 0, 0))):
            number = ctypes.get_errno()
            raise JailError(f"prctl({option}): {os.strerror(number)}")

    def _drop_capabilities(self) -> None:
        header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)  # linux/capability.h, version 3
        if self._capset(header, none):
            raise JailError(f"capset: {os.strerror(ctypes.get_errno())}")

    def enter(self, parent: int) -> None:
        """Lock the calling process in, and prove it."""
        if os.geteuid() == 0:
            nobody = 65534
            for give_up in (partial(os.setgroups, []), partial(os.setresgid, *[nobody] * 3),
                            partial(os.setresuid, *[nobody] * 3)):  # fmt: skip
                with contextlib.suppress(OSError):  # each by itself: a user namespace may refuse one, or have no nobody
                    give_up()
        self._drop_capabilities()  # so that uid 0, where it has to stay, is worth no more than any other
        self._prctl(4, 0)  # PR_SET_DUMPABLE
        die_with(parent)  # a change of user has cleared it
        self._prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
        self._prctl(22, 2, ctypes.addressof(self._program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        attempts: tuple[Callable[[], int], ...] = (lambda: os.open("/", os.O_RDONLY), os.fork)
        for attempt in attempts:
            try:
                attempt()
            except PermissionError:
                continue
            os._exit(1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(1, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def limit_resources(cpu_seconds: int) -> None:
    """Bound memory and CPU of the calling process; no files, no children, no core dump."""
    for name, limit in (("AS", LIMITS.memory_bytes), ("FSIZE", 0), ("CORE", 0), ("NPROC", 0), ("NOFILE", 4),
                        ("MEMLOCK", 0)):  # fmt: skip
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


class _NoStream(io.TextIOBase):
    """Standard streams of a player: printing goes nowhere, input is at its end."""

    def write(self, text: str) -> int:
        return len(text)

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        return ""


def _fix_random(seed: int) -> None:
    """Make all random numbers of this process follow from a seed: a strategy plays the same game twice."""
    random.seed(seed)
    own_seed, stream = random.Random.seed, random.getrandbits

    def seed_from_the_game(self: random.Random, a: Any = None, version: int = 2) -> None:
        own_seed(self, stream(64) if a is None else a, version)

    random.Random.seed = seed_from_the_game  # type: ignore[method-assign]
    random.SystemRandom = random.Random  # type: ignore[misc, assignment]
    random.seed = vars(random)["_inst"].seed


def _guarded_import(
    name: str, globals: object = None, locals: object = None, fromlist: object = (), level: int = 0
) -> ModuleType:
    """`__import__` for strategies: the allowed modules and no others."""
    if level or name.partition(".")[0] not in (*ALLOWED_MODULES, "__future__"):
        raise ImportError(f"{name} may not be imported here; allowed are {', '.join(ALLOWED_MODULES)}")
    return __import__(name, None, None, fromlist, 0)  # type: ignore[arg-type]


def _describe(value: object) -> bytes:
    """A note about an exception or a wrong key, whatever it does when it is printed."""
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else f"returned {value!r:.100}"
        return text.encode("utf-8", "replace")[:1000]
    except BaseException:
        return b"something that cannot be printed"


def _load(source: bytes) -> tuple[bytes, Callable[[object], object] | None]:
    """The player's claim about how loading went, with its reason; and the strategy."""
    try:
        code = compile(source.decode("utf-8", "surrogatepass"), "<strategy>", "exec", dont_inherit=True)
    except BaseException as error:
        return b"none" + _describe(error), None
    module = sys.modules["strategy"] = ModuleType("strategy")  # where dataclasses looks up string annotations
    namespace = vars(module)
    namespace["__builtins__"] = dict(vars(builtins), __import__=_guarded_import)
    try:
        exec(code, namespace)
    except BaseException as error:
        return b"fail" + _describe(error), None
    strategy = namespace.get("strategy")
    return (b"load", strategy) if callable(strategy) else (b"none" + b"no function strategy(board)", None)


_TOKEN_BYTES = 4
_NOT_A_KEY, _RAISED = 254, 255


def _answer(strategy: Callable[[object], object], size: int, keys: str, channel: int) -> None:
    """Answer every message, a token and the exponents of a board, with the token and a direction; until the end.

    Behind a direction that is none stands a note.
    """
    table, tile = key_table(keys), _TILES.__getitem__
    rows = itemgetter(*(slice(start, start + size) for start in range(0, size * size, size)))
    read, write = os.read, os.write
    while message := read(channel, 512):
        note = b""
        try:
            key = strategy(list(rows(list(map(tile, message[_TOKEN_BYTES:])))))  # fresh lists at every call
            direction = table.get(key) if type(key) is str else None
            if direction is None:
                direction = direction_of(key, table)
            if direction is None:
                direction, note = _NOT_A_KEY, _describe(key)
        except BaseException as error:
            direction, note = _RAISED, _describe(error)
        write(channel, message[:_TOKEN_BYTES] + _NUMBERS[direction] + note)


def _player(jail: Jail | None, channel: int, parent: int) -> None:
    """A forked child of the zygote: lock the door, say so, load the strategy, answer boards."""
    with contextlib.suppress(OSError):  # where memory is short, the kernel ends the player and not the trainer
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(descriptor, b"1000")
    header, _, source = os.read(channel, LIMITS.source_bytes + 1000).partition(b"\n")
    job = json.loads(header)
    if len(source) != job["bytes"]:
        raise ValueError("the source was cut")
    os.closerange(0, channel)
    os.closerange(channel + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = sys.stdout = sys.stderr = _NoStream()
    limit_resources(job["cpu_seconds"])
    if jail:
        jail.enter(parent)
    else:
        die_with(parent)
    os.write(channel, b"jailed")  # the last word that is trusted
    _fix_random(job["random_seed"])
    claim, strategy = _load(source)
    os.write(channel, claim)
    if strategy:
        _answer(strategy, job["size"], job["keys"], channel)


def _zygote(control: socket.socket, jailed: bool, parent: int) -> None:
    """Fork a player for every channel that is sent.  Knows no seed, no game, and not how any player fared."""
    # the last three are not for the strategies: functools needs two, the compiler one for names like "ligne_complète"
    for name in (*ALLOWED_MODULES, "__future__", "collections.abc", "types", "weakref", "unicodedata"):
        __import__(name)
    jail = Jail() if jailed else None
    die_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: an exit status would tell the next player
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while _fork_player(control, jail, os.getpid()):
        pass


def _fork_player(control: socket.socket, jail: Jail | None, zygote: int) -> bool:
    """Wait for a channel, fork its player and send the referee its number; False where the referee has gone."""
    request, descriptors, _, _ = socket.recv_fds(control, 16, 1)
    if not request:
        return False
    player = os.fork()
    if player == 0:
        try:
            os.dup2(descriptors[0], 3)
            _player(jail, 3, zygote)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                os.write(3, _describe(error))
        os._exit(0)
    os.close(descriptors[0])
    control.send(struct.pack("=i", player))
    return True


_PROCESS = "the player's process"
_BY_THE_JAIL = (_PROCESS, "MemoryError", "PermissionError")  # how the details of such games begin


class GameOver(Exception):
    """A game has ended or has to: its outcome, and why."""

    def __init__(self, outcome: str, detail: str = "") -> None:
        super().__init__(outcome, detail)
        self.outcome, self.detail = outcome, detail


def printable(text: str) -> str:
    """Text from a player or a model, bounded and without control characters."""
    return "".join(map(_visible, text[: LIMITS.detail_chars]))[: LIMITS.detail_chars]


def printable_source(source: str) -> str:
    """A program as a terminal may show it: line breaks stay, other control characters become visible."""
    return "\n".join("".join(map(_visible, line)) for line in source.split("\n"))


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


_NUMBERS = tuple(bytes((i,)) for i in range(256))


class _PlayerProcess:
    """A jailed player as its referee sees it: a board out, a direction in, under CPU and wall limits.

    Its methods raise GameOver where the player breaks a limit or the protocol, or has died.
    """

    POLL_SECONDS = 0.1  # how often a waiting referee looks at the clocks
    ASLEEP_POLLS = 4  # only the referee sends anything: a player asleep at so many looks is deadlocked
    CONTROL_SECONDS = 30.0  # for the zygote's part; a referee whose zygote takes longer gives up, and is replaced

    def __init__(self, zygote: socket.socket, job: Job, random_seed: int, source: bytes) -> None:
        self._zygote, self._job = zygote, job
        self.moves = bytearray()  # what the player answered, a byte a move
        most = job.cpu_seconds(LIMITS.paid_moves)
        self._deadline = time.monotonic() + LIMITS.wall_factor * most + 10
        self._referee_began = time.process_time()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote.settimeout(self.CONTROL_SECONDS)
        with theirs:
            socket.send_fds(zygote, [b"fork"], [theirs.fileno()])
            self.pid: int = struct.unpack("=i", zygote.recv(16))[0]
        self._process, self._cpu_seconds = os.pidfd_open(self.pid), 0.0
        poll = struct.pack("ll", 0, int(self.POLL_SECONDS * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._channel.setsockopt(socket.SOL_SOCKET, option, poll)
        self._descriptor = self._channel.fileno()
        self._clock = (~self.pid << 3) | 2  # the process's CPU clock: clock_getcpuclockid(3)
        self._next_look = 0.0
        header = {"size": job.size, "keys": job.keys, "random_seed": random_seed, "cpu_seconds": int(most) + 2,
                  "bytes": len(source)}  # fmt: skip
        try:
            self._send(json.dumps(header).encode() + b"\n" + source)
            said = self._receive()
        except GameOver as over:
            said = over.detail.encode()
        if said != b"jailed":
            self.close()
            raise JailError("a player could not be jailed: " + printable(said.decode("utf-8", "replace")))

    def load(self) -> tuple[str, str]:
        """What the player says became of loading: "load", "fail" or "none", and why."""
        said = self._receive().decode("utf-8", "replace")
        return (said[:4] if said[:4] in ("load", "none") else "fail"), said[4:]

    def choose(self, board: bytes) -> tuple[int, bytes]:
        """Its answer to a board of exponents: an index in DIRECTIONS, or a larger number and a note."""
        token = os.urandom(_TOKEN_BYTES)  # only who has read the board knows it: no answer is given ahead, or twice
        self._send(token + board)
        answer = self._receive()
        if not answer.startswith(token) or len(answer) == _TOKEN_BYTES:
            raise GameOver("error", "the player broke the protocol")
        self.moves.append(direction := answer[_TOKEN_BYTES])
        return direction, answer[_TOKEN_BYTES + 1 :]

    def _send(self, message: bytes) -> None:
        try:
            os.write(self._descriptor, message)  # never waits: it has read all before, or broken the protocol
        except OSError:
            raise GameOver("error", f"{_PROCESS} ended") from None

    def _receive(self) -> bytes:
        """The next message, for which the player may use the CPU seconds of a move."""
        try:
            try:
                message = os.read(self._descriptor, 4096)  # nearly always there in time: one system call
            except BlockingIOError:
                message = self._wait()
        except ConnectionError:
            message = b""
        if not message:
            raise GameOver("error", f"{_PROCESS} ended")
        if time.monotonic() > self._next_look:
            self._look()
        return message

    def _cpu(self) -> float:
        """CPU seconds of the player so far, or when it was last seen."""
        with contextlib.suppress(OSError):
            self._cpu_seconds = time.clock_gettime(self._clock)
        return self._cpu_seconds

    def _look(self) -> None:
        """Hold the clocks against the limits.  The referee's own CPU counts too: wall time has a bound by it."""
        self._next_look = time.monotonic() + self.POLL_SECONDS / 2
        limit = self._job.cpu_seconds(len(self.moves))
        if self._cpu() + time.process_time() - self._referee_began > limit:
            raise GameOver("timeout", f"more than {limit:g} s of CPU time in {len(self.moves)} moves")
        if time.monotonic() > self._deadline:
            raise GameOver("timeout", "the wall clock's ceiling")

    def _wait(self) -> bytes:
        allowed, asleep = max(0.0, self._cpu() - self.POLL_SECONDS) + LIMITS.move_seconds, 0
        while True:
            self._look()
            if self._cpu() > allowed:
                raise GameOver("timeout", f"more than {LIMITS.move_seconds:g} s of CPU time for one move")
            try:
                stat = Path(f"/proc/{self.pid}/stat").read_bytes()
                asleep = asleep + 1 if stat.rpartition(b") ")[2][:1] == b"S" else 0
            except OSError:
                asleep = 0
            if asleep >= self.ASLEEP_POLLS:
                raise GameOver("timeout", "blocked: it waits for what never comes")
            with contextlib.suppress(BlockingIOError):
                return os.read(self._descriptor, 4096)

    def close(self) -> float:
        """End the process and wait until it is gone; the CPU seconds that it used."""
        self._channel.close()
        seconds = self._cpu()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        gone, _, _ = select.select([self._process], [], [], self.CONTROL_SECONDS)
        os.close(self._process)
        if not gone:
            raise TimeoutError(f"{_PROCESS} does not end")
        return seconds


def _play_game(player: _PlayerProcess, game: GameBoard) -> NoReturn:
    """Play until the game is over, which is raised."""
    idle = 0
    while game.state() == "ongoing":
        direction, note = player.choose(game.flat())
        if direction >= len(DIRECTIONS):
            outcome = "invalid_move" if direction == _NOT_A_KEY else "error"
            raise GameOver(outcome, note.decode("utf-8", "replace"))
        idle = 0 if game.move(direction) else idle + 1
        if idle == LIMITS.idle_moves:
            raise GameOver("stuck", f"{idle} moves in a row changed nothing")
    raise GameOver("success" if game.state() == "success" else "lost")


def _unplayed(job: Job, over: GameOver) -> list[GameResult]:
    """Results of a strategy that never got to play."""
    starts = [GameBoard(job.size, seed, job.target) for seed in job.seeds]
    return [GameResult(seed, over.outcome, 0, game.max_tile(), game.score(), 0.0, printable(over.detail))
            for seed, game in zip(job.seeds, starts, strict=True)]  # fmt: skip


class Referee:
    """Plays one game at a time, which it alone holds.  Raises JailError where no player can be jailed."""

    def __init__(self, jailed: bool = True) -> None:
        parent = os.getpid()
        self._zygote, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._zygote_pid = os.fork()
        if self._zygote_pid == 0:
            try:
                self._zygote.close()
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, 0)
                os.dup2(nowhere, 1)
                _zygote(theirs, jailed, parent)
            except JailError as error:
                theirs.send(str(error).encode())
            except Exception as error:
                theirs.send(_describe(error))
            finally:
                os._exit(0)
        theirs.close()
        self._zygote.settimeout(_PlayerProcess.CONTROL_SECONDS)
        said = self._zygote.recv(1000)
        if said != b"ready":
            raise JailError(said.decode() or "the players' parent process did not start")

    def lives(self) -> bool:
        """Whether its zygote does.  No other is forked: by now this process knows seeds, and so would its players."""
        return os.waitpid(self._zygote_pid, os.WNOHANG) == (0, 0)

    def play(self, source: str, job: Job) -> tuple[str, list[GameResult]]:
        """What became of loading ("load", "fail", "none": the worst of them), and one result per seed of the job."""
        encoded = source.encode("utf-8", "surrogatepass")
        if not job.seeds:
            return self._play(encoded, job, 0)[0], []
        claims, results = zip(*(self._play(encoded, job, seed) for seed in job.seeds), strict=True)
        return min(claims, key=("none", "fail", "load").index), list(results)

    def _play(self, source: bytes, job: Job, seed: int) -> tuple[str, GameResult]:
        """Load the strategy in a player of its own and, where the job has boards, play one of them."""
        game, claim = GameBoard(job.size, seed, job.target), "fail"
        player = _PlayerProcess(self._zygote, job, _random_seed(game), source)
        try:
            claim, reason = player.load()
            if claim != "load":
                raise GameOver("no_function" if claim == "none" else "error", reason)
            if job.seeds:
                _play_game(player, game)
            over = GameOver("lost")
        except GameOver as end:
            over = end
        finally:
            cpu = player.close()
        moves = "".join(str(move) for move in player.moves if move < len(DIRECTIONS)) if job.record else ""
        return claim, GameResult(seed, over.outcome, len(player.moves), game.max_tile(), game.score(), round(cpu, 6),
                                 printable(over.detail), moves)  # fmt: skip


def _random_seed(game: GameBoard) -> int:
    """A seed for the strategy's own `random`: from the first board, which it may see, and not from the game's seed,
    which it could find by trying all small numbers."""
    return int.from_bytes(hashlib.sha256(b"player" + game.flat()).digest()[:8])


@dataclass(frozen=True)
class Job:
    """One text to judge: a strategy's source, or a completion to extract it from; and the boards it plays."""

    text: str
    seeds: tuple[int, ...]
    size: int = 6
    target: int = 2048
    keys: str = "bepo"
    timeout: float = 5.0  # CPU seconds for a game's first thousand moves; each further thousand has as many
    completion: bool = False
    reasons: bool = False  # the model was asked to think before it answers: see final_channel
    record: bool = False  # keep the moves

    def __post_init__(self) -> None:
        check_game(self.size, self.target)
        key_table(self.keys)
        if not 0 < self.timeout < 1e6:
            raise ValueError(f"timeout must be a positive number of seconds, not {self.timeout!r}")
        if not all(type(seed) is int for seed in self.seeds):
            raise ValueError("seeds must be whole numbers")

    def cpu_seconds(self, moves: int) -> float:
        """What one game may use until it has had so many moves.  Games grow with the target, and their time with them.

        A game to a target takes about half as many moves as the target's number; time is granted for twice that.
        """
        return self.timeout * max(1.0, min(moves, self.target, LIMITS.paid_moves) / 1000)

    def wall_seconds(self) -> float:
        """After so long there is a verdict, or the worker is at fault: a bound for waits, far above what is normal."""
        game = LIMITS.wall_factor * self.cpu_seconds(LIMITS.paid_moves) + 10 + _PlayerProcess.CONTROL_SECONDS
        return LIMITS.parse_seconds * LIMITS.wall_factor + game * max(1, len(self.seeds))


@dataclass(frozen=True)
class Verdict:
    """All that is known of one text.  Rewards, logs and reports read this and nothing else."""

    source: str | None  # of the strategy; None where there is none
    works: str  # "load", "fail" (it parses but does not load) or "none" (no function, or it does not parse)
    cheating: str  # what it does that it may not, or ""
    results: tuple[GameResult, ...]  # one per seed; a completion that cheats does not play


def _judge_in_worker(referee: Referee, job: Job) -> Verdict:
    """Trusted code, hostile data: the source is only read here, and run by a jailed player."""
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMITS.parse_seconds)  # ends this worker, if the parser takes for ever
    source = extract_function(job.text, job.reasons) if job.completion else job.text
    if source is not None and job.completion and not _is_too_long(source):
        source = visible_program(source)
    if source is not None and _is_too_long(source):
        over = GameOver("error", f"the source is longer than {LIMITS.source_bytes} bytes")
        return _no_verdict(job, None, "fail", over)
    parses = source is not None and parse(source) is not None
    cheating = printable(find_cheating(source)) if source and parses else ""
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if source is None or not parses:
        return _no_verdict(job, source, "none", GameOver("no_function", "no strategy(board) that Python can parse"))
    if job.completion and cheating:
        works, _ = referee.play(source, dataclasses.replace(job, seeds=()))
        return _no_verdict(job, source, works, GameOver("error", f"does not play: it {cheating}"), cheating)
    works, results = referee.play(source, job)
    return Verdict(source, works, cheating, tuple(results))


def _is_too_long(source: str) -> bool:
    return len(source.encode("utf-8", "surrogatepass")) > LIMITS.source_bytes


def _no_verdict(job: Job, source: str | None, works: str, over: GameOver, cheating: str = "") -> Verdict:
    """The verdict on a text that never played."""
    return Verdict(source, works, cheating, tuple(_unplayed(job, over)))


def worker_main(core: int, jailed: bool) -> None:
    """A referee process: JSON lines in, JSON lines out, until its input ends or its trainer is gone."""
    trainer = os.getppid()

    def leave_with_trainer(*_: object) -> None:
        if os.getppid() != trainer:
            os._exit(1)

    signal.signal(signal.SIGALRM, leave_with_trainer)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    warnings.simplefilter("ignore")
    with contextlib.suppress(OSError):  # referee and player alternate strictly: on one core nothing has to travel
        os.sched_setaffinity(0, {core})
    try:
        referee = Referee(jailed)
        canary = _judge_in_worker(referee, Job("def strategy(board): return 'a'", (0,)))
        refusal = "" if canary.results[0].outcome == "stuck" else canary.results[0].detail
    except JailError as error:
        refusal = str(error)
    resource.setrlimit(resource.RLIMIT_AS, (LIMITS.referee_bytes, LIMITS.referee_bytes))
    print(json.dumps({"refusal": refusal}), flush=True)
    if refusal:
        return
    for line in sys.stdin:
        if not referee.lives():
            return
        print(json.dumps({"begun": True}), flush=True)  # who dies before has not died over this job
        job = json.loads(line)
        verdict = _judge_in_worker(referee, Job(**{**job, "seeds": tuple(job["seeds"])}))
        print(json.dumps(dataclasses.asdict(verdict)), flush=True)


class _Worker:
    """A referee process as the trainer sees it; replaced before the next job when it has died."""

    START_SECONDS = 60.0

    def __init__(self, core: int, jailed: bool) -> None:
        import threading

        self._core, self._jailed = core, jailed
        self._lock, self._closed = threading.Lock(), False
        self._start()

    def _start(self) -> None:
        import subprocess

        here = Path(__file__).resolve()
        code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem} as program; " \
               f"program.worker_main({self._core}, {self._jailed})"  # fmt: skip
        # not -I, which would ignore PYTHONHASHSEED: the order of sets would change rewards
        command = [sys.executable, "-P", "-s", "-S", "-c", code]
        environment = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("rb")
        with theirs:  # a socket, because reads and writes of a pipe have no time limit
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=environment,
                                             cwd="/", start_new_session=True)  # fmt: skip

    def check(self) -> None:
        """Wait until it is ready.  Raises JailError when its canary got out, or no player could be jailed."""
        line = self._exchange("", self.START_SECONDS)
        if line is None or line["refusal"]:
            raise JailError(line["refusal"] if line else "a worker died at its start")

    def _exchange(self, line: str, seconds: float) -> dict[str, Any] | None:
        """Send a line, if there is one, and read one; None where the worker dies over it or takes too long."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: close() was called in another thread
            self._socket.settimeout(seconds)
            self._socket.sendall(line.encode())
            answer = self._answers.readline()
            return json.loads(answer) if answer.endswith(b"\n") else None
        return None

    def judge(self, job: Job) -> Verdict:
        """The verdict on one job; "error" where the worker died over it.  Raises as check() where none starts.

        A worker that dies before it has begun has not died over the job, which then goes to the next.
        """
        line, limit = json.dumps(dataclasses.asdict(job)) + "\n", job.wall_seconds()
        reply = None
        for _ in range(3):
            if self._process.poll() is not None:
                self._replace()
            if self._exchange(line, min(limit, self.START_SECONDS)):
                reply = self._exchange("", limit)
                break
            with self._lock:
                self._end()
        if reply is None:
            with self._lock:
                self._end()
            if self._closed:
                raise RuntimeError("the pool is closed")
            return _no_verdict(job, None, "none", GameOver("error", "the referee's process ended over it"))
        results = tuple(GameResult(**result) for result in reply.pop("results"))
        return Verdict(**reply, results=results)

    def _replace(self) -> None:
        with self._lock:
            if self._closed:  # ended by close() in another thread, while this one waited for a verdict
                raise RuntimeError("the pool is closed")
            self._end()
            self._start()
        try:
            self.check()
        except JailError:
            with self._lock:
                self._end()
            raise

    def close(self) -> None:
        """End the process, its zygote and its player with it, for good."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        import subprocess

        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.START_SECONDS)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._answers.close()
        self._socket.close()


def own_cores(cores: Sequence[int]) -> Sequence[int]:
    """This process's share of a machine's cores, where torchrun has started several."""
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return list(cores[rank::ranks]) or [cores[rank % len(cores)]]


class Pool:
    """Referee workers, one per core by default.  Raises JailError where the jail does not hold, unless not `jailed`.

    Safe to use from several threads.  A context manager; close() leaves no process behind.
    """

    def __init__(self, workers: int | None = None, jailed: bool = True) -> None:
        import queue
        import threading

        cores = own_cores(sorted(os.sched_getaffinity(0)))
        self.jailed, self.closed = jailed, False
        self._begun: dict[Job, Future[Verdict]] = {}
        self._owed: dict[Future[Verdict], float] = {}  # seconds until each job under way has to have its verdict
        self._queue: queue.SimpleQueue[tuple[Future[Verdict], Job] | None] = queue.SimpleQueue()  # None: the end
        self._workers = [_Worker(cores[i % len(cores)], jailed) for i in range(workers or len(cores))]
        try:
            for worker in self._workers:
                worker.check()
        except BaseException:
            self.close()
            raise
        for worker in self._workers:  # not an executor's threads: those play the whole queue before Python may end
            threading.Thread(target=self._serve, args=(worker,), name="referee", daemon=True).start()

    def _serve(self, worker: _Worker) -> None:
        """A thread: one worker's jobs, one after the other."""
        while asked := self._queue.get():
            future, job = asked
            try:
                verdict = self._judge(worker, job)
            except BaseException as error:
                settle = partial(future.set_exception, error)
            else:
                settle = partial(future.set_result, verdict)
            with contextlib.suppress(Exception):  # close() was first
                settle()

    def _judge(self, worker: _Worker, job: Job) -> Verdict:
        """The worker's verdict.  One that has died and cannot be replaced is tried again, for a minute."""
        deadline = time.monotonic() + _Worker.START_SECONDS
        while True:
            try:
                return worker.judge(job)
            except (JailError, OSError):
                if self.closed or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def begin(self, job: Job) -> Future[Verdict]:
        """Start on a job that judge() will be asked for later."""
        from concurrent.futures import Future

        future = self._begun.get(job)
        if future is None:
            if self.closed:
                raise RuntimeError("the pool is closed")
            self._begun[job] = future = Future()
            self._queue.put((future, job))
            self._owed[future] = job.wall_seconds() + 2 * _Worker.START_SECONDS
            future.add_done_callback(lambda done: self._owed.pop(done, None))
        return future

    def judge(self, jobs: Sequence[Job]) -> list[Verdict]:
        """One verdict per job, in order; equal jobs are judged once."""
        try:
            futures = {job: self.begin(job) for job in dict.fromkeys(jobs)}
            deadline = time.monotonic() + sum(list(self._owed.values()))  # if one worker did all of it, one by one
            verdicts = {job: future.result(deadline - time.monotonic()) for job, future in futures.items()}
            for job in verdicts:
                self._begun.pop(job, None)
            return [verdicts[job] for job in jobs]
        except TimeoutError:
            self.close()
            raise JailError("the referees gave no verdict for far longer than any game may take") from None
        except BaseException:  # Ctrl-C: nobody waits for what is still being played
            self.close()
            raise

    def forget_begun(self) -> None:
        """No verdict will be asked for of what was begun so far."""
        self._begun.clear()

    def close(self) -> None:
        """End all processes.  No further jobs; who waits for one gets a RuntimeError."""
        self.closed = True
        for worker in self._workers:
            worker.close()
            self._queue.put(None)
        for future in list(self._owed):
            with contextlib.suppress(Exception):  # it has its verdict
                future.set_exception(RuntimeError("the pool is closed"))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_shared: list[Pool] = []
_sharing = _thread.allocate_lock()  # threading's own, without its fork handler


def shared_pool(jailed: bool | None = None) -> Pool:
    """The pool that rewards and commands share, started when first asked for; jailed unless a caller says otherwise."""
    with _sharing:
        if _shared and jailed not in (None, _shared[0].jailed):
            _shared[0].close()
        if not _shared or _shared[0].closed:
            _shared[:] = [Pool(jailed=jailed is not False)]
            atexit.register(_shared[0].close)
        return _shared[0]


def execute_strategies(
    sources: Sequence[str], seeds: Sequence[int], size: int = 6, target: int = 2048, keys: str = "bepo",
    timeout: float = 5.0, record: bool = False, pool: Pool | None = None,
) -> list[list[GameResult]]:  # fmt: skip
    """Play many strategies, each on all seeds, over the pool's workers.  One result per seed, for each source.

    Never raises for what a strategy does; ValueError for a game that cannot be.  `timeout` as in Job.
    """
    parts = [tuple(seeds[i : i + 4]) for i in range(0, len(seeds), 4)]  # small ones keep all workers busy to the end
    jobs = [Job(source, part, size, target, keys, timeout, record=record) for source in sources for part in parts]
    verdicts = iter((pool or shared_pool()).judge(jobs))
    return [[result for _ in parts for result in next(verdicts).results] for _ in sources]


def execute_strategy(
    source: str, seeds: Sequence[int], size: int = 6, target: int = 2048, keys: str = "bepo", timeout: float = 5.0
) -> list[GameResult]:
    """Play one strategy: one result per seed.  As execute_strategies."""
    return execute_strategies([source], seeds, size, target, keys, timeout)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Rewards

BOARDS = (0, 1, 2, 3)  # what a reward function plays when it is not told: the tests' and the reader's default
SUCCESS, LOST, LOST_PROGRESS = 20.0, 2.0, 8.0
STOPPED = {"stuck": -1.0, "timeout": -1.0, "error": -3.0, "invalid_move": -3.0}  # where no tile was made
WORKS = {"load": 1.0, "fail": -0.5, "none": -2.0}
CLEAN, CHEATING, NOTHING_TO_CHECK = 1.0, -20.0, -1.0
CUT_OFF = -1.0


@lru_cache(maxsize=2)
def _judge_batch(jobs: tuple[Job, ...]) -> list[Verdict]:
    return shared_pool().judge(jobs)


def completion_text(completion: Any) -> str:
    """The text of a completion as TRL hands it over: a string, or a list of messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def judge(completions: Sequence[Any], **kwargs: Any) -> list[Verdict]:
    """The verdict on each completion, worked out once whoever asks.

    `completions` as TRL hands them over: strings, or lists of messages.  The game is read from the dataset's columns,
    one entry per completion: `seeds` (the boards), `size`, `target`, `keys`, `timeout`.
    """
    columns = {"seeds", "size", "target", "keys", "timeout", "reasons"} & kwargs.keys()
    rows = ({name: kwargs[name][i] for name in columns} for i in range(len(completions)))
    return _judge_batch(tuple(map(completion_job, map(completion_text, completions), rows)))


def completion_job(text: str, row: Mapping[str, Any]) -> Job:
    """A completion's game, from its row of the dataset."""
    columns = {name: row[name] for name in ("size", "target", "keys", "timeout", "reasons") if name in row}
    return Job(text, tuple(row.get("seeds", BOARDS)), completion=True, **columns)


def function_works(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """TRL reward: is there a strategy, and does it load?"""
    return [WORKS[verdict.works] for verdict in judge(completions, **kwargs)]


def no_cheating(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """TRL reward: does it stay clear of the interpreter and of modules that it may not import?"""
    verdicts = judge(completions, **kwargs)
    return [NOTHING_TO_CHECK if v.works == "none" else CHEATING if v.cheating else CLEAN for v in verdicts]


def game_reward(result: GameResult, target: int, flat: bool = False) -> float:
    """What one game is worth; `flat` is the published scheme, in which every loser gets the same.

    Games that a program breaks off (STOPPED) are graded too, always below one that was lost with the same tile: from
    -1 or -3 without a tile above 4 up to what losing would be worth at the target.
    """
    reached, wanted = math.log2(result.max_tile), math.log2(target)
    most = LOST + LOST_PROGRESS
    match result.outcome:
        case "success":
            return SUCCESS
        case "no_function":
            return 0.0
        case "lost" | "stuck" if flat:
            return LOST
        case "lost":
            return LOST + LOST_PROGRESS * min(1.0, reached / wanted)
        case stopped if flat:
            return STOPPED[stopped]
        case stopped:
            least, progress = STOPPED[stopped], max(0.0, reached - 2) / max(1.0, wanted - 2)
            return least + (most - least) * min(1.0, progress)


def strategy_succeeds(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """TRL reward: how far it gets, as the mean over its boards; 0 for no function or one that cheats."""
    rewards = []
    for i, verdict in enumerate(judge(completions, **kwargs)):
        target = kwargs["target"][i] if "target" in kwargs else 2048
        flat = bool(kwargs["flat_reward"][i]) if "flat_reward" in kwargs else False
        games = [] if verdict.cheating else [game_reward(result, target, flat) for result in verdict.results]
        rewards.append(sum(games) / max(1, len(games)))
    return rewards


REWARDS = (function_works, no_cheating, strategy_succeeds)


def ends_in_time(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """TRL reward of the stable recipe: does the answer end by itself?  Else nothing held back what follows the program.

    `completion_ids` are the completions' tokens, `max_new_tokens` the limit of each.
    """
    if "completion_ids" not in kwargs:
        return [0.0] * len(completions)
    lengths = zip(kwargs["completion_ids"], kwargs["max_new_tokens"], strict=True)
    return [CUT_OFF if len(ids) >= limit else 0.0 for ids, limit in lengths]


# ---------------------------------------------------------------------------------------------------------------------
# Strategies for the warm start: independent parts, so that most of their combinations are never in the corpus

MOVE = """    def move(k):
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
SCORE = """
    def score(k):
        board = after[k]
        flat = sum(board, [])
        return {total}
"""
TERMS = ("flat.count(0)", "len(set(flat))", "max(flat)", "board[0][0]", "board[-1][-1]", "sum(board[0])",
         "sum(board[-1])", "sum(r[0] for r in board)", "sum(x * x for x in flat)",
         "sum(x * i for i, x in enumerate(flat))", "sum(r == sorted(r) for r in board)",
         "sum(x == y for r in board for x, y in zip(r, r[1:]))")  # fmt: skip
WEIGHTS = (1, 2, 3, 5, 8, 20, 50, 100)


# Ways to choose a key and how often each is composed.  At 2048 on 6x6 draws from 3 or 4 keys win, and more than half of
# the searches: about one program in five.  Searches are common because what is rare dies out: benchmarks/LOG.md.
CHOICES = {"constant": 8, "cycle": 26, "draw2": 22, "draw3": 2, "draw4": 1, "first": 15, "search": 26}


def _weighted_sum(rng: random.Random, terms: int) -> str:
    """A weighted sum over TERMS of a `board` and its cells `flat`."""
    first, *rest = (f"{rng.choice(WEIGHTS)} * {term}" for term in rng.sample(TERMS, terms))
    return first + "".join(rng.choice((" + ", " + ", " - ")) + part for part in rest)


def _some_keys(rng: random.Random, keys: str, count: int) -> str:
    """That many of the keys, in any order."""
    return "".join(rng.sample(keys, count))


def moves_source(keys: str, order: str) -> str:
    """Code that works out all four moves of a `board`; `keys` in DIRECTIONS' order, `order` the one to list them in."""
    return MOVE.format(vertical=keys[:2], backwards=keys[1] + keys[3], keys=order)


def _choose(rng: random.Random, kind: str, keys: str) -> str:
    """An expression for the next key; `kind` is one of CHOICES."""
    if kind == "constant":
        return f'"{rng.choice(keys)}"'
    if kind == "cycle":
        count = rng.choice((2, 3, 4))
        return f'"{_some_keys(rng, keys, count)}"[n % {count}]'
    if kind in ("draw2", "draw3", "draw4"):
        count = int(kind[-1])
        return f'"{_some_keys(rng, keys, count)}"[random.randrange({count})]'
    if kind == "first":
        return rng.choice(("moves[0]", "moves[0]", "moves[-1]"))
    return "max(moves, key=score)"


def compose_strategy(rng: random.Random, keys: str) -> str:
    """Source of one strategy; `keys` in DIRECTIONS' order.

    One or two ways to choose a key (CHOICES; two are joined by a test of the board), each with its own order of keys,
    and sums of TERMS with WEIGHTS to count by and to search by.
    """
    kinds = rng.choices(list(CHOICES), list(CHOICES.values()), k=rng.choice((1, 1, 1, 2)))
    picks = [_choose(rng, kind, keys) for kind in kinds]
    body = f"    return {picks[-1]}\n"
    if len(picks) == 2:
        test = f"{rng.choice(TERMS)} > {rng.choice((1, 2, 4, 8, 16, 32, 64))}"
        body = f"    if {test}:\n        return {picks[0]}\n{body}"
    if "cycle" in kinds:
        body = f"    n = {_weighted_sum(rng, rng.choice((1, 1, 2)))}\n{body}"
    if "flat" in body:
        body = f"    flat = sum(board, [])\n{body}"
    if {"first", "search"} & set(kinds):
        head = moves_source(keys, _some_keys(rng, keys, 4))
        if "search" in kinds:
            noise = rng.choice(("", " + random.random()"))  # equal moves: the first of them, or any
            head += SCORE.format(total=_weighted_sum(rng, rng.choice((1, 2, 3))) + noise)
        body = f"{head}\n{body}"
    imports = "import random\n\n" if "random." in body else ""
    return f"{imports}def strategy(board):\n{body}"


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and model

HARMONY = ("<|return|>", "<|endoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>",
           "<|call|>")  # fmt: skip
FINAL_CHANNEL = "<|channel|>final<|message|>"
TINY_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""


def tiny_conversation(rng: random.Random, keys: str) -> list[dict[str, str]]:
    """One training example: a training wording about some board and target, and a composed strategy."""
    prompt = build_prompt(rng.randint(3, 8), 1 << rng.randint(9, 16), keys, rng.randrange(len(WORDINGS) - 1))
    answer = f"```python\n{compose_strategy(rng, LAYOUTS[keys])}```"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def train_tiny_tokenizer(conversations: list[list[dict[str, str]]], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with harmony's special tokens.

    It merges across words and lines, so that programs are some 30 tokens long.  Statements, numbers and each key of a
    string of keys stay apart: what a program chooses is a token of its own.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    key = "[" + "".join(sorted(set("".join(LAYOUTS.values())))) + "]"
    number = r"(?<=[ x(])\d+(?=[ x),.;:])"
    end = rf'\n {{0,4}}(?! )|{number}|{key}+"|$'  # a line break within a block of code is no end
    pieces = rf'\n {{0,4}}(?! )|{number}|{key}(?={key}*")|[\s\S]+?(?={end})'
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(HARMONY), initial_alphabet=alphabet,
                                  max_token_length=256, show_progress=False)  # fmt: skip
    programs = [answer["content"] for _, answer in conversations]
    prompts = [prompt["content"] for prompt, _ in conversations[::8]]  # so that most merges are spent on programs
    tokenizer.train_from_iterator(programs + prompts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|return|>", pad_token="<|endoftext|>",
        padding_side="left", model_max_length=1024, chat_template=TINY_CHAT_TEMPLATE)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Warm start


@dataclass(frozen=True)
class TinyConfig:
    """The embedded model and its warm start.  Chosen by measurement on two CPU cores: benchmarks/LOG.md."""

    layers: int = 3
    hidden: int = 128  # width of the residual stream and of each expert
    heads: int = 4
    kv_heads: int = 2
    experts: int = 4
    experts_per_token: int = 2
    vocab: int = 1024
    init: float = 0.06  # standard deviation of the first weights; gpt-oss's 0.02 is too small for this width
    corpus: int = 3000  # conversations that the tokenizer is trained on
    steps: int = 320
    batch: int = 48  # answers in a step, all to one prompt, in two halves of like length
    lr: float = 3e-3
    temperature: float = 0.9  # the model is sharpened by it: sampled at 1.0, a third as many programs are broken


TINY_MODEL = TinyConfig()


def tiny_gpt_oss(config: TinyConfig, tokenizer: PreTrainedTokenizerFast) -> GptOssForCausalLM:
    """An untrained GptOssForCausalLM: the architecture of gpt-oss-20b, about 1 M parameters."""
    from transformers import GptOssConfig, GptOssForCausalLM

    shape = GptOssConfig(
        vocab_size=config.vocab, hidden_size=config.hidden, intermediate_size=config.hidden,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.hidden // config.heads, num_local_experts=config.experts,
        num_experts_per_tok=config.experts_per_token, max_position_embeddings=1024, initializer_range=config.init,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, router_aux_loss_coef=0.0,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)  # fmt: skip
    return GptOssForCausalLM(shape)


def _answer_loss(model: GptOssForCausalLM, prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    """Summed cross-entropy of B answers to one prompt, which is computed once for all of them."""
    import torch

    cache = model(input_ids=torch.tensor([prompt[:-1]]), use_cache=True).past_key_values  # (1, P - 1)
    cache.batch_repeat_interleave(len(answers))
    width = max(map(len, answers))
    ids = torch.tensor([prompt[-1:] + answer + [-100] * (width - len(answer)) for answer in answers])  # (B, 1 + T)
    logits = model(input_ids=ids[:, :-1].clamp(min=0), past_key_values=cache).logits  # (B, T, V)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def train_tiny(
    folder: Path, config: TinyConfig, seed: int, keys: str, progress: Callable[[int, int, float], None]
) -> None:
    """Train tokenizer and model from nothing and save both as a Hugging Face folder.

    The number of steps is fixed, the corpus never repeats and one thread adds up, so the weights follow from the
    arguments alone.
    """
    import torch

    torch.set_num_threads(1)  # the model is so small that a second one costs more than it brings
    rng = random.Random(seed)
    tokenizer = train_tiny_tokenizer([tiny_conversation(rng, keys) for _ in range(config.corpus)], config.vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_gpt_oss(config, tokenizer).float()
    model.set_experts_implementation("eager")  # the default, grouped_mm, adds up in any order
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.lr, total_steps=config.steps, pct_start=0.1, cycle_momentum=False
    )
    for step in range(1, config.steps + 1):
        batch = [tiny_conversation(rng, keys) for _ in range(config.batch)]
        text = tokenizer.apply_chat_template(batch[0][:1], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text + FINAL_CHANNEL)["input_ids"]
        answers = sorted(tokenizer([answer["content"] + "<|return|>" for _, answer in batch])["input_ids"], key=len)
        tokens, mean = sum(map(len, answers)), 0.0
        for half in (answers[: config.batch // 2], answers[config.batch // 2 :]):  # by length: little padding
            loss = _answer_loss(model, prompt, half) / tokens
            loss.backward()
            mean += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress(step, config.steps, mean)
    model.lm_head.weight.data /= config.temperature
    model.generation_config.update(do_sample=True, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_fingerprint(config: TinyConfig, seed: int, keys: str) -> str:
    """Changes with the seed, the keys, the config and the source of all that the weights depend on."""
    makers: list[Callable[..., object]] = [
        _weighted_sum, _some_keys, moves_source, _choose, compose_strategy, tiny_conversation, train_tiny_tokenizer,
        tiny_gpt_oss, _answer_loss, train_tiny]  # fmt: skip
    parts = [seed, keys, dataclasses.asdict(config), MOVE, SCORE, TERMS, WEIGHTS, CHOICES, HARMONY, TINY_CHAT_TEMPLATE]
    prompts = [build_prompt(keys=keys, wording=wording) for wording in range(len(WORDINGS) - 1)]
    text = json.dumps([*parts, *prompts, *map(inspect.getsource, makers)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cache_folder() -> Path:
    """Where the embedded model and compiled code are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt_2048_rl"


def tiny_folder(seed: int = 3407, keys: str = "bepo", config: TinyConfig = TINY_MODEL) -> Path:
    """Where the embedded model of these arguments is cached."""
    return cache_folder() / f"tiny-{tiny_fingerprint(config, seed, keys)}"


def warm_start(
    folder: Path | None = None,
    seed: int = 3407,
    keys: str = "bepo",
    config: TinyConfig = TINY_MODEL,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> Path:
    """The folder of the embedded model; trained first where it is not there yet.

    `folder` None is the user's cache.  The folder appears whole or not at all: it is written beside its place and
    renamed.  `progress` gets (step, steps, loss) after each step.
    """
    folder = folder or tiny_folder(seed, keys, config)
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".tiny-", dir=folder.parent))
    try:
        train_tiny(unfinished, config, seed, keys, progress)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:  # another run was first
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Configuration

Layout = Literal["bepo", "wasd", "zqsd", "arrows"]


@dataclass
class TrainConfig:
    """Train a model with GRPO; then hold it, on boards that it never saw, against itself before and two controls.

    The defaults are the stable recipe for gpt-oss-20b; the published one (PUBLISHED), the embedded model (TINY) and a
    reasoning effort (REASONING) have numbers of their own, and --help shows those that apply.
    """

    model: str = "auto"  # auto: gpt-oss-20b where a CUDA GPU is found, else tiny; or a hub id, or a local folder
    recipe: Literal["stable", "published"] = "stable"  # decides the numbers below, unless they are given
    reasoning: Literal["none", "low", "medium", "high"] = "none"  # analysis before the answer; none: it starts at once
    output_dir: Path = Path("outputs")  # a run's folder is made in here
    run_name: str = ""  # name of the run's folder; by default the model and the time
    steps: int = 300  # optimizer steps
    minutes: float = 0.0  # end training after so many; 0: no limit
    generations: int = 16  # completions in a group, compared with one another
    batch_size: int = 8  # completions in a forward pass
    accumulation: int = 4  # forward passes in a step; batch_size * accumulation completions are generated together
    boards: int = 4  # boards that every completion of a group plays
    wordings: int = len(WORDINGS) - 1  # of the task, in turns
    learning_rate: float = 2e-5  # peak, after the warm-up
    lr_schedule: Literal["linear", "constant"] = "constant"  # after the warm-up: falls to 0, or stays for a while
    decay_steps: float = 0.4  # at the end, in which a constant rate falls to 0 too; below 1 a share of all steps
    warmup_steps: float = 10  # until the peak; below 1 a share of all steps
    weight_decay: float = 0.001
    max_grad_norm: float = 1.0  # longer gradients are cut to it
    temperature: float = 1.0  # of sampling, in training and in evaluation
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dr_grpo"  # TRL's loss_type
    scale_rewards: Literal["group", "batch", "none"] = "none"  # TRL's scale_rewards
    entropy_coef: float = 0.0  # bonus for entropy
    beta: float = 0.0  # weight of the KL divergence from the model at the start
    skip_flat_groups: bool = True  # leave groups whose rewards are all equal out of the mean
    lora_rank: int = 4  # adapters on attention and experts
    lora_alpha: int = 8
    max_new_tokens: int = 200  # tokens of a completion
    max_seq_length: int = 0  # tokens of prompt and completion; 0: 568 for the prompt and those of the completion
    load_in_4bit: bool = True  # on a GPU
    load_in_16bit: bool = False  # on a GPU of 80 GB and more, instead
    loader: Literal["unsloth", "transformers"] = "unsloth"  # transformers: in 16 bits; for accelerate's FSDP, and vLLM
    vllm_server: str = ""  # URL of a `trl vllm-serve` that writes the completions
    save_steps: int = 20  # steps between checkpoints
    keep: int = 3  # newest checkpoints that are kept, besides the best
    resume: bool = False  # go on with the newest run in --output-dir; one that is named again goes on anyway
    patience: int = 20  # steps in a row with nothing to learn (no valid code, or no spread) that end the run
    seed: int = 3407  # of weights, sampling and training boards
    size: int = 6  # cells along each side of the board
    target: int = 2048  # the tile that wins
    curriculum: bool = True  # double the target in training whenever more than 90% of the games of late were won
    keys: Layout = "bepo"  # keyboard layout of the four moves
    timeout: float = 5.0  # CPU seconds of a strategy for a game's first thousand moves, and for each thousand more
    flat_reward: bool = False  # the published reward: 20 for a win, 2 for anything that plays
    cut_off_price: float = 1.0  # what an answer loses that the length limit cuts off
    games: int = 64  # held-out boards; each is played by a program of its own
    eval_batch_size: int = 32  # completions generated at a time for them
    unsafe_no_jail: bool = False  # run model-written code without seccomp; recorded in the results
    quiet: bool = False  # print nothing of our own but the result
    json: bool = False  # the last line of stdout is one JSON object; everything else goes to stderr


TINY: dict[str, Any] = {  # the embedded model's own numbers, chosen by measurement: benchmarks/LOG.md
    "model": "tiny", "steps": 75, "generations": 48, "batch_size": 48, "accumulation": 1, "boards": 1,
    "learning_rate": 1e-3, "warmup_steps": 5, "max_grad_norm": 0.2, "lora_rank": 32, "lora_alpha": 64,
}  # fmt: skip
PUBLISHED: dict[str, Any] = {  # of the public notebook, whatever the model
    "recipe": "published", "steps": 1000, "generations": 2, "batch_size": 1, "accumulation": 4, "boards": 1,
    "wordings": 1, "learning_rate": 5e-5, "warmup_steps": 0.1, "lr_schedule": "linear", "loss_type": "dapo",
    "scale_rewards": "group", "save_steps": 100, "curriculum": False, "flat_reward": True, "cut_off_price": 0.0,
    "skip_flat_groups": False, "max_grad_norm": 1.0,
}  # fmt: skip
REASONING = {"none": 200, "low": 1024, "medium": 2048, "high": 4096}  # tokens of a completion, with its analysis


def train_defaults(model: str, recipe: str, reasoning: str) -> TrainConfig:
    """The numbers that hold where the command line gives none."""
    numbers: dict[str, Any] = {"model": model, "reasoning": reasoning, "max_new_tokens": REASONING[reasoning]}
    return TrainConfig(**numbers | (TINY if model == "tiny" else {}) | (PUBLISHED if recipe == "published" else {}))


@dataclass
class EvalConfig:
    """Hold a model, an adapter, a checkpoint or a strategy file (.py) against held-out boards and the controls."""

    model: str  # "tiny", a hub id, a folder (model, adapter, checkpoint or run) or a .py file with a strategy
    reasoning: Literal["none", "low", "medium", "high"] = "none"  # analysis before the answer; none: it starts at once
    games: int = 64  # held-out boards; each is played by a program of its own
    temperature: float = 1.0
    max_new_tokens: int = 200  # tokens of a completion
    max_seq_length: int = 0  # tokens of prompt and completion; 0: 568 for the prompt and those of the completion
    eval_batch_size: int = 32  # completions generated at a time
    load_in_4bit: bool = True  # on a GPU
    load_in_16bit: bool = False  # on a GPU of 80 GB and more, instead
    seed: int = 3407  # of sampling
    size: int = 6
    target: int = 2048
    keys: Layout = "bepo"
    timeout: float = 5.0  # CPU seconds for a game's first thousand moves, and for each thousand more
    unsafe_no_jail: bool = False
    json: bool = False


@dataclass
class PlayConfig:
    """Play one strategy file."""

    file: Path  # Python source that defines strategy(board)
    seeds: tuple[int, ...] = tuple(range(10))  # a game each; a strategy that searches could find such small ones
    size: int = 6
    target: int = 2048
    keys: Layout = "bepo"
    timeout: float = 5.0  # CPU seconds for the first thousand moves, and for each thousand more
    watch: bool = False  # show the first game in the terminal
    delay: float = 0.02  # seconds between its moves
    unsafe_no_jail: bool = False
    json: bool = False


@dataclass
class CompareConfig:
    """Put several runs side by side, with paired tests on the held-out boards that they have in common."""

    runs: tuple[Path, ...]  # their folders
    output: Path = Path("compare.html")  # the page to write
    json: bool = False


@dataclass
class ExportConfig:
    """Write what a run has learned to a folder of its own that other programs load."""

    source: Path  # a run's folder, one of its checkpoints, or an adapter's folder
    format: Literal["lora", "merged_16bit", "mxfp4"] = "lora"  # the adapter; or the whole model, the last for gpt-oss
    output_dir: Path | None = None  # by default lora_model, merged_16bit_model or mxfp4_model
    base: str = ""  # the model that the adapter belongs to, where it is not the one that was trained
    push_to_hub: str = ""  # upload the folder there too: OWNER/NAME
    private: bool = True  # make the hub's repository a private one, where it is new
    json: bool = False


@dataclass
class DoctorConfig:
    """Say what this machine has, what would be switched and why, and whether the model can train; starts nothing."""

    model: str = "auto"  # as in training
    load_in_4bit: bool = True
    load_in_16bit: bool = False
    json: bool = False


Config = TrainConfig | EvalConfig | PlayConfig | CompareConfig | ExportConfig | DoctorConfig


class UsageError(Exception):
    """What was wrong and what to do, in one line; exit code 2."""


# ---------------------------------------------------------------------------------------------------------------------
# Model


RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))


def sharded() -> bool:
    """Whether accelerate was told to spread the model over the processes' GPUs."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def uses_transformers(config: TrainConfig | EvalConfig) -> bool:
    """Whether a model is loaded without Unsloth."""
    return isinstance(config, TrainConfig) and config.loader == "transformers"


def join_ranks(config: TrainConfig) -> None:
    """Meet the other processes that torchrun or accelerate has started; nothing to do where there are none."""
    if RANKS > 1:
        prepare_environment(offline=config.model == "tiny")
        if not uses_transformers(config):
            import unsloth  # noqa: F401 - before all others
        import torch
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=2))  # one evaluates, the others wait


def gathered(items: Sequence[T]) -> list[T]:
    """The items of all ranks, one rank after another: on each rank the same."""
    if RANKS == 1:
        return list(items)
    from accelerate.utils import gather_object

    return list(gather_object(list(items)))


def by_first_rank(make: Callable[[], T]) -> T:
    """What the first rank makes, on all ranks; the others wait for it, and end where it raises."""
    if RANKS == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    made: list[Any] = [None, False]
    try:
        if RANK == 0:
            made = [make(), True]
    finally:
        broadcast_object_list(made)
    if not made[1]:
        raise SystemExit(2)
    return made[0]  # type: ignore[no-any-return]


def prepare_environment(offline: bool) -> None:
    """What has to be in the environment before unsloth is imported."""
    cache = cache_folder()
    defaults = {
        "TOKENIZERS_PARALLELISM": "false",
        "UNSLOTH_DISABLE_STATISTICS": "1",  # no download only to be counted
        "UNSLOTH_COMPILE_LOCATION": str(cache / "unsloth_compiled"),  # else it writes into the working directory
        "UNSLOTH_GRPO_SEQ_PACKING": "0",  # gpt-oss's attention takes no packed rows: Unsloth would try, check, go back
        "UNSLOTH_GRPO_PREFIX_GROUPER": "0",
        "UNSLOTH_MOE_ROUTED_MAX_SLOTS": "128",  # 32 completions x 4 experts; beyond, each token decodes all experts
        "OMP_WAIT_POLICY": "PASSIVE",  # torch's threads must not spin on the cores that the players need
        **({"HF_HUB_OFFLINE": "1"} if offline else {}),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Machine:
    """What there is to train with."""

    gpu: str = ""  # its name; empty where there is none
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    memory: int = 0  # bytes that the model and all else share: the GPU's, or RAM where there is no other
    unified: bool = False  # GPU and processor share their memory
    processor: str = "x86_64"
    triton: tuple[int, int] = (0, 0)  # version


def find_machine() -> Machine:
    """This machine; of several GPUs the first."""
    import torch

    processor = os.uname().machine
    if not torch.cuda.is_available():
        return Machine(memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), processor=processor)
    gpu = torch.cuda.get_device_properties(0)
    major, minor = (int(part) for part in library_versions(("triton",))["triton"].split(".")[:2])
    return Machine(gpu.name, (gpu.major, gpu.minor), gpu.total_memory, bool(gpu.is_integrated), processor,
                   (major, minor))  # fmt: skip


LIBRARIES = ("torch", "triton", "unsloth", "unsloth_zoo", "transformers", "trl", "peft", "bitsandbytes")


def library_versions(names: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Installed versions; "0.0" for what is not there."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        found[name] = "0.0"
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@dataclass(frozen=True)
class Settings:
    """How a model is loaded and trained on a machine, and why so."""

    load: dict[str, Any]  # arguments for Unsloth's loader
    environment: dict[str, str]  # to be set before anything is compiled
    rows: tuple[tuple[str, str, str], ...]  # what, how, why


def choose_settings(machine: Machine, config: TrainConfig | EvalConfig) -> Settings:
    """What fits a machine.  Raises UsageError for what it cannot do."""
    if not machine.gpu:
        return Settings(
            {"load_in_4bit": False, "use_gradient_checkpointing": False}, {},
            (("device", f"CPU, {machine.processor}", "no CUDA GPU was found"),
             ("memory", f"{machine.memory / 1e9:.0f} GB", ""),
             ("precision", "float32", "no 4-bit kernels without a GPU")),
        )  # fmt: skip
    if config.load_in_16bit and machine.memory < 75e9:  # GPUs sold with 80 GB have a little less
        raise UsageError(f"--load-in-16bit needs a GPU of 80 GB, and {machine.gpu} has {machine.memory / 1e9:.0f}: "
                         "leave it out")  # fmt: skip
    device = ("device", f"{machine.gpu} ({machine.capability[0]}.{machine.capability[1]}), {machine.processor}", "")
    if uses_transformers(config):
        return Settings(
            {}, {},
            (device,
             ("memory", f"{machine.memory / 1e9:.0f} GB", "each GPU holds a part of the weights" if sharded() else ""),
             ("precision", "bfloat16", "--loader transformers"),
             ("gradient checkpointing", "on the GPU", "")),
        )  # fmt: skip
    precision = ("bfloat16", "--load-in-16bit") if config.load_in_16bit else (
        ("4-bit NF4", "the default; --load-in-16bit on GPUs of 80 GB and more") if config.load_in_4bit else
        ("as stored", "gpt-oss stays in MXFP4"))  # fmt: skip
    shared = "memory is shared, moving them frees nothing"
    environment, ptxas = {}, ("triton's own", "")
    if machine.capability >= (10, 0) and machine.triton < (3, 6):
        environment = {"TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas",
                       "TORCH_CUDA_ARCH_LIST": f"{machine.capability[0]}.{machine.capability[1]}a"}  # fmt: skip
        ptxas = ("CUDA's", f"triton {machine.triton[0]}.{machine.triton[1]} has none for this GPU")
    load = {
        "load_in_4bit": config.load_in_4bit and not config.load_in_16bit,
        "load_in_16bit": config.load_in_16bit,
        "use_gradient_checkpointing": True,
        "offload_embedding": False if machine.unified else "auto",
    }
    rows = (
        device,
        ("memory", f"{machine.memory / 1e9:.0f} GB", "shared with the processor" if machine.unified else ""),
        ("precision", *precision),
        ("gradient checkpointing", "on the GPU", shared if machine.unified else "short sequences: RAM would cost time"),
        ("embeddings", "on the GPU" if machine.unified else "in RAM where memory is tight",
         shared if machine.unified else "Unsloth decides"),
        ("attention", "gpt-oss: flex in training, eager in generation", "attention sinks; no flash-attn, no xformers"),
        ("ptxas", *ptxas),
    )  # fmt: skip
    return Settings(load, environment, rows)


def gpu_is_there() -> bool:
    """Whether there is a device node of a CUDA GPU; asked without torch, so that --help stays quick."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    return visible and any(any(Path("/dev").glob(node)) for node in ("nvidia[0-9]*", "nvhost-gpu", "dxg"))


def resolve_model(name: str) -> str:
    """ "auto" -> the model that this machine can train."""
    return name if name != "auto" else "unsloth/gpt-oss-20b" if gpu_is_there() else "tiny"


def open_channel(tokenizer: Any, reasoning: str) -> None:
    """Let a harmony model start its answer in the final channel, or with an analysis where there is room for one."""
    template = tokenizer.chat_template or ""
    opening = "{%- if add_generation_prompt -%}" + FINAL_CHANNEL + "{%- endif -%}"
    if "<|channel|>" in template:  # trained adapters keep their template: it may have the opening already
        tokenizer.chat_template = template.removesuffix(opening) + (opening if reasoning == "none" else "")


def template_arguments(reasoning: str) -> dict[str, Any]:
    """What a chat template is told about the analysis; templates ignore what they do not know.

    The effort is named even where there is no room for any: gpt-oss would be told "medium" otherwise.
    """
    return {"reasoning_effort": "low" if reasoning == "none" else reasoning, "enable_thinking": reasoning != "none"}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no file.  Raises UsageError for a damaged one."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    except (OSError, ValueError, TypeError):
        raise UsageError(f"{file} is damaged: take another folder or checkpoint") from None


def adapter_base(name: str) -> Path | None:
    """The model that an adapter's folder belongs to; None where the folder holds no adapter."""
    base = read_json(Path(name) / "adapter_config.json").get("base_model_name_or_path")
    return Path(base) if base else None


def stays_as_stored(name: str) -> bool:
    """Whether 4 bits are not for a model: the embedded one is too small, and an adapter to fused experts fits those."""
    return name == "tiny" or bool(read_json(Path(name) / "adapter_config.json").get("target_parameters"))


def tiny_keys(folder: Path | None) -> str | None:
    """The keyboard layout of the embedded model that is cached in a folder; None for any other folder."""
    return next((keys for keys in LAYOUTS if tiny_folder(keys=keys) == folder), None)


def instruct_variant(name: str) -> str:
    """The name that a base model's instruct variant most likely has."""
    for ending, instead in (("-Base", ""), ("-base", ""), ("-pt", "-it")):
        if name.endswith(ending):
            return name.removesuffix(ending) + instead
    return f"{name}-Instruct"


def check_template(name: str, files: Container[str], read: Callable[[str], Path | str]) -> None:
    """Raise UsageError for a model without a chat template; `files` are its files' names, `read` gives one's place."""
    if "chat_template.jinja" in files or "chat_template.json" in files or "tokenizer_config.json" not in files:
        return
    if not read_json(Path(read("tokenizer_config.json"))).get("chat_template"):
        raise UsageError(f"{name} has no chat template, so it is no model for chats: try {instruct_variant(name)}")


def check_model(name: str, reasoning: str) -> None:
    """Raise UsageError for a model that cannot be had or used so, before anything expensive starts."""
    folder = Path(name)
    if reasoning != "none" and (name == "tiny" or tiny_keys(adapter_base(name))):
        raise UsageError("the embedded model knows no analysis: take --reasoning none")
    if folder.is_dir():
        base = adapter_base(name)
        if base is None and "model_type" not in read_json(folder / "config.json"):
            raise UsageError(f"{name} holds no model: no config.json of a model, and no adapter_config.json")
        if base and base.is_absolute() and not base.exists() and not tiny_keys(base):
            raise UsageError(f"{name} is an adapter to {base}, which is not there any more")
        if base is None:
            check_template(name, {file.name for file in folder.iterdir()}, folder.joinpath)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        check_hub(name)
    elif name != "tiny":
        raise UsageError(f"model {name!r} is neither auto, tiny, a folder that exists nor a hub id like owner/name")


def check_hub(name: str) -> None:
    """Raise UsageError for a model that the hub does not have, or does not give; without a hub, one not cached."""
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(name, timeout=10)
        check_template(name, {file.rfilename for file in info.siblings or ()}, partial(hf_hub_download, name))
    except UsageError:
        raise
    except GatedRepoError:
        raise UsageError(f"{name} wants its licence agreed to: do so on its page, then set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UsageError(f"the hub has no model {name!r}, or shows it only to a token (set HF_TOKEN)") from None
    except Exception:  # whatever the network stack raises
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise UsageError(f"the hub cannot be reached for {name!r}: go online, or name a local folder") from None
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


def check_disk(folder: Path, needed: float, remedy: str) -> None:
    """Raise UsageError where a folder's disk has less room than `needed` bytes."""
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UsageError(f"{folder} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free: {remedy}")


def available_memory() -> int:
    """Bytes of RAM that this machine can still give; on a machine with unified memory its GPU's too."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def parameter_shapes(config: Any) -> dict[str, torch.Size]:
    """The shapes of a causal language model's parameters, from its transformers config, without any weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: weights.shape for name, weights in model.named_parameters()}


def memory_needed(name: str, config: TrainConfig | EvalConfig) -> dict[str, float]:
    """Bytes that a model takes on a GPU, by purpose: an estimate from its config; empty where that says too little.

    Experts and projections at 4.13 bits a weight in NF4 (4.25 in MXFP4), all else at 16; an adapter's weight with its
    gradient and both moments at 10 bytes; keys and values of all completions of a step.
    """
    from transformers import AutoConfig

    rows = config.batch_size * config.accumulation if isinstance(config, TrainConfig) else config.eval_batch_size
    try:
        model_config = AutoConfig.from_pretrained(str(adapter_base(name) or name))
        shapes = parameter_shapes(model_config)
        text = model_config.get_text_config()
        heads = getattr(text, "num_key_value_heads", text.num_attention_heads)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    except Exception:  # architectures of which transformers knows too little; loading will tell
        return {}
    unpacked = config.load_in_16bit or uses_transformers(config)
    packed = 4.13 / 8 if config.load_in_4bit and not unpacked else 2.0
    if getattr(model_config, "quantization_config", None) and not unpacked:
        packed = min(packed, 4.25 / 8)
    whole = re.compile(r"embed|lm_head|router|bias")
    weights = sum(shape.numel() * (2 if len(shape) < 2 or whole.search(name) else packed)
                  for name, shape in shapes.items())  # fmt: skip
    adapted = sum(sum(shape[-2:]) * math.prod(shape[:-2]) for name, shape in shapes.items()
                  if len(shape) > 1 and not whole.search(name))  # fmt: skip
    parts = RANKS if sharded() else 1
    return {
        "weights": weights / parts,
        "adapters": 10.0 * config.lora_rank * adapted / parts if isinstance(config, TrainConfig) else 0.0,
        "keys and values": 2.0 * 2 * rows * config.max_seq_length * text.num_hidden_layers * heads * width,
        "CUDA and scratch": 3e9,
    }


def check_memory(name: str, machine: Machine, needed: Mapping[str, float]) -> None:
    """Raise UsageError where a model will not fit."""
    import torch

    free = available_memory() if machine.unified else torch.cuda.mem_get_info()[0]
    if sum(needed.values()) > free:
        parts = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in needed.items())
        raise UsageError(
            f"{name} needs about {sum(needed.values()) / 1e9:.0f} GB of GPU memory ({parts}), and "
            f"{free / 1e9:.0f} are free: end what else uses it, lower --batch-size, or take a smaller --model"
        )


def check_download(name: str) -> None:
    """Raise UsageError where the disk has no room for what is still to be downloaded of a model."""
    from huggingface_hub import constants, snapshot_download

    if Path(name).is_dir() or constants.HF_HUB_OFFLINE:
        return
    files = snapshot_download(name, dry_run=True, ignore_patterns=["*/*"])
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    check_disk(Path(constants.HF_HUB_CACHE), missing, "set HF_HOME to a folder on a larger disk")


def load_model(name: str, config: TrainConfig | EvalConfig, say: Callable[[Any], None]) -> tuple[Any, Any]:
    """Unsloth's loader for every model: (model, tokenizer).  Raises UsageError, in one line."""
    base = adapter_base(name)
    local = name == "tiny" or (Path(name).is_dir() and (base is None or base.is_dir() or bool(tiny_keys(base))))
    prepare_environment(offline=local)
    plain = uses_transformers(config)
    say(f"loading torch, {'transformers' if plain else 'unsloth'} and trl")
    if not plain:
        import unsloth  # before transformers and trl, which it patches, and before torch, which it sets up
    import torch
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    machine = find_machine()
    if stays_as_stored(name):
        config = dataclasses.replace(config, load_in_4bit=False)
    settings = choose_settings(machine, config)
    os.environ.update(settings.environment)
    say(settings_table(settings))
    if local:
        disable_progress_bar()  # it is for downloads
    if keys := config.keys if name == "tiny" else tiny_keys(base):
        torch.set_num_threads(1)  # as in its warm start
        tiny = by_first_rank(partial(warm_start, keys=keys, progress=every_tenth(say)))  # an adapter's base may be gone
        name = str(tiny) if name == "tiny" else name
    if machine.gpu:
        check_memory(name, machine, memory_needed(name, config))
    if not local:
        check_download(four_bit_name(name) if settings.load.get("load_in_4bit") else name)
    dtype = None if machine.gpu else torch.float32
    try:
        model, tokenizer = load_plain(name, dtype or torch.bfloat16) if plain else (
            unsloth.FastLanguageModel.from_pretrained(model_name=name, max_seq_length=config.max_seq_length,
                                                      dtype=dtype, random_state=config.seed, **settings.load)
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"model {name!r} could not be loaded: {reason}") from error
    if settings.load.get("load_in_4bit") and not getattr(model, "is_loaded_in_4bit", False):
        raise UsageError("bitsandbytes cannot load 4-bit weights here: see the lines above, or take --no-load-in-4bit")
    if not tokenizer.chat_template:
        raise UsageError(f"model {name!r} has no chat template: try {instruct_variant(name)}")
    model.generation_config.max_length = None  # unsloth names one, and each generation would say that ours goes first
    open_channel(tokenizer, config.reasoning)
    return model, tokenizer


def load_plain(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model and its tokenizer by transformers alone, MXFP4 unpacked.  It stays in RAM until the trainer moves it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

    packed = getattr(AutoConfig.from_pretrained(name), "quantization_config", None)
    unpacked = Mxfp4Config(dequantize=True) if packed else None
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, quantization_config=unpacked)
    model._is_fsdp_managed_module = sharded()  # accelerate does not say so, and ranks would not wait for one another
    return model, AutoTokenizer.from_pretrained(name)


def four_bit_name(name: str) -> str:
    """The repository that Unsloth takes where a model is loaded in 4 bits: often one with such weights."""
    from unsloth.models.loader_utils import get_model_name  # only where there is a GPU

    return str(get_model_name(name, load_in_4bit=True) or name)


def settings_table(settings: Settings) -> Table:
    """What was found and switched, and why."""
    from rich.table import Table

    table = Table("", "", "why", box=None, show_header=False)
    for row in settings.rows:
        table.add_row(*map(rich_text, row))
    return table


def every_tenth(say: Callable[[str], None]) -> Callable[[int, int, float], None]:
    """A line for every tenth of the warm start."""

    def progress(step: int, steps: int, loss: float) -> None:
        if step % max(1, steps // 10) == 0:
            say(f"warm start {step:4d}/{steps}  loss {loss:.3f}")

    return progress


def add_adapters(model: Any, config: TrainConfig) -> Any:
    """LoRA on attention and experts; all other weights stay as they are."""
    # Where experts are fused into one parameter (16-bit, and on a CPU), naming their projections adapts nothing.
    fused = {name.split(".", 3)[-1] for name, _ in model.named_parameters() if re.search(r"experts\.\w+_proj$", name)}
    numbers: dict[str, Any] = {
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "target_parameters": sorted(fused) or None,
    }
    if uses_transformers(config):
        import torch
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(config.seed)  # the same weights on every rank
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **numbers))
    from unsloth import FastLanguageModel

    return FastLanguageModel.get_peft_model(
        model,
        use_gradient_checkpointing=bool(find_machine().gpu),  # as it was loaded; the embeddings may be in RAM
        random_state=config.seed,
        **numbers,
    )


def sample_completions(
    model: Any, tokenizer: Any, prompt: str, count: int, config: TrainConfig | EvalConfig
) -> list[str]:
    """`count` completions of one prompt, sampled at the config's temperature; special tokens stripped, as in TRL."""
    import torch

    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True,
                                           **template_arguments(config.reasoning))  # fmt: skip
    texts: list[str] = []
    model.eval()
    with torch.random.fork_rng(), torch.no_grad():  # training goes on with the random numbers that it had
        torch.manual_seed(config.seed)
        while len(texts) < count:
            rows = min(config.eval_batch_size, count - len(texts))
            batch = {key: value.repeat(rows, 1).to(model.device) for key, value in inputs.items()}  # (B, T)
            ids = model.generate(**batch, max_new_tokens=config.max_new_tokens, do_sample=True, top_k=0, top_p=1.0,
                                 temperature=config.temperature, pad_token_id=tokenizer.pad_token_id)  # fmt: skip
            texts += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def control_strategies(keys: str) -> dict[str, str]:
    """What a result has to be held against: random legal moves, and greedy on empty cells."""
    moves = moves_source(LAYOUTS[keys], LAYOUTS[keys])
    return {
        "random": f"import random\ndef strategy(board):\n{moves}    return random.choice(moves)\n",
        "greedy": f"def strategy(board):\n{moves}"
        "    return max(moves, key=lambda k: sum(row.count(0) for row in after[k]))\n",
    }


@cache
def board_key() -> str:
    """This machine's secret, from which the seeds of boards are drawn.  Raises UsageError where it cannot be kept.

    With a rule that a strategy can know, it could work a board's seed out, and with it every coming tile.  Players
    cannot read files, and the key is in no other process than this one.
    """
    file = cache_folder() / "board_key"
    try:
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f".board_key-{os.getpid()}")
            new.touch(mode=0o600)
            new.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):  # another run was first
                os.link(new, file)
            new.unlink()
        return file.read_text()
    except OSError as error:
        raise UsageError(f"{file} cannot be kept ({error.strerror}): set XDG_CACHE_HOME to a folder for it") from None


def board_seeds(count: int, *parts: object, held_out: bool = False) -> tuple[int, ...]:
    """Seeds of boards, 63 bits each, from a hash of this machine's key: even for training, odd for evaluation.

    The same parts give the same boards in every run on this machine.
    """
    digests = (hashlib.sha256(json.dumps([board_key(), *parts, i]).encode()).digest()[:8] for i in range(count))
    return tuple(int.from_bytes(digest) >> 1 & ~1 | held_out for digest in digests)


def board_names(config: TrainConfig | EvalConfig) -> list[str]:
    """A name for each held-out board, by which runs are compared; nobody can tell its seed from it."""
    seeds = board_seeds(config.games, held_out=True)
    return [hashlib.sha256(f"{config.size} {seed}".encode()).hexdigest()[:12] for seed in seeds]


def wilson_interval(won: int, games: int) -> tuple[float, float]:
    """95% confidence interval of a share (Wilson 1927); (0, 1) for no games."""
    if not games:
        return 0.0, 1.0
    z, p = 1.959964, won / games
    centre, spread = p + z * z / (2 * games), z * math.sqrt(p * (1 - p) / games + z * z / (4 * games * games))
    low, high = ((centre + sign * spread) / (1 + z * z / games) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


@dataclass(frozen=True)
class Score:
    """Results on held-out boards, one game per board, each played on to its end."""

    games: int
    won: float  # share of games in which the target tile was made
    won_low: float  # 95% interval (Wilson)
    won_high: float
    largest_tile_median: float
    tiles: tuple[int, ...]  # the largest of each game, in the boards' order


def score(results: Sequence[GameResult], target: int) -> Score:
    """Sum up one game per board.  A game counts as won when the target was made, however it ended later."""
    won = sum(result.max_tile >= target for result in results)
    low, high = wilson_interval(won, len(results))
    tiles = tuple(result.max_tile for result in results)
    median = statistics.median(tiles) if tiles else 0.0
    return Score(len(results), round(won / max(1, len(results)), 4), round(low, 4), round(high, 4), median, tiles)


TO_THE_END = 1 << 64  # a target that no board can reach


def evaluate_model(model: Any, tokenizer: Any, config: TrainConfig | EvalConfig) -> Score:
    """Sample one program for each held-out board, in a wording that training never sees, and play it there.

    A game and a program each: the games are independent, so that the interval means what it says.  Of several ranks the
    first does it; where the model is spread over them, all sample the same, for each needs the others' parts.
    """
    prompt = build_prompt(config.size, config.target, config.keys, wording=-1)
    sample = partial(sample_completions, model, tokenizer, prompt, config.games, config)
    texts = sample() if sharded() else by_first_rank(sample)

    def play_them() -> Score:
        jobs = [
            Job(text, (seed,), config.size, TO_THE_END, config.keys, config.timeout, True, config.reasoning != "none")
            for text, seed in zip(texts, board_seeds(config.games, held_out=True), strict=True)
        ]
        return score([verdict.results[0] for verdict in shared_pool().judge(jobs)], config.target)

    return by_first_rank(play_them)


def play_held_out(source: str, config: TrainConfig | EvalConfig, record: bool = False) -> list[GameResult]:
    """One strategy's games on the held-out boards."""
    seeds = board_seeds(config.games, held_out=True)
    return execute_strategies([source], seeds, config.size, TO_THE_END, config.keys, config.timeout, record)[0]


def evaluate_strategy(source: str, config: TrainConfig | EvalConfig) -> Score:
    """One strategy on the held-out boards."""
    return score(play_held_out(source, config), config.target)


class _SpawnsNoted(GameBoard):
    """A game that knows where its last tile appeared."""

    spawned = 0

    def _spawn(self) -> int:
        before, empty = self._flat, super()._spawn()
        self.spawned = next(i for i, pair in enumerate(zip(before, self._flat, strict=True)) if pair[0] != pair[1])
        return empty


def recorded_game(result: GameResult, size: int) -> dict[str, Any]:
    """A recorded game as it can be shown without the engine and its seed: the boards at the start and the end, row by
    row, and for every move that changed something its direction, the cell where a tile appeared, and that tile."""
    game = _SpawnsNoted(size, result.seed, TO_THE_END)
    start = [_TILES[exponent] for exponent in game.flat()]
    moves = [(direction, game.spawned, _TILES[game.flat()[game.spawned]])
             for direction in map(int, result.moves) if game.move(direction)]  # fmt: skip
    end = [_TILES[exponent] for exponent in game.flat()]
    reached = {"score": game.score(), "max_tile": game.max_tile()}
    return {"size": size, "start": start, "moves": moves, "end": end, **reached}


def best_game(games: Sequence[GameResult], size: int) -> dict[str, Any]:
    """Of recorded games, the one that came furthest, as it can be shown."""
    return recorded_game(max(games, key=lambda game: (game.max_tile, game.score)), size)


def board_picture(tiles: Sequence[int], cell: int = 64) -> Any:
    """A square board, row by row, as a PIL image: the larger a tile, the darker its red."""
    from PIL import Image, ImageDraw, ImageFont

    size = math.isqrt(len(tiles))
    image = Image.new("RGB", (size * cell, size * cell), "#bbada0")
    draw = ImageDraw.Draw(image)
    for i, tile in enumerate(tiles):
        top, left = (cell * at for at in divmod(i, size))
        shade = min(1.0, math.log2(tile) / 17) if tile else 0.0
        colour = (238 - round(80 * shade**2), 228 - round(210 * shade), 218 - round(200 * shade)) if tile else "#cdc1b4"
        draw.rounded_rectangle((left + 3, top + 3, left + cell - 4, top + cell - 4), cell // 10, fill=colour)
        if tile:
            font = ImageFont.load_default(cell * min(0.4, 1.3 / len(str(tile))))
            draw.text((left + cell / 2, top + cell / 2), str(tile), "white" if shade > 0.4 else "#3c3a32", font, "mm")
    return image


# ---------------------------------------------------------------------------------------------------------------------
# Run folder and checkpoints

UNFINISHED, DIGESTS = ".unfinished", "digests.json"  # where a checkpoint is written; SHA-256 of its files


def bring_to_disk(path: Path) -> None:
    """Wait until a file, or all of a folder, is on the disk."""
    for part in (*(path.rglob("*") if path.is_dir() else ()), path):
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: whoever is killed meanwhile leaves the old one."""
    aside = path.with_name(f".{path.name}.unfinished")
    aside.write_text(text, encoding="utf-8")
    bring_to_disk(aside)
    aside.replace(path)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of a folder's files, by their paths in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != DIGESTS:
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def point(link: Path, name: str) -> None:
    """Make a symbolic link to its neighbour, or let it point there from now on."""
    aside = link.with_name(f".{link.name}-{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    aside.replace(link)


def finish_checkpoint(written: Path, run: Path, keep: int, best: bool) -> None:
    """Move a checkpoint to its place in the run's folder once all of it is on the disk, and remove the oldest ones.

    The best so far stays, however old it is.
    """
    write_whole(written / DIGESTS, json.dumps(digests(written), indent=2) + "\n")
    bring_to_disk(written)
    place = run / written.name
    shutil.rmtree(place, ignore_errors=True)  # a damaged one, by now written anew
    written.rename(place)
    if best:
        point(run / "best", written.name)
    bring_to_disk(run)
    for old in checkpoints(run)[keep:]:
        if old.resolve() != (run / "best").resolve():
            shutil.rmtree(old, ignore_errors=True)


def checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints, newest first."""
    found = {int(path.name.removeprefix("checkpoint-")): path for path in run.glob("checkpoint-*")
             if path.name.removeprefix("checkpoint-").isdecimal()}  # fmt: skip
    return [found[step] for step in sorted(found, reverse=True)]


def newest_checkpoint(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; None where there is none."""
    for checkpoint in checkpoints(run):
        with contextlib.suppress(UsageError, OSError):
            if digests(checkpoint) == read_json(checkpoint / DIGESTS) != {}:
                return checkpoint
        say(f"{checkpoint} is damaged, and left alone")
    return None


def open_run(config: TrainConfig) -> Path:
    """A run's folder: a new one with its config in it, or that of a run that goes on; `latest` points to it.

    Raises UsageError where it cannot be written, another process trains in it, or its run is finished.
    """
    name = config.run_name or f"{Path(config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = config.output_dir / name
    try:
        run.mkdir(parents=True, exist_ok=True)
        if (run / "result.json").exists():
            raise UsageError(f"{run} is finished: choose another --run-name")
        if not (run / "config.json").exists():
            if any(path.name != "origin.json" and path.name[0] != "." for path in run.iterdir()):
                raise UsageError(f"{run} is there already, and no run of this program: choose another --run-name")
            began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            origin = {"started": began, "versions": library_versions(), "git": git_state()}
            write_whole(run / "origin.json", json.dumps(origin, indent=2) + "\n")
            write_whole(run / "config.json", json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n")
        lock(run)
        point(config.output_dir / "latest", name)
    except OSError as error:
        raise UsageError(f"{run} cannot be written ({error.strerror}): choose another --output-dir") from None
    return run


@cache  # and so kept open for as long as this process lives
def lock(run: Path) -> io.TextIOBase:
    """Make sure that no other process trains in a run's folder.  Raises UsageError where one does."""
    file = (run / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"another process trains in {run}: wait for it, or choose another --run-name") from None
    return file


def git_state() -> dict[str, Any]:
    """Commit of the program's own folder, and whether files differ from it; empty where git does not know it."""
    import subprocess

    def ask(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(Path(__file__).resolve().parent), *words], capture_output=True,
                              text=True, check=False)  # fmt: skip
        return done.stdout.strip()

    with contextlib.suppress(OSError):  # no git
        if commit := ask("rev-parse", "HEAD"):
            return {"commit": commit, "changed": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    return {}


@contextlib.contextmanager
def blaming_the_folder(run: Path) -> Iterator[None]:
    """Say so in one line (UsageError) where a run ends because its folder was removed or its disk is full."""
    try:
        yield
    except Exception as error:
        time.sleep(1)  # a removal may still be under way, of which this error is the beginning
        if not (run / "config.json").exists():
            trouble = f"{run} was removed"
        elif shutil.disk_usage(run).free < 50e6:
            trouble = f"the disk that {run} is on is full"
        else:
            raise
        kept = newest_checkpoint(run, lambda _: None)
        where = f"after step {kept.name.removeprefix('checkpoint-')}" if kept else "from the start"
        raise UsageError(f"{trouble}: mend that and start again, to go on {where}") from error


class Interruption:
    """What Ctrl-C and SIGTERM do: during training the first lets the step end, the second ends the program at once."""

    def __init__(self) -> None:
        self.signal = 0  # the first that came
        self.waits = False  # whether a step is under way

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if self.signal or not self.waits:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.signal = number
        os.write(2, b"\nending this step; once more ends it at once\n")


# ---------------------------------------------------------------------------------------------------------------------
# Training


class Curriculum:
    """The target tile of the moment: it doubles when more than BAR of the games of the last GROUPS groups were won.

    So a task that is solved goes on teaching.  Without `rising` the target stays.  The loader asks for a step's groups
    while the step before is still under way, so a new target holds from the step after the next on.
    """

    BAR, GROUPS = 0.9, 8

    def __init__(self, target: int, rising: bool = True) -> None:
        self.rising = rising
        self.since: list[tuple[int, int]] = [(0, target)]  # first step of a target, and it
        self.recent: deque[float] = deque(maxlen=self.GROUPS)  # shares of won games, at the last target

    @property
    def target(self) -> int:
        """The last one."""
        return self.since[-1][1]

    def at(self, step: int) -> int:
        """The target of a step's groups; the first step is 0."""
        return next(target for first, target in reversed(self.since) if first <= step)

    def record(self, step: int, target: int, won: float) -> None:
        """Note a group's share of won games, and double the target if it is time to."""
        if target == self.target:  # groups that were under way when it doubled count no more
            self.recent.append(won)
        solved = len(self.recent) == self.GROUPS and statistics.fmean(self.recent) > self.BAR
        if self.rising and solved and self.target < 1 << 63:
            self.since.append((step + 2, 2 * self.target))
            self.recent.clear()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"since": self.since, "recent": list(self.recent)}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on where a checkpoint's training stood."""
        self.since = [(step, target) for step, target in kept["since"]]
        self.recent.extend(kept["recent"])


def flat_groups(totals: Sequence[float], group: int) -> list[bool]:
    """For each group of completions, whether the sums of their rewards are all equal: then it has no gradient."""
    return [max(part) - min(part) < 1e-6 for part in (totals[i : i + group] for i in range(0, len(totals), group))]


@dataclass(frozen=True)
class StepSummary:
    """What the verdicts of one step say: its line in the terminal, the watcher's evidence, and curves."""

    target: int
    random_won: float  # share of games in which random legal moves make this target
    won: float  # share of games
    works: float  # share of completions whose strategy loads
    cheating: float  # share of completions
    distinct: float  # share of completions that equal no earlier one of their group
    identical: bool  # whether every group is one text
    flat: float  # share of groups in which all rewards are equal, so that there is no gradient
    reward: float  # mean of strategy_succeeds
    spread: float  # its standard deviation
    largest_tile: float  # median over the games
    tiles: Mapping[int, float]  # share of games by largest tile
    outcomes: Mapping[str, float]  # share of games by outcome
    jailed: float  # share of games that ended because of the jail
    scoring_seconds: float

    @classmethod
    def of(
        cls, texts: Sequence[str], verdicts: Sequence[Verdict], rewards: Sequence[float], group: int, **known: Any
    ) -> StepSummary:  # fmt: skip
        """Of a batch that consists of groups of `group` completions.

        `rewards` are those of strategy_succeeds, `known` the fields that are not worked out here.
        """
        results = [result for verdict in verdicts for result in verdict.results]
        distinct = [len(set(texts[i : i + group])) for i in range(0, len(texts), group)]
        tiles, outcomes = Counter(r.max_tile for r in results), Counter(r.outcome for r in results)
        return cls(
            won=outcomes["success"] / len(results),
            works=statistics.fmean(verdict.works == "load" for verdict in verdicts),
            cheating=statistics.fmean(bool(verdict.cheating) for verdict in verdicts),
            distinct=sum(distinct) / len(texts),
            identical=set(distinct) == {1},
            reward=statistics.fmean(rewards),
            spread=statistics.pstdev(rewards),
            largest_tile=statistics.median(result.max_tile for result in results),
            tiles={tile: count / len(results) for tile, count in sorted(tiles.items())},
            outcomes={outcome: outcomes[outcome] / len(results) for outcome in OUTCOMES},
            jailed=statistics.fmean(r.outcome == "error" and r.detail.startswith(_BY_THE_JAIL) for r in results),
            **known,
        )

    def line(self) -> str:
        """What people read of it."""
        return (
            f"reward {self.reward:5.2f} ±{self.spread:5.2f}  won {self.won:4.0%} at {self.target}  "
            f"loads {self.works:4.0%}  distinct {self.distinct:4.0%}"
            + (f"  no gradient in {self.flat:.0%} of groups" if self.flat else "")
        )

    def curves(self) -> dict[str, float]:
        """Every number by the name of its curve."""
        numbers = {f"games/{name}": float(value) for name, value in vars(self).items() if not isinstance(value, dict)}
        outcomes = {f"outcomes/{name}": share for name, share in self.outcomes.items()}
        reached = {f"reached/{1 << n}": sum(share for tile, share in self.tiles.items() if tile >= 1 << n)
                   for n in range(5, 18)}  # fmt: skip
        return numbers | outcomes | reached


def random_moves_win(config: TrainConfig, target: int) -> float:
    """Share of 16 boards of their own on which random legal moves make the target."""
    seeds = board_seeds(16, config.seed, "random moves")
    source = control_strategies(config.keys)["random"]
    results = execute_strategies([source], seeds, config.size, target, config.keys, config.timeout)[0]
    return statistics.fmean(result.outcome == "success" for result in results)


def log2_tiles(verdicts: Sequence[Verdict]) -> list[float]:
    """Of every game the exponent of its largest tile."""
    return [math.log2(max(1, result.max_tile)) for verdict in verdicts for result in verdict.results]


class RolloutLog:
    """Every step's completions and verdicts in rollouts.jsonl, a summary of the last one, and the best programs.

    It also tells the curriculum how the groups did.
    """

    FINALISTS = 6

    def __init__(self, path: Path, config: TrainConfig, curriculum: Curriculum) -> None:
        self._path, self._config, self._curriculum = path, config, curriculum
        self._random_won = cache(partial(random_moves_win, config))
        self.finalists: dict[str, tuple[float, int]] = {}  # source -> mean of its largest tiles in a step, and which
        self._steps = 0
        self._levels: list[float] = []  # mean log2 of the largest tiles, for each step since the last checkpoint
        self._best_level = 0.0  # the highest mean of these that a checkpoint had
        self.summary: StepSummary | None = None
        self.last: list[tuple[str, float, Verdict]] = []  # the last step's completions, their rewards and verdicts
        self.flat: list[bool] = []  # for each group of the last step, whether it has no gradient

    def around(self, reward_function: Callable[..., list[float]]) -> Callable[..., list[float]]:
        """The trainer's first reward function, with every call recorded (the others look the verdicts up)."""

        @wraps(reward_function)
        def recorded(completions: Sequence[Any], **columns: Any) -> list[float]:
            started = time.perf_counter()
            verdicts = judge(completions, **columns)
            random_won = self._random_won(max(columns["target"]))
            known = {"random_won": random_won, "scoring_seconds": time.perf_counter() - started}
            self._record(completions, verdicts, columns, known)
            return reward_function(completions, **columns)

        return recorded

    def _record(
        self, completions: Sequence[Any], verdicts: list[Verdict], columns: dict[str, Any], known: dict[str, Any]
    ) -> None:
        rewards = strategy_succeeds(completions, **columns)
        totals = (  # as the trainer weighs them
            sum(values) + self._config.cut_off_price * late
            for *values, late in zip(
                function_works(completions, **columns), no_cheating(completions, **columns), rewards,
                ends_in_time(completions, **columns), strict=True)
        )  # fmt: skip
        rows = gathered(list(zip(map(completion_text, completions), rewards, totals, columns["target"], verdicts,
                                 strict=True)))  # fmt: skip
        group = self._config.generations
        groups = [rows[i : i + group] for i in range(0, len(rows), group)]
        self.flat = flat_groups([total for _, _, total, _, _ in rows], group)
        target = max(target for _, _, _, target, _ in rows)
        known |= {"target": target, "flat": statistics.fmean(self.flat)}
        texts, rewards, _, _, verdicts = (list(column) for column in zip(*rows, strict=True))
        self.last = list(zip(texts, rewards, verdicts, strict=True))
        self.summary = StepSummary.of(texts, verdicts, rewards, group, **known)
        for name, value in self.summary.curves().items():
            columns.get("log_metric", lambda *_: None)(name, value)
        for part in groups:
            results = [result for *_, verdict in part for result in verdict.results]
            self._curriculum.record(self._steps, part[0][3], statistics.fmean(r.outcome == "success" for r in results))
        self._steps += 1
        self._levels.append(statistics.fmean(log2_tiles(verdicts)))
        self._choose_finalists(verdicts)
        if RANK == 0:
            played = [{"text": text, "reward": reward, **dataclasses.asdict(verdict)}
                      for text, reward, verdict in zip(texts, rewards, verdicts, strict=True)]  # fmt: skip
            with self._path.open("a", encoding="utf-8") as file:
                step = {"step": self._steps, "target": target, "completions": played}
                file.write(json.dumps(step) + "\n")

    def is_best(self) -> bool:
        """Whether the steps before this checkpoint reached larger tiles than those before any other."""
        level, self._levels = statistics.fmean(self._levels or [0.0]), []
        best, self._best_level = level > self._best_level, max(level, self._best_level)
        return best

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"steps": self._steps, "finalists": self.finalists, "best_level": self._best_level}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on where a checkpoint's training stood: what came after it is forgotten."""
        self._steps, self._best_level = kept["steps"], kept["best_level"]
        self.finalists = {source: (tile, step) for source, (tile, step) in kept["finalists"].items()}
        if RANK == 0 and self._path.exists():
            with self._path.open(encoding="utf-8") as file:
                write_whole(self._path, "".join(islice(file, self._steps)))

    def _choose_finalists(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.source and verdict.works == "load" and not verdict.cheating:
                tile = statistics.fmean(result.max_tile for result in verdict.results)
                self.finalists[verdict.source] = max((tile, self._steps), self.finalists.get(verdict.source, (0.0, 0)))
        best = sorted(self.finalists.items(), key=itemgetter(1), reverse=True)  # of equal ones, the latest
        self.finalists = dict(best[: self.FINALISTS])


def training_row(config: TrainConfig, group: int, target: int) -> dict[str, Any]:
    """What a group is given: a prompt, and the boards that all of its completions play.  A new group, new boards."""
    prompt = build_prompt(config.size, target, config.keys, wording=group % config.wordings)
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "seeds": board_seeds(config.boards, config.seed, group),
        "size": config.size,
        "target": target,
        "keys": config.keys,
        "timeout": config.timeout,
        "reasons": config.reasoning != "none",
        "flat_reward": config.flat_reward,
        "max_new_tokens": config.max_new_tokens,
    }


def training_set(config: TrainConfig, curriculum: Curriculum) -> Any:
    """A datasets.Dataset with one row per group, made when it is asked for: at its step's target."""
    from datasets import Dataset

    groups = RANKS * config.batch_size * config.accumulation // config.generations  # of a step

    def rows(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        made = [training_row(config, group, curriculum.at(group // groups)) for group in batch["group"]]
        return {name: [row[name] for row in made] for name in made[0]}

    return Dataset.from_dict({"group": list(range(config.steps * groups))}).with_transform(rows)


def without_flat_groups(batch: dict[str, Any], flat: Sequence[bool], by_token: bool) -> dict[str, Any]:
    """A batch whose loss is that of the groups with spread alone; unchanged where there is none or only such.

    A flat group has no gradient but counts in the loss's mean, over completions or over tokens: the advantages of the
    others are raised by as much.  `flat` are the groups of all ranks; a batch holds those of its own.
    """
    import torch

    if all(flat) or not any(flat):
        return batch
    advantages = batch["advantages"]  # (B,)
    own = flat[RANK * len(flat) // RANKS : (RANK + 1) * len(flat) // RANKS]
    kept = ~torch.tensor(own, device=advantages.device).repeat_interleave(len(advantages) // len(own))  # (B,)
    weights = batch["completion_mask"].sum(1) if by_token else torch.ones_like(advantages)  # (B,)
    every, some = map(sum, zip(*gathered([(weights.sum().item(), (weights * kept).sum().item())]), strict=True))
    return batch | {"advantages": advantages * kept * every / some}


def sampled_curves(model: Any, batch: dict[str, Any], rows: int = 4, tokens: int = 256) -> dict[str, float]:
    """KL divergence of the model from itself without adapters, and its entropy; both in nats a token.

    Exact over the vocabulary, at the first tokens of a batch's first completions.
    """
    import torch

    kl, entropy, count = 0.0, 0.0, 0
    for row in range(min(rows, len(batch["completion_ids"]))):
        prompt, answer = (
            batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")
        )
        ids = torch.cat((prompt, answer[:tokens]))[None]  # (1, P + T)
        with torch.no_grad():
            now = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)  # (T, V)
            with model.disable_adapter():
                start = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)  # (T, V)
        kl += (now.exp() * (now - start)).sum().item()
        entropy -= (now.exp() * now).sum().item()
        count += len(now)
    torch.compiler.set_stance("default")  # unsloth's forward without labels may have changed it
    return {"sampled/kl": kl / max(1, count), "sampled/entropy": entropy / max(1, count)}


@contextlib.contextmanager
def scored_early(model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Let the players begin with each completion as soon as it has ended, while longer ones are still being written.

    `rows` are the dataset's, one for each completion that is generated within.
    """
    import torch
    from transformers import StoppingCriteria

    class StopsNothing(StoppingCriteria):  # type: ignore[misc]
        EVERY = 16  # tokens: looking means to wait for the GPU

        def __init__(self) -> None:
            self.start = self.calls = 0
            self.begun: set[int] = set()

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:  # (B, T)
            self.start = self.start or input_ids.shape[1] - 1
            self.calls += 1
            if self.calls % self.EVERY == 0 and len(input_ids) == len(rows):
                ended = input_ids[:, self.start :] == tokenizer.eos_token_id
                for i in set(ended.any(1).nonzero().flatten().tolist()) - self.begun:
                    answer = input_ids[i, self.start :][: int(ended[i].int().argmax())]
                    shared_pool().begin(completion_job(tokenizer.decode(answer, skip_special_tokens=True), rows[i]))
                    self.begun.add(i)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    shared_pool().forget_begun()
    own, generate = vars(model).get("generate"), model.generate

    @wraps(generate)
    def generate_and_begin(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, stopping_criteria=[StopsNothing()], **kwargs)

    model.generate = generate_and_begin
    try:
        yield
    finally:
        if own is None:
            del model.generate
        else:
            model.generate = own


SAMPLED_EVERY = 10  # steps


def trainer_class(rollouts: RolloutLog, config: TrainConfig, run: Path) -> type[Any]:
    """TRL's GRPOTrainer without the flat groups; with seconds and, on some steps, KL and entropy as curves of our own.

    TRL has a curve of the KL divergence only where beta is not 0, and one of the entropy not with every loss.  A
    checkpoint is written beside the others' place, and moved there when all of it is on the disk.
    """
    from trl import GRPOTrainer

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        step_began = 0.0
        place = run  # of the checkpoint that is being written

        def _get_output_dir(self, trial: Any) -> str:
            return str(self.place)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.place = run / UNFINISHED
            if RANK == 0:
                shutil.rmtree(self.place, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            best = rollouts.is_best()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if RANK == 0:
                finish_checkpoint(self.place / f"checkpoint-{self.state.global_step}", run, config.keep, best)

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            started = time.perf_counter()
            with scored_early(self.model, self.processing_class, inputs):
                batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
            self.rollout_seconds = time.perf_counter() - started
            self.sampled = {}
            if self.state.global_step % SAMPLED_EVERY == 0:
                with self.compute_loss_context_manager():
                    self.sampled = sampled_curves(self.model, batch)
            if not config.skip_flat_groups:
                return batch
            return without_flat_groups(batch, rollouts.flat, by_token=self.loss_type in ("dapo", "bnpo"))

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs and rollouts.summary:
                scoring = rollouts.summary.scoring_seconds
                logs["seconds/score"] = scoring
                logs["seconds/generate"] = self.rollout_seconds - scoring
                logs["seconds/update"] = time.perf_counter() - self.step_began - self.rollout_seconds
                logs |= self.sampled
            super().log(logs, *args, **kwargs)

    return Trainer


def make_trainer(
    model: Any, tokenizer: Any, config: TrainConfig, run: Path, log: RolloutLog, curriculum: Curriculum
) -> Any:
    """The trainer, as the config says."""
    import torch
    from trl import GRPOConfig

    gpu = torch.cuda.is_available()
    decay = int(config.decay_steps if config.decay_steps >= 1 else config.decay_steps * config.steps)
    plain = uses_transformers(config)
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": config.vllm_server}
    arguments = GRPOConfig(
        output_dir=str(run),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        num_generations=config.generations,
        max_completion_length=config.max_new_tokens,
        chat_template_kwargs=template_arguments(config.reasoning),
        temperature=config.temperature,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear" if config.lr_schedule == "linear" else "warmup_stable_decay",
        lr_scheduler_kwargs={} if config.lr_schedule == "linear" else {"num_decay_steps": decay},
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        optim="adamw_8bit" if gpu and not plain else "adamw_torch_fused",
        loss_type=config.loss_type,
        scale_rewards=config.scale_rewards,
        entropy_coef=config.entropy_coef,
        beta=config.beta,
        mask_truncated_completions=False,  # unsloth would mask them where the loss is dapo, and clip otherwise
        epsilon=0.2,
        epsilon_high=0.2,
        **({"gradient_checkpointing": gpu} if plain else {}),  # unsloth's loader has set it
        # Without a number, unsloth makes parts of a batch by what memory is free at the moment.
        **({"unsloth_grpo_mini_batch": config.batch_size} if gpu and not plain else {}),
        **(server if config.vllm_server else {}),
        reward_weights=[1.0, 1.0, 1.0, config.cut_off_price],
        router_aux_loss_coef=0.0,  # gpt-oss ships 0.9, which would be added to the loss
        shuffle_dataset=False,  # step n plays the same boards in every run of a seed
        save_steps=config.save_steps,
        seed=config.seed,
        logging_steps=1,
        report_to="none",  # but to the run's own curves
        disable_tqdm=True,
        use_cpu=not gpu,
        bf16=gpu,
        dataloader_pin_memory=gpu,
    )
    first, *others = REWARDS
    return trainer_class(log, config, run)(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[log.around(first), *others, ends_in_time],
        args=arguments,
        train_dataset=training_set(config, curriculum),
    )


class Watcher:
    """Says in plain words when training goes wrong, and what to do; and when it has collapsed for good.

    A step is lost when nothing can be learned from it: no valid code, or no group whose rewards differ.  A task that is
    solved looks the same to the optimizer, but is no collapse.
    """

    REPEAT = 10  # steps until a trouble that goes on is named again
    KL = 2.0  # nats a token; runs that learn stay below 0.2, one that lost all its searches came to 0.9

    def __init__(self, patience: int, rising: bool = False) -> None:
        self._patience, self._rising = patience, rising  # whether the curriculum raises the target by itself
        self.trouble, self._lasted = "", 0  # the present one, and how many steps it has lasted
        self._entropy = 0.0  # the last that was seen
        self._first_entropies: list[float] = []
        self._target, self._at_target = 0, 0  # and the steps since it came
        self.lost_steps = 0  # in a row, without anything to learn

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {name: value for name, value in vars(self).items() if name not in ("_patience", "_rising")}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on where a checkpoint's training stood."""
        vars(self).update(kept)

    @property
    def collapsed(self) -> bool:
        """Whether there was nothing to learn for as many steps in a row as `patience` allows."""
        return self.lost_steps >= self._patience

    def look(self, step: StepSummary, logs: Mapping[str, float]) -> str:
        """What to say after a step, or "".  `logs` are TRL's metrics of the step."""
        nothing_to_learn = step.works == 0 or (step.flat == 1 and step.won < 1)
        self.lost_steps = self.lost_steps + 1 if nothing_to_learn else 0
        self._at_target = self._at_target + 1 if step.target == self._target else 1
        self._target = step.target
        trouble = self._name(step, logs)
        self._lasted = self._lasted + 1 if trouble == self.trouble else 0
        self.trouble = trouble
        return trouble if self._lasted % self.REPEAT == 0 else ""

    def _name(self, step: StepSummary, logs: Mapping[str, float]) -> str:
        entropy = logs.get("entropy", logs.get("sampled/entropy", self._entropy))
        self._entropy = entropy
        if len(self._first_entropies) < 5:
            self._first_entropies.append(entropy)
        usual, no_spread, all_won = statistics.fmean(self._first_entropies), step.flat == 1, step.won == 1
        troubles = {  # the first that holds is named
            "nearly all completions are cut off at the length limit: raise --max-new-tokens, or take --reasoning none":
                logs.get("completions/clipped_ratio", 0.0) >= 0.8,
            "next to no completion is valid code: lower --learning-rate, or go back to an earlier checkpoint":
                step.works <= 0.1,
            "every game is won, there is nothing left to learn from: raise --target, or drop --no-curriculum":
                no_spread and all_won and not self._rising,
            "collapsed, all completions are equal: lower --learning-rate, or hold the model with --beta":
                no_spread and step.identical and not all_won,
            "all rewards of a group are equal, so there is no gradient: raise --generations or --boards":
                no_spread and not all_won,
            "most completions cheat, and do not play (`cheating` in rollouts.jsonl says how): lower --learning-rate":
                step.cheating > 0.5,
            "the clock ends most games: the programs are too slow for --timeout": step.outcomes["timeout"] > 0.5,
            "the jail ends most games (`detail` in rollouts.jsonl says why): lower --temperature or --learning-rate":
                step.jailed > 0.5,
            "entropy runs away, answers turn random: lower --entropy-coef and --learning-rate":
                entropy > 3 * usual + 0.5,
            "KL runs away, the model is far from where it started: lower --learning-rate, or raise --beta":
                logs.get("sampled/kl", 0.0) > self.KL,
            "random moves would do as well: only a higher target shows skill (--target, or the curriculum's next)":
                self._at_target > self.REPEAT and step.won <= step.random_won,
        }  # fmt: skip
        return next((trouble for trouble, holds in troubles.items() if holds), "")


def small_curve(values: Sequence[float], width: int = 48) -> str:
    """The last values as a line of bars."""
    bars, values = "▁▂▃▄▅▆▇█", values[-width:]
    low, high = min(values), max(values)
    return "".join(bars[round((value - low) / (high - low or 1.0) * (len(bars) - 1))] for value in values)


class TrainingView:
    """What people see of training: in a terminal one view that is kept up to date, elsewhere a line for each step."""

    def __init__(self, console: Console, config: TrainConfig) -> None:
        from rich.live import Live

        self._console, self._config = console, config
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._rewards: list[float] = []
        self._seconds: deque[float] = deque(maxlen=10)

    def __enter__(self) -> TrainingView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """A line that stays."""
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def step(
        self, number: int, step: StepSummary, tokens: float, seconds: float, word: str, trouble: str,
        best: tuple[str, float, int] | None,
    ) -> None:  # fmt: skip
        """A step is over.  `word` is what the watcher says now, for lines, and `trouble` what it sees, for the view;
        `best` is the best program so far with its tile and its step."""
        count = f"step {number:{len(str(self._config.steps))}d}/{self._config.steps}"
        line = f"{step.line()}  {tokens:3.0f} tokens  {seconds:4.1f} s"
        if not self._live:
            self.say(f"{count}  {line}")
            if word:
                self.say(f"  watch out: {word}", style="bold yellow")
            return
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        self._rewards.append(step.reward)
        self._seconds.append(seconds)
        left = statistics.fmean(self._seconds) * (self._config.steps - number)
        ends = "  ".join(f"{outcome} {share:.0%}" for outcome, share in step.outcomes.items() if share)
        head = Table.grid(padding=(0, 2))
        head.add_row(count, ProgressBar(self._config.steps, number, width=40),
                     f"about {timedelta(seconds=round(left))} left")  # fmt: skip
        parts: list[Any] = [
            head,
            Text(line),
            Text(f"reward {small_curve(self._rewards)}"),
            Text(f"games: {ends}"),
            Text(f"watch out: {trouble}" if trouble else "", style="bold yellow"),
        ]
        if best:
            source, tile, found = best
            lines = printable_source(source).splitlines()
            shown = "\n".join(lines[:16] + ["..."] * (len(lines) > 16))
            parts.append(
                Panel(Text(shown), title=f"best program so far: tile {tile:.0f} in step {found}", expand=False)
            )
        self._live.update(Group(*parts), refresh=True)


def show_in_tensorboard(writer: Any, step: int, log: RolloutLog, config: TrainConfig) -> None:
    """A histogram of the largest tiles; as often as there are checkpoints the completions with their verdicts, and the
    best program with the end of a game of its."""
    import numpy as np

    writer.add_histogram("largest tile, log2", np.array(log2_tiles([verdict for *_, verdict in log.last])), step)
    if step % config.save_steps:
        return
    rows = [f"**reward {reward:.2f}, {verdict.works}** {verdict.cheating} "
            + " ".join(f"{result.outcome} {result.max_tile}" for result in verdict.results)
            + f"\n\n{indented(text)}" for text, reward, verdict in log.last[:8]]  # fmt: skip
    writer.add_text("completions", "\n\n---\n\n".join(rows), step)
    for source in islice(log.finalists, 1):
        seeds = board_seeds(1, config.seed, "picture")
        games = execute_strategies([source], seeds, config.size, TO_THE_END, config.keys, config.timeout, True)[0]
        show_best(writer, step, source, best_game(games, config.size))


def show_best(writer: Any, step: int, source: str, game: Mapping[str, Any]) -> None:
    """The best program and the end of its best game, in TensorBoard."""
    import numpy as np

    writer.add_text("best program", indented(source), step)
    writer.add_image("end of the best game", np.asarray(board_picture(game["end"])), step, dataformats="HWC")


def indented(text: str) -> str:
    """Model-written text as a block of code in Markdown, out of which nothing leads."""
    return textwrap.indent(printable_source(text), "    ", lambda _: True)


class Reporter:
    """Evaluates the untrained model, and shows every step with the watcher's word.

    It skips the optimizer's step where there is no gradient, stops a collapsed run, one whose minutes are over and one
    that is interrupted, and keeps in the checkpoints what the trainer knows nothing of.
    """

    def __init__(
        self, trainer: Any, log: RolloutLog, curriculum: Curriculum, watcher: Watcher, view: TrainingView,
        config: TrainConfig, interruption: Interruption,
    ) -> None:  # fmt: skip
        self._trainer, self._config, self._view, self._interruption = trainer, config, view, interruption
        self._log, self._curriculum, self._watcher = log, curriculum, watcher
        self.before: Score | None = None  # of the untrained model
        self.writer: Any = None  # of the curves
        self.distinct: list[float] = []  # a step each
        self.flat: list[float] = []
        self.target = 0
        self.spent = 0.0  # seconds of training, with those before a checkpoint that it goes on from
        self._began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.before is None:
            self._view.say(f"playing {self._config.games} held-out boards with the untrained model")
            self.before = evaluate_model(self._trainer.model, self._trainer.processing_class, self._config)
        self._began = time.monotonic() - self.spent

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.step_began = time.perf_counter()
        self._interruption.waits = True

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        flat = self._log.summary is not None and self._log.summary.flat == 1
        if self._config.skip_flat_groups and self._config.beta == 0 and flat:
            optimizer.zero_grad()  # neither momentum nor an entropy bonus alone may move the weights

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.spent = time.monotonic() - self._began
        if any(gathered([self._interruption.signal])):
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        step, config = self._log.summary, self._config
        if step is None or "loss" not in logs:
            return
        self.distinct.append(step.distinct)
        self.flat.append(step.flat)
        if step.target != self.target:
            self._view.say(f"the target is {step.target}: random legal moves make it in {step.random_won:.0%} of games")
            self.target = step.target
        seconds = time.perf_counter() - self._trainer.step_began
        best = next(((source, *found) for source, found in self._log.finalists.items()), None)
        tokens, word = logs.get("completions/mean_length", 0), self._watcher.look(step, logs)
        self._view.step(state.global_step, step, tokens, seconds, word, self._watcher.trouble, best)
        if self.writer:
            show_in_tensorboard(self.writer, state.global_step, self._log, config)
        over = config.minutes > 0 and self.spent > 60 * config.minutes
        if self._watcher.collapsed or by_first_rank(lambda: over):
            control.should_save = control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        parts = {"curriculum": self._curriculum, "log": self._log, "watcher": self._watcher}
        own = {"distinct": self.distinct, "flat": self.flat, "spent": self.spent, "target": self.target}
        kept = {name: part.state() for name, part in parts.items()}  # type: ignore[attr-defined]
        return {"args": {}, "attributes": {**kept, **own, "before": self.before and vars(self.before)}}

    def restore(self, checkpoint: Path) -> None:
        """Go on where a checkpoint's training stood."""
        kept = read_json(checkpoint / "trainer_state.json")["stateful_callbacks"]["StepReporter"]["attributes"]
        self._curriculum.restore(kept["curriculum"])
        self._log.restore(kept["log"])
        self._watcher.restore(kept["watcher"])
        self.before = Score(**kept["before"])
        self.distinct, self.flat, self.spent, self.target = (kept[k] for k in ("distinct", "flat", "spent", "target"))


def step_reporter(*parts: Any) -> Any:
    """A Reporter of these parts, as the trainer takes it."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    class StepReporter(Reporter, TrainerCallback, ExportableState):  # type: ignore[misc]
        pass

    return StepReporter(*parts)


def best_program(sources: Sequence[str], config: TrainConfig) -> str | None:
    """Of the programs with the largest tiles, the one that scores most when it plays boards of neither set on."""
    seeds = board_seeds(4, config.seed, "final")
    played = execute_strategies(sources, seeds, config.size, TO_THE_END, config.keys, config.timeout)
    ranked = sorted(zip(played, sources, strict=True), key=lambda row: sum(result.score for result in row[0]))
    return ranked[-1][1] if ranked else None


@dataclass(frozen=True)
class Training:
    """What a run's training came to."""

    steps: int
    minutes: float
    target: int  # the curriculum's last
    distinct: float  # programs, as a share of a group's completions; mean over the steps
    zero_spread: float  # share of groups without spread
    collapsed: bool
    interrupted: int  # the signal that ended it; 0: none
    finalists: tuple[str, ...]  # the programs with the largest tiles


def adapter_digest(model: Any) -> str:
    """Of all weights that are trained."""
    digest = hashlib.sha256()
    for weights in model.parameters():
        if weights.requires_grad:
            digest.update(weights.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def learn(model: Any, tokenizer: Any, config: TrainConfig, run: Path, console: Console) -> tuple[Score, Training]:
    """All training steps, or those until a collapse, an interruption or the end of time, from the newest checkpoint on.

    The adapter is left in the run's folder.  The untrained model is evaluated here too: only the trainer puts the model
    where it belongs.
    """
    from torch.utils.tensorboard import SummaryWriter
    from transformers import PrinterCallback
    from transformers.integrations import TensorBoardCallback

    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    curriculum = Curriculum(config.target, config.curriculum)
    log, watcher = RolloutLog(run / "rollouts.jsonl", config, curriculum), Watcher(config.patience, config.curriculum)
    trainer = make_trainer(model, tokenizer, config, run, log, curriculum)
    trainer.remove_callback(PrinterCallback)  # the raw dictionaries
    checkpoint = by_first_rank(partial(newest_checkpoint, run, say))
    step = int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0
    with TrainingView(console, config) as view, Interruption() as interruption:
        reporter = step_reporter(trainer, log, curriculum, watcher, view, config, interruption)
        if checkpoint:
            reporter.restore(checkpoint)
            say(f"going on after step {step}")
        trainer.add_callback(reporter)
        if RANK == 0:  # of what was logged after the checkpoint, readers of the curves keep nothing
            reporter.writer = SummaryWriter(run, purge_step=step + 1)
            trainer.add_callback(TensorBoardCallback(reporter.writer))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded() else None
    if RANKS > 1 and not sharded() and len(set(gathered([adapter_digest(model)]))) > 1:
        raise RuntimeError("the processes have trained different adapters")
    if RANK == 0:
        model.save_pretrained(run / "adapter", state_dict=weights)
        tokenizer.save_pretrained(run / "adapter")
    return reporter.before, Training(
        steps=trainer.state.global_step,
        minutes=round(reporter.spent / 60, 2),
        target=curriculum.target,
        distinct=round(statistics.fmean(reporter.distinct), 4),
        zero_spread=round(statistics.fmean(reporter.flat), 4),
        collapsed=watcher.collapsed,
        interrupted=max(gathered([interruption.signal])),
        finalists=tuple(log.finalists),
    )


def train(config: TrainConfig, console: Console) -> dict[str, Any]:
    """Train, evaluate before and after, save.  Returns what --json prints."""
    started, loud = time.monotonic(), console
    if config.quiet:
        console = type(console)(quiet=True)
    check_model(config.model, config.reasoning)
    join_ranks(config)
    shared_pool(jailed=not config.unsafe_no_jail)
    run = by_first_rank(partial(open_run, config))
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    model, tokenizer = load_model(config.model, config, say)
    model = add_adapters(model, config)
    with blaming_the_folder(run):
        before, training = learn(model, tokenizer, config, run, console)
        if training.interrupted:
            say("choosing the best program so far (Ctrl-C leaves that out)")
            by_first_rank(partial(keep_best, training, config, run))
            say(by_first_rank(partial(report_run, run)))
            say(f"stopped after step {training.steps}; to go on: --run-name {run.name}")
            return {"run": str(run), "steps": training.steps, "interrupted": training.interrupted}
        if training.collapsed:
            say(f"stopped at step {training.steps}: nothing to learn for {config.patience} steps in a row (--patience)")
        say(f"playing {config.games} held-out boards with the trained model")
        after = evaluate_model(model, tokenizer, config)
        return by_first_rank(partial(conclude, before, training, after, config, run, started, console, loud))


def keep_best(training: Training, config: TrainConfig, run: Path) -> tuple[str, dict[str, Any] | None]:
    """Choose a run's best program and leave it in the run's folder, with its best held-out game.

    Returns its source and its score; "" and None where no program played.
    """
    from torch.utils.tensorboard import SummaryWriter

    source = best_program(training.finalists, config)
    if source is None:
        return "", None
    games = play_held_out(source, config, record=True)
    game = best_game(games, config.size)
    write_whole(run / "best_strategy.py", source + "\n")
    write_whole(run / "best_game.json", json.dumps(game) + "\n")
    with SummaryWriter(run) as writer:
        show_best(writer, training.steps, source, game)
    return source, dataclasses.asdict(score(games, config.target))


def report_run(run: Path) -> str:
    """Write a run's report.html from its folder; what hinders that costs the run nothing.  Returns what to say."""
    try:
        import report

        return f"the report is {report.write_report(run)}"
    except Exception as error:  # the weights are worth more than any page about them
        return f"no report could be written: {error}"


def conclude(
    before: Score, training: Training, after: Score, config: TrainConfig, run: Path, started: float, console: Console,
    loud: Console,
) -> dict[str, Any]:  # fmt: skip
    """Hold a run's result against the controls, write it down and show it with the best program."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say("playing them with both controls")
    result: dict[str, Any] = {
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(after),
        "controls": evaluate_controls(config),
        "best": None,  # its place among these
        "boards": board_names(config),
        **{name: value for name, value in vars(training).items() if name not in ("finalists", "interrupted")},
        "run": str(run),
        "ranks": RANKS,
        "jailed": shared_pool().jailed,
    }
    say("choosing the best program of the run, and playing them with it")
    source, result["best"] = keep_best(training, config, run)
    result["seconds"] = round(time.monotonic() - started, 1)
    lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in result.items())
    write_whole(run / "result.json", "{\n" + ",\n".join(lines) + "\n}\n")
    say(report_run(run))
    show_result(loud, result, config.target)
    if source:
        say(f"the best program ({run / 'best_strategy.py'}):\n")
        console.print(printable_source(source), highlight=False, markup=False, soft_wrap=True)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Export

MXFP4_CONFIG = {  # what config.json says of such weights
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
EXPERTS = re.compile(r"\.experts\.\w+_proj$")  # the parameters that MXFP4 is for
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of E2M1; a code's fourth bit is the sign


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix (in, out), `in` a multiple of 32, to MXFP4: blocks (out, in/32, 16) and scales (out, in/32), uint8.

    Groups of 32 inputs share a power of two (a scale is its exponent plus 127); two codes of four bits make a byte, the
    first in the low half.  Of the two exponents that fit a group's largest weight, the one with the smaller squared
    error; so weights that were MXFP4 before come back exactly.  OCP Microscaling Formats 1.0, sections 5 and 6.
    """
    import torch

    groups = weight.float().T.contiguous().unflatten(1, (-1, 32))  # (out, in/32, 32)
    values = torch.tensor(FP4, device=weight.device)
    middles = (values[1:] + values[:-1]) / 2
    largest = groups.abs().amax(-1, keepdim=True)
    floor = torch.frexp(largest).exponent - 3  # floor(log2(largest)) - 2: FP4 reaches 6, from 4 on

    def rounded(exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, the exponent as it can be stored, and the squared error of each group."""
        exponent = exponent.where(largest > 0, 0).clamp(-127, 127)
        size = torch.ldexp(groups.abs(), -exponent)
        codes = torch.bucketize(size, middles)  # what lies in the middle goes down,
        codes += (codes % 2 == 1) & (size == middles[codes.clamp(max=6)])  # unless the even code is above
        error = (values[codes] - size).square().sum(-1, keepdim=True) * torch.exp2(2.0 * exponent)
        return codes + 8 * (groups < 0), exponent, error

    (low_codes, low, low_error), (high_codes, high, high_error) = rounded(floor), rounded(floor + 1)
    better = high_error < low_error
    codes, exponent = high_codes.where(better, low_codes).to(torch.uint8), high.where(better, low)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + 127).squeeze(-1).to(torch.uint8)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What quantize_mxfp4 has made of a matrix, as float32 (in, out)."""
    import torch

    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()  # (out, in/32, 32)
    values = torch.tensor([*FP4, *(-value for value in FP4)], device=blocks.device)[codes]
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(1).T


def fuse_expert_adapters(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter whose experts have a LoRA pair each, as trained in 4 bits, in the layout of the released gpt-oss.

    There the experts of a layer are one parameter (E, in, out), whose pair is A (E * r, in), expert after expert, and
    B (out, r * E), in which the expert changes fastest.  Other adapters come back unchanged.
    """
    import torch

    name = re.compile(r"(.*\.experts)\.(gate_up|down)_projs\.(\d+)\.(lora_[AB])\.weight")
    matches = {key: name.fullmatch(key) for key in weights}
    fused = {key: weights[key] for key, match in matches.items() if not match}
    experts: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    for key, match in matches.items():
        if match:
            experts.setdefault((match[1], match[2], match[4]), {})[int(match[3])] = weights[key]
    for (module, projection, side), pairs in experts.items():
        inner = ".base_layer" if projection == "gate_up" else ""  # PEFT wraps a module once for each of its parameters
        parts = [pairs[expert] for expert in range(len(pairs))]
        fused[f"{module}{inner}.{side}.weight"] = (
            torch.cat(parts) if side == "lora_A" else torch.stack(parts, -1).flatten(1)
        )
    return fused


def full_precision(name: str) -> str:
    """The model whose weights a 4-bit one was made from; Unsloth names the latter after it."""
    return re.sub(r"(-unsloth)?-bnb-4bit$", "", name)


def export_adapter(source: Path, base: str, folder: Path) -> None:
    """Write an adapter and its tokenizer so that PEFT loads it on the model as it was released, `base`."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    config = read_json(source / "adapter_config.json")
    weights = load_file(source / "adapter_model.safetensors")
    fused = fuse_expert_adapters(weights)
    if fused.keys() != weights.keys():
        config["target_modules"] = sorted({key.split(".")[-3] for key in fused if ".experts." not in key})
        config["target_parameters"] = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    # What unsloth notes there is of the layout before: it would take these weights for its old one, and repack them.
    for note in ("lora_B_layout", "unsloth_fused_expert_lora"):
        config.pop(note, None)
    config |= {"base_model_name_or_path": base, "auto_mapping": None}
    save_file(fused, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def weights_size(config: Any, format: str) -> int:
    """Bytes of a model's weights in bfloat16, or with the experts in MXFP4 (4.25 bits a weight)."""
    return int(sum(shape.numel() * (4.25 if format == "mxfp4" and EXPERTS.search(name) else 16) / 8
                   for name, shape in parameter_shapes(config).items()))  # fmt: skip


def pack_experts(adapted: PeftModel) -> tuple[dict[str, torch.Tensor], float, float]:
    """The experts of an adapted model in MXFP4, by the names that transformers reads.

    With two shares of the size of what the adapter changes in them: how much of it is left after the rounding to four
    bits, and the noise that the rounding adds.
    """
    import torch
    from peft.tuners.lora.layer import ParamWrapper

    def plain(name: str) -> str:
        return name.removeprefix("base_model.model.").replace(".base_layer", "")

    changes = {f"{plain(name)}.{module.parameter_name}": partial(module.get_delta_weight, "default")
               for name, module in adapted.named_modules() if isinstance(module, ParamWrapper)}  # fmt: skip
    experts = {plain(name): weights.detach() for name, weights in adapted.named_parameters()
               if EXPERTS.search(plain(name))}  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed: dict[str, torch.Tensor] = {}
    left = noise = size = 0.0
    for name, weights in experts.items():  # (E, in, out)
        parts = []
        for expert, change in zip(weights, changes[name]() if name in changes else 0 * weights, strict=True):
            expert, change = expert.to(device).float(), change.detach().to(device).float()
            parts.append(quantize_mxfp4(expert + change))
            moved = dequantize_mxfp4(*parts[-1]) - expert
            left += (moved * change).sum().item()
            noise += (moved - change).square().sum().item()
            size += change.square().sum().item()
        for part, tensors in zip(("blocks", "scales"), zip(*parts, strict=True), strict=True):
            packed[f"{name}_{part}"] = torch.stack(tensors).cpu()
    return packed, left / (size or 1.0), math.sqrt(noise / (size or 1.0))


def merge_adapter(adapter: Path, base: str, format: str, folder: Path, say: Callable[[str], None]) -> None:
    """Write the model with an adapter merged in: in bfloat16, or the experts in MXFP4.  Works on the CPU.

    Raises UsageError where memory or disk do not suffice, or the model has no such experts.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    config = AutoConfig.from_pretrained(base)
    packed = getattr(config, "quantization_config", None)
    if packed and packed["quant_method"] != "mxfp4":
        raise UsageError(f"{base} is quantized ({packed['quant_method']}): name the model it was made from with --base")
    if format == "mxfp4" and config.model_type != "gpt_oss":
        raise UsageError(f"mxfp4 is the format of gpt-oss, and {base} is {config.model_type}: take merged_16bit")
    written, whole = weights_size(config, format), weights_size(config, "merged_16bit")
    check_disk(folder, written, "choose another --output-dir")
    needed, available = 1.1 * whole + (written if format == "mxfp4" else 0), available_memory()
    if needed > available:
        raise UsageError(f"merging {base} takes {needed / 1e9:.0f} GB of memory, and {available / 1e9:.0f} are free: "
                         "take --format lora, and merge on a larger machine")  # fmt: skip
    say(f"loading {base}")
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype="auto", quantization_config=Mxfp4Config(dequantize=True) if packed else None
    )
    say("merging the adapter")
    adapted = PeftModel.from_pretrained(model, adapter)
    if format == "mxfp4":
        say("rounding the experts to four bits")
        experts, left, noise = pack_experts(adapted)
        say(
            f"of what the adapter changes in the experts {left:.0%} is left; the rounding is {noise:.1f} times as large"
        )
    model = adapted.merge_and_unload().to(torch.bfloat16)
    weights = model.state_dict()
    if format == "mxfp4":
        weights = {name: tensor for name, tensor in weights.items() if not EXPERTS.search(name)} | experts
        model.config.quantization_config = MXFP4_CONFIG
    model.hf_quantizer = None  # it is quantized no more, or as said above
    model.save_pretrained(folder, state_dict=weights, save_original_format=config.model_type != "gpt_oss")


MODEL_CARD = """\
---
library_name: {library}
pipeline_tag: text-generation
tags: [grpo, "2048"]{base}
---

# {name} playing 2048

{kind}, trained with GRPO to answer a prompt with a Python function that plays the game 2048. What it writes is code by
a language model: run it only where it can do no harm, such as in the jail of gpt_2048_rl.py.
{results}
```python
from {library} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained(FOLDER, dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```
{config}"""


def model_card(base: str, format: str, run: Path) -> str:
    """README.md of an export: what it is, the run's results, how to load it, the run's config and seed."""
    config, result = read_json(run / "config.json"), read_json(run / "result.json")
    config.pop("output_dir", None)  # a path of this machine
    settings, table = json.dumps(config, indent=2), ""
    if result:
        rows = {"before training": result["before"], "after training": result["after"],
                **{f"control: {name} moves": score for name, score in result["controls"].items()}}  # fmt: skip
        table = f"\n| held-out boards | made {config['target']} | 95% interval | median tile | games |\n"
        table += "|---|---|---|---|---|\n"
        for name, row in rows.items():
            table += (f"| {name} | {row['won']:.0%} | {row['won_low']:.0%} to {row['won_high']:.0%} "
                      f"| {row['largest_tile_median']:.0f} | {row['games']} |\n")  # fmt: skip
    library, loader, kind = {
        "lora": ("peft", "AutoPeftModelForCausalLM", "A LoRA adapter"),
        "merged_16bit": ("transformers", "AutoModelForCausalLM", "The whole model, in bfloat16"),
        "mxfp4": ("transformers", "AutoModelForCausalLM", "The whole model, the experts in MXFP4"),
    }[format]
    return MODEL_CARD.format(
        library=library, loader=loader, kind=kind, results=table,
        base="" if Path(base).is_dir() else f"\nbase_model: {base}",
        name="The embedded model" if tiny_keys(Path(base)) else Path(base).name,
        config=f"\nThe run's config, with its seed:\n\n```json\n{settings}\n```\n" if config else "",
    )  # fmt: skip


def check_token() -> None:
    """Raise UsageError where the hub lets this machine upload nothing."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # no token, a wrong one, or no network
        raise UsageError(f"the hub takes no upload from here ({error}): set HF_TOKEN, or run hf auth login") from None


def upload(folder: Path, repository: str, private: bool) -> None:
    """Upload a folder to the hub.  Raises UsageError."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained by gpt_2048_rl.py")
    except Exception as error:
        raise UsageError(f"{repository} could not be uploaded ({error}): {folder} is whole, use hf upload") from None


def export(config: ExportConfig, console: Console) -> dict[str, Any]:
    """The export command.  The folder appears whole or not at all.  Returns what --json prints."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    adapter = next((folder for folder in (config.source / "adapter", config.source)
                    if (folder / "adapter_model.safetensors").is_file()), None)  # fmt: skip
    if adapter is None:
        raise UsageError(f"{config.source} holds no adapter: name a run's folder, a checkpoint or an adapter's folder")
    folder = config.output_dir or Path("lora_model" if config.format == "lora" else f"{config.format}_model")
    if folder.exists():
        raise UsageError(f"{folder} is there already: choose another --output-dir")
    base = config.base or full_precision(str(adapter_base(str(adapter))))
    check_model(base, "none")
    if keys := tiny_keys(Path(base)):
        warm_start(keys=keys, progress=every_tenth(say))  # it may have left the cache
    if config.format != "lora":
        check_download(base)
    if config.push_to_hub:
        check_token()
    say("loading torch and transformers")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as scratch:
            made, lora = Path(scratch) / "made", Path(scratch) / "lora"
            lora.mkdir()
            export_adapter(adapter, base, lora)
            if config.format == "lora":
                lora.rename(made)
            else:
                merge_adapter(lora, base, config.format, made, say)
                for file in [file for file in lora.iterdir() if not file.name.startswith("adapter_")]:
                    shutil.copy(file, made)
            run = next((place for place in (config.source, config.source.parent) if (place / "config.json").is_file()
                        and "recipe" in read_json(place / "config.json")), config.source)  # fmt: skip
            (made / "README.md").write_text(model_card(base, config.format, run), encoding="utf-8")
            made.rename(folder)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written ({error.strerror or error}): choose another --output-dir"
        ) from None
    say(f"{config.format} of {config.source} is in {folder}")
    if config.push_to_hub:
        say(f"uploading to {config.push_to_hub}")
        upload(folder, config.push_to_hub, config.private)
    return {"format": config.format, "base": base, "folder": str(folder), "hub": config.push_to_hub or None}


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def show_result(console: Console, result: dict[str, Any], target: int) -> None:
    """The table that a run or an evaluation ends with."""
    from rich.table import Table

    rows = {
        "before training": result.get("before"),
        "after training": result.get("after"),
        result.get("model", "model"): result if "won" in result else None,
        "best program": result.get("best"),
        "random legal moves": result["controls"]["random"],
        "greedy on empty cells": result["controls"]["greedy"],
    }
    table = Table("held-out boards", f"made {target}", "95% interval", "median tile", "games")
    for name, row in rows.items():
        if row:
            interval = f"{row['won_low']:.0%} to {row['won_high']:.0%}"
            table.add_row(rich_text(name), f"{row['won']:.0%}", interval, f"{row['largest_tile_median']:.0f}",
                          str(row["games"]))  # fmt: skip
    console.print(table)
    if not result["jailed"]:
        console.print("These strategies ran WITHOUT the jail (--unsafe-no-jail): nothing kept them from cheating.")


def evaluate_controls(config: TrainConfig | EvalConfig) -> dict[str, dict[str, Any]]:
    """Both controls on the held-out boards."""
    strategies = control_strategies(config.keys).items()
    return {name: dataclasses.asdict(evaluate_strategy(source, config)) for name, source in strategies}


def read_strategy(path: Path) -> str:
    """A strategy file's text.  Raises UsageError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path} cannot be read: {reason}") from None


def evaluate(config: EvalConfig, console: Console) -> dict[str, Any]:
    """The eval command.  Returns what --json prints."""
    started = time.monotonic()
    source = read_strategy(Path(config.model)) if config.model.endswith(".py") else None
    config.model = resolve_model(config.model)
    if (Path(config.model) / "adapter").is_dir():  # a run's folder
        config.model = str(Path(config.model) / "adapter")
    if source is None:
        check_model(config.model, config.reasoning)
    pool = shared_pool(jailed=not config.unsafe_no_jail)
    if source is not None:
        if pool.judge([Job(source, ())])[0].works == "none":
            raise UsageError(f"{config.model} defines no strategy(board) that Python can parse")
        result = evaluate_strategy(source, config)
    else:
        say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        model, tokenizer = load_model(config.model, config, say)
        result = evaluate_model(model, tokenizer, config)
    controls = evaluate_controls(config)
    seconds = round(time.monotonic() - started, 1)
    summary = {"model": config.model, **dataclasses.asdict(result), "controls": controls, "seconds": seconds,
               "jailed": pool.jailed}  # fmt: skip
    show_result(console, summary, config.target)
    return summary


def compare(config: CompareConfig, console: Console) -> dict[str, Any]:
    """The compare command.  Returns what --json prints."""
    from rich.table import Table

    import records
    import report

    try:
        runs = records.read_runs(config.runs)
        pairs = records.pairs_between(runs)
        report.write_comparison(runs, pairs, config.output)
    except records.ReportError as error:
        raise UsageError(str(error)) from None
    target = next(iter(runs.values())).config["target"]
    scores = {name: vars(run.scores[records.AFTER]) for name, run in runs.items()}
    table = Table("after training", f"made {target}", "95% interval", "median tile", "games")
    for name, row in scores.items():
        table.add_row(rich_text(name), f"{row['won']:.0%}", f"{row['low']:.0%} to {row['high']:.0%}",
                      f"{row['median']:.0f}", str(row["games"]))  # fmt: skip
    console.print(table)
    tests = Table("board by board", f"only one made {target}", "p (McNemar)", "higher tile", "p (sign)", "boards")
    for pair in pairs:
        tests.add_row(rich_text(f"{pair.first} against {pair.second}"), f"{pair.won_first} : {pair.won_second}",
                      f"{pair.won_p:.3g}", f"{pair.higher_first} : {pair.higher_second}", f"{pair.higher_p:.3g}",
                      str(pair.boards))  # fmt: skip
    console.print(tests)
    console.print(f"both tests are exact, two-sided, and not corrected for their number; the page is {config.output}",
                  highlight=False, markup=False, soft_wrap=True)  # fmt: skip
    return {"page": str(config.output), "runs": scores, "pairs": [dataclasses.asdict(pair) for pair in pairs]}


def doctor(config: DoctorConfig, console: Console) -> dict[str, Any]:
    """The doctor command.  Returns what --json prints; `fit` says whether training could start."""
    from rich.table import Table

    name = resolve_model(config.model)
    prepare_environment(offline=name == "tiny")
    machine, versions = find_machine(), library_versions()
    training = train_defaults(name, "stable", "none")
    training.load_in_4bit = config.load_in_4bit and not stays_as_stored(name)
    training.load_in_16bit = config.load_in_16bit
    training.max_seq_length = 568 + training.max_new_tokens
    rows: list[tuple[str, ...]] = []

    def settings() -> str:
        rows.extend(choose_settings(machine, training).rows)
        return "as above"

    def model() -> str:
        check_model(name, "none")
        return f"{name} can be had"

    def memory() -> str:
        if not machine.gpu:
            return "not looked at without a GPU"
        check_memory(name, machine, needed := memory_needed(name, training))
        return f"about {sum(needed.values()) / 1e9:.0f} GB needed" if needed else "not known for this model"

    checks: dict[str, str] = {}
    wrong: list[str] = []
    for part, check in {"settings": settings, "jail": jail_works, "model": model, "memory": memory}.items():
        try:
            checks[part] = check()
        except (UsageError, JailError) as error:
            checks[part] = str(error)
            wrong.append(part)
    table = Table("", "", "", box=None, show_header=False)
    for row in (*rows, *((library, version, "") for library, version in versions.items()),
                *((part, "NO" if part in wrong else "ok", text) for part, text in checks.items())):  # fmt: skip
        table.add_row(*map(rich_text, row))
    console.print(table)
    return {"machine": dataclasses.asdict(machine), "settings": rows, "versions": versions, "checks": checks,
            "fit": not wrong}  # fmt: skip


def jail_works() -> str:
    """What the pool's canary says.  Raises JailError."""
    return f"holds, {len(os.sched_getaffinity(0))} workers" if shared_pool().jailed else "left off"


def play(config: PlayConfig, console: Console) -> dict[str, Any]:
    """The play command.  Returns what --json prints."""
    from rich.table import Table

    source = read_strategy(config.file)
    pool = shared_pool(jailed=not config.unsafe_no_jail)
    results = execute_strategies(
        [source], config.seeds, config.size, config.target, config.keys, config.timeout, record=True
    )[0]
    if config.watch and results:
        watch(results[0], config, console)
    table = Table("seed", "outcome", "moves", "largest tile", "score", "CPU s", "detail")
    for r in results:
        table.add_row(str(r.seed), r.outcome, str(r.steps), str(r.max_tile), str(r.score), f"{r.seconds:.3f}",
                      rich_text(r.detail))  # fmt: skip
    console.print(table)
    games = {str(r.seed): dataclasses.asdict(r) for r in results}
    return {"file": str(config.file), "size": config.size, "target": config.target, "keys": config.keys,
            "games": games, "jailed": pool.jailed}  # fmt: skip


def rich_text(text: str) -> Any:
    """Text that rich prints as it is, brackets included."""
    from rich.text import Text

    return Text(text)


def watch(result: GameResult, config: PlayConfig, console: Console) -> None:
    """Play a finished game back in the terminal, move by move."""
    from rich.live import Live
    from rich.text import Text

    game = GameBoard(config.size, result.seed, config.target)

    def frame(step: int) -> Text:
        return Text.from_ansi(f"seed {result.seed}  move {step}/{result.steps}  score {game.score()}\n{game.render()}")

    with Live(frame(0), console=console, auto_refresh=False) as live:
        for step, direction in enumerate(result.moves, 1):
            game.move(int(direction))
            live.update(frame(step), refresh=True)
            time.sleep(config.delay)


_RANGES = {
    "steps": (1, 10**7), "minutes": (0.0, 10**6), "generations": (2, 1024), "batch_size": (1, 1024),
    "accumulation": (1, 1024), "boards": (1, 64), "wordings": (1, len(WORDINGS) - 1), "learning_rate": (0.0, 1.0),
    "warmup_steps": (0.0, 10**6), "decay_steps": (0.0, 10**6),
    "weight_decay": (0.0, 1.0), "max_grad_norm": (0.0, 10**6), "temperature": (0.01, 10.0), "entropy_coef": (0.0, 1.0),
    "beta": (0.0, 100.0), "cut_off_price": (0.0, 100.0), "lora_rank": (1, 1024), "lora_alpha": (1, 4096),
    "max_new_tokens": (1, 1 << 20), "max_seq_length": (0, 1 << 20), "save_steps": (1, 10**7),
    "keep": (1, 10**6), "patience": (1, 10**7),
    "seed": (0, 2**32 - 1), "games": (1, 10**4), "eval_batch_size": (1, 1024), "timeout": (0.01, 3600.0),
    "delay": (0.0, 60.0),
}  # fmt: skip


def check_config(config: Config) -> None:
    """Raise UsageError for the first number that makes no sense."""
    for name, (low, high) in _RANGES.items():
        value = getattr(config, name, low)
        if not low <= value <= high:
            raise UsageError(f"--{name.replace('_', '-')} must lie between {low} and {high}, not {value}")
    if isinstance(config, TrainConfig | EvalConfig | PlayConfig):
        try:
            check_game(config.size, config.target)
        except ValueError as error:
            raise UsageError(f"--{error}") from None
    if isinstance(config, PlayConfig) and not config.seeds:
        raise UsageError("--seeds needs at least one number")
    if isinstance(config, TrainConfig) and (config.run_name != Path(config.run_name).name or config.run_name == ".."):
        raise UsageError(f"--run-name must be the name of one folder, not {config.run_name!r}")
    if isinstance(config, TrainConfig) and config.loader == "unsloth" and (config.vllm_server or sharded()):
        raise UsageError(f"{'--vllm-server' if config.vllm_server else 'FSDP'} needs --loader transformers: "
                         "Unsloth keeps the whole model in one process")  # fmt: skip
    if isinstance(config, TrainConfig) and config.vllm_server and not importlib.util.find_spec("vllm"):
        raise UsageError("--vllm-server needs vllm beside trl, in an environment of their own: see the README")
    if isinstance(config, TrainConfig) and config.batch_size * config.accumulation % config.generations:
        raise UsageError(
            f"--batch-size times --accumulation ({config.batch_size * config.accumulation}) must be a multiple of "
            f"--generations ({config.generations})"
        )


KINDS: dict[str, Any] = {
    "train": TrainConfig,
    "eval": EvalConfig,
    "play": PlayConfig,
    "compare": CompareConfig,
    "export": ExportConfig,
    "doctor": DoctorConfig,
}


def _given(argv: Sequence[str], flag: str, choices: Container[str] | None, default: str) -> Any:
    """The value that a flag has on the command line, or the default; wrong ones are left to tyro's complaint."""
    argv = [word.replace("_", "-", word.split("=")[0].count("_")) if word.startswith("--") else word for word in argv]
    values = [after if name == flag else name.removeprefix(f"{flag}=") for name, after in pairwise([*argv, ""])
              if name == flag or name.startswith(f"{flag}=")]  # fmt: skip
    return values[-1] if values and (choices is None or values[-1] in choices) else default


CHANGEABLE = {"resume", "keep", "save_steps", "patience", "minutes", "quiet", "json"}  # by a run that goes on


def run_to_resume(argv: Sequence[str]) -> Path | None:
    """The folder of the run that a command line names again, or with --resume the newest one; None for a new run."""
    name = str(_given(argv, "--run-name", None, "latest" if "--resume" in argv else ""))
    run = Path(_given(argv, "--output-dir", None, "outputs")) / name
    if name and (run / "config.json").is_file():
        return run.resolve()
    if "--resume" in argv:
        raise UsageError(f"there is no run {run} to go on with: leave --resume out")
    return None


def stored_config(run: Path) -> TrainConfig:
    """The config that a run began with."""
    stored = read_json(run / "config.json")
    known = {field.name: stored[field.name] for field in dataclasses.fields(TrainConfig) if field.name in stored}
    return TrainConfig(**known | {"output_dir": run.parent, "run_name": run.name, "resume": False, "json": False})


def check_unchanged(config: TrainConfig, stored: TrainConfig) -> None:
    """Raise UsageError for a number that a run did not begin with, and that would make another run of it."""
    for name, value in vars(stored).items():
        if name not in CHANGEABLE | {"output_dir", "run_name"} and getattr(config, name) != value:
            raise UsageError(f"--{name.replace('_', '-')} was {value} when {stored.run_name} began: leave it out, or "
                             "choose another --run-name")  # fmt: skip


def parse_arguments(argv: list[str]) -> Config:
    """The command's config.  Raises UsageError; SystemExit(0) after --help."""
    import tyro

    command = argv.pop(0) if argv and argv[0] in KINDS else "train"
    if command == "train" and argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
    reasoning = _given(argv, "--reasoning", REASONING, "none")
    default: Any = None  # the numbers, and what --help says of them, are those of what was chosen
    resumed = run_to_resume(argv) if command == "train" else None
    if resumed:
        default = stored_config(resumed)
    elif command == "train":
        recipe = _given(argv, "--recipe", ("stable", "published"), "stable")
        default = train_defaults(resolve_model(_given(argv, "--model", None, "auto")), recipe, reasoning)
    elif command == "eval":
        default = EvalConfig(model=tyro.MISSING, reasoning=reasoning, max_new_tokens=REASONING[reasoning])
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            config: Config = tyro.cli(
                KINDS[command], args=argv, default=default, prog=f"gpt_2048_rl.py {command}",
                config=(tyro.conf.PositionalRequiredArgs,),
            )  # fmt: skip
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        lines = [line.strip("│ ") for line in complaint.getvalue().splitlines()[1:]]
        said = " ".join(takewhile(lambda line: line and not line.startswith("─"), lines))
        raise UsageError(f"{said} (see gpt_2048_rl.py {command} --help)") from None
    if isinstance(config, TrainConfig):
        config.model = resolve_model(config.model)
    if isinstance(config, TrainConfig | EvalConfig):
        config.max_seq_length = config.max_seq_length or 568 + config.max_new_tokens
    if isinstance(config, TrainConfig) and resumed:
        check_unchanged(config, stored_config(resumed))
        config.output_dir, config.run_name = resumed.parent, resumed.name
    check_config(config)
    if RANKS > 1 and not isinstance(config, TrainConfig):
        raise UsageError(f"{command} runs in one process: start it with python, without torchrun")
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit code: 0; 2 for what the user can mend (one line says what); 3 where training
    collapsed; 130 for Ctrl-C, 143 for SIGTERM."""
    real_stdout = sys.stdout
    try:
        config = parse_arguments(list(sys.argv[1:] if argv is None else argv))
        from rich.console import Console

        with contextlib.redirect_stdout(sys.stderr) if config.json else contextlib.nullcontext():
            console = Console(quiet=RANK > 0)
            commands: dict[type, Callable[[Any, Console], dict[str, Any]]] = {
                TrainConfig: train, EvalConfig: evaluate, PlayConfig: play, CompareConfig: compare,
                ExportConfig: export, DoctorConfig: doctor,
            }  # fmt: skip
            result = commands[type(config)](config, console)
        if config.json and RANK == 0:
            print(json.dumps(result), file=real_stdout)
    except JailError as error:
        print(f"error: model-written code cannot be jailed here ({error}); --unsafe-no-jail runs it all the same",
              file=sys.stderr)  # fmt: skip
        return 2
    except UsageError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    if result.get("fit") is False:
        return 2
    if result.get("interrupted"):
        return 128 + int(result["interrupted"])
    return 3 if result.get("collapsed") else 0


if __name__ == "__main__":
    sys.exit(main())
