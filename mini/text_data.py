"""A text as token ids: training part, held-out part, and baselines that count.

B windows    T tokens to predict, after one that is given    V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path

import torch
from torch import Tensor, nn

from mini.config import TextConfig
from mini.files import write_whole
from mini.tokens import BpeTokens
from toolkit import UsageError

HELD_OUT = 10  # one part in so many, the last, is held out


class CharTokens:
    """One token per character of a text, in code point order."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self.size = len(self.alphabet)
        self._ids = {character: i for i, character in enumerate(self.alphabet)}

    def encode(self, text: str) -> list[int]:
        """One id per character."""
        return [self._ids[character] for character in text]

    def decode(self, ids: list[int]) -> str:
        """The text of any ids."""
        return "".join(self.alphabet[i] for i in ids)


@dataclass(frozen=True)
class Corpus:
    """A text in tokens."""

    tokens: CharTokens | BpeTokens
    train: Tensor  # ids
    held_out: Tensor  # ids

    def held_out_windows(self, T: int, count: int) -> Tensor:
        """At most `count` windows, evenly spread, with no predicted token in two of them: (B, T + 1)."""
        every = self.held_out.unfold(0, T + 1, T)
        return every[torch.linspace(0, len(every) - 1, min(count, len(every))).long()]


def draw_windows(ids: Tensor, T: int, count: int, seed: int, step: int) -> Tensor:
    """A step's random windows; they depend on seed and step alone: (B, T + 1).  cpp/train.cpp draws the same."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)  # it silently drops higher bits
    starts = torch.randint(len(ids) - T, (count,), generator=generator)
    return ids.unfold(0, T + 1, 1)[starts]


def read_text(path: Path | None) -> str:
    """A file's text, or 465 KB of English and code that come with every Python."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--data {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--data {path} is no UTF-8 text") from None


def build_corpus(config: TextConfig, T: int, folder: Path) -> Corpus:
    """The text of --data as a corpus; its ids are also written to tokens.bin, 16 bits each, lower byte first.

    Raises UsageError if a resumed run began with another text.
    """
    text = read_text(config.data)
    tokens = CharTokens(text) if config.tokens == "char" or config.vocabulary is None else BpeTokens(config.vocabulary)
    ids = torch.tensor(tokens.encode(text))
    if len(ids) < HELD_OUT * (T + 2) or tokens.size > 2**16:
        raise UsageError(f"the text has {len(ids)} tokens, {tokens.size} different ones; windows of {T} need "
                         f"{HELD_OUT * (T + 2)}, and of 65536 different ones at most")  # fmt: skip
    data = ids.to(torch.uint16).numpy().astype("<u2").tobytes()
    path = folder / "tokens.bin"
    if config.resume and not (path.exists() and path.read_bytes() == data):
        raise UsageError(f"the text is not the one that the run in {folder} began with")
    write_whole(path, methodcaller("write", data))
    split = len(ids) - len(ids) // HELD_OUT
    return Corpus(tokens, ids[:split], ids[split:])


# ---------------------------------------------------------------------------------------------------------------------
# Baselines that count


class Counts(nn.Module):
    """Log-probabilities from counts of the training text, with one added to each (Laplace).

    It has a GPT's interface, so it can serve as its reference: the hidden state of a token is its row of the table.
    Most pairs of byte-pair tokens never occur, so the counts are sparse.
    """

    def __init__(self, ids: Tensor, V: int, bigram: bool = True) -> None:
        super().__init__()
        self.V, self.bigram = V, bigram
        before = ids[:-1] if bigram else torch.zeros_like(ids[:-1])
        pairs = torch.stack((before, ids[1:]))
        self.counts = torch.sparse_coo_tensor(pairs, torch.ones(len(ids) - 1), (V, V), check_invariants=True).coalesce()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(N, T) -> (N, T)."""
        return ids if self.bigram else torch.zeros_like(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows (N, T) -> log-probabilities (N, T, V)."""
        rows: Tensor = self.counts.index_select(0, hidden.flatten()).to_dense() + 1
        return (rows / rows.sum(1, keepdim=True)).log().view(*hidden.shape, self.V)
