"""Text to token ids and back: GPT-2's byte pairs, and characters of chess lines.

Byte pairs cut a position into pieces of uneven length, so a small model has to count before it can copy a square.
Characters, with a token for each empty square, do not.  Both vocabularies round-trip exactly.
"""

from __future__ import annotations

import re
from itertools import groupby
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
