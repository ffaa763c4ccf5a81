"""Text to token ids and back: GPT-2's byte pairs, and a small vocabulary for chess.

Byte pairs cut a position into pieces of uneven length, so a small model has to count before it can copy a square.  With
the chess tokens a position is always 71, one of them for each square, and the token to copy or change is always at the
same distance.  A move is two, and the best move is written as its number in the list.  A clock is two: its remainders
by 14 and by 15, which name each number below 210 and count on without a carry.  Both vocabularies round-trip exactly.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from pathlib import Path
from typing import Protocol

from toolkit import UsageError

END = "<|endoftext|>"  # before and after each document


class Tokens(Protocol):
    """The interface of a vocabulary."""

    end: int  # id of END
    size: int
    longest: int  # the most tokens of a chess answer, with its end token

    def encode(self, text: str) -> list[int]:
        """The ids of a text.  Raises ValueError if it has no tokens for it."""

    def decode(self, ids: list[int]) -> str:
        """The text of any ids, sensible or not."""


# ---------------------------------------------------------------------------------------------------------------------
# Byte pairs


class BpeTokens:
    """GPT-2's byte pairs, from a folder with vocab.bpe and encoder.json, or merges.txt and vocab.json."""

    longest = 144
    NAMES = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"))

    def __init__(self, folder: Path) -> None:
        from tokenizers import ByteLevelBPETokenizer

        pair = next((pair for pair in self.NAMES if all((folder / name).is_file() for name in pair)), None)
        if pair is None:
            raise UsageError(f"{folder} has no GPT-2 vocabulary: vocab.bpe and encoder.json, or merges.txt and "
                             "vocab.json")  # fmt: skip
        try:
            self.files = {name: (folder / name).read_bytes() for name in pair}  # for the models that use it
            self._bpe = ByteLevelBPETokenizer(str(folder / pair[1]), str(folder / pair[0]))
        except Exception:  # the library raises nothing narrower
            raise UsageError(f"{folder}: {' and '.join(pair)} are no GPT-2 vocabulary, or not of one another") from None
        self._bpe.add_special_tokens([END])
        self.end, self.size = self._bpe.token_to_id(END), self._bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of any text; END in it is END's id."""
        ids: list[int] = self._bpe.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Invalid UTF-8 becomes U+FFFD, as do ids beyond the vocabulary, which a padded head can produce."""
        runs = groupby(ids, key=lambda i: i < self.size)
        return "".join(
            self._bpe.decode([*run], skip_special_tokens=False) if known else "\N{REPLACEMENT CHARACTER}" * len([*run])
            for known, run in runs
        )


# ---------------------------------------------------------------------------------------------------------------------
# Characters of chess lines


class LineTokens:
    """Characters of P and A lines, with a token for each empty square, each named square and a number's decimals.

    Each field of a position has its full width, and a history its ten moves, so a square, a clock's last digit and the
    last move always have the same place; `decode` takes the filling out.  Ruoss et al. (2024) spell positions like
    this.  Repeated blanks become single ones.
    """

    longest = 98  # a position, its reward and flags, END
    FEN = re.compile(r"((?:[1-8pnbrqkPNBRQK]+/){7}[1-8pnbrqkPNBRQK]+) ([wb]) (-|K?Q?k?q?) (-|[a-h][36]) (\d+) (\d+)")
    HISTORY = re.compile(r"\+([^+]*)\+$")  # at the end of an A prompt
    TOKEN = re.compile(r"[AP]: |M:| [EB]:| ?[a-h][1-8]| [wb]|\.\d\d|.")
    VOCABULARY = (
        END, *"_~pnbrqkPNBRQK/ w-acdefgh0123456789+.", "A: ", "P: ", "M:", " E:", " B:", " w", " b",
        *(blank + file + rank for blank in ("", " ") for file in "abcdefgh" for rank in "12345678"),
        *(f".{number:02}" for number in range(100)),
    )  # fmt: skip

    def __init__(self) -> None:
        self._ids = {token: i for i, token in enumerate(self.VOCABULARY)}
        self.end = 0
        self.size = len(self.VOCABULARY)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt or an answer, without the end token."""

        def widen(fen: re.Match[str]) -> str:
            board, side, castling, passing, *clocks = fen.groups()
            board = re.sub(r"\d", lambda digit: "_" * int(digit[0]), board)
            passing += "~" if passing == "-" else "~~"  # a blank and a dash are two tokens, a square with its blank one
            return f"{board} {side} {castling:~<4} {passing}" + "".join(f" {clock:~>3}" for clock in clocks)

        text = " ".join(text.split())
        if text.startswith("A:"):  # a move is two tokens
            text = self.HISTORY.sub(lambda moves: f"+{'~' * (20 - 2 * len(moves[1].split()))}{moves[1]}+", text)
        try:
            return [self._ids[token] for token in self.TOKEN.findall(self.FEN.sub(widen, text))]
        except KeyError as unknown:
            raise ValueError(f"no chess token for {unknown.args[0]!r} in {text!r}") from None

    def decode(self, ids: list[int]) -> str:
        """The tokens one after the other, without filling, and with each row of empty squares as its number."""
        text = "".join(self.VOCABULARY[i] for i in ids).replace("~", "")
        return re.sub("_+", lambda gap: str(len(gap[0])), text).strip()


# ---------------------------------------------------------------------------------------------------------------------
# Chess

SQUARES = [file + rank for rank in "12345678" for file in "abcdefgh"]
PROMOTIONS = [file + rank + piece for rank in "18" for file in "abcdefgh" for piece in "qrbn"]  # target squares
HISTORY, CANDIDATES = 10, 5  # at most this many moves in an A line, with its own, and in a P line
EMPTY = ("none", "")  # fills a short history

Token = tuple[str, str]  # kind and text


VOCABULARY: tuple[Token, ...] = (
    ("end", ""),
    EMPTY,
    *(("mark", text) for text in ("A: ", "P: ", "M:", " E:", " B:", "+")),
    *(("square", piece) for piece in ".PNBRQKpnbrqk"),
    *(("side", side) for side in (" w", " b")),
    *(("castling", " " + ("".join(right for i, right in enumerate("KQkq") if bits >> i & 1) or "-"))
      for bits in range(16)),
    *(("en passant", " " + square) for square in ("-", *(square for square in SQUARES if square[1] in "36"))),
    *((f"mod {by}", f" {rest} mod {by}") for by in (14, 15) for rest in range(by)),
    *((past + "from", " " + square) for past in ("", "past ") for square in SQUARES),
    *((past + "to", square) for past in ("", "past ") for square in (*SQUARES, *PROMOTIONS)),
    *(("number", str(number)) for number in range(1, CANDIDATES + 1)),
    *(("whole", f" {sign}{number}.") for sign in ("", "-") for number in range(100)),
    *(("hundredths", f"{number:02}") for number in range(100)),
    *(("reward", reward) for reward in ("+0.001", "+1.0", "+0.5", "+-1.0")),
    *(("flag", flag) for flag in ("+0", "+1")),
)  # fmt: skip

FEN = r"([1-8pnbrqkPNBRQK/]+) ([wb]) (-|K?Q?k?q?) (-|[a-h][36]) (0|[1-9]\d*) (0|[1-9]\d*)"
MOVES = r"((?: ?[a-h][1-8][a-h][1-8][qrbn]?)*)"
SHAPES = {
    "A prompt": re.compile(rf"A: ?{FEN}\+{MOVES}\+{MOVES}\+"),
    "P prompt": re.compile(rf"P: ?{FEN}"),
    "A answer": re.compile(rf"{FEN}(\+-?[\d.]+)(\+[01])(\+[01])"),
    "P answer": re.compile(rf"M:{MOVES} E:((?: -?\d+\.\d\d)*) B:{MOVES}"),
}


def position(board: str, *fields: str) -> list[Token]:
    """The six fields of a FEN: 64 squares and seven more tokens."""
    rows = [re.sub(r"\d", lambda digit: "." * int(digit[0]), row) for row in board.split("/")]
    if [len(row) for row in rows] != [8] * 8:
        raise ValueError(f"{board} is no board")
    if too_late := [clock for clock in fields[3:] if int(clock) >= 14 * 15]:
        raise ValueError(f"no chess token for {too_late[0]!r}")
    tokens = [("square", piece) for piece in "".join(rows)]
    tokens += [(kind, " " + field) for kind, field in zip(("side", "castling", "en passant"), fields[:3], strict=True)]
    return tokens + [(f"mod {by}", f" {int(clock) % by} mod {by}") for clock in fields[3:] for by in (14, 15)]


def clock_of(rests: re.Match[str]) -> str:
    """The number below 210 with these remainders: 15 has 1 and 0, and -14 has 0 and 1."""
    return str((15 * int(rests[1]) - 14 * int(rests[2])) % 210)


def squares_of(moves: str, past: str = "") -> list[Token]:
    """Two tokens for each move of a line; a history has its own, so that the move to make is no one of many."""
    return [token for uci in moves.split() for token in ((past + "from", " " + uci[:2]), (past + "to", uci[2:]))]


class ChessTokens:
    """Tokens of the prompts and answers of P and A lines; repeated blanks in the text become single ones.

    A move is two tokens, because the model has to find its squares on the board.
    """

    longest = 75  # 71 of a position, reward, two flags, end

    def __init__(self) -> None:
        self._ids = {token: i for i, token in enumerate(VOCABULARY)}
        self.end = 0
        self.size = len(VOCABULARY)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt or an answer, without the end token."""
        text = " ".join(text.split())
        for shape, pattern in SHAPES.items():
            if parts := pattern.fullmatch(text):
                try:
                    return [self._ids[token] for token in self._tokens(shape, parts.groups())]
                except KeyError as unknown:
                    raise ValueError(f"no chess token for {unknown.args[0][1].strip()!r} in {text!r}") from None
        raise ValueError(f"neither prompt nor answer of a P or A line: {text!r}")

    def _tokens(self, shape: str, parts: tuple[str, ...]) -> list[Token]:
        if shape == "P prompt":
            return [("mark", "P: "), *position(*parts)]
        if shape == "A answer":
            return [*position(*parts[:6]), ("reward", parts[6]), ("flag", parts[7]), ("flag", parts[8])]
        if shape == "A prompt":
            move, history = squares_of(parts[6]), squares_of(parts[7], "past ")
            unused = 2 * HISTORY - len(history)  # they come first, so the last move is always at the same position
            if len(move) != 2 or unused < 0:
                raise ValueError(f"not one move, or a history of more than {HISTORY}: {parts[6] + '+' + parts[7]!r}")
            return [("mark", "A: "), *position(*parts[:6]), ("mark", "+"), *move, ("mark", "+"),
                    *[EMPTY] * unused, *history, ("mark", "+")]  # fmt: skip
        moves, best = parts[0].split(), parts[2].strip()
        if best not in moves:
            raise ValueError(f"{best!r} is none of the moves {parts[0]}")
        evals = [token for number in parts[1].split()
                 for token in (("whole", f" {number[:-2]}"), ("hundredths", number[-2:]))]  # fmt: skip
        return [("mark", "M:"), *squares_of(parts[0]), ("mark", " E:"), *evals, ("mark", " B:"),
                ("number", str(moves.index(best) + 1))]  # fmt: skip

    def decode(self, ids: list[int]) -> str:
        """Concatenate the tokens' texts; squares are written row by row, a move's number as the move."""
        text, tokens = "", [VOCABULARY[i] for i in ids]
        moves = [a[1] + b[1] for a, b in pairwise(tokens) if (a[0], b[0]) == ("from", "to")]
        for kind, run in groupby(tokens, key=lambda token: token[0]):
            part = "".join(piece for _, piece in run)
            if kind == "square":
                rows = (part[i : i + 8] for i in range(0, len(part), 8))
                part = "/".join(re.sub(r"\.+", lambda gap: str(len(gap[0])), row) for row in rows)
            if kind == "number":
                part = "".join(move for digit in part for move in moves[int(digit) - 1 : int(digit)])
            text += part
        text = re.sub(r"(\d+) mod 14 (\d+) mod 15", clock_of, text)
        return text.replace("+ ", "+").strip()
