#!/usr/bin/env python3
"""How fast is training?  Whole steps of the program's own trainer, with several numbers of completions.

    python benchmarks/bench_gpu.py                # gpt-oss-20b's shape with random weights; the embedded model on a CPU
    python benchmarks/bench_gpu.py --precision 4bit --batches 32

Nothing is downloaded.  On a GPU the weights are random, in the shape of gpt-oss-20b and in MXFP4 as published: all 24
layers if disk and memory allow, otherwise as many as fit; the table says how many.  Each sampled token is replaced by
one of a prepared program, like the embedded model's, filled up with a comment.  So steps are realistic: the model
computes as always, programs end at different times, players play them, rewards differ, and there is a gradient.  One
step warms up, the others are measured.

The bound is the time to read the weights that the completions need for each token: 4 of 32 experts for one completion,
nearly all from 16 on.  The bandwidth is measured with a copy.  Prints a table and one JSON line.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import gpt_2048_rl as program  # noqa: E402
from toolkit import evaluation, export, machine, programs, tiny, watch  # noqa: E402


@dataclass(frozen=True)
class Args:
    """What to run."""

    batches: tuple[int, ...] = (1, 4, 16, 32)  # completions per step; 1 is only generated, not trained
    steps: int = 3  # measured steps for each
    tokens: int = 200  # tokens of the longest completion
    precision: Literal["mxfp4", "4bit", "16bit"] = "mxfp4"  # of the weights in memory; a CPU uses float32
    layers: int = 24
    model: str = ""  # a folder with a model, instead of random weights


@dataclass(frozen=True)
class Measured:
    """Medians over the measured steps."""

    completions: int
    tokens: int  # generated in a step
    generate: float  # seconds of a step
    score: float
    update: float
    peak: float  # bytes
    bound: float  # tokens per second in generation that the memory bandwidth allows

    @property
    def step(self) -> float:
        """Seconds of a whole step."""
        return self.generate + self.score + self.update

    @property
    def speed(self) -> float:
        """Tokens generated per second."""
        return self.tokens / self.generate


def made_up_gpt_oss(folder: Path, layers: int, packed: bool) -> None:
    """Write a gpt-oss-20b with random weights, in bfloat16 or with experts in MXFP4, and the embedded tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GptOssConfig

    AutoTokenizer.from_pretrained(tiny.warm_start(program.tiny_task())).save_pretrained(folder)
    config = GptOssConfig(num_hidden_layers=layers, num_local_experts=32, pad_token_id=1)
    config.architectures, config.dtype = ["GptOssForCausalLM"], "bfloat16"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    index: dict[str, str] = {}
    for name, shape in machine.parameter_shapes(config).items():
        tensors: dict[str, torch.Tensor] = {}
        if packed and export.EXPERT_WEIGHTS.search(name):
            experts, inputs, outputs = shape
            blocks = (experts, outputs, inputs // 32, 16)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, device=device)
            tensors[f"{name}_scales"] = torch.full(blocks[:3], 127 - 8, dtype=torch.uint8)  # weights up to 6 / 256
        elif name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensors[name] = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
        file = f"model-{len(index):05d}.safetensors"
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    described = config.to_dict() | ({"quantization_config": export.MXFP4_CONFIG} if packed else {})
    (folder / "config.json").write_text(json.dumps(described, indent=2))


def layers_that_fit(folder: Path, wanted: int, packed: bool) -> int:
    """How many layers of gpt-oss-20b fit on the disk and in the GPU's memory."""
    import torch

    layer, rest = (0.425e9 + 0.055e9 if packed else 1.65e9), 2.4e9  # bytes
    disk, memory = shutil.disk_usage(folder).free - 2e9, torch.cuda.mem_get_info()[0] - 12e9
    return max(1, min(wanted, int((min(disk, memory) - rest) / layer)))


def answers(count: int, tokens: int, tokenizer: Any) -> list[list[int]]:
    """Programs like the embedded model's, each filled up with a comment to between 60% and 100% of `tokens`."""
    task, rng = program.tiny_task(), random.Random(1)
    filling = tokenizer("# and so on, and on\n", add_special_tokens=False)["input_ids"]
    made: list[list[int]] = []
    while len(made) < count:
        text = tiny.conversation(rng, task)[1]["content"]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        length = rng.randint(tokens * 6 // 10, tokens - 1)
        if len(ids) < length:
            made.append(ids + (filling * length)[: length - len(ids)] + [tokenizer.eos_token_id])
    return made


def forced(generate: Callable[..., Any], rows: list[list[int]]) -> Callable[..., Any]:
    """A model's generate, with every sampled token replaced by the one in these rows."""
    import torch
    from transformers import LogitsProcessor

    class Forced(LogitsProcessor):  # type: ignore[misc]
        start = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.start = self.start or input_ids.shape[1]
            at = input_ids.shape[1] - self.start
            tokens = torch.tensor([row[min(at, len(row) - 1)] for row in rows[: len(scores)]], device=scores.device)
            return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)

    @wraps(generate)
    def generate_rows(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, logits_processor=[Forced()], **kwargs)

    return generate_rows


def bytes_a_token(folder: Path, completions: int, bits: float, dense_bits: float) -> float:
    """Bytes to read for one token of each completion: all weights except experts that no completion uses."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    sizes = {name: shape.numel() for name, shape in machine.parameter_shapes(config).items()}
    experts = sum(size for name, size in sizes.items() if export.EXPERT_WEIGHTS.search(name))
    taken = 1 - (1 - config.num_experts_per_tok / config.num_local_experts) ** completions
    embeddings = config.vocab_size * config.hidden_size  # only one row is read per token
    return float((sum(sizes.values()) - experts - embeddings) * dense_bits + taken * experts * bits) / 8


def bandwidth() -> float:
    """Bytes per second that a copy reads and writes."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.empty(1 << (30 if device == "cuda" else 28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * source.numel() / statistics.median(seconds)


def measure(model: Any, tokenizer: Any, completions: int, args: Args, scratch: Path, bound: float) -> Measured:
    """Measure steps with this many completions; with one, GRPO has nothing to compare, so only generation."""
    import torch

    texts = answers(completions, args.tokens, tokenizer)
    own = model.generate
    model.generate = forced(own, texts)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    config = program.TrainConfig(
        steps=args.steps + 1, batch_size=min(8, completions), accumulation=max(1, completions // 8), warmup_steps=0,
        generations=max(2, min(16, completions)), max_new_tokens=args.tokens,
        eval_batch_size=completions, save_steps=10**6, patience=10**6,
    )  # fmt: skip
    try:
        if completions == 1:
            seconds = []
            for _ in range(config.steps):
                started = time.perf_counter()
                program.sample_completions(model, tokenizer, [program.build_prompt()], config)
                seconds.append(time.perf_counter() - started)
            generate, score, update = statistics.median(seconds[1:]), 0.0, 0.0
        else:
            stage = program.Stage(6, 2048)
            ladder = program.Ladder([stage])
            rollouts = program.Rollouts(scratch / "rollouts.jsonl", config, ladder)
            rows = program.training_set(config, ladder)
            trainer = program.make_trainer(model, tokenizer, config, scratch, rollouts, rows)
            (scratch / "before.json").write_text(json.dumps({"6x6": asdict(evaluation.score((), stage.target))}))
            games = programs.BackgroundGames([stage], partial(program.Evaluator, config))
            watch.Progress(trainer, rollouts, games, scratch, Console(quiet=True)).train()
            steps = [entry for entry in trainer.state.log_history if "seconds/update" in entry][1:]
            generate, score, update = (
                statistics.median(step[f"seconds/{part}"] for step in steps) for part in ("generate", "score", "update")
            )
    finally:
        model.generate = own
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # fmt: skip
    return Measured(completions, sum(map(len, texts)), generate, score, update, peak, bound)


def main(args: Args) -> int:
    """Measure and print."""
    machine.prepare_environment(offline=True)
    import torch
    import unsloth  # noqa: F401 - before torch

    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder, layers = Path(args.model) if args.model else tiny.warm_start(program.tiny_task()), 0
        if gpu and not args.model:
            packed = args.precision == "mxfp4"
            folder, layers = scratch / "gpt-oss", layers_that_fit(scratch, args.layers, packed)
            folder.mkdir()
            made_up_gpt_oss(folder, layers, packed)
        config = program.TrainConfig(load_in_4bit=args.precision == "4bit", load_in_16bit=args.precision == "16bit",
                                     max_new_tokens=args.tokens)  # fmt: skip
        started = time.perf_counter()
        model, tokenizer = program.load_model(str(folder), config, lambda _: None)
        model = program.add_adapters(model, config)
        loading = time.perf_counter() - started
        bits = {"mxfp4": 4.25, "4bit": 4.13, "16bit": 16.0}[args.precision] if gpu else 32.0
        speed, measured = bandwidth(), []
        for completions in args.batches:
            bound = completions * speed / bytes_a_token(folder, completions, bits, 16.0 if gpu else 32.0)
            measured.append(measure(model, tokenizer, completions, args, scratch, bound))
    what = f"{layers} layers of gpt-oss-20b, {args.precision}" if layers else str(args.model or "the embedded model")
    device = torch.cuda.get_device_name() if gpu else f"CPU, {os.cpu_count()} cores"
    title = f"{what} on {device}, {speed / 1e9:.0f} GB/s; loaded in {loading:.0f} s"
    table = Table("rows", "tokens/s", "of bound", "generate s", "score", "update", "step", "score", "GB", title=title)
    for m in measured:
        parts = [f"{m.score:.2f}", f"{m.update:.2f}", f"{m.step:.2f}", f"{m.score / m.step:.1%}"]
        table.add_row(str(m.completions), f"{m.speed:.0f}", f"{m.speed / m.bound:.1%}", f"{m.generate:.2f}",
                      *(parts if m.completions > 1 else [""] * 4), f"{m.peak / 1e9:.1f}")  # fmt: skip
    Console().print(table)
    print(json.dumps({"args": asdict(args), "device": device, "layers": layers, "bandwidth": speed, "loading": loading,
                      "measured": [asdict(m) for m in measured]}, default=str))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
