"""Pretraining: a new GPT-2 learns chess lines by likelihood, from GPT-2's own start values.

    python -m mini data --out FOLDER --a-lines 400000 --p-lines 400000 --game-lines 800000
    python -m mini pretrain --data FOLDER --log-dir RUN            RUN/model is for --init

A killed run goes on from its last checkpoint with --resume, to the same numbers.  Documents are checked when they are
drawn, so millions of lines need no time at the start.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from mini.chess_lines import (
    KINDS,
    ChessTask,
    Corpus,
    Example,
    Kind,
    best_first,
    evaluate,
    mirrored,
    prompts_of,
    read_example,
    tables,
    usual_held_out,
)
from mini.config import PretrainConfig
from mini.grpo import Learner, likelihood_steps, make_learner, score
from mini.model import GPT, GptConfig, Rows, Sampling
from mini.runs import Figures, Run, device_of, digest, load_model, restore, save_model, say
from mini.tokens import LineTokens, Tokens
from toolkit import UsageError

POSITIONS = 256  # the longest A line has 220 tokens
WARM_UP = 200  # steps in which the learning rate rises
HELD_OUT = ("nats a character, P", "nats a character, A")

Lines = dict[Kind, list[str]]


def read_lines(path: Path) -> Lines:
    """The P and A lines of a corpus, or of all of a folder's."""
    lines: Lines = {"P": [], "A": []}
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    try:
        for file in files:
            with file.open(encoding="utf-8") as text:
                for line in text:
                    lines["P" if "P:" in line[:16] else "A"].append(line)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not all(lines.values()):
        raise UsageError(f"{path} needs P and A lines: see python -m mini data --help")
    say(f"{len(lines['P'])} P and {len(lines['A'])} A lines")
    return lines


def take_out(lines: Lines, count: int, tokens: Tokens) -> dict[Kind, list[Example]]:
    """Held-out documents, evenly spread over the lines of each task."""
    held_out: dict[Kind, list[Example]] = {"P": [], "A": []}
    for kind in KINDS:
        for line in lines[kind][:: max(1, len(lines[kind]) // (2 * count))]:
            with contextlib.suppress(ValueError):
                held_out[kind] += [read_example(line, tokens)] if len(held_out[kind]) < count else []
    return held_out


def documents(
    lines: Lines, held_out: set[str], tokens: Tokens, config: PretrainConfig
) -> Callable[[int], list[Example]]:
    """A step's documents: they depend on --seed and the step alone, so a resumed run draws the same."""

    def draw(step: int) -> list[Example]:
        rng, items = random.Random(f"pretrain {config.seed} {step}"), list[Example]()
        p_count = int(config.batch_size * config.p_share + rng.random())
        while len(items) < config.batch_size:
            kind: Kind = "P" if len(items) < p_count else "A"
            try:
                example = read_example(rng.choice(lines[kind]), tokens)
            except ValueError:  # another one is drawn
                continue
            if kind == "P":
                example = best_first(mirrored(example) if rng.random() < 0.5 else example)
            if example.prompt not in held_out:
                items.append(example)
        return items

    return draw


@torch.no_grad()
def held_out_loss(model: GPT, task: ChessTask) -> dict[str, float]:
    """Nats for each character of the right answers, so models with different tokens compare."""
    figures = {}
    for kind in KINDS:
        items, nats = [best_first(e) if kind == "P" else e for e in task.corpus.held_out[kind]], 0.0
        for i in range(0, len(items), 32):
            nats -= score(model, task.rows(items[i : i + 32], model.device), 1.0)[0].sum().item()
        figures[f"nats a character, {kind}"] = nats / sum(len(item.answer) + 1 for item in items)
    return figures


class Steps(Dataset[Rows]):
    """The rows of each step, for a DataLoader: its workers read lines while a GPU computes."""

    def __init__(self, rows: Callable[[int], Rows]) -> None:
        self.rows = rows

    def __getitem__(self, step: int) -> Rows:
        return self.rows(step)


def pretraining(learner: Learner, steps: Steps, task: ChessTask, config: PretrainConfig) -> Iterator[dict[str, float]]:
    """Supervised steps; every --eval-steps and at the end also the held-out loss."""
    device = learner.model.device
    workers = 0 if device.type == "cpu" else max(1, (os.cpu_count() or 1) - 2)
    coming = iter(DataLoader(steps, batch_size=None, sampler=range(learner.step, config.steps), num_workers=workers,
                             prefetch_factor=4 if workers else None))  # fmt: skip
    draw: Callable[[int], Rows] = lambda step: next(coming).to(device)  # noqa: E731
    for figures in likelihood_steps(learner, draw, config.steps, decay=config.lr_decay, warmup=WARM_UP):
        last = learner.step == config.steps
        yield figures | (held_out_loss(learner.model, task) if last or learner.step % config.eval_steps == 0 else {})


def pretrain_command(config: PretrainConfig) -> dict[str, Any]:
    """Train a new model; write it in 16 bits; report on held-out lines of the corpus and of the chess job."""
    began, run, tokens = time.perf_counter(), Run(config), LineTokens()
    checkpoint = run.load() if config.resume else None
    lines = read_lines(config.data)
    corpus = take_out(lines, config.held_out, tokens)
    task, usual = (ChessTask(tokens, config, Corpus({}, held)) for held in (corpus, usual_held_out(config.held_out)))
    draw = documents(lines, prompts_of(corpus) | prompts_of(usual.corpus.held_out), tokens, config)
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    shape = GptConfig(config.n_layer, config.n_head, config.n_embd, POSITIONS, tokens.size)
    model = load_model(config.init) if config.init else GPT(shape)
    model.to(device_of(config.device))
    say(f"a model of {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, on {model.device}")
    learner = make_learner(model, model, config.lr, config.seed)
    run.begin()
    if checkpoint:
        restore(learner.restore, checkpoint, run.saved)
    curve = run.extra.setdefault("curve", [])  # goes with the checkpoint

    def line(figures: Figures) -> str | None:
        if held_out := {name: value for name, value in figures.items() if name in HELD_OUT}:
            curve.append({"step": learner.step, "loss": figures["loss"], "seconds": learner.seconds, **held_out})
        elif learner.step % 100:
            return None
        shown = "".join(f"  {name} {value:.4f}" for name, value in held_out.items())
        said = f"step {learner.step}/{config.steps}  loss {figures['loss']:.4f}{shown}"
        return f"{said}  {learner.tokens / learner.seconds:.0f} tokens a processor second"

    cpu = torch.device("cpu")
    run.follow(learner, pretraining(learner, Steps(lambda step: task.rows(draw(step), cpu)), task, config), line)
    save_model(model, tokens, run.folder / "model", torch.float16)
    model = load_model(run.folder / "model").to(model.device)  # what is reported is what was written
    reports = {}
    for name, part in (("the corpus", task), ("the chess job", usual)):
        for how, temperature in (("", config.temperature), (", likeliest", 0.0)):
            sampling = Sampling(temperature, config.top_k, config.top_p, config.max_new_tokens or tokens.longest)
            reports[name + how] = evaluate(model, part, sampling)
    say(tables(reports))
    say(f"{run.folder / 'model'}: the weights, SHA-256 {digest(run.folder / 'model')}")
    return {**reports, "curve": curve, "steps": learner.step, "tokens": learner.tokens,
            "train_seconds": learner.seconds, "seconds": time.perf_counter() - began}  # fmt: skip
