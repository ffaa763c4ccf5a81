"""Small models, and slow but plain ways to the numbers that the package works out in batches."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import mini.__main__
from mini.model import GPT, GptConfig
from mini.runs import LineTokens, save_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = GptConfig(n_layer=2, n_head=4, n_embd=32, n_positions=64, vocab_size=50)
LATENT = dataclasses.replace(SMALL, latent=6)
END = 0


ENGINE = '''#!{python}
"""Speaks just enough UCI.  The moves are the first legal ones; their evals begin at 0.50 and fall, then it is mated."""
import sys
import chess

count = 1
for line in sys.stdin:
    words = line.split()
    if words[0] == "uci":
        names = ("MultiPV", "Threads", "Hash", "Skill Level")
        print(*(f"option name {{name}} type spin default 1 min 0 max 500" for name in names), "uciok", sep="\\n")
    elif words[0] == "isready":
        print("readyok")
    elif words[:3] == ["setoption", "name", "MultiPV"]:
        count = int(words[-1])
    elif words[0] == "position":
        board = chess.Board() if words[1] == "startpos" else chess.Board(" ".join(words[2:8]))
        for move in words[words.index("moves") + 1:] if "moves" in words else ():
            board.push_uci(move)
    elif words[0] == "go":
        moves = sorted(map(str, board.legal_moves))[:count]
        for n, move in enumerate(moves):
            score = "mate -3" if n == 3 else f"cp {{50 - 35 * n}}"
            print(f"info depth {{words[2]}} multipv {{n + 1}} score {{score}} pv {{move}}")
        print(f"bestmove {{moves[0]}}")
    elif words[0] == "quit":
        break
    sys.stdout.flush()
'''


def fake_engine(folder: Path) -> Path:
    """The engine above as a program."""
    path = folder / "engine"
    path.write_text(ENGINE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def untrained(folder: Path) -> Path:
    """A folder with a chess model that knows nothing."""
    model = small_model(config=GptConfig(n_layer=2, n_head=4, n_embd=32, n_positions=256, vocab_size=LineTokens().size))
    save_model(model, LineTokens(), folder)
    return folder


def small_model(seed: int = 0, spread: float = 6.0, config: GptConfig = SMALL) -> GPT:
    """Random weights, wide enough that the next token is not a coin toss."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(spread)
    return model


def log_probs_of(model: GPT, document: Sequence[int], temperature: float = 1.0) -> list[list[float]]:
    """log p(token | the document before it) for every token of the vocabulary: alone, without padding or cache."""
    ids = torch.tensor([list(document)])
    with torch.no_grad():
        logits = model.logits(model(ids, torch.ones_like(ids)))[0].double() / temperature
    sums = [math.log(sum(map(math.exp, row))) for row in logits.tolist()]
    return [[value - total for value in row] for row, total in zip(logits.tolist(), sums, strict=True)]


def run_mini(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The package as its user runs it, but in this process: torch takes seconds to import."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = mini.__main__.main([*map(str, arguments)])
    return subprocess.CompletedProcess([*map(str, arguments)], code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Put tensors whose device is not stated on one without memory: whoever uses them with a model here fails."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
