"""Whether an exported model computes what the trained one does, in the program that will serve it.

The trained model is the base model with its adapter, by transformers and PEFT.  It answers prompts in the held-out
wording.  The export is asked for its logits at every token of these answers: how often is the most likely token the
same, how far apart are the distributions, and how much of what the adapter changed is still there?

Shapes: N tokens of an answer, V tokens of the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import UsageError
from toolkit.model.loading import least_effort, load_plain
from toolkit.model.machine import available_memory, multiplies_bfloat16
from toolkit.model.tiny import GameSpec

if TYPE_CHECKING:
    import torch

TOKENS = 32  # of an answer, at most
ROWS = 16  # answers sampled together
REQUIRED = 0.99  # share of equal most likely tokens, for formats that lose nothing
TIE = 2**-8  # of the largest logit: closer ones are the same in bfloat16, and either may come first
KEPT = 0.9  # below this share of the adapter's shift, the export says what was lost

Logits = Callable[[list[int], int], "torch.Tensor"]
"""(ids, start) -> (N, V) in float32: a model's logits for the tokens from `start` on."""


def held_out_prompts(spec: GameSpec) -> list[str]:
    """64 prompts in the wording that training never uses."""
    games = product(range(3, 11), (64 << stage for stage in range(8)))
    return [spec.prompt(size, target, wording=spec.wordings) for size, target in games]


def logits_of(model: Any) -> Logits:
    """The logits of a model of transformers or PEFT.  One sequence at a time, so nothing depends on padding."""
    import torch

    def logits(ids: list[int], start: int) -> torch.Tensor:
        with torch.inference_mode():
            wanted = len(ids) - start + 1
            return model(torch.tensor([ids]), logits_to_keep=wanted).logits[0, :-1].float()  # type: ignore[no-any-return]

    return logits


def quick(model: Any) -> Any:
    """A model that computes in a type for which the processor has instructions.

    Where it has none for bfloat16, that is a copy in float32, if memory holds it: 64 tokens of SmolLM2 took 0.4 s in
    float32 and 1.9 in bfloat16, and whole batches far longer still.
    """
    import torch

    size = 4 * sum(weights.numel() for weights in model.parameters())  # in float32
    in_16_bits = next(model.parameters()).dtype == torch.bfloat16
    emulated = in_16_bits and not multiplies_bfloat16()
    return copy.deepcopy(model).float() if emulated and 2 * size < available_memory() else model


@dataclass(frozen=True)
class Answer:
    """A prompt with the trained model's answer, and what base and trained model say to each of its tokens."""

    ids: list[int]
    start: int  # where the answer begins
    base: torch.Tensor  # (N, V)
    trained: torch.Tensor  # (N, V)


def sample_answers(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[tuple[list[int], int]]:
    """Prompts with an answer of each, as token ids, and where the answers begin.  The same in every call."""
    import torch

    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    answers = []
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        for first in range(0, len(prompts), ROWS):
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts[first : first + ROWS]]
            batch = tokenizer.apply_chat_template(
                chats,
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
                padding=True,
                reasoning_effort=least_effort(tokenizer),
                tokenizer_kwargs={"padding_side": "left"},
            )  # (ROWS, P)
            made = model.generate(
                **batch,
                max_new_tokens=TOKENS,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                pad_token_id=tokenizer.pad_token_id,
            )
            width = batch["input_ids"].shape[1]
            for row, mask in zip(made.tolist(), batch["attention_mask"].tolist(), strict=True):
                end = next((place for place, token in enumerate(row[width:], 1) if token in ends), TOKENS)
                answers.append((row[width - sum(mask) : width + end], sum(mask)))
    return answers


def reference(adapted: Any, tokenizer: Any, prompts: Sequence[str]) -> list[Answer]:
    """The answers of an adapted model, with its logits and those of its base."""
    adapted = quick(adapted.eval())
    logits, answers = logits_of(adapted), []
    for ids, start in sample_answers(adapted, tokenizer, prompts):
        with adapted.disable_adapter():
            base = logits(ids, start)
        answers.append(Answer(ids, start, base, logits(ids, start)))
    return answers


@dataclass(frozen=True)
class Agreement:
    """How far an export computes what the trained model does."""

    tokens: int
    equal: float  # share of tokens at which the most likely token is the same
    ties: float  # share at which it is another one that is as likely to the trained model, up to rounding
    kl: float  # mean KL divergence of the export from the trained model, in nats
    kept: float  # share of the adapter's shift of the logits: projection of (export - base) on (trained - base)

    def __str__(self) -> str:
        return (
            f"{self.equal:.2%} of {self.tokens} most likely tokens are equal, {self.ties:.2%} tie, mean KL "
            f"{self.kl:.2g}, {self.kept:.1%} of the adapter's shift of the logits is kept"
        )


def compare(answers: Sequence[Answer], exported: Logits) -> Agreement:
    """An export's logits against those of the trained model."""
    tokens = equal = ties = 0
    kl = along = size = 0.0
    for answer in answers:
        theirs = exported(answer.ids, answer.start)  # (N, V)
        tokens += len(theirs)
        choice, best = theirs.argmax(-1), answer.trained.argmax(-1)  # (N,)
        behind = answer.trained.amax(-1) - answer.trained.gather(-1, choice[:, None])[:, 0]
        equal += int((choice == best).sum())
        ties += int(((choice != best) & (behind <= TIE * answer.trained.abs().amax(-1))).sum())
        wanted = answer.trained.log_softmax(-1)
        kl += float((wanted.exp() * (wanted - theirs.log_softmax(-1))).sum())
        change, moved = answer.trained - answer.base, theirs - answer.base
        change = change - change.mean(-1, keepdim=True)  # a constant added to all logits changes nothing
        along += float((change * moved).sum())
        size += float(change.square().sum())
    return Agreement(tokens, equal / tokens, ties / tokens, kl / tokens, along / size if size else 1.0)


def served_by_transformers(folder: Path, base: str) -> Logits:
    """The logits of an export that transformers loads, or PEFT if it is an adapter on `base`."""
    if not (folder / "adapter_config.json").is_file():
        return logits_of(quick(load_plain(str(folder), "auto")[0].eval()))
    from peft import PeftModel

    return logits_of(quick(PeftModel.from_pretrained(load_plain(base, "auto")[0], folder).eval()))


def report(found: Agreement, format: str, exact: bool, instead: str) -> str:
    """What was found, and what was lost.  Raises UsageError if an exact format differs.

    `instead` names what keeps that which this format loses.
    """
    if exact and found.equal + found.ties < REQUIRED:
        raise UsageError(
            f"{format} is not what was trained and is not written: {found}; {REQUIRED:.0%} must be equal "
            "or tie: --no-verify writes it all the same"
        )
    if found.kept >= KEPT:
        return str(found)
    return f"{found}; rounding weights for {format} loses {1 - found.kept:.0%} of what was trained: {instead} keeps it"
