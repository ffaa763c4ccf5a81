"""The chess task: corpus, prompts and rewards for GRPO, held-out report, and the commands chess, eval and sample."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import chess
import torch
from torch import Tensor

from mini import chess_data as data
from mini import config as defaults
from mini.chess_data import Example, Task
from mini.chess_reward import Verdict, judge, parse_policy, shaped
from mini.config import ChessConfig, EvalConfig, Options, SampleConfig
from mini.generate import Sampling, generate
from mini.model import GPT, GptConfig
from mini.runs import load_checkpoint, open_run, resident_memory, save_checkpoint, settings, step_line
from mini.tokens import ChessTokens, Tokens
from mini.track import open_tracker
from mini.train import make_learner, supervised, train
from mini.weights import load_model, load_tokens, save_model
from toolkit import UsageError

EMBEDDED = GptConfig(n_layer=4, n_head=4, n_embd=128, n_positions=256, vocab_size=ChessTokens().size)
TASKS: tuple[Task, ...] = ("P", "A")


# ---------------------------------------------------------------------------------------------------------------------
# Corpus


@dataclass(frozen=True)
class Corpus:
    """Documents by task: training and held-out."""

    train: dict[Task, list[Example]]
    held_out: dict[Task, list[Example]]


def build_corpus(config: Options, tokens: Tokens) -> Corpus:
    """Held-out documents depend on the data alone, not on --seed.  Their prompts are excluded from training."""
    if config.data:
        examples = usable(data.read_corpus(config.data, config.data_lines), tokens)
        random.Random("held out").shuffle(examples)
        train = {task: [e for e in examples if e.task == task] for task in TASKS}
        held_out = {task: train[task][: config.held_out] for task in TASKS}
    else:
        policy = [example for line in data.shipped_lines() if (example := data.parse_line(line))]
        if config.held_out >= len(policy):
            raise UsageError(f"--held-out {config.held_out}: of {len(policy)} P lines none are left to train on")
        far_apart = islice(data.self_play(random.Random("held out")), 0, 10 * config.held_out, 10)
        held_out = {"P": policy[: config.held_out], "A": [e for line in far_apart if (e := data.parse_line(line))]}
        played = islice(data.self_play(random.Random(f"games {config.seed}")), config.a_lines)
        train = {"P": [data.ordered(example) for line in policy for example in (line, data.mirrored(line))],
                 "A": [e for line in played if (e := data.parse_line(line))]}  # fmt: skip
    forbidden = {example.prompt for examples in held_out.values() for example in examples}
    forbidden |= {data.mirrored(example).prompt for example in held_out["P"]}
    train = {task: [example for example in train[task] if example.prompt not in forbidden] for task in TASKS}
    for task in TASKS:
        if not train[task]:
            raise UsageError(f"--held-out {config.held_out}: of {len(held_out[task])} usable {task} lines none are "
                             "left to train on")  # fmt: skip
    print(" and ".join(f"{len(train[task])} {task}" for task in TASKS) + " lines to train on")
    return Corpus(train, held_out)


def usable(examples: list[Example], tokens: Tokens) -> list[Example]:
    """The examples that match the grammar and can be encoded; prints how many are left out."""
    kept = []
    for example in examples:
        try:
            tokens.encode(example.prompt)
            tokens.encode(example.answer)
            judge(example.task, example.answer, example.answer)
            chess.Board(example.prompt[3:].partition("+")[0])
        except ValueError:
            continue
        kept.append(example)
    if len(kept) < len(examples):
        print(f"{len(examples) - len(kept)} of {len(examples)} lines are left out: not well-formed, or without tokens")
    return kept


class ChessTask:
    """Prompts of both tasks, and their rewards."""

    def __init__(self, tokens: Tokens, config: Options) -> None:
        self.config, self.tokens, self.end, self.shaping = config, tokens, tokens.end, config.reward_shaping

    @cached_property
    def corpus(self) -> Corpus:
        """Built when first needed, because sampling a finished model needs none."""
        return build_corpus(self.config, self.tokens)

    def draw(self, rng: random.Random, count: int, p_share: float = 0.5) -> list[Example]:
        """Draw training documents; the number of P documents is rounded up or down at random."""
        p_count = int(count * p_share + rng.random())
        return [rng.choice(self.corpus.train["P" if i < p_count else "A"]) for i in range(count)]

    def prompt_ids(self, item: Example) -> list[int]:
        """The prompt after an end token, as documents begin in GPT-2's own training."""
        return [self.end, *self.tokens.encode(item.prompt)]

    def answer_ids(self, item: Example) -> list[int]:
        """The right answer and the end token."""
        blank = " " if item.task == "P" else ""
        return [*self.tokens.encode(blank + item.answer), self.end]

    def judge(self, item: Example, completion: list[int]) -> Verdict:
        """Judge a completion against the right answer."""
        return judge(item.task, self.tokens.decode(completion), item.answer)

    def rewards(self, items: Sequence[Example], completions: list[list[list[int]]]) -> tuple[Tensor, dict[str, float]]:
        """Rewards (B, K); mean reward and validity of each task."""
        verdicts = [[self.judge(item, row) for row in rows] for item, rows in zip(items, completions, strict=True)]
        rewards = torch.tensor([[shaped(verdict, self.shaping) for verdict in group] for group in verdicts])
        figures = {}
        for task in TASKS:
            group = torch.tensor([item.task == task for item in items])
            if group.any():
                figures[f"reward/{task}"] = rewards[group].mean().item()
                valid = [verdict.valid for row in verdicts for verdict in row if verdict.task == task]
                figures[f"valid/{task}"] = sum(valid) / len(valid)
        return rewards, figures


# ---------------------------------------------------------------------------------------------------------------------
# Held-out report


def report(verdicts: Sequence[Verdict], task: ChessTask) -> dict[str, float | None]:
    """Means over held-out prompts; None where no prompt applies.  An invalid answer has similarity 0."""

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    similarity = [verdict.scores.get("fen", 0.0) for verdict in verdicts if verdict.task == "A"]
    return {
        "reward": mean([shaped(verdict, task.shaping) for verdict in verdicts]),
        "validity": mean([float(verdict.valid) for verdict in verdicts]),
        "exact_fen": mean([float(value == 1) for value in similarity]),
        "fen_similarity": mean(similarity),
        "best_move": mean([verdict.scores.get("best", 0.0) for verdict in verdicts if verdict.task == "P"]),
    }


def evaluate(model: GPT, task: ChessTask, sampling: Sampling) -> dict[str, Any]:
    """One sampled answer per held-out prompt, with the same random numbers every time."""
    generator = torch.Generator().manual_seed(0)
    verdicts = []
    for name in TASKS:
        items = task.corpus.held_out[name]
        for part in (items[i : i + 32] for i in range(0, len(items), 32)):
            made = generate(model, [task.prompt_ids(item) for item in part], 1, sampling, task.end, generator)
            rows = made.tokens(task.end)
            verdicts += [task.judge(item, completions[0]) for item, completions in zip(part, rows, strict=True)]
    by_task: dict[str, Any] = {
        name: report([verdict for verdict in verdicts if verdict.task == name], task) for name in TASKS
    }
    return {**report(verdicts, task), **by_task}


def table(columns: dict[str, dict[str, Any]]) -> str:
    """Reports side by side."""
    rows = [("", *columns)]
    for scope in ("", *TASKS):
        for name in ("reward", "validity", "exact_fen", "fen_similarity", "best_move"):
            values = [(result[scope] if scope else result)[name] for result in columns.values()]
            if None not in values:
                rows.append((f"{scope:2}{name}", *(f"{value:.3f}" for value in values)))
    return "\n".join(f"{row[0]:18}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows)


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def prepare(config: Options) -> tuple[GPT, ChessTask, Sampling]:
    """The model before its warm start, the task, and the sampling options."""
    tokens: Tokens = load_tokens(config.init) if config.init else ChessTokens()
    torch.manual_seed(config.seed)
    model = load_model(config.init) if config.init else GPT(EMBEDDED)
    print(f"a model of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    top_k = tokens.top_k if config.top_k is None else config.top_k
    sampling = Sampling(config.temperature, top_k, config.top_p, config.max_new_tokens or tokens.longest)
    return model, ChessTask(tokens, config), sampling


def warm_start(model: GPT, task: ChessTask, config: Options) -> None:
    """Supervised steps before GRPO, if any are configured."""
    steps = config.warm_steps if config.warm_steps is not None else 0 if config.init else defaults.EMBEDDED_WARM_STEPS
    rng = random.Random(f"warm start {config.seed}")
    supervised(model, task, lambda count: task.draw(rng, count, config.warm_p_share), config.warm_batch,
               config.warm_lr, steps, say=print)  # fmt: skip


def chess_command(config: ChessConfig) -> dict[str, Any]:
    """Warm start, GRPO, supervised training from the same start for the same time; reports on all three."""
    began = time.perf_counter()
    folder = open_run(config)
    model, task, sampling = prepare(config)
    if config.resume:
        checkpoint = load_checkpoint(folder, config)
        model, before = load_model(folder / "start"), checkpoint["before"]
    else:
        warm_start(model, task, config)
        save_model(model, task.tokens, folder / "start", config.init)
        before = evaluate(model, task, sampling)
    lr = config.lr if config.lr is not None else defaults.PRETRAINED_LR if config.init else defaults.EMBEDDED_LR
    learner = make_learner(copy.deepcopy(model), model, config, lr)
    if config.resume:
        learner.restore(checkpoint)
    tracker = open_tracker(config.track, folder, settings(config), learner.step)
    for figures in train(learner, task, config, sampling):
        tracker.write(learner.step, {**figures, "memory_gib": resident_memory()})
        print(step_line(learner.step, config.steps, figures), flush=True)
        if learner.step % config.save_steps == 0 or learner.step == config.steps:
            save_checkpoint(folder, config, {**learner.state(), "before": before})
    tracker.close()
    save_model(learner.model, task.tokens, folder / "model", config.init)
    reports = {"before": before, "after": evaluate(learner.model, task, sampling)}
    if config.control:
        control = copy.deepcopy(model).requires_grad_(True)
        rng = random.Random(f"control {config.seed}")
        supervised(control, task, lambda count: task.draw(rng, count), config.warm_batch, config.warm_lr,
                   seconds=learner.seconds, say=print)  # fmt: skip
        reports["supervised"] = evaluate(control, task, sampling)
    print(table(reports))
    print(f"{folder}: models, checkpoint and curves")
    return {**reports, "steps": learner.step, "rl_seconds": learner.seconds, "seconds": time.perf_counter() - began}


def eval_command(config: EvalConfig) -> dict[str, Any]:
    """Evaluate a model."""
    began = time.perf_counter()
    model, task, sampling = prepare(config)
    warm_start(model, task, config)
    result = evaluate(model, task, sampling)
    print(table({str(config.init or "warm start"): result}))
    return {**result, "seconds": time.perf_counter() - began}


def right_answer(prompt: str) -> str | None:
    """The answer of python-chess to an A prompt; None for a P prompt.  Raises UsageError for anything else."""
    try:
        if prompt.startswith("P:"):
            chess.Board(prompt[2:].strip())
            return None
        fen, move, history, nothing = prompt.removeprefix("A:").strip().split("+")
        before = history.split()[:-1]
        example = data.parse_line(data.environment_line(chess.Board(fen), chess.Move.from_uci(move), before))
        if nothing or not prompt.startswith("A:") or not example:
            raise ValueError
    except ValueError:
        raise UsageError(f"--prompt must be 'P: FEN' or 'A: FEN+move+history+', not {prompt!r}") from None
    return example.answer


def sample_command(config: SampleConfig) -> None:
    """Print completions of one prompt with their verdicts."""
    prompt = config.prompt.strip()
    truth = right_answer(prompt)
    model, task, sampling = prepare(config)
    warm_start(model, task, config)
    try:
        ids = task.prompt_ids(Example("P", prompt, ""))
    except ValueError as error:
        raise UsageError(str(error)) from None
    generator = torch.Generator().manual_seed(config.seed)
    made = generate(model, [ids], config.k_samples, sampling, task.end, generator)
    for row, log_prob in zip(made.tokens(task.end)[0], made.log_probs[0].sum(1).tolist(), strict=True):
        text = task.tokens.decode(row)
        if truth is None:
            said = "valid" if parse_policy(text.strip()) else "invalid"
        else:
            verdict = judge("A", text, truth)
            said = f"reward {shaped(verdict, config.reward_shaping):.1f}, raw score {verdict.raw:.3f}"
        print(f"{text}\n    log-probability {log_prob:.2f}, {said}")
    if truth is not None:
        print(f"{truth}\n    is right")
