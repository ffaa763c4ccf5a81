#!/usr/bin/env python3
"""Measures `mini text`: the cost of a step, and what each way of learning reaches.

    python benchmarks/bench_mini_text.py                        speed, about a minute
    python benchmarks/bench_mini_text.py --parts runs           all ways of learning, a table

speed: processor seconds per 1,000 tokens of text, each algorithm against a plain loop in the style of nanoGPT (below)
with the same shape, windows and optimizer; several times in turns.
runs: a table as in mini/README.md, over several seeds; each run is the command that the table names.
Prints tables and one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import tyro  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from mini.config import TextConfig, text_defaults  # noqa: E402
from mini.grpo import KlController, Learner  # noqa: E402
from mini.model import GPT, GptConfig  # noqa: E402
from mini.runs import CharTokens  # noqa: E402
from mini.text import STEPS, Counts, read_text  # noqa: E402

SHAPE = ""  # options of every run
RUNS = {  # rows: options; four are in mini/README.md's table
    "supervised": "--algo supervised",
    "GRPO from a supervised start": "--algo grpo",
    "GRPO from scratch": "--algo grpo --warm-steps 0",
    "GRPO from scratch, own context": "--algo grpo --warm-steps 0 --no-teacher-forcing --steps 150",
    "PPO from a supervised start": "--algo ppo",
    "PPO with gamma 1": "--algo ppo --gamma 1",
    "denoise": "--algo denoise",
}


@dataclass(frozen=True)
class Args:
    """What to measure."""

    parts: tuple[Literal["speed", "runs"], ...] = ("speed",)
    repetitions: int = 7  # per side, in turns
    batch: int = 32  # windows
    horizon: int = 64  # tokens per window
    data: Path | None = None  # text of the runs; default: the text that comes with Python
    rows: tuple[str, ...] = tuple(RUNS)
    seeds: tuple[int, ...] = (1, 2, 3)
    jobs: int = 1  # parallel runs, one thread each
    output_dir: Path = ROOT / "outputs" / "bench-mini-text"  # keeps the runs; a finished run is not repeated


# ---------------------------------------------------------------------------------------------------------------------
# A plain loop


class PlainBlock(nn.Module):
    """A block written without regard to caches or padding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class PlainGpt(nn.Module):
    """A GPT of the same shape as mini's."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.Sequential(*(PlainBlock(config.n_embd, config.n_head) for _ in range(config.n_layer)))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        return F.linear(self.ln_f(self.blocks(x)), self.wte.weight)


def plain_step(model: PlainGpt, optimizer: torch.optim.AdamW, text: Tensor) -> None:
    """Cross-entropy of the next token."""
    logits = model(text[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def take_step(algo: str, learner: Learner, config: TextConfig, text: Tensor) -> Mapping[str, float]:
    """One step of mini's algorithm."""
    return STEPS[algo](learner, text, config)


def speed(args: Args) -> dict[str, Any]:
    """Processor seconds per 1,000 tokens of each algorithm, in turns."""
    text = read_text(None)
    tokens = CharTokens(text)
    ids = torch.tensor(tokens.encode(text))
    shape = GptConfig(4, 4, 128, 128, tokens.size)
    plain = PlainGpt(shape)
    steps: dict[str, Callable[[Tensor], object]] = {
        "plain loop": partial(plain_step, plain, torch.optim.AdamW(plain.parameters(), lr=3e-4, betas=(0.9, 0.95)))
    }
    for algo in STEPS:
        for forced in (True, False) if algo in ("grpo", "ppo") else (True,):
            config = replace(text_defaults(algo), teacher_forcing=forced, horizon=args.horizon, epochs=4, minibatches=4)
            model = GPT(replace(shape, vocab_size=tokens.size + (algo == "denoise")))
            learner = Learner(model, Counts(ids, tokens.size), config.lr, 1, value_lr=config.lr,
                                   kl=KlController(config.kl_coef))  # fmt: skip
            name = algo if forced else f"{algo}, free"
            steps[name] = partial(take_step, algo, learner, config)
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.repetitions + 1):
        window = ids[turn * 3000 :].unfold(0, args.horizon + 1, 7)[: args.batch]
        for name, take in steps.items():
            began = time.process_time()
            take(window)
            spent[name].append((time.process_time() - began) / (args.batch * args.horizon) * 1000)
    spent = {name: values[1:] for name, values in spent.items()}  # the first round warms up
    base = statistics.median(spent["plain loop"])
    print(
        f"| {args.batch} x {args.horizon} characters a step | processor seconds per 1,000 | times the plain loop |\n"
        "| --- | --- | --- |"
    )
    for name, values in spent.items():
        middle = statistics.median(values)
        print(f"| {name} | {middle:.3f} ({min(values):.3f} to {max(values):.3f}) | {middle / base:.2f} |")
    return spent


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def run(args: Args, row: str, seed: int) -> dict[str, Any]:
    """Train if needed and return the run's result."""
    words = f"{SHAPE} {RUNS[row]} --seed {seed} --track none --json --log-dir".split()
    words += [str(folder := args.output_dir / f"{row.replace(' ', '-')}-{seed}")]
    words += ["--data", str(args.data)] if args.data else []
    known = folder / "words"  # the command of the run that result.json belongs to
    if not (known.is_file() and known.read_text().split("\n") == words):
        (folder / "checkpoint.pt").unlink(missing_ok=True)  # left over from an interrupted run
        done = subprocess.run(
            [sys.executable, "-m", "mini", "text", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{row}, seed {seed}: {done.stderr[-2000:]}")
        (folder / "result.json").write_text(done.stdout.splitlines()[-1])
        known.write_text("\n".join(words))
    return dict(json.loads((folder / "result.json").read_text()))


def runs(args: Args) -> dict[str, Any]:
    """A table as in mini/README.md: of each figure the seeds' median (lowest to highest)."""
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {row: [pool.submit(run, args, row, seed) for seed in args.seeds] for row in args.rows}
        results = {row: [job.result() for job in told] for row, told in jobs.items()}

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    def moved(told: list[dict[str, Any]], name: str) -> str:
        before, after = ([one[when][name] for one in told] for when in ("before", "after"))
        return f"{statistics.median(before):.2f} → {spread(after)}"

    names = ("bits", "right", "p_right")
    columns = ("", *names, *(f"likelihood, as long: {name}" for name in names), "processor seconds", "options")
    print(f"| {' | '.join(columns)} |")
    print("| --- " * len(columns) + "|")
    for row, told in results.items():
        controls = [one["baselines"]["supervised"] for one in told if "supervised" in one["baselines"]]
        cells = [moved(told, name) for name in names]
        cells += [spread([control[name] for control in controls]) if controls else "" for name in names]
        seconds = [one["train_seconds"] for one in told]
        print(f"| {row} | {' | '.join(cells)} | {min(seconds):.0f} to {max(seconds):.0f} | `{RUNS[row]}` |")
    for row in dict.fromkeys((args.rows[0], *({"denoise"} & results.keys()))):  # masked characters have their own
        for name, report in results[row][0]["baselines"].items():
            if name != "supervised":
                print(f"| {name}, beside {row} | {' | '.join(f'{report[figure]:.3f}' for figure in names)} | | | | | |")
    return results


def main(args: Args) -> int:
    """Measure and print."""
    measures = {"speed": speed, "runs": runs}
    results = {part: measures[part](args) for part in args.parts}
    print(json.dumps({"args": asdict(args), "cores": os.cpu_count(), **results}, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
