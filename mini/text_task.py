"""One small GPT learns a text in four ways: the training loop, the held-out report, and the command text.

    python -m mini text --algo supervised|grpo|ppo|denoise

With the same --horizon all algorithms train on the same windows and are evaluated on the same held-out ones.  All start
from the same weights, except denoise, whose vocabulary also has a mask.

    N windows    T tokens to predict, after one that is given    V vocabulary
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini.config import TextConfig
from mini.denoise import denoise_step, fill, hide, left_to_right, unmask
from mini.files import write_whole
from mini.generate import Sampling, generate
from mini.model import GPT, GptConfig, ValueHead
from mini.rl import Baseline, KlController
from mini.runs import load_checkpoint, open_run, save_checkpoint, settings
from mini.text_data import Corpus, Counts, build_corpus, draw_windows
from mini.text_rl import NO_END, grpo_step, ppo_step, supervised_step, whole_rows
from mini.track import open_tracker
from mini.train import LanguageModel, Learner, make_optimizer, score
from toolkit import UsageError

STEPS: dict[str, Callable[[Learner, Tensor, TextConfig], dict[str, float]]] = {
    "supervised": supervised_step, "grpo": grpo_step, "ppo": ppo_step, "denoise": denoise_step,
}  # fmt: skip
LR = {"supervised": 3e-4, "grpo": 1e-5, "ppo": 3e-5, "denoise": 3e-4}
Report = dict[str, Any]
say = functools.partial(print, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Learning


def make_learner(model: GPT, reference: LanguageModel, config: TextConfig, lr: float) -> Learner:
    """A learner before its first step."""
    torch.manual_seed(config.seed)
    head, optimizer = ValueHead(config.n_embd), make_optimizer(list(model.parameters()), lr)
    if config.algo == "ppo":
        optimizer.add_param_group({"params": list(head.parameters()), "lr": config.critic_lr})
    generator = torch.Generator().manual_seed(config.seed)
    return Learner(model, reference, head, optimizer, Baseline(), KlController(config.beta_kl), random.Random(0),
                   generator, lr)  # fmt: skip


def learn(learner: Learner, algo: str, corpus: Corpus, T: int, config: TextConfig, iters: float, seconds: float
          ) -> Iterator[dict[str, float]]:  # fmt: skip
    """Train for `iters` steps or `seconds`, whichever ends first; yields each step's figures.

    Seconds are processor time over all threads, so a busy neighbour does not change a comparison.
    """
    while learner.step < iters and learner.seconds < seconds:
        began = time.process_time()
        left = 1 - max(learner.step / iters, learner.seconds / seconds)
        for group in learner.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * min(1.0, left / (config.lr_decay or left))
        text = draw_windows(corpus.train, T, config.batch_size, config.seed, learner.step)
        figures = STEPS[algo](learner, text, config)
        learner.step += 1
        learner.seconds += time.process_time() - began
        yield figures | {"tokens": learner.tokens, "seconds": learner.seconds}


def supervised(model: GPT, corpus: Corpus, T: int, config: TextConfig, iters: float, seconds: float) -> GPT:
    """Train the model by likelihood: the warm start, and the baseline of equal time."""
    learner = make_learner(model, model, config, config.warm_lr)
    for _ in learn(learner, "supervised", corpus, T, config, iters, seconds):
        pass
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Held-out report


def judged(log_probs: Tensor, right: Tensor) -> Tensor:
    """For each right id (...): its log-probability in (..., V), and 1 if it is the likeliest, otherwise 0: (m, 2)."""
    lp = log_probs.gather(-1, right[..., None])[..., 0]
    return torch.stack((lp, (log_probs.argmax(-1) == right).float()), -1).flatten(0, -2)


def summary(tokens: Tensor, right: Tensor, corpus: Corpus) -> Report:
    """From judged tokens (m, 2) and their ids: bits per character, share and mean probability of right tokens."""
    lp, likeliest = tokens.unbind(1)
    bits = -lp.sum().item() / math.log(2) / len(corpus.tokens.decode(right.flatten().tolist()))
    return {"bits": bits, "right": likeliest.mean().item(), "p_right": lp.exp().mean().item()}


@torch.no_grad()
def foretold(model: LanguageModel, windows: Tensor, corpus: Corpus) -> Report:
    """The summary over all tokens of the windows (N, 1 + T)."""
    tokens = [judged(score(model, whole_rows(part), 1.0)[1], part[:, 1:]) for part in windows.split(16)]
    return summary(torch.cat(tokens), windows[:, 1:], corpus)


@torch.no_grad()
def filled_in(model: GPT, windows: Tensor, corpus: Corpus, config: TextConfig, generator: torch.Generator) -> Report:
    """A denoiser's report: as a next-token predictor, and on masked tokens, which it is trained for."""
    places = [left_to_right(model, part, generator) for part in windows.repeat(4, 1).split(64)]  # four per window
    right = torch.cat([part for _, part in places])
    report = summary(torch.cat([judged(*part) for part in places]), right, corpus)
    ids, hidden = hide(model, windows, config.mask_share, generator)
    lp, likeliest = judged(fill(model, ids, hidden), windows[hidden]).mean(0).tolist()
    return report | {"masked_nats": -lp, "masked_right": likeliest}


def evaluate(model: GPT, corpus: Corpus, T: int, config: TextConfig) -> Report:
    """A model on the held-out windows, and what it writes itself, with the same random numbers every time."""
    windows, generator = corpus.held_out_windows(T, config.held_out), torch.Generator().manual_seed(0)
    if config.algo == "denoise":
        report = filled_in(model, windows, corpus, config, generator)
        written = unmask(model, 16, T, config.unmask_steps, generator)
    else:
        report = foretold(model, windows, corpus)
        written = generate(model, windows[:, :1].tolist(), 1, Sampling(max_new_tokens=T), NO_END, generator).ids[:, 0]
        report["free_right"] = (written == windows[:, 1:]).float().mean().item()
    counts = written.flatten().bincount()
    return report | {
        "commonest": corpus.tokens.decode([int(counts.argmax())]),
        "commonest_share": counts.max().item() / written.numel(),
        "share_in_text": (corpus.train == counts.argmax()).float().mean().item(),
        "sample": corpus.tokens.decode(written[0].tolist()),
    }


def collapse(report: Report) -> str | None:
    """A warning if the model writes little but one token: its share is nearer to 1 than to its share in the text."""
    if report["commonest_share"] < (1 + report["share_in_text"]) / 2:
        return None
    return (f"collapsed: {report['commonest_share']:.0%} of what the model writes is {report['commonest']!r}, which is "
            f"{report['share_in_text']:.0%} of the text")  # fmt: skip


def table(reports: dict[str, Report]) -> str:
    """Reports side by side."""
    names = [name for name in ("bits", "right", "p_right", "free_right", "masked_nats", "masked_right")
             if any(name in report for report in reports.values())]  # fmt: skip
    rows = [("", *reports)]
    for name in names:
        values = (report.get(name) for report in reports.values())
        rows += [(name, *("" if value is None else f"{value:.3f}" for value in values))]
    return "\n".join(f"{row[0]:14}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows)


# ---------------------------------------------------------------------------------------------------------------------
# Command


def with_defaults(config: TextConfig) -> TextConfig:
    """Fill in the defaults that depend on other options."""
    horizon = config.horizon or (32 if config.algo == "ppo" or config.tokens == "gpt2" else 70)
    if horizon >= config.block:
        raise UsageError(f"--block {config.block} has no room for windows of {horizon} tokens: lower --horizon")
    return dataclasses.replace(config, horizon=horizon, lr=LR[config.algo] if config.lr is None else config.lr)


def make_model(config: TextConfig, corpus: Corpus) -> GPT:
    """A model with random weights; denoise has one more id, the mask."""
    torch.manual_seed(config.seed)
    latent = config.latent if config.attention == "mla" else 0
    size = corpus.tokens.size + (config.algo == "denoise")
    model = GPT(GptConfig(config.n_layer, config.n_head, config.n_embd, config.block, size, latent=latent))
    say(f"{len(corpus.train)} tokens to train on, {size} different ones; "
        f"a model of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")  # fmt: skip
    return model


def make_start(model: GPT, corpus: Corpus, T: int, config: TextConfig, folder: Path) -> None:
    """Warm-start the model and write start.pt, or load start.pt of the resumed run."""
    path = folder / "start.pt"
    if config.resume:
        try:
            model.load_state_dict(torch.load(path, weights_only=True))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; without it the run cannot go on") from None
        return
    if config.warm_steps:
        say(f"warm start: {config.warm_steps} supervised steps")
    apart = dataclasses.replace(config, seed=config.seed + 2**31)  # otherwise training repeats these windows
    supervised(model, corpus, T, apart, config.warm_steps, math.inf)
    write_whole(path, lambda file: torch.save(dict(model.state_dict()), file))


def text_command(config: TextConfig) -> dict[str, Any]:
    """Warm start, training, likelihood from the same start for the same time; reports with counting baselines."""
    began = time.perf_counter()
    config = with_defaults(config)
    assert config.horizon is not None
    assert config.lr is not None
    folder, T = open_run(config), config.horizon
    checkpoint = load_checkpoint(folder, config) if config.resume else None
    corpus = build_corpus(config, T, folder)
    start = make_model(config, corpus)
    make_start(start, corpus, T, config, folder)
    unigram, bigram = (Counts(corpus.train, corpus.tokens.size, two) for two in (False, True))
    windows = corpus.held_out_windows(T, config.held_out)
    baselines = {"commonest": foretold(unigram, windows, corpus), "bigram": foretold(bigram, windows, corpus)}
    before = checkpoint["before"] if checkpoint else evaluate(start, corpus, T, config)

    model = copy.deepcopy(start)
    learner = make_learner(model, bigram if config.reference == "bigram" else start, config, config.lr)
    if checkpoint:
        learner.restore(checkpoint)
    tracker = open_tracker(config.track, folder, settings(config), learner.step)
    limit = math.inf if config.seconds is None else config.seconds
    for figures in learn(learner, config.algo, corpus, T, config, config.iters, limit):
        tracker.write(learner.step, figures)
        if learner.step % config.log_steps == 0:
            say(f"step {learner.step}  " + "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        if learner.step % config.save_steps == 0:
            save_checkpoint(folder, config, {**learner.state(), "before": before})
    save_checkpoint(folder, config, {**learner.state(), "before": before})
    tracker.close()

    after = evaluate(model, corpus, T, config)
    if config.control and config.algo != "supervised":
        say(f"likelihood from the same start, for as long: {learner.seconds:.0f} s")
        control = supervised(copy.deepcopy(start), corpus, T, config, math.inf, learner.seconds)
        baselines["supervised"] = foretold(control, windows, corpus)
    say(table({"before": before, "after": after, **baselines}))
    say(f"before: {before['sample']!r}\nafter:  {after['sample']!r}")
    say(collapse(after) or "no collapse to one token")
    say(f"{folder}: checkpoint, tokens and curves")
    return {"algo": config.algo, "before": before, "after": after, "baselines": baselines, "collapse": collapse(after),
            "steps": learner.step, "train_seconds": learner.seconds, "tokens": learner.tokens,
            "seconds": time.perf_counter() - began}  # fmt: skip
