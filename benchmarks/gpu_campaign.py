#!/usr/bin/env python3
"""What to measure with a borrowed GPU in an hour.

    python benchmarks/gpu_campaign.py smoke mxfp4             # two parts, one after the other
    python benchmarks/gpu_campaign.py mxfp4 nf4 --layers 2    # two of gpt-oss-20b's 24 layers
    python benchmarks/gpu_campaign.py mxfp4 --dry-run         # its commands at small size, on a CPU that poses as a GPU

Parts can be run in any order.  Each ends within ten minutes and leaves a JSON file with what was measured until then:

- smollm2-16bit, smollm2-4bit, smollm2-vllm: the whole program with a real language model (./setup.sh --with smollm2),
  with its weights in 16 or 4 bits, or with completions from vLLM (./setup.sh --with vllm).
- smoke: the embedded model trains, resumes, is evaluated and exported.
- mxfp4, bf16, nf4: steps of 32 completions of gpt-oss-20b's shape with the weights in this form, then of others.

vLLM's wheels have 315 MB and more.  wheels.py fetches those of everything else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
BENCH, SCRIPT = "benchmarks/bench_gpu.py", "gpt_2048_rl.py"

Part = Literal["smollm2-16bit", "smollm2-4bit", "smollm2-vllm", "smoke", "mxfp4", "bf16", "nf4"]


@dataclass(frozen=True)
class Args:
    """Which parts to run, and where their files go."""

    parts: tyro.conf.Positional[tuple[Part, ...]] = ("smollm2-16bit", "smollm2-4bit", "smoke", "mxfp4", "bf16", "nf4")
    out: Path = Path("gpu")  # folder of the JSON files
    seconds: float = 570.0  # of a part
    layers: int = 24  # of gpt-oss-20b's 24
    dry_run: bool = False  # at small size, on a CPU that poses as a GPU


def commands(part: Part, scratch: Path, args: Args) -> list[tuple[object, ...]]:
    """A part's commands, each a script and its arguments; `scratch` is for their files."""
    small = args.dry_run
    run = ("--output-dir", scratch, "--run-name", part)
    if part.startswith("smollm2"):
        form = part.partition("-")[2]
        how = ("--sampler", "vllm") if form == "vllm" else ("--weights", form)
        size = ("--model", "tiny", "--steps", 1, "--games", 2, "--best-of", 2, "--held-out", "3:32")
        whole = ("--model", "smollm2", "--keys", "wasd", "--minutes", 9, "--games", 64, "--best-of", 256)
        return [(SCRIPT, "train", *(size if small else whole), *how, *run, "--json")]
    if part == "smoke":
        numbers = ("--games", 4, "--best-of", 8, "--save-steps", 1, "--held-out", "3:32")
        few = (*numbers, "--generations", 4, "--batch-size", 4, "--accumulation", 1, "--ladder", "4:64")
        train = (SCRIPT, "train", "--model", "tiny", *run, *(few if small else numbers), "--json")
        folder = scratch / "smoke"
        return [
            (*train, "--steps", 1 if small else 4),
            (*train, "--steps", 2 if small else 5),  # from the checkpoint on
            (SCRIPT, "eval", folder, "--games", 4, "--held-out", "3:32", "--json"),
            (SCRIPT, "export", folder, "--format", "merged_16bit", "--output-dir", scratch / "whole"),
        ]
    if small:
        return [(BENCH, "--form", part, "--model", "tiny", "--steps", 1, "--tokens", 80, "--batches", 2, 4)]
    tokens = 768 if part == "mxfp4" else 200  # the default's limit, or what the other forms do in ten minutes
    words = ("--form", part, "--layers", args.layers, "--steps", 2, "--tokens", tokens)
    return [(BENCH, *words, "--batches", 32, 1, 4, 16, 64)]


def run(command: tuple[object, ...], seconds: float, small: bool) -> dict[str, Any]:
    """Run a command: its words, exit status (124: out of time), seconds, its JSON lines, and the end of its output."""
    words = [*(["tests/gpu_on_cpu.py"] if small else []), *map(str, command)]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(1.0, seconds),
            check=False,
        )
        status, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, said = 124, (late.stdout or b"").decode(errors="replace")
    told = [json.loads(line) for line in said.splitlines() if line.startswith("{") and line.endswith("}")]
    return {
        "words": words,
        "status": status,
        "told": told,
        "seconds": round(time.monotonic() - started, 1),
        "said": said.splitlines()[-200:],
    }


def measure(part: Part, args: Args) -> list[dict[str, Any]]:
    """Run a part's commands and leave their results in its file, after each of them."""
    end, found = time.monotonic() + args.seconds, list[dict[str, Any]]()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for command in commands(part, Path(scratch), args):
            found.append(run(command, end - time.monotonic(), args.dry_run))
            (args.out / f"{part}.json").write_text(json.dumps({"part": part, "runs": found}, indent=1) + "\n")
    return found


def main(args: Args) -> int:
    """Run the parts.  Returns 1 if a command failed."""
    table = Table("part", "command", "status", "s", "tokens/s", "step s", "ms/token", "no graph", "gap", "GB")
    failed = False
    for part in args.parts:
        for done in measure(part, args):
            failed |= done["status"] != 0
            words = " ".join(word for word in done["words"] if "/" not in word)
            for row in [told["measured"] for told in done["told"] if "measured" in told] or [None]:
                figures = (
                    [""] * 6
                    if row is None
                    else [
                        f"{row['tokens'] / row['generate']:.0f}",
                        f"{row['generate'] + row['score'] + row['update']:.2f}",
                        f"{row['token'] * 1e3:.1f}",
                        f"{row['token_plain'] * 1e3:.1f}",
                        f"{row['gap']:.1g}",
                        f"{row['peak'] / 1e9:.1f}",
                    ]
                )
                table.add_row(part, words[:60], str(done["status"]), f"{done['seconds']:.0f}", *figures)
    Console(width=140).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
