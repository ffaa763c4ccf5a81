"""The program in a model's answer: its channel, its fenced block, and what `strategy` needs of the code there.

Answers are hostile text, which can loop in a parser or exhaust its stack.  So only workers read them.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import islice

from toolkit import BLANK
from toolkit.referee.names import globals_of, parse

_SPELLED_OUT = re.compile(r"(analysis|commentary|final)(?=[^\W_]|[\"'`*#<])")  # a channel's name, then its text at once
_SPELLED = re.compile(r"\s*(analysis|commentary|final)")
_FINAL_CHANNEL = re.compile(r"<\|channel\|>final[^<]*(?:<\|constrain\|>\w+)?<\|message\|>")
_END_MARKS = re.compile(r"<\|(?:return|end|call|start)\|>")
_NEXT_TURN = re.compile(r"<\|(?:return|end|call)\|>\s*<\|start\|>")


def final_channel(text: str, reasons: bool = False) -> str | None:
    """The final channel of a harmony answer (gpt-oss), with or without special tokens, and what follows </think>; other
    text unchanged.  None where the text ends before that begins.  Without special tokens only the first word shows an
    analysis.  Prose can begin with that word too, so text has to follow it at once, unless the model `reasons` before
    it answers."""
    if text.lstrip().startswith(("<|channel|>", "<|start|>")) or "<|start|>assistant<|channel|>" in text:
        final = _FINAL_CHANNEL.search(text)
        return _NEXT_TURN.split(text[final.end() :], maxsplit=1)[0] if final else None
    channel = (_SPELLED if reasons else _SPELLED_OUT).match(text)  # "analysisWe need...assistantfinalHere it is"
    if channel is None:
        _, end, answer = text.rpartition("</think>")  # some prompts end with the tag that opens them
        return None if not end and answer.lstrip().startswith("<think>") else answer
    if channel[1] == "final":
        return text[channel.end() :]
    _, found, answer = text.partition("assistantfinal")
    return answer if found else None


_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _written(nodes: Sequence[ast.AST]) -> set[str]:
    """The names that nodes assign to or delete, directly or through an attribute or item."""
    targets = [node for node in nodes if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))]
    while any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets):
        targets = [t.value if isinstance(t, (ast.Attribute, ast.Subscript)) else t for t in targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names in some nodes, without those whose attribute is meant."""
    nodes = list(nodes)
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in owners}


class _Program:
    """Which statements of some code are part of its program."""

    def __init__(self, tree: ast.Module) -> None:
        definitions = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
        self.own = {node.name for node in definitions}
        self.needs = globals_of(tree)[0] | self.own
        self.examples = {"strategy", "input"}  # what uses the program or a person, and not what the program uses
        uses = {node.name: _names(ast.walk(node)) for node in definitions}
        while more := {name for name, used in uses.items() if used & self.examples} - self.examples:
            self.examples |= more

    def has(self, node: ast.stmt, above: bool) -> bool:
        """Whether a statement is part of it.  Below `strategy` it has to change what the program needs: by assigning to
        it, or by a call in which it takes part, or of an own function."""
        if isinstance(node, _DEFINITIONS):
            return True
        nodes = list(ast.walk(node))
        calls = [n for n in nodes if isinstance(n, ast.Call)]
        called = {getattr(call.func, "id", "") for call in calls}
        if above:
            return not isinstance(node, ast.Expr) or (bool(calls) and "print" not in called)
        if called & {"strategy", "print", "input"} or isinstance(node, ast.Assert):
            return False
        if _written(nodes) & self.needs:
            return True
        if (_names(nodes) & self.examples) or "__name__" in _names(nodes):
            return False
        parts = {n.id for call in calls for n in ast.walk(call) if isinstance(n, ast.Name)} - called
        return bool(called & self.own or parts & self.needs - vars(builtins).keys())


def _program(code: str, prose: bool = False) -> str | None:
    """The part of some code that `strategy` may need, without examples of its use.  None without a `strategy`.  In
    `prose` a line above it counts only where it assigns: other words can look like code."""
    tree = parse(code)
    defined = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "strategy"] if tree else []
    if tree is None or not defined:
        return None
    lines, kept, program = code.split("\n"), set[int](), _Program(tree)
    for node in reversed(tree.body):  # what comes later may need what comes before
        above = node.lineno < defined[-1].lineno and (not prose or isinstance(node, (ast.Assign, ast.AnnAssign)))
        if program.has(node, above):
            program.needs |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            decorators = getattr(node, "decorator_list", [])
            kept.update(range(min(n.lineno for n in (node, *decorators)), (node.end_lineno or node.lineno) + 1))
    return "\n".join(lines[i - 1] for i in sorted(kept))


def _unfenced_program(lines: list[str]) -> str | None:
    """Collect code from prose: paragraphs that start in column 0 and are Python, of which _program takes its part."""
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
        if tree and not all(isinstance(n, ast.AnnAssign) and not n.value for n in tree.body):  # "Note: this" is prose
            code.append(paragraph)
    return _program("\n".join(code), prose=True)


_FENCE_OPENS = re.compile(r"(.*?)(?<!`)`{3,}+[ \t]*+[\w+-]*+[ \t]*+$")  # prose may stand before: Sure! ```python
_FENCE_CLOSES = re.compile(r"[ \t]*`{3,}+(?![ \t]*[\w+-]+[ \t]*$)")  # ```python opens another and closes none
_FENCES = 16  # only the last 16 are examined, so that hostile text costs little


def _find_program(lines: list[str]) -> str | None:
    """The program in the lines of an answer.  The last fenced block wins; code outside of fences is accepted."""
    opens = [i for i, line in enumerate(lines) if _FENCE_OPENS.match(line)][-_FENCES:]
    closes = [i for i, line in enumerate(lines) if _FENCE_CLOSES.match(line)][-_FENCES:]
    for end in reversed(closes):
        for start in reversed([i for i in opens if i < end]):  # the nearest is wrong if the code contains a fence
            code = "\n".join(lines[start + 1 : end])
            if program := _program(code) or _program(textwrap.dedent(code)):
                return program
    outside, inside = list[str](), False
    for line in lines:
        opening = None if inside else _FENCE_OPENS.match(line)
        if not inside:
            outside.append(opening[1] if opening else line)
        inside = bool(opening) or (inside and not _FENCE_CLOSES.match(line))
    return _unfenced_program(outside)


def extract_function(text: str, reasons: bool = False) -> str | None:
    """The source of `def strategy(board)` in a completion, with its helpers and imports, or None.  Prose, examples of
    use and truncated code are left out.  `reasons` as in final_channel."""
    answer = final_channel(text.replace("\r\n", "\n").replace("\r", "\n"), reasons)
    if answer is None:
        return None
    # An answer ends at harmony's end mark.  A program can contain that mark, so later ends are tried too.
    ends = [*(mark.start() for mark in islice(_END_MARKS.finditer(answer), _FENCES)), len(answer)]
    return next(filter(None, (_find_program(answer[:end].split("\n")) for end in ends)), None)


def _without_blanks(text: str) -> str:
    """Text with invisible characters escaped."""
    return BLANK.sub(lambda found: ascii(found[0])[1:-1], text)


def visible_program(source: str) -> str | None:
    """The same program without characters that are invisible or control a terminal, as it is played, shown and saved.
    None where that fails."""

    def is_visible(text: str) -> bool:
        return not BLANK.search(text) and all(letter.isprintable() or letter in "\n\t" for letter in text)

    if is_visible(source):
        return source
    try:
        anew = ast.unparse(parse(source) or ast.Module([], []))
        if BLANK.search(anew):  # in strings, where they can be escaped, or in names
            anew, meant = _without_blanks(anew), ast.dump(ast.parse(anew))
            anew = anew if meant == ast.dump(ast.parse(anew)) else ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return anew if anew and is_visible(anew) else None
