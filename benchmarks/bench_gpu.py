#!/usr/bin/env python3
"""How fast is training?  Whole steps of the program's own trainer, with several numbers of completions.

    python benchmarks/bench_gpu.py                # gpt-oss-20b's shape with random weights; the embedded model on a CPU
    python benchmarks/bench_gpu.py --form bf16 --batches 32

Nothing is downloaded.  On a GPU the weights are random, in the shape of gpt-oss-20b and in one of the forms in which it
is published (checkpoints.py): all 24 layers if disk and memory allow, otherwise as many as fit, and the table says how
many.  Each sampled token is replaced by one of a prepared program, like the embedded model's, filled up with a comment.
So steps are realistic: the model computes as always, programs end at different times, players play them, rewards
differ, and there is a gradient.  One step warms up, the others are measured.

The bound is the time to read what the completions need for each token: their keys and values, and the weights, which
means 4 of 32 experts for one completion and nearly all from 16 on.  The bandwidth is measured with a copy.  Prints a
table at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import checkpoints  # noqa: E402
import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import gpt_2048_rl as program  # noqa: E402
from toolkit.games import programs  # noqa: E402
from toolkit.model import decoding, machine, models, tiny  # noqa: E402
from toolkit.run import sampler, watch  # noqa: E402
from toolkit.serve import export  # noqa: E402


@dataclass(frozen=True)
class Args:
    """What to run."""

    batches: tuple[int, ...] = (32, 1, 4, 16)  # completions per step; 1 is only generated, not trained
    steps: int = 3  # measured steps for each
    tokens: int = 768  # of the longest completion: the default's limit
    form: Literal["mxfp4", "nf4", "bf16"] = "mxfp4"  # of the weights in memory; a CPU uses float32
    layers: int = 24
    model: str = ""  # a folder with a model, or tiny, instead of random weights


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
    forwards: float  # forward passes with a gradient, in a step
    gap: float  # between the sampler's log-probabilities and the trained model's, in nats
    token: float  # seconds for a token of all completions
    token_plain: float  # without a CUDA graph; 0 on a CPU

    @property
    def step(self) -> float:
        """Seconds of a whole step."""
        return self.generate + self.score + self.update

    @property
    def speed(self) -> float:
        """Tokens generated per second."""
        return self.tokens / self.generate


def made_up_gpt_oss(folder: Path, layers: int, form: str) -> None:
    """Write a gpt-oss-20b with random weights in one of the FORMS, and the embedded model's tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import GptOssConfig

    spec, corpus = program.game_spec(), random.Random(tiny.SEED)
    start = tiny.DEFAULT_CONFIG
    tokenizer = tiny.train_tokenizer(*tiny.draw_corpus(corpus, spec, start), spec.alphabet, start.vocab)
    tokenizer.save_pretrained(folder)
    config = GptOssConfig(
        num_hidden_layers=layers,
        num_local_experts=32,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.architectures, config.dtype = ["GptOssForCausalLM"], "bfloat16"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    index: dict[str, str] = {}
    for name, shape in models.parameter_shapes(config).items():
        weight = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
        if name.endswith("norm.weight"):
            weight = torch.ones(shape, dtype=torch.bfloat16)
        tensors = checkpoints.stored(name, weight, form)
        file = f"model-{len(index):05d}.safetensors"
        save_file(
            {key: tensor.cpu().contiguous() for key, tensor in tensors.items()},
            folder / file,
            metadata={"format": "pt"},
        )
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    packing = {"quantization_config": checkpoints.FORMS[form]} if checkpoints.FORMS[form] else {}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | packing, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))


def layers_that_fit(folder: Path, wanted: int, form: str) -> int:
    """How many layers of gpt-oss-20b fit on the disk and in the GPU's memory."""
    import torch

    layer, rest = (1.65e9 if form == "bf16" else 0.425e9 + 0.055e9), 2.4e9  # bytes
    disk, memory = shutil.disk_usage(folder).free - 2e9, torch.cuda.mem_get_info()[0] - 12e9
    return max(1, min(wanted, int((min(disk, memory) - rest) / layer)))


def answers(count: int, tokens: int, tokenizer: Any) -> list[list[int]]:
    """Programs like the embedded model's, each filled up with a comment to between 60% and 100% of `tokens`."""
    spec, rng = program.game_spec(), random.Random(1)
    filling = tokenizer("# and so on, and on\n", add_special_tokens=False)["input_ids"]
    made: list[list[int]] = []
    while len(made) < count:
        text = tiny.conversation(rng, spec)[1]["content"]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        length = rng.randint(tokens * 6 // 10, tokens - 1)
        if len(ids) < length:
            made.append(ids + (filling * length)[: length - len(ids)] + [tokenizer.eos_token_id])
    return made


@contextlib.contextmanager
def forced(model: Any, rows: list[list[int]]) -> Iterator[None]:
    """Every token that the model samples is replaced by the one in these rows, after its probability is noted."""
    import torch

    length = prompt = 0

    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal length, prompt
        if input_ids.shape[1] != length + 1:  # another call of generate
            prompt = input_ids.shape[1]
        length = input_ids.shape[1]
        tokens = torch.tensor([row[min(length - prompt, len(row) - 1)] for row in rows[: len(scores)]])
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None].to(scores.device), 0.0)

    sampler.add_last(model, force)
    try:
        yield
    finally:
        del model.get_base_model()._get_logits_processor  # with the recorder's


@contextlib.contextmanager
def counting(model: Any) -> Iterator[list[bool]]:
    """The model's forward passes: for each, whether it keeps what a gradient needs."""
    import torch

    passes: list[bool] = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    try:
        yield passes
    finally:
        hook.remove()


def a_token(model: Any, tokenizer: Any, config: program.TrainConfig, completions: int) -> float:
    """Seconds for a token of all completions: what 48 more of them take."""
    asked, seconds = [program.build_prompt()] * completions, list[float]()
    for tokens in (16, 16, 64):  # the first warms up
        started = time.perf_counter()
        program.sample_completions(model, tokenizer, asked, replace(config, max_new_tokens=tokens))
        seconds.append(time.perf_counter() - started)
    return (seconds[2] - seconds[1]) / 48


def without_graph(model: Any, tokenizer: Any, config: program.TrainConfig, completions: int) -> float:
    """The same as the libraries do it, without a CUDA graph; 0 on a CPU, which has none."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    base = model.get_base_model()
    del base._valid_auto_compile_criteria, base.get_compiled_call
    try:
        return a_token(model, tokenizer, config, completions)
    finally:
        decoding.Decoding(base)


def bytes_a_token(folder: Path, completions: int, context: float, bits: float, dense_bits: float) -> float:
    """Bytes to read for one token of each completion: all weights except experts that no completion uses, and the keys
    and values of so many tokens before it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    sizes = {name: shape.numel() for name, shape in models.parameter_shapes(config).items()}
    experts = sum(size for name, size in sizes.items() if export.EXPERT_WEIGHTS.search(name))
    taken = 1 - (1 - config.num_experts_per_tok / config.num_local_experts) ** completions
    embeddings = config.vocab_size * config.hidden_size  # only one row is read per token
    cached = 2 * completions * context * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return float((sum(sizes.values()) - experts - embeddings + cached) * dense_bits + taken * experts * bits) / 8


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
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    config = program.TrainConfig(
        steps=args.steps + 1,
        batch_size=min(8, completions),
        accumulation=max(1, completions // 8),
        warmup_steps=0,
        generations=max(2, min(16, completions)),
        max_new_tokens=args.tokens,
        eval_batch_size=completions,
        save_steps=10**6,
        patience=10**6,
    )
    generate, score, update, gap, forwards = 0.0, 0.0, 0.0, 0.0, 0.0
    if completions == 1:
        seconds = []
        with forced(model, texts):
            for _ in range(config.steps):
                started = time.perf_counter()
                program.sample_completions(model, tokenizer, [program.build_prompt()], config)
                seconds.append(time.perf_counter() - started)
        generate = statistics.median(seconds[1:])
    else:
        stage = program.Stage(6, 2048)
        ladder = program.Ladder([stage])
        rollouts = program.Rollouts(scratch / "rollouts.jsonl", config, ladder)
        rows = program.training_set(config, ladder)
        games = programs.BackgroundGames([stage], partial(program.Evaluator, config))
        progress = watch.Progress(rollouts, games, scratch, Console(stderr=True))  # tells steps as they end
        trainer = program.make_trainer(model, tokenizer, config, scratch, rollouts, rows, progress)
        progress.begin(trainer)
        with forced(model, texts), counting(model) as passes, progress.watching():
            trainer.train()
        steps = [entry for entry in trainer.state.log_history if "seconds/update" in entry][1:]
        generate, score, update, gap = (
            statistics.median(step[name] for step in steps)
            for name in ("seconds/generate", "seconds/score", "seconds/update", "sampler/gap")
        )
        forwards = sum(passes) / progress.steps
    peak = (
        torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    )
    with forced(model, texts):
        times = (way(model, tokenizer, config, completions) for way in (a_token, without_graph))
        return Measured(completions, sum(map(len, texts)), generate, score, update, peak, bound, forwards, gap, *times)


def table_of(title: str, measured: list[Measured]) -> Table:
    """What was measured, for people."""
    table = Table(
        "rows",
        "tokens/s",
        "of bound",
        "ms/token",
        "no graph",
        "GB",
        "generate s",
        "score",
        "update",
        "step",
        "score",
        "forwards",
        "gap",
        title=title,
    )
    for m in measured:
        parts = [
            f"{m.score:.2f}",
            f"{m.update:.2f}",
            f"{m.step:.2f}",
            f"{m.score / m.step:.1%}",
            f"{m.forwards:.0f}",
            f"{m.gap:.1g}",
        ]
        table.add_row(
            str(m.completions),
            f"{m.speed:.0f}",
            f"{m.speed / m.bound:.1%}",
            f"{m.token * 1e3:.1f}",
            f"{m.token_plain * 1e3:.1f}",
            f"{m.peak / 1e9:.1f}",
            f"{m.generate:.2f}",
            *(parts if m.completions > 1 else []),
        )
    return table


def main(args: Args) -> int:
    """Measure and print."""
    machine.prepare_environment(offline=True)
    import torch
    import unsloth  # noqa: F401 - before torch

    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        embedded = args.model == "tiny" or not (gpu or args.model)
        folder, layers = tiny.warm_start(program.game_spec()) if embedded else Path(args.model), 0
        if gpu and not args.model:
            folder, layers = scratch / "gpt-oss", layers_that_fit(scratch, args.layers, args.form)
            folder.mkdir()
            made_up_gpt_oss(folder, layers, args.form)
        weights: dict[str, Any] = {"nf4": "4bit", "mxfp4": "stored", "bf16": "16bit"}
        config = program.TrainConfig(weights=weights[args.form], max_new_tokens=args.tokens)
        started = time.perf_counter()
        model, tokenizer = program.load_model(str(folder), config, lambda _: None)
        model = program.add_adapters(model, config)
        loading = time.perf_counter() - started
        bits = {"mxfp4": 4.25, "nf4": 4.13, "bf16": 16.0}[args.form] if gpu else 32.0
        speed, measured = bandwidth(), list[Measured]()
        device = torch.cuda.get_device_name() if gpu else f"CPU, {os.cpu_count()} cores"
        about = asdict(args) | {"device": device, "layers": layers, "bandwidth": speed, "loading": loading}
        context = len(tokenizer(program.build_prompt())["input_ids"]) + args.tokens / 2
        for completions in args.batches:
            needed = bytes_a_token(folder, completions, context, bits, 16.0 if gpu else 32.0)
            bound = completions * speed / needed
            own = scratch / f"rows-{completions}"  # in the folder of a run, training would go on after its last step
            own.mkdir()
            measured.append(measure(model, tokenizer, completions, args, own, bound))
            print(json.dumps(about | {"measured": asdict(measured[-1])}), flush=True)
    what = f"{layers} layers of gpt-oss-20b, {args.form}" if layers else str(args.model or "tiny")
    title = f"{what} on {device}, {speed / 1e9:.0f} GB/s; loaded in {loading:.0f} s"
    Console(width=120).print(table_of(title, measured))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
