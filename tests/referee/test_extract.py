"""What comes back from a model: finding the strategy in it, and the static look for cheating."""

from __future__ import annotations

import ast
import importlib.util
import symtable
import sys
import textwrap
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
import toolkit
from gpt_2048_rl import find_cheating
from toolkit.referee.extract import extract_function, visible_program
from toolkit.referee.names import globals_of

PLAIN = 'def strategy(board):\n    return "a"'
OTHER = 'def strategy(board):\n    return "i"'
FENCED = f"```python\n{PLAIN}\n```"
HELPED = textwrap.dedent("""\
    import math
    from collections import Counter
    WEIGHTS = [1, 2]
    def helper(board):
        return math.sqrt(sum(map(sum, board)))
    def strategy(board):
        return "a" if helper(board) > WEIGHTS[0] else "u\"""")

FOUND = {  # completion -> the source that stands in it
    "fenced": (FENCED, PLAIN),
    "prose around the fence": (f"Here it is:\n\n{FENCED}\n\nIt goes left.", PLAIN),
    "fence without a language": (f"```\n{PLAIN}\n```", PLAIN),
    "fence with another language tag": (f"```py3 title=x\n{PLAIN}\n```", PLAIN),
    "the last of several fences": (f"{FENCED}\nBetter:\n```python\n{OTHER}\n```", OTHER),
    "the last complete fence": (f"{FENCED}\nBetter:\n```python\n{OTHER}\n", PLAIN),
    "the last fence with a strategy in it": (f"{FENCED}\nRun it:\n```sh\npython play.py\n```", PLAIN),
    "the last fence that parses": (f"{FENCED}\n```python\ndef strategy(board):\n    return (\n```", PLAIN),
    "a fence opened again inside": (f"```python\ndef strat\n{FENCED}", PLAIN),
    "blanks after the closing fence": (f"{FENCED}  \nDone.", PLAIN),
    "indented fence": (textwrap.indent(FENCED, "   "), PLAIN),
    "fence in a list": (f"1. This:\n\n{textwrap.indent(FENCED, '    ')}", PLAIN),
    "CRLF": (FENCED.replace("\n", "\r\n"), PLAIN),
    "CR alone": (FENCED.replace("\n", "\r"), PLAIN),
    "helpers, imports and constants above": (f"```python\n{HELPED}\n```", HELPED),
    "helpers below": (
        f"```python\n{PLAIN}\ndef helper():\n    return 1\n```",
        f"{PLAIN}\ndef helper():\n    return 1",
    ),
    "example use below": (f"```python\n{PLAIN}\nboard = [[0] * 6] * 6\nprint(strategy(board))\n```", PLAIN),
    "example use above": (f"```python\nprint('hello')\n{PLAIN}\n```", PLAIN),
    "main guard": (f"```python\n{PLAIN}\nif __name__ == '__main__':\n    strategy([])\n```", PLAIN),
    "decorators": (
        f"```python\nimport functools\n@functools.cache\n@functools.lru_cache(\n    None)\n{PLAIN}\n```",
        f"import functools\n@functools.cache\n@functools.lru_cache(\n    None)\n{PLAIN}",
    ),
    "class and its methods above": (
        f"```python\nclass Player:\n    def strategy(self, board):\n        return 'a'\n{PLAIN}\n```",
        f"class Player:\n    def strategy(self, board):\n        return 'a'\n{PLAIN}",
    ),
    "defined twice": (f"```python\n{PLAIN}\n{OTHER}\n```", f"{PLAIN}\n{OTHER}"),
    "docstring with a triple quote": (
        '```python\ndef strategy(board):\n    """Left.\n\n    Always."""\n    return "a"\n```',
        'def strategy(board):\n    """Left.\n\n    Always."""\n    return "a"',
    ),
    "letters outside of ASCII": (FENCED.replace('"a"', "'é'"), PLAIN.replace('"a"', "'é'")),
    "unfenced": (PLAIN, PLAIN),
    "unfenced with prose": (f"Sure, here it is:\n\n{PLAIN}\n\nThis always goes left.", PLAIN),
    "unfenced, prose right below": (f"My answer:\n{PLAIN}\nThis always goes left!", PLAIN),
    "unfenced with helpers": (f"Sure:\n\n{HELPED}\n\nThat is all.", HELPED),
    "unfenced example dropped": (f"{PLAIN}\n\nprint(strategy([[0]]))", PLAIN),
    "unfenced decorator": (f"Use:\n\nimport functools\n@cache\n{PLAIN}", f"import functools\n@cache\n{PLAIN}"),
    "unfenced, no space after the colon of prose": (f"Idea:greedy\n{PLAIN}", PLAIN),
}


@pytest.mark.parametrize(("text", "source"), FOUND.values(), ids=FOUND.keys())
def test_finds_the_strategy(text: str, source: str) -> None:
    """Blank lines aside, exactly the code that belongs to the strategy, line by line."""
    found = extract_function(text)
    assert found is not None
    assert [line for line in found.split("\n") if line.strip()] == [line for line in source.split("\n") if line.strip()]


ABSENT = {
    "nothing": "",
    "prose": "I would always go left, then up.",
    "another name": FENCED.replace("strategy", "policy"),
    "fence never closed": FENCED.removesuffix("```"),
    "fence never closed, prose before": f"Sure:\n{FENCED.removesuffix('```')}",
    "fence cut in its first line": "```python",
    "cut in the middle of a statement": "```python\ndef strategy(board):\n    return (",
    "unfenced, cut in the middle of a statement": "def strategy(board):\n    for x in",
    "unfenced, cut in the middle of a string": 'def strategy(board):\n    return "',
    "unfenced, cut after the colon": "def strategy(board):",
    "unfenced, cut after a decorator": "import functools\n@functools.cache\n",
    "does not parse": "```python\ndef strategy(board)\n    return 'a'\n```",
    "async def": "```python\nasync def strategy(board):\n    return 'a'\n```",
    "only a method": "```python\nclass Player:\n    def strategy(self, board):\n        return 'a'\n```",
    "only a nested function": "```python\ndef f():\n    def strategy(board):\n        return 'a'\n```",
    "only a lambda": "```python\nstrategy = lambda board: 'a'\n```",
    "only quoted": "```python\ntext = '''\ndef strategy(board):\n    return 1\n'''\n```",
}


@pytest.mark.parametrize("text", ABSENT.values(), ids=ABSENT.keys())
def test_finds_none_where_there_is_none(text: str) -> None:
    """No function of that name, or one that was cut off."""
    assert extract_function(text) is None


def test_every_cut_of_a_fenced_answer_is_none() -> None:
    """A completion that ran into its limit of tokens never gives half a strategy: the fence was not closed."""
    answer = f"Sure:\n```python\n{HELPED}\n```"
    assert [i for i in range(len(answer)) if extract_function(answer[:i]) is not None] == []
    assert extract_function(answer) == HELPED


def test_what_is_found_always_parses() -> None:
    """An unfenced answer, cut anywhere, gives None or Python with a strategy in it."""
    for i in range(len(HELPED)):
        if found := extract_function(HELPED[:i]):
            assert "strategy" in {n.name for n in ast.parse(found).body if isinstance(n, ast.FunctionDef)}


def test_a_comment_in_column_0_does_not_end_the_function() -> None:
    """Unfenced code was cut at such a comment, and what came back had lost its return."""
    code = 'def strategy(board):\n    x = 1\n# now the move\n    return "a"'
    assert extract_function(f"{code}\n\nDone.") == code


def test_prose_that_looks_like_an_annotation_is_not_kept() -> None:
    """ "Strategy: greedy" is an annotated name to Python; kept above the function it raised NameError when loading."""
    assert extract_function(f"Strategy: greedy\n\n{PLAIN}\n\nNote: good") == PLAIN


def test_an_annotated_constant_is_kept() -> None:
    """Unfenced `name: type = value` is code."""
    source = f"DEPTH: int = 2\n{PLAIN}"
    assert extract_function(source) == source


HARMONY = "<|channel|>analysis<|message|>{analysis}<|end|><|start|>assistant<|channel|>final<|message|>{final}{end}"
STRIPPED = "analysis{analysis}assistantfinal{final}{end}"  # what a decoder leaves that skips special tokens


@pytest.mark.parametrize("layout", [HARMONY, STRIPPED, "<|start|>assistant" + HARMONY])
@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>"])
def test_harmony_only_the_final_channel_counts(layout: str, end: str) -> None:
    """A fence inside the analysis is a thought, not an answer."""
    analysis = f"Perhaps\n```python\n{OTHER}\n```\nor better not."
    assert extract_function(layout.format(analysis=analysis, final=f"{FENCED}\n", end=end)) == PLAIN
    assert extract_function(layout.format(analysis=analysis, final="I give up.", end=end)) is None


@pytest.mark.parametrize("layout", [HARMONY, STRIPPED])
def test_harmony_fence_at_the_very_start_of_the_final_channel(layout: str) -> None:
    """No line break stands between the channel's mark and the fence."""
    assert extract_function(layout.format(analysis="Think.", final=FENCED, end="")) == PLAIN


@pytest.mark.parametrize("layout", [HARMONY, STRIPPED])
def test_harmony_unfenced_code_in_the_final_channel(layout: str) -> None:
    """Accepted, as from any model."""
    assert extract_function(layout.format(analysis="Think.", final=PLAIN, end="")) == PLAIN


@pytest.mark.parametrize(
    "text",
    [
        f"<|channel|>analysis<|message|>{FENCED}",
        f"<|channel|>analysis<|message|>{FENCED}<|end|>",
        f"<|channel|>analysis<|message|>{FENCED}<|end|><|start|>assistant<|channel|>final",
        f"<|channel|>commentary<|message|>{FENCED}<|end|>",
        f"analysisPerhaps\n{FENCED}\n",
        f"commentary{FENCED}",
    ],
)
def test_harmony_without_a_final_channel_is_none(text: str) -> None:
    """Cut off while it was still thinking."""
    assert extract_function(text) is None


def test_harmony_analysis_then_commentary_then_final() -> None:
    """All channels before the final one are skipped, in both forms."""
    thoughts = (f"<|channel|>{c}<|message|>{OTHER}<|end|><|start|>assistant" for c in ("analysis", "commentary"))
    assert extract_function(f"{''.join(thoughts)}<|channel|>final<|message|>{FENCED}") == PLAIN
    assert extract_function(f"analysis{OTHER}assistantcommentary{OTHER}assistantfinal{FENCED}") == PLAIN


def test_harmony_straight_to_the_final_channel() -> None:
    """Without special tokens such an answer begins with "final", glued to the fence, which then went unseen."""
    assert extract_function(f"<|channel|>final<|message|>{FENCED}<|return|>") == PLAIN
    assert extract_function(f"final{FENCED}") == PLAIN


def test_harmony_a_second_turn_is_not_read() -> None:
    """Text after the end of the model's turn is no answer."""
    text = f"<|channel|>final<|message|>{FENCED}\n<|return|><|start|>user<|message|>```python\n{OTHER}\n```"
    assert extract_function(text) == PLAIN


SAID = [
    f"analysis of the game first:\n{FENCED}",
    f"analysis: go left.\n{FENCED}",
    f"analysis\n{FENCED}",
    f"analysis = 1\n{PLAIN}",
    f"analysis_depth = 2\n{PLAIN}",
    f"analysis(1)\n{FENCED}",
    f"analysis, then code:\n{FENCED}",
    f"commentary on my code\n\n{FENCED}",
    f"commentary: none\n{FENCED}",
    f"final = 3\n{PLAIN}",
    f"final answer:\n{FENCED}",
]


@pytest.mark.parametrize("text", SAID)
def test_a_word_that_is_also_a_channels_name_is_only_a_word(text: str) -> None:
    """Such an answer counted as an analysis without a final channel, and so as no function."""
    assert extract_function(text) is not None


@pytest.mark.parametrize(("text", "found"), [
    (f"<think>{FENCED}</think>I cannot.", None),
    (f"{FENCED}\n</think>\nNo.", None),  # the prompt ended with <think>
    (f"<think>a draft:\n{FENCED}", None),
    (f"<think>```python\ndef strategy(board): ...\n```</think>\n{FENCED}", PLAIN),
    (f"<think></think>{PLAIN}", PLAIN),
    (FENCED, PLAIN),
])  # fmt: skip
def test_what_stands_in_think_is_no_answer(text: str, found: str | None) -> None:
    """A draft played instead of the answer, or of none: with Qwen3 and a reasoning effort, and DeepSeek-R1-Distill."""
    assert extract_function(text) == found


@pytest.mark.parametrize("text", [*SAID[:9], f"analysis We think\n{FENCED}", f" analysisWe\n{FENCED}",
                                  f"analysis…\n{FENCED}", f"commentary(\n{FENCED}"])  # fmt: skip
def test_a_model_that_reasons_answers_in_the_final_channel(text: str) -> None:
    """A line break behind the first word was enough for code in an analysis to count."""
    assert extract_function(text, reasons=True) is None
    assert extract_function(f"{text}assistantfinal{FENCED}", reasons=True) == PLAIN


@pytest.mark.parametrize("text", [
    f" <|channel|>analysis<|message|>{FENCED}",
    f"\n<|channel|>analysis<|message|>{FENCED}",
    f"<|channel|>final<|message|>I cannot.<|end|><|start|>assistant<|channel|>analysis<|message|>{FENCED}",
    f"<|channel|>final<|message|>No.<|return|><|start|>user<|message|>{FENCED}",
])  # fmt: skip
def test_another_channel_or_turn_is_no_answer(text: str) -> None:
    assert extract_function(text) is None


MARKS = ["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|channel|>final",
         "<|constrain|>", "<|end|><|return|>"]  # fmt: skip


@pytest.mark.parametrize("end", ["", "<|return|>", "<|end|>"])
@pytest.mark.parametrize("mark", MARKS)
def test_harmonys_marks_may_stand_in_a_program(mark: str, end: str) -> None:
    """In a string, a comment, a docstring, an f-string: the answer was cut there, and counted as no function."""
    code = f'def strategy(board):\n    """Not {mark}."""\n    x = "{mark}" + f"{mark}"  # {mark}\n    return "a"'
    assert extract_function(f"```python\n{code}\n```{end}") == code
    assert extract_function(f"<|channel|>final<|message|>```python\n{PLAIN}  # {mark[:-1]}\n```{end}") is not None


BELOW = [
    "MEMO = collections.defaultdict(int)",
    "RNG = random.Random(0)",
    "ORDER = list('auéi')",
    "D = lambda k: str(k)",
    "strategy.rng = random.Random(0)",
    "strategy.memo = dict()",
    "best = functools.lru_cache(None)(_best)",
    "A = 'a'\nK = A",
    "K = ['a']\nK += ['u']",
    "T = {}\nfor k in 'auéi': T[k] = ord(k)",
    "if True: K = 'a'",
    "T = []\nT.append('a')",
    "T = []\nfor k in 'auéi': T.append(k)",
    "T = {}\nT.update(a=1)",
    "setup()",
    "T = {'a': []}\nT['a'].append(1)",
    "ORDER = list('auéi')\nrandom.shuffle(ORDER)",
    "T = [1, 2]\ndel T[0]",
    "while not T: setup()",
    "strategy.memo.update(a=1)",
    "S = [1]\nsetup(S)",
    "if K: setup()",
    "import heapq\nT = [2, 1]\nheapq.heapify(T)",
    "with K: T.clear()",
]


@pytest.mark.parametrize("below", BELOW)
def test_what_a_strategy_reads_may_stand_below_it(below: str) -> None:
    """Assignments with a call in them were taken for an example of use, and the program raised NameError.  Calls that
    fill a list were dropped later, and the program played as a file and failed as an answer.
    """
    code = ("import collections, functools, random\ndef _best(board): return 'a'\ndef setup(*_): ORDER.sort()\n"
            "def strategy(board):\n    x = [MEMO, RNG, ORDER, D, K, T, best] and strategy\n    return 'a'\n"
            f"{below}")  # fmt: skip
    assert extract_function(f"```python\n{code}\nkey = strategy([[0]])\nboard = [[0]]\n```") == code
    assert extract_function(f"Sure:\n\n{code}\n\nkey = strategy([[0]])\n\nsorted(board)\nDone.") == code


EXAMPLES = [
    "print(T)",
    "T.append(strategy([[0]]))",
    "main()",
    "play(strategy)",
    "assert helper([[0]]) == 1",
    "Game().run()",
    "if __name__ == '__main__':\n    helper(T)",
    "while True: main()",
    "for _ in range(9): T.append(main())",
    "board = [[0]]\nboard.append([0])",
    "len(board)",
    "helper",
    "input('key? ')",
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_use_is_no_part_of_a_program(example: str) -> None:
    """Also behind functions that play a game: they would play it, or ask a person, when the program is loaded."""
    code = ("T = []\ndef helper(b): return len(T)\ndef strategy(board):\n    return 'a' if helper(board) else 'u'\n"
            "def play(f): return f([[0]])\ndef turn(): return strategy([[0]])\ndef main(): turn()\n"
            "class Game:\n    def run(self): main()")  # fmt: skip
    assert extract_function(f"```python\n{code}\n{example}\n```") == code


def test_prose_that_looks_like_code_is_not_kept() -> None:
    """Above an unfenced program it would raise NameError: only what assigns or takes part in the program counts."""
    code = f"T = []\nT.append('a')\n{PLAIN.replace(chr(34) + 'a' + chr(34), 'T[0]')}"
    assert extract_function(f"Idea (greedy)\nif so: good\n{code}\nif so: better\nThen (left)") == code


def test_the_lines_of_a_string_keep_their_blanks() -> None:
    """dedent() empties blank lines, even inside strings, and so changes those strings."""
    code = 'def strategy(board):\n    x = """\n   \n"""\n    return "a" if len(x) == 5 else "u"'
    assert extract_function(f"```python\n{code}\n```") == code


UNPRINTABLE = {
    "clears the screen": "'\x1b[2J'",
    "rings": "'\a'",
    "goes back": "'\b\b'",
    "a form feed": "'\x0c'",
    "turns the order of characters around": "'\u202e'",
    "isolates": "'\u2066'",
    "no width": "'\u200b'",
    "a sequence of one byte": "'\x9b2J'",
    "delete": "'\x7f'",
    "a title": "'\x1b]0;x\a'",
    "no-break space": "'\xa0'",
    "a letter without a shape": "'\u3164'",
    "an empty braille cell": "'\u2800'",
    "a selector of variants": "'\u2b05\ufe0f'",
}


@pytest.mark.parametrize("where", ["{} or 'a'", "f{}[:0] + 'a'", "'a' # {}", "'a' if len({}) > 0 else 'u'"])
@pytest.mark.parametrize("text", UNPRINTABLE.values(), ids=UNPRINTABLE.keys())
def test_a_program_holds_nothing_that_a_terminal_acts_on(text: str, where: str) -> None:
    """best_strategy.py was written as it came, and `cat` ran its escape sequences.

    The program is written anew, and means the same.
    """
    source = f"def strategy(board):\n    return {where.format(text)}"
    visible = visible_program(source)
    assert visible is not None
    assert visible_program(visible) == visible
    assert toolkit.visible(visible) == visible
    programs = [dict[str, Any](), dict[str, Any]()]
    exec(source, programs[0])
    exec(visible, programs[1])
    assert programs[0]["strategy"]([]) == programs[1]["strategy"]([])


def test_a_name_that_nobody_can_see_is_no_name() -> None:
    """It passed for printable, so what was shown was not what played."""
    assert visible_program("def strategy(board, \u3164=1):\n    return 'a' if \u3164 else 'u'") is None


def test_what_nobody_sees_is_escaped_where_it_is_shown() -> None:
    """Fillers, joiners, selectors of variants, by their names in Unicode: isprintable() lets them pass."""
    named = ("HANGUL FILLER", "HANGUL CHOSEONG FILLER", "HANGUL JUNGSEONG FILLER", "VARIATION SELECTOR",
             "GRAPHEME JOINER", "BRAILLE PATTERN BLANK")  # fmt: skip
    letters = [chr(number) for number in range(sys.maxunicode + 1) if chr(number).isprintable()]
    unseen = "".join(letter for letter in letters if any(part in unicodedata.name(letter, "") for part in named))
    assert len(unseen) > 260
    assert program.printable(unseen[:20]) == ascii(unseen[:20])[1:-1]
    assert toolkit.visible(unseen) == ascii(unseen)[1:-1]


def test_a_program_that_can_be_read_stays_as_it_is() -> None:
    assert visible_program(f"{HELPED}\n\t# é ↑") == f"{HELPED}\n\t# é ↑"


HOSTILE = {
    "50,000 minus signs": "def strategy(board):\n    return " + "-" * 50_000 + "1",
    "30,000 brackets": "def strategy(board):\n    return " + "[" * 30_000 + "]" * 30_000,
    "30,000 open brackets": "(" * 30_000,
    "30,000 nots": "def strategy(board):\n    return " + "not " * 30_000 + "1",
    "a chain of 30,000 attributes": "def strategy(board):\n    return board" + ".x" * 30_000,
    "a sum of 30,000 terms": "def strategy(board):\n    return " + "+".join("1" * 30_000),
    "30,000 lambdas": "def strategy(board):\n    return " + "lambda: " * 30_000 + "1",
    "null byte": "def strategy(board):\n    return '\0'",
    "lone surrogate": "def strategy(board):\n    return '\ud800'",
    "lone surrogate in prose": f"\udfff\n{PLAIN}",
    "byte order mark": f"\ufeff{PLAIN}",
    "form feeds": f"\f{PLAIN}\f",
    "line separators": f"\u2028{PLAIN}\u2029\x85",
    "a huge number": "def strategy(board):\n    return " + "9" * 50_000,
    "deep indentation": "".join(" " * i + "if 1:\n" for i in range(200)) + " " * 200 + "pass\ndef strategy(b): pass",
    "10,000 fences": "```\n" * 10_000,
    "10,000 nested parentheses in a fence": "```python\ndef strategy(b):\n return " + "(" * 10_000 + "\n```",
    "10,000 paragraphs": "a\n\n" * 10_000,
    "10,000 decorators": "@a\n" * 10_000 + PLAIN,
    "f-strings in f-strings": "def strategy(board):\n    return " + "f'{" * 300 + "1" + "}'" * 300,
    "wrong encoding cookie": f"# -*- coding: nonsense -*-\n{PLAIN}",
    "only channel marks": "<|channel|>" * 5_000 + "final<|message|>" * 5_000,
    "backslash at the end": PLAIN + "\\",
}


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_gives_none_or_a_source(text: str, fenced: bool) -> None:
    """Neither extraction nor `find_cheating` raises.  Such text killed in-process trainers."""
    found = extract_function(f"```python\n{text}\n```" if fenced else text)
    assert found is None or ("def strategy" in found and find_cheating(found) == "")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_source_does_not_upset_the_look_for_cheating(text: str) -> None:
    """It also reads raw sources from files."""
    assert isinstance(find_cheating(text), str)


def body(line: str) -> str:
    return f"def strategy(board):\n    {line}\n    return 'a'"


CHEATING = {
    **{f"{name}()": (body(f"{name}('1')"), f"uses {name}") for name in sorted(program._INTERPRETER_NAMES)},
    "alias of eval": (body("e = eval"), "uses eval"),
    "import os": ("import os\n" + PLAIN, "imports os"),
    "import inside": (body("import numpy as np"), "imports numpy"),
    "import of a submodule": (body("import os.path"), "imports os.path"),
    "one bad import of several": ("import math, subprocess\n" + PLAIN, "imports subprocess"),
    "from import": (body("from sys import exit"), "imports sys"),
    "relative import": (body("from . import x"), "imports ."),
    "relative import of an allowed name": (body("from .math import sqrt"), "imports .math"),
    "dunder attribute": (body("x = f.__globals__"), "reaches for __globals__"),
    "the classic way out": (body("x = ().__class__.__bases__[0].__subclasses__()"), "reaches for __"),
    "globals of a function": (body("x = strategy.__globals__"), "reaches for __globals__"),
    "builtins by name": (body("x = __builtins__"), "reaches for __builtins__"),
    "written dunder": (body("f.__code__ = g.__code__"), "reaches for __code__"),
    "in a decorator": ("@eval\n" + PLAIN, "uses eval"),
    "in a default": ("def strategy(board, x=open('/etc/passwd')):\n    return 'a'", "uses open"),
    "in an annotation": ("def strategy(board: exec('1')):\n    return 'a'", "uses exec"),
    "in a lambda": (body("f = lambda: eval('1')"), "uses eval"),
    "in an f-string": (body('f = f"{eval(1)}"'), "uses eval"),
    "in a class body": ("class A:\n    import socket\n" + PLAIN, "imports socket"),
}


@pytest.mark.parametrize("expression", [
    "max(s, key=s.__getitem__)", "int.__add__(1, 2)", "'ai'.__contains__('a')", "super().__new__", "x.__doc__",
    "[].__len__()", "operator.__add__", "super().__setattr__", "A.__eq__", "__debug__", "__doc__",
    "self.__class__()", "__class__", "type(s).__name__", "s.__dict__", "f.__defaults__", "f.__kwdefaults__",
    "f.__annotations__", "f.__wrapped__(1)", "s.__module__", "super().__init_subclass__()", "m.__func__",
    "super().__getattribute__('x')", "s.__weakref__",
])  # fmt: skip
def test_an_operators_name_is_honest(expression: str) -> None:
    """`key=s.__getitem__` cost 20, and does what `key=s.get` does; `s.__class__` does what `type(s)` does."""
    assert find_cheating(body(f"k = {expression}")) == ""


ELSEWHERE = {  # names that are bound in another scope than the one that reads them
    "a lambda's parameter": "f = lambda eval: 0",
    "a function's parameter": "def f(eval): pass",
    "a local": "def f():\n    eval = 1",
    "a comprehension's variable": "[eval for eval in range(3)]",
    "an empty comprehension's variable": "[eval for eval in ()]",
    "a comprehension's variable in another": "x = [[eval for eval in r] + [eval('1') for _ in r] for r in ()]",
    "a comprehension's variable in a function": "def f():\n    return {eval: 1 for eval in ()}, [eval(x) for x in '1']",
    "a function called top": "def top(eval): return eval",
    "a lambda's default": "f = lambda g=lambda eval: 0: eval('1')",
    "a class's attribute": "class A:\n    eval = 1",
    "a keyword-only parameter": "def f(*, eval=1): pass",
    "a star parameter": "def f(*eval): pass",
    "an attribute": "import math\nmath.eval = 1",
    "a nested function": "def f():\n    def eval(): pass",
    "a local import": "def f():\n    from re import compile as eval",
    "an exception's name": "def f():\n    try: pass\n    except Exception as eval: pass",
    "a method": "class A:\n    def eval(self): pass",
}


@pytest.mark.parametrize("lines", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_a_name_of_another_scope_lends_nothing(lines: str) -> None:
    """`lambda eval: 0` anywhere made every `eval` an honest name."""
    assert find_cheating(f"{lines}\ndef strategy(board):\n    return eval('\"a\"')") == "uses eval"


@pytest.mark.parametrize("source", [
    "def strategy(board):\n    eval = len\n    return 'ai'[eval(board) % 2]",
    "def eval(board):\n    return 'a'\ndef strategy(board):\n    return eval(board)",
    "def strategy(board):\n    def eval(b):\n        return b\n    def f():\n        return eval('a')\n    return f()",
    "def strategy(board, open=max):\n    return [open(r) for r in board]",
    "def f():\n    global eval\n    eval = max\ndef strategy(board):\n    return eval(board)",
])  # fmt: skip
def test_a_name_of_its_own_scope_is_honest(source: str) -> None:
    assert find_cheating(source) == ""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="symtable no longer tells comprehensions' names apart")
@pytest.mark.parametrize("module", program.ALLOWED_MODULES)
def test_names_have_the_scopes_that_python_gives_them(module: str) -> None:
    """Of real code, by symtable, which was used until comprehensions hid an `eval` from it.  It leaves out `__class__`,
    and annotations that are never evaluated."""
    origin = importlib.util.find_spec(module).origin or ""  # type: ignore[union-attr]
    if not origin.endswith(".py"):
        pytest.skip("written in C")
    source = Path(origin).read_text(encoding="utf-8")
    top = symtable.symtable(source, origin, "exec")
    tables, inside, read, bound = [top], set[str](), set[str](), set[str]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            name = {symbol.get_name()}
            if table is top or symbol.is_global():
                read |= name if symbol.is_referenced() else set()
                inside |= name if symbol.is_referenced() and table is not top else set()
                bound |= name if symbol.is_assigned() or symbol.is_imported() else set()
    found = [names - {"__class__"} for names in globals_of(ast.parse(source))]
    assert found == [inside - {"__class__"}, read - bound - {"__class__"}]


@pytest.mark.parametrize(("source", "reason"), CHEATING.values(), ids=CHEATING.keys())
def test_finds_cheating(source: str, reason: str) -> None:
    """The reason names what was found; reasons of one kind begin alike."""
    assert find_cheating(source).startswith(reason)


def test_interpreter_names_are_those_of_the_rules() -> None:
    """The table above is built from the program's set; this says what must be in it."""
    assert sorted(program._INTERPRETER_NAMES) == ["__import__", "compile", "eval", "exec", "input", "open"]


HONEST = {
    "plain": PLAIN,
    "helpers": HELPED,
    "a variable named input": body("input = board[0]; x = input[0]"),
    "a parameter named input": "def f(input):\n    return input\n" + PLAIN,
    "a lambda's parameter named open": body("f = lambda open: open + 1"),
    "a function named compile": "def compile(row):\n    return row\n" + body("compile(board)"),
    "a loop variable named open": body("for open in board: print(open)"),
    "a method named eval": "class A:\n    def eval(self):\n        return self.eval\n" + PLAIN,
    "attribute named compile": body("import re; re.compile('a')"),
    "constructor": "class A:\n    def __init__(self):\n        self.x = 1\n" + PLAIN,
    "operators": "class A:\n    def __lt__(self, other):\n        return 1\n" + PLAIN,
    "super().__init__": "class A(list):\n    def __init__(self):\n        super().__init__()\n" + PLAIN,
    "main guard": PLAIN + "\nif __name__ == '__main__':\n    print(1)",
    "future import": "from __future__ import annotations\n" + PLAIN,
    "submodule of an allowed one": "from collections.abc import Sequence\nimport collections.abc\n" + PLAIN,
    "the word in a string": body("x = 'eval(open(input()))'"),
    "a name with underscores": body("__x = 1; _y_ = __x"),
    "does not parse": "def strategy(",
    "empty": "",
}


@pytest.mark.parametrize("source", HONEST.values(), ids=HONEST.keys())
def test_honest_code_is_clean(source: str) -> None:
    """A false accusation costs 20 points: names that the code itself binds are its own."""
    assert find_cheating(source) == ""


@pytest.mark.parametrize("module", program.ALLOWED_MODULES)
def test_every_allowed_module_is_clean_to_import(module: str) -> None:
    """The prompt, the jail and `find_cheating` read one list."""
    assert find_cheating(f"import {module}\nfrom {module} import *\n{PLAIN}") == ""


def test_a_chain_of_600_branches_does_not_run_out_of_stack() -> None:
    """Each elif is nested in the one before, so a recursive walk over the tree ended in a RecursionError."""
    chain = "".join(f"    elif board[0][0] == {i}: return 'u'\n" for i in range(600))
    source = f"def strategy(board):\n    if not board: return 'a'\n{chain}    return eval('1')"
    assert extract_function(f"```python\n{source}\n```") == source
    assert find_cheating(source) == "uses eval"
