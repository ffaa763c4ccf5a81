#!/usr/bin/env python3
"""Measures `mini/`: generation, whole steps, memory, and the effect of KL types and baselines.

    python benchmarks/bench_mini.py                         speed, about two minutes
    python benchmarks/bench_mini.py --parts curves          learning curves: 18 runs of the default job
    python benchmarks/bench_mini.py --parts large           a step of GPT-2's 124 M shape, 8 prompts x 8 completions

speed: tokens per second against transformers' generate with the same weights, prompts and options; seconds per step
(one update) against the same step with completions generated one at a time; several times in turns.
curves: one option changed at a time, over several seeds, each from its seed's warm start; writes docs/mini_learning.svg
and prints a table in Markdown.

Prints tables and one JSON line.  Exits with code 1 if a target is missed: generation at least as fast as transformers',
a step at least 5 times as fast as with one completion at a time, the large step within 24 GiB.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.nn.functional import pad  # noqa: E402

from mini.chess_task import EMBEDDED, ChessTask  # noqa: E402
from mini.config import EMBEDDED_LR, ChessConfig, EvalConfig  # noqa: E402
from mini.generate import Completions, Sampling, generate, left_pad  # noqa: E402
from mini.model import GPT, GptConfig  # noqa: E402
from mini.tokens import ChessTokens  # noqa: E402
from mini.train import make_learner, train  # noqa: E402
from mini.weights import save_model  # noqa: E402

VARIANTS: dict[str, tuple[tuple[str, ...], str]] = {  # options that differ from the defaults, and a colour
    "group_mean, forward": ((), "#0a7d5a"),
    "reverse": (("--kl-type", "reverse"), "#c2571a"),
    "symmetric": (("--kl-type", "symmetric"), "#7a4fb5"),
    "ema": (("--baseline-type", "ema"), "#1f6fb2"),
    "adaptive": (("--baseline-type", "adaptive"), "#b0304f"),
    "rloo": (("--baseline-type", "rloo"), "#8a7a12"),
}
SPEED_UP, LARGE_GIB = 5.0, 24.0


@dataclass(frozen=True)
class Args:
    """What to measure."""

    parts: tuple[Literal["speed", "curves", "large"], ...] = ("speed",)
    repetitions: int = 5  # per side, in turns
    prompts: int = 8
    completions: int = 8  # per prompt
    seeds: tuple[int, ...] = (1, 2, 3)
    steps: int = 40  # per learning curve
    jobs: int = 2  # parallel runs, one thread each
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
        torch.tensor(rows), attention_mask=torch.tensor(mask), do_sample=True, temperature=sampling.temperature,
        top_k=sampling.top_k, top_p=sampling.top_p, max_new_tokens=sampling.max_new_tokens, eos_token_id=end,
        pad_token_id=end,
    )[:, longest:]  # fmt: skip
    return int(((out == end).cumsum(1) - (out == end).int() == 0).sum())


def one_at_a_time(
    model: GPT, prompts: list[list[int]], k: int, sampling: Sampling, end: int, generator: torch.Generator | None
) -> Completions:
    """The same number of completions, one call each: with a cache, but no batch."""
    made = [generate(model, [prompt], 1, sampling, end, generator) for prompt in prompts for _ in range(k)]
    room = max(one.ids.shape[2] for one in made)
    parts = []
    for name, fill in (("ids", end), ("mask", False), ("log_probs", 0.0)):
        rows = [pad(getattr(one, name)[0, 0], (0, room - one.ids.shape[2]), value=fill) for one in made]
        parts.append(torch.stack(rows).view(len(prompts), k, room))
    return Completions(*left_pad(prompts, end), *parts)


def measure_generation(args: Args, task: ChessTask, model: GPT) -> dict[str, Any]:
    """Tokens per second of both sides, in turns."""
    from transformers import GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as folder:
        save_model(model, task.tokens, Path(folder))
        other = GPT2LMHeadModel.from_pretrained(folder).eval()
    rng, sampling = random.Random(0), Sampling(0.8, task.tokens.top_k, 0.95, task.tokens.longest)
    rates: dict[str, list[float]] = {"mini": [], "transformers": []}
    for _ in range(args.repetitions + 1):
        prompts = [task.prompt_ids(item) for item in task.draw(rng, args.prompts)]
        began = time.perf_counter()
        made = generate(model, prompts, args.completions, sampling, task.end)
        rates["mini"].append(int(made.mask.sum()) / (time.perf_counter() - began))
        began = time.perf_counter()
        count = theirs(other, prompts, args.completions, sampling, task.end)
        rates["transformers"].append(count / (time.perf_counter() - began))
    return {name: values[1:] for name, values in rates.items()}  # the first round warms up


def measure_steps(args: Args, task: ChessTask, model: GPT) -> dict[str, Any]:
    """Seconds of whole steps, batched and one completion at a time."""
    import mini.train

    sampling = Sampling(0.8, task.tokens.top_k, 0.95, task.tokens.longest)
    ways: dict[str, Callable[..., Completions]] = {"batched": generate, "one at a time": one_at_a_time}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(args.repetitions):
        for name, way in ways.items():
            config = ChessConfig(steps=1, batch_size=args.prompts, k_samples=args.completions, updates=1)
            learner = make_learner(model, model, config, 0.0)
            model.requires_grad_(True)
            mini.train.generate = way  # type: ignore[attr-defined]
            (figures,) = train(learner, task, config, sampling)
            mini.train.generate = generate  # type: ignore[attr-defined]
            seconds[name].append({part: value for part, value in figures.items() if part.startswith("seconds")})
    return seconds


def speed(args: Args, console: Console) -> tuple[dict[str, Any], bool]:
    """Both comparisons, with the embedded model after a short warm start so that answers have a realistic length."""
    from mini.chess_task import warm_start

    config = EvalConfig(warm_steps=60, a_lines=4000)
    torch.manual_seed(0)
    model, task = GPT(EMBEDDED), ChessTask(ChessTokens(), config)
    warm_start(model, task, config)
    rates, steps = measure_generation(args, task, model), measure_steps(args, task, model)
    shape = f"{args.prompts} prompts x {args.completions} completions, {torch.get_num_threads()} threads"
    shown = Table("", "median", "lowest", "highest", title=shape)
    rows = [(f"{name}, tokens a second", values) for name, values in rates.items()]
    rows += [(f"{name}, {part} a step", [step[part] for step in values])
             for name, values in steps.items() for part in values[0]]  # fmt: skip
    for name, values in rows:
        shown.add_row(name, *(f"{f(values):.2f}" for f in (statistics.median, min, max)))
    console.print(shown)
    faster = statistics.median(rates["mini"]) / statistics.median(rates["transformers"])
    batched, single = (statistics.median(step["seconds"] for step in values) for values in steps.values())
    console.print(f"generation {faster:.1f} times as fast as transformers', "
                  f"a step {single / batched:.1f} times as fast as one completion at a time")  # fmt: skip
    result = {"tokens_per_second": rates, "steps": steps, "generation_ratio": faster, "step_ratio": single / batched}
    return result, faster >= 1 and single / batched >= SPEED_UP


# ---------------------------------------------------------------------------------------------------------------------
# A large step


def large(args: Args, console: Console) -> tuple[dict[str, Any], bool]:
    """A step with random weights in GPT-2's shape, which write full-length answers; peak memory of the process."""

    class Documents(ChessTask):
        """Prompts and answers as long as RookWorld-LM's."""

        def prompt_ids(self, item: Any) -> list[int]:
            return random.Random(item.prompt).choices(range(1000), k=48 if item.task == "P" else 88)

    torch.manual_seed(0)
    task = Documents(ChessTokens(), EvalConfig(a_lines=100))
    task.end = 50256
    task.tokens.decode = lambda ids: ""  # type: ignore[method-assign]
    config = ChessConfig(steps=1, batch_size=args.prompts, k_samples=args.completions)
    model, start = GPT(GptConfig()), GPT(GptConfig())
    start.load_state_dict(model.state_dict())
    learner = make_learner(model, start, config, 1e-5)
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


def run_variant(args: Args, name: str, seed: int) -> Path:
    """Train if needed and return the run's folder.  All runs of a seed share the first one's warm start."""
    folder = args.output_dir / f"{name.replace(', ', '-')}-{seed}"
    if (folder / "result.json").is_file():
        return folder
    start = args.output_dir / f"{next(iter(VARIANTS)).replace(', ', '-')}-{seed}" / "start"
    options: list[object] = [*VARIANTS[name][0], "--seed", seed, "--steps", args.steps, "--log-dir", folder]
    if VARIANTS[name][0]:
        options += ["--init", start, "--lr", EMBEDDED_LR, "--warm-steps", 0]
    command = [sys.executable, "-m", "mini", "chess", "--json", "--no-control", *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for old in folder.glob("*"):  # left over from an interrupted run
        if old.is_file():
            old.unlink()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: {done.stderr[-2000:]}")
    (folder / "result.json").write_text(done.stdout.splitlines()[-1])
    print(f"{name}, seed {seed}: done", file=sys.stderr, flush=True)
    return folder


def read_curve(folder: Path) -> list[float]:
    """Mean sampled reward per step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars("reward")]


def figure(curves: dict[str, list[list[float]]]) -> str:
    """An SVG: each variant's mean over seeds, smoothed over nine steps."""
    width, height, left, top = 640, 300, 50, 30
    every = [value for runs in curves.values() for run in runs for value in run]
    low, high = min(every), max(every)

    def at(value: float) -> float:
        return top + (high - value) / (high - low) * height

    def text(x: float, y: float, words: str, colour: str = "#666", anchor: str = "end") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'

    def line(name: str) -> str:
        means = [statistics.fmean(values) for values in zip(*curves[name], strict=True)]
        smooth = [statistics.fmean(means[max(0, i - 4) : i + 5]) for i in range(len(means))]
        points = " ".join(f"{left + i / max(1, len(smooth) - 1) * width:.1f},{at(y):.1f}" for i, y in enumerate(smooth))
        return f'<polyline points="{points}" fill="none" stroke="{VARIANTS[name][1]}" stroke-width="2"/>'

    marks = [low + (high - low) * i / 4 for i in range(5)]
    parts = [f'<path d="M{left} {at(y):.0f}h{width}" stroke="#8885"/>' + text(left - 8, at(y) + 4, f"{y:.2f}")
             for y in marks]  # fmt: skip
    parts += [text(left, 18, "mean sampled reward of a step, both tasks; mean over seeds", anchor="start")]
    parts += [text(left + width, top + height - 12 - 18 * i, name, VARIANTS[name][1]) for i, name in enumerate(curves)]
    steps = len(next(iter(curves.values()))[0])
    parts += [text(left + i / 4 * width, top + height + 20, f"step {round(i / 4 * steps)}", anchor="middle")
              for i in range(5)]  # fmt: skip
    parts += map(line, curves)
    size = f'viewBox="0 0 {left + width + 30} {top + height + 30}"'
    style = 'font-family="system-ui, sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def curves(args: Args, console: Console) -> tuple[dict[str, Any], bool]:
    """All runs, then the figure and a table for the README."""
    folders: dict[str, list[Path]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        first, *others = VARIANTS
        folders[first] = [*pool.map(lambda seed: run_variant(args, first, seed), args.seeds)]
        jobs = {(name, seed): pool.submit(run_variant, args, name, seed) for name in others for seed in args.seeds}
        folders |= {name: [jobs[name, seed].result() for seed in args.seeds] for name in others}
    args.figure.write_text(figure({name: [read_curve(folder) for folder in runs] for name, runs in folders.items()}))
    results = {name: [json.loads((folder / "result.json").read_text()) for folder in runs]
               for name, runs in folders.items()}  # fmt: skip
    console.print("| | P reward | A reward | validity | FEN similarity | exact FEN | best move |\n"
                  "| --- | --- | --- | --- | --- | --- | --- |", markup=False)  # fmt: skip
    paths = (("P", "reward"), ("A", "reward"), ("validity",), ("fen_similarity",), ("exact_fen",), ("best_move",))

    def cell(reports: list[dict[str, Any]], path: tuple[str, ...]) -> str:
        values = [report[path[0]][path[1]] if len(path) == 2 else report[path[0]] for report in reports]
        return f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    rows = [("warm start", [told["before"] for told in results[next(iter(VARIANTS))]])]
    rows += [(name, [told["after"] for told in told_by_seed]) for name, told_by_seed in results.items()]
    for name, reports in rows:
        console.print(f"| {name} | " + " | ".join(cell(reports, path) for path in paths) + " |", markup=False)
    return results, True


def main(args: Args) -> int:
    """Measure and print."""
    console = Console(width=160)
    measures = {"speed": speed, "curves": curves, "large": large}
    results, met = dict[str, Any](), True
    for part in args.parts:
        results[part], good = measures[part](args, console)
        met = met and good
    print(json.dumps({"args": asdict(args), "cores": os.cpu_count(), **results, "met": met}, default=str))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
