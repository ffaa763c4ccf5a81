"""Small models, and slow but plain ways to the numbers that the package works out in batches."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import mini.__main__
from mini.model import GPT, GptConfig

ROOT = Path(__file__).resolve().parents[2]
SMALL = GptConfig(n_layer=2, n_head=4, n_embd=32, n_positions=64, vocab_size=50)
LATENT = dataclasses.replace(SMALL, latent=6)
END = 0


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
