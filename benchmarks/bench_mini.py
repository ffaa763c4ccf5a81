#!/usr/bin/env python3
"""Measures `mini/`: what chess learns beside its controls, generation, whole steps, memory.

    python benchmarks/bench_mini.py                         speed, about two minutes
    python benchmarks/bench_mini.py --parts curves          the default job with three seeds, one after the other
    python benchmarks/bench_mini.py --parts variants        one option changed at a time
    python benchmarks/bench_mini.py --parts large           a step of GPT-2's 124 M shape, 8 prompts x 8 completions

speed: tokens per second against transformers' generate with the same weights, prompts and options; seconds per step
(one update) against the same step with completions generated one at a time; several times in turns.
curves: writes docs/mini_learning.svg, with all controls as dashed lines, and prints a table in Markdown.

Prints tables and one JSON line.  Exits with code 1 if a target is missed: generation at least as fast as transformers',
a step at least 5 times as fast as with one completion at a time, the large step within 24 GiB.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402

from mini.chess_lines import ChessTask, build_corpus, prepare  # noqa: E402
from mini.config import ChessConfig  # noqa: E402
from mini.grpo import Learner, train  # noqa: E402
from mini.model import GPT, GptConfig, Rows, Sampling, generate  # noqa: E402
from mini.runs import LineTokens, save_model  # noqa: E402

VARIANTS: dict[str, tuple[str, ...]] = {  # options that differ from the defaults
    "default": (),
    "--kl-coef 0.02": ("--kl-coef", "0.02"),
    "--kl-coef 0.02 --kl-type squared": ("--kl-coef", "0.02", "--kl-type", "squared"),
    "--kl-coef 0.02 --kl-type forward": ("--kl-coef", "0.02", "--kl-type", "forward"),
    "--kl-coef 0.02 --kl-type reverse": ("--kl-coef", "0.02", "--kl-type", "reverse"),
    "--no-scale-by-std": ("--no-scale-by-std",),
    "--baseline-type rloo": ("--baseline-type", "rloo"),
    "--baseline-type adaptive": ("--baseline-type", "adaptive"),
    "--baseline-type ema": ("--baseline-type", "ema"),
}
SPEED_UP, LARGE_GIB = 5.0, 24.0


@dataclass(frozen=True)
class Args:
    """What to measure."""

    parts: tuple[Literal["speed", "curves", "variants", "large"], ...] = ("speed",)
    repetitions: int = 5  # per side, in turns
    prompts: int = 8
    completions: int = 8  # per prompt
    seeds: tuple[int, ...] = (1, 2, 3)
    jobs: int = 2  # variants at a time, one thread each
    output_dir: Path = ROOT / "outputs" / "bench-mini"  # keeps the runs; a finished run is not repeated
    figure: Path = ROOT / "docs" / "mini_learning.svg"


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def theirs(model: Any, prompts: list[list[int]], k: int, sampling: Sampling, end: int) -> int:
    """Number of tokens that transformers' generate makes, up to each row's end."""
    longest = max(map(len, prompts))
    rows = [[end] * (longest - len(prompt)) + prompt for prompt in prompts for _ in range(k)]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts for _ in range(k)]
    out = model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=end,
        pad_token_id=end,
    )[:, longest:]
    return int(((out == end).cumsum(1) - (out == end).int() == 0).sum())


def one_at_a_time(
    model: GPT, prompts: list[list[int]], k: int, sampling: Sampling, end: int, generator: torch.Generator | None
) -> tuple[Rows, torch.Tensor]:
    """The same number of completions, one call each: with a cache, but no batch."""
    made = [generate(model, [prompt], 1, sampling, end, generator) for prompt in prompts for _ in range(k)]
    answers = [rows.answer_ids[0].tolist() for rows, _ in made]
    rows = Rows.of_documents([prompt for prompt in prompts for _ in range(k)], answers, end)
    return replace(rows, K=k), pad_sequence([log_probs[0] for _, log_probs in made], batch_first=True)


def measure_generation(args: Args, task: ChessTask, model: GPT) -> dict[str, Any]:
    """Tokens per second of both sides, in turns."""
    from transformers import GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as folder:
        save_model(model, task.tokens, Path(folder))
        other = GPT2LMHeadModel.from_pretrained(folder).eval()
    rng, sampling = random.Random(0), Sampling(0.8, 50, 0.95, task.tokens.longest)
    rates: dict[str, list[float]] = {"mini": [], "transformers": []}
    for _ in range(args.repetitions + 1):
        prompts = [task.prompt_ids(item) for item in task.draw(rng, args.prompts)]
        began = time.perf_counter()
        rows, _ = generate(model, prompts, args.completions, sampling, task.end)
        rates["mini"].append(int(rows.answer_mask.sum()) / (time.perf_counter() - began))
        began = time.perf_counter()
        count = theirs(other, prompts, args.completions, sampling, task.end)
        rates["transformers"].append(count / (time.perf_counter() - began))
    return {name: values[1:] for name, values in rates.items()}  # the first round warms up


def measure_steps(args: Args, task: ChessTask, model: GPT) -> dict[str, Any]:
    """Seconds of whole steps, batched and one completion at a time."""
    import mini.grpo

    sampling = Sampling(0.8, 50, 0.95, task.tokens.longest)
    ways: dict[str, Callable[..., tuple[Rows, torch.Tensor]]] = {"batched": generate, "one at a time": one_at_a_time}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(args.repetitions):
        for name, way in ways.items():
            config = ChessConfig(steps=1, batch_size=args.prompts, k_samples=args.completions, updates=1)
            learner = Learner(model, model, 0.0, config.seed)
            model.requires_grad_(True)
            mini.grpo.generate = way  # type: ignore[attr-defined]
            mini.grpo.clock = lambda model: time.perf_counter  # both threads' time would count for one side only
            (figures,) = train(learner, task, config, sampling)
            mini.grpo.generate = generate  # type: ignore[attr-defined]
            seconds[name].append({part: value for part, value in figures.items() if part.startswith("seconds")})
    return seconds


def speed(args: Args, console: Console) -> tuple[dict[str, Any], bool]:
    """Both comparisons, with the shipped model, as speed depends on the length of answers."""
    options = ChessConfig()
    model, tokens, _ = prepare(options)
    task = ChessTask(tokens, options, build_corpus(options, tokens))
    rates, steps = measure_generation(args, task, model), measure_steps(args, task, model)
    shape = f"{args.prompts} prompts x {args.completions} completions, {torch.get_num_threads()} threads"
    shown = Table("", "median", "lowest", "highest", title=shape)
    rows = [(f"{name}, tokens a second", values) for name, values in rates.items()]
    rows += [
        (f"{name}, {part} a step", [step[part] for step in values])
        for name, values in steps.items()
        for part in values[0]
    ]
    for name, values in rows:
        shown.add_row(name, *(f"{f(values):.2f}" for f in (statistics.median, min, max)))
    console.print(shown)
    faster = statistics.median(rates["mini"]) / statistics.median(rates["transformers"])
    batched, single = (statistics.median(step["seconds"] for step in values) for values in steps.values())
    console.print(
        f"generation {faster:.1f} times as fast as transformers', "
        f"a step {single / batched:.1f} times as fast as one completion at a time"
    )
    result = {"tokens_per_second": rates, "steps": steps, "generation_ratio": faster, "step_ratio": single / batched}
    return result, faster >= 1 and single / batched >= SPEED_UP


# ---------------------------------------------------------------------------------------------------------------------
# A large step


def large(args: Args, console: Console) -> tuple[dict[str, Any], bool]:
    """A step with random weights in GPT-2's shape, which write full-length answers; peak memory of the process."""

    class Documents(ChessTask):
        """Prompts and answers as long as RookWorld-LM's."""

        def prompt_ids(self, item: Any) -> list[int]:
            return random.Random(item.prompt).choices(range(1000), k=48 if item.kind == "P" else 88)

    torch.manual_seed(0)
    options = ChessConfig(a_lines=100)
    task = Documents(LineTokens(), options, build_corpus(options, LineTokens()))
    task.end = 50256
    task.tokens.decode = lambda ids: ""  # type: ignore[method-assign]
    config = ChessConfig(steps=1, batch_size=args.prompts, k_samples=args.completions)
    model, start = GPT(GptConfig()), GPT(GptConfig())
    start.load_state_dict(model.state_dict())
    learner = Learner(model, start, 1e-5, config.seed)
    steps = [*train(learner, task, config, Sampling(0.8, 50, 0.95, 144))]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    shown = Table("step", "tokens", "generate", "score", "train", "seconds", title=f"124 M, peak memory {peak:.1f} GiB")
    for n, step in enumerate(steps):
        parts = [step[f"seconds{part}"] for part in ("/generate", "/score", "/train", "")]
        tokens = step["length"] * args.prompts * args.completions
        shown.add_row(str(n + 1), f"{tokens:.0f}", *(f"{seconds:.1f}" for seconds in parts))
    console.print(shown)
    return {"steps": steps, "peak_gib": peak}, peak <= LARGE_GIB


# ---------------------------------------------------------------------------------------------------------------------
# Learning curves


def run_job(folder: Path, options: Sequence[object], threads: int) -> dict[str, Any]:
    """Run the chess job in a folder, or read the result of a finished run there."""
    result = folder / "result.json"
    if not result.is_file():
        shutil.rmtree(folder, ignore_errors=True)  # left over from an interrupted run
        command = [sys.executable, "-m", "mini", "chess", "--json", "--log-dir", folder, *options]
        done = subprocess.run(
            [*map(str, command)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{folder.name} ended with exit code {done.returncode}")
        result.write_text(done.stdout.splitlines()[-1])
    return dict(json.loads(result.read_text()))


def read_curve(folder: Path, name: str) -> list[float]:
    """A figure of every step, each as the mean of nine steps around it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = [event.value for event in EventAccumulator(str(folder)).Reload().Scalars(name)]
    return [statistics.fmean(values[max(0, i - 4) : i + 5]) for i in range(len(values))]


def panel(kind: str, curves: list[list[float]], controls: dict[str, float], left: int) -> str:
    """An SVG group: the curves of one task's reward, and controls as dashed lines."""
    width, height, top, colours = 400, 300, 40, ("#0a7d5a", "#c2571a", "#1f6fb2", "#7a4fb5", "#b0304f", "#8a7a12")
    low, high = min(-0.3, *(min(curve) for curve in curves)), 1.0

    def at(value: float) -> float:
        return top + (high - value) / (high - low) * height

    def text(x: float, y: float, words: str, anchor: str = "end") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" fill="#666" text-anchor="{anchor}">{words}</text>'

    parts = [text(left, 22, f"{kind}: mean reward of a step's sampled answers", "start")]
    for mark in (-0.3, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts += [
            f'<path d="M{left} {at(mark):.0f}h{width}" stroke="#8883"/>',
            text(left - 8, at(mark) + 4, f"{mark:.1f}"),
        ]
    for name, value in controls.items():
        parts += [
            f'<path d="M{left} {at(value):.1f}h{width}" stroke="#666" stroke-dasharray="5 4"/>',
            text(left + width - 4, at(value) - 4, name),
        ]
    for curve, colour in zip(curves, colours, strict=False):
        points = " ".join(f"{left + i / max(1, len(curve) - 1) * width:.1f},{at(y):.1f}" for i, y in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts += [
        text(left + i / 4 * width, top + height + 22, f"{round(i / 4 * len(curves[0]))}", "middle") for i in range(5)
    ]
    return "\n".join(parts)


def markdown(columns: dict[str, list[dict[str, Any]]]) -> str:
    """Reports by name, one for each seed, as a table: median (lowest to highest)."""
    shown = {
        "A": ("reward", "validity", "exact_fen"),
        "P": ("reward", "validity", "legal", "king", "moves", "best_move"),
    }
    rows = [["", *(f"{kind} {name.replace('_', ' ')}" for kind, names in shown.items() for name in names)]]
    for label, told in columns.items():
        row = [label]
        for kind, names in shown.items():
            for name in names:
                values = [value for report in told if (value := report.get(kind, {}).get(name)) is not None]
                spread = f" ({min(values):.2f} to {max(values):.2f})" if len({*values}) > 1 else ""
                row.append(f"{statistics.median(values):.2f}{spread}" if values else "")
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def curves(args: Args, console: Console) -> tuple[dict[str, Any], bool]:
    """The default job with each seed, then the figure and a table for the README."""
    folders = [args.output_dir / f"default-{seed}" for seed in args.seeds]
    told = [
        run_job(folder, ("--seed", seed), os.cpu_count() or 1) for folder, seed in zip(folders, args.seeds, strict=True)
    ]
    columns = {name: [one["controls"][name] for one in told] for name in told[0]["controls"]}
    moments = ("before", "before, likeliest", "after", "supervised", "rejection")
    columns |= {name: [one[name] for one in told] for name in moments}
    console.print(markdown(columns), markup=False)
    for name in ("seconds", "train_seconds", "steps"):
        console.print(name, ", ".join(f"{one[name]:.0f}" for one in told))
    panels = []
    for i, kind in enumerate(("A", "P")):
        lines = {
            name: statistics.fmean(report[kind]["reward"] for report in reports)
            for name, reports in columns.items()
            if name not in ("before", "after") and kind in reports[0]
        }
        panels.append(panel(kind, [read_curve(folder, f"reward/{kind}") for folder in folders], lines, 50 + 480 * i))
    args.figure.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 380" font-family="system-ui, '
        'sans-serif" font-size="13">\n' + "\n".join(panels) + "\n</svg>\n"
    )
    return {"runs": told}, True


def variants(args: Args, console: Console) -> tuple[dict[str, Any], bool]:
    """Each variant with the first seed."""
    start = ("--no-control", "--seed", args.seeds[0])

    def run(name: str) -> dict[str, Any]:
        return run_job(args.output_dir / name.strip("-").replace(" ", "-"), (*start, *VARIANTS[name]), 1)

    with ThreadPoolExecutor(args.jobs) as pool:
        told = dict(zip(VARIANTS, pool.map(run, VARIANTS), strict=True))
    console.print(markdown({name: [one["after"]] for name, one in told.items()}), markup=False)
    return told, True


def main(args: Args) -> int:
    """Measure and print."""
    console = Console(width=160)
    measures = {"speed": speed, "curves": curves, "variants": variants, "large": large}
    results, met = dict[str, Any](), True
    for part in args.parts:
        results[part], good = measures[part](args, console)
        met = met and good
    print(json.dumps({"args": asdict(args), "cores": os.cpu_count(), **results, "met": met}, default=str))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
