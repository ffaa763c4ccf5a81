"""A text, learnt in four ways: the rewards, the four algorithms, the held-out report, and the command text.

    python -m mini text --algo supervised|grpo|ppo|denoise

With the same --horizon all algorithms train on the same windows and are evaluated on the same held-out ones.  All have
the same start values, except denoise, whose vocabulary also has a mask; --warm-steps teach these by likelihood.
Numbers in brackets refer to README.md.

    B windows    K rollouts of each    R contexts: B, or B * K without teacher forcing   T tokens    C width
    A tokens chosen at each position of a context: K, or 1 without teacher forcing    V vocabulary
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mini import grpo
from mini.config import TextConfig
from mini.grpo import LanguageModel, Learner, score
from mini.model import GPT, GptConfig, Rows, Sampling, generate
from mini.runs import BpeTokens, CharTokens, Figures, Run, device_of, naming, save_model, say, table, write
from toolkit import UsageError

# ---------------------------------------------------------------------------------------------------------------------
# A text in tokens

HELD_OUT = 10  # one part in so many, the last, is held out
UNMASK_STEPS = 5  # of a denoiser that writes


@dataclass(frozen=True)
class Corpus:
    """A text in tokens."""

    tokens: CharTokens | BpeTokens
    train: Tensor  # ids
    held_out: Tensor  # ids

    def held_out_windows(self, T: int, count: int) -> Tensor:
        """At most `count` windows, evenly spread, with no predicted token in two of them: (B, T + 1)."""
        every = self.held_out.unfold(0, T + 1, T)
        return every[torch.linspace(0, len(every) - 1, min(count, len(every))).long()]


def draw_windows(ids: Tensor, T: int, count: int, seed: int, step: int) -> Tensor:
    """A step's random windows; they depend on seed and step alone: (B, T + 1).  cpp/train.cpp draws the same."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)  # it silently drops higher bits
    starts = torch.randint(len(ids) - T, (count,), generator=generator)
    return ids.unfold(0, T + 1, 1)[starts.to(ids.device)]


def whole_rows(text: Tensor) -> Rows:
    """Windows (N, 1 + T) as rows: one given token and T scored ones."""
    return Rows(text, torch.ones_like(text, dtype=torch.bool), 1)


def read_text(path: Path | None) -> str:
    """A file's text, or 465 KB of English and code that come with every Python."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    with naming(path):
        return path.read_text(encoding="utf-8")


def build_corpus(config: TextConfig, run: Run) -> Corpus:
    """The text of --data as a corpus.  The run keeps its ids as tokens.bin, 16 bits each, lower byte first.

    Raises UsageError if a resumed run began with another text.
    """
    text, T = read_text(config.data), config.horizon
    tokens = BpeTokens(config.vocabulary) if config.vocabulary else CharTokens(text)
    ids = torch.tensor(tokens.encode(text))
    if len(ids) < HELD_OUT * (T + 2) or tokens.size > 2**16:
        raise UsageError(
            f"the text has {len(ids)} tokens, {tokens.size} different ones; windows of {T} need "
            f"{HELD_OUT * (T + 2)}, and of 65536 different ones at most"
        )
    data = ids.to(torch.uint16).numpy().astype("<u2").tobytes()
    path = run.folder / "tokens.bin"
    if not config.resume:
        write(path, data)
    elif not path.exists() or path.read_bytes() != data:
        raise UsageError(f"the text is not the one that the run in {run.folder} began with")
    split = len(ids) - len(ids) // HELD_OUT
    ids = ids.to(device_of(config.device))
    return Corpus(tokens, ids[:split], ids[split:])


class Counts(nn.Module):
    """Log-probabilities from counts of the training text, with one added to each (Laplace).

    It has a GPT's interface, so it can serve as its reference: the hidden state of a token is its row of the table.
    Most pairs of byte-pair tokens never occur, so the counts are sparse.
    """

    def __init__(self, ids: Tensor, V: int, bigram: bool = True) -> None:
        super().__init__()
        self.V, self.bigram = V, bigram
        before = ids[:-1] if bigram else torch.zeros_like(ids[:-1])
        ones = torch.ones(len(ids) - 1, device=ids.device)
        self.counts = torch.sparse_coo_tensor(torch.stack((before, ids[1:])), ones, (V, V), check_invariants=True)
        self.counts = self.counts.coalesce()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(N, T) -> (N, T)."""
        return ids if self.bigram else torch.zeros_like(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows (N, T) -> log-probabilities (N, T, V)."""
        rows: Tensor = self.counts.index_select(0, hidden.flatten()).to_dense() + 1
        return (rows / rows.sum(1, keepdim=True)).log().view(*hidden.shape, self.V)


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts and rewards
#
# A rollout chooses a token at each position of a window and is rewarded if the text has the same one.  With
# teacher forcing it reads the text's own tokens, whatever it chose before.  Without, it reads its own choices, as in RL
# of language models.  Once it has left the text it never finds back, so the best policy is to always
# choose the commonest token; collapse() reports that.


@dataclass(frozen=True)
class Rollouts:
    """The contexts, the chosen tokens, the right ones, and the model's outputs."""

    rows: Rows  # (R, 1 + T)
    chosen: Tensor  # (R, T, A)
    right: Tensor  # (R, T)
    log_probs: Tensor  # (R, T, V)
    hidden: Tensor  # (R, T, C)


def roll_out(learner: Learner, text: Tensor, config: TextConfig) -> Rollouts:
    """K rollouts of each window (B, 1 + T) under the current policy; one forward pass serves sampling and gradient."""
    K, right = config.k_samples, text[:, 1:]
    if not config.teacher_forcing:
        sampling = Sampling(max_new_tokens=right.shape[1])
        rows, _ = generate(learner.model, text[:, :1].tolist(), K, sampling, CharTokens.end, learner.generator)
        _, log_probs, hidden = score(learner.model, rows, 1.0)
        return Rollouts(rows, rows.answer_ids[:, :, None], right.repeat_interleave(K, 0), log_probs, hidden)
    rows = whole_rows(text)
    _, log_probs, hidden = score(learner.model, rows, 1.0)
    probs = log_probs.detach().exp().flatten(0, 1)  # (B * T, V)
    chosen = torch.multinomial(probs, K, replacement=True, generator=learner.generator).unflatten(0, right.shape)
    return Rollouts(rows, chosen, right, log_probs, hidden)


def token_rewards(rollouts: Rollouts, config: TextConfig) -> Tensor:
    """(R, T, A): 1 for the right token, otherwise 0 (-1 with pm1), plus partial credit.

    The credit depends on the context alone.  With teacher forcing a group shares its context, so GRPO's baseline
    cancels the credit; PPO's critic has to learn it, and until then it is noise.
    """
    right = rollouts.right[:, :, None]
    hit = (rollouts.chosen == right).float()  # (R, T, A)
    credit = config.partial_logprob * rollouts.log_probs.detach().gather(2, right)  # (R, T, 1)
    return (2 * hit - 1 if config.reward_mode == "pm1" else hit) + credit  # (19)


def group_advantages(learner: Learner, rewards: Tensor, K: int) -> Tensor:
    """Each reward minus the mean of its group at the same position: (R, T, A) -> (R, T, A)."""
    R, T, A = rewards.shape
    groups = rewards.view(R * A // K, K // A, T, A).transpose(1, 2)  # (B, T, K / A, A)
    return learner.baseline.advantages(groups.reshape(-1, K)).view_as(groups).transpose(1, 2).reshape(R, T, A)


def divergence(learner: Learner, rows: Rows, log_probs: Tensor) -> Tensor:
    """KL(policy || reference) at each position: (R, T, V) -> (R, T)."""
    with torch.no_grad():
        reference = score(learner.reference, rows, 1.0)[1]
    return grpo.exact_kl(log_probs, reference)


# ---------------------------------------------------------------------------------------------------------------------
# The four algorithms: one update each, on windows (B, 1 + T)


def supervised_step(learner: Learner, text: Tensor, config: TextConfig) -> Figures:
    """The cross-entropy of all tokens."""
    return grpo.likelihood_step(learner, whole_rows(text), config.max_grad_norm)


def grpo_step(learner: Learner, text: Tensor, config: TextConfig) -> Figures:
    """One update per step, so the ratio is 1 and nothing is clipped.  The KL divergence is exact."""
    rollouts = roll_out(learner, text, config)
    lp = rollouts.log_probs.gather(2, rollouts.chosen)  # (R, T, A)
    rewards = token_rewards(rollouts, config)
    advantages = group_advantages(learner, rewards, config.k_samples)
    kl_coef = grpo.warmed_up(learner.kl.coef, learner.tokens, config.kl_warmup_tokens)
    kl = divergence(learner, rollouts.rows, rollouts.log_probs).mean()
    loss = grpo.policy_loss(lp, lp.detach(), advantages, config.clip_range)[0].mean() + kl_coef * kl  # (20)
    loss.backward()
    learner.tokens += lp.numel()
    learner.flat = 0 if advantages.any() else learner.flat + 1
    entropy, grad_norm = grpo.entropy(rollouts.log_probs.detach()).mean(), learner.descend(config.max_grad_norm)
    means = {"loss": loss, "reward": rewards.mean(), "kl": kl, "entropy": entropy}
    return {name: mean.item() for name, mean in means.items()} | {"kl_coef": kl_coef, "grad_norm": grad_norm}


def ppo_step(learner: Learner, text: Tensor, config: TextConfig) -> Figures:
    """Actor and critic share the network; the value head has its own learning rate."""
    assert learner.value_head is not None
    with torch.no_grad():
        rollouts = roll_out(learner, text, config)
        old = rollouts.log_probs.gather(2, rollouts.chosen)  # (R, T, A)
        rewards = token_rewards(rollouts, config)
        values = learner.value_head(rollouts.hidden)[:, :, None].expand_as(rewards)  # before the token is chosen
        paid, expected = (part.transpose(1, 2).flatten(0, 1) for part in (rewards, values))  # (R * A, T)
        advantages = grpo.gae(paid, expected, torch.ones_like(paid), config.gamma, config.gae_lambda)
        advantages = advantages.unflatten(0, (-1, rewards.shape[2])).transpose(1, 2)  # (R, T, A)
        returns = advantages + values
        if advantages.numel() > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    kl_coef = grpo.warmed_up(learner.kl.coef, learner.tokens, config.kl_warmup_tokens)
    sums = defaultdict[str, float](float)
    generator = torch.Generator().manual_seed(learner.step)
    orders = [torch.randperm(len(old), generator=generator).to(old.device) for _ in range(config.epochs)]
    parts = [part for order in orders for part in order.chunk(config.minibatches)]
    for chosen in parts:
        rows = whole_rows(rollouts.rows.ids[chosen])
        _, log_probs, hidden = score(learner.model, rows, 1.0)  # (r, T, V)
        lp = log_probs.gather(2, rollouts.chosen[chosen])  # (r, T, A)
        kl = divergence(learner, rows, log_probs).mean()
        value_loss = ((learner.value_head(hidden)[:, :, None] - returns[chosen]) ** 2).mean()
        policy, clipped = grpo.policy_loss(lp, old[chosen], advantages[chosen], config.clip_range)
        loss = policy.mean() + kl_coef * kl + config.value_loss_coef * value_loss
        loss.backward()
        figures = {"loss": loss, "value_loss": value_loss, "kl": kl, "clip_share": clipped.float()}
        for name, values in figures.items():
            sums[name] += values.mean().item() / len(parts)
        sums["grad_norm"] += learner.descend(config.max_grad_norm) / len(parts)
    learner.tokens += old.numel()
    return sums | {"reward": rewards.mean().item(), "kl_coef": kl_coef}


# Denoising is a masked language model (BERT, 2018), sampled as in MaskGIT (2022).  The last id of the vocabulary is the
# mask.  The model sees both sides of a gap and never predicts the mask itself.


def fill(model: GPT, ids: Tensor, at: Any = ...) -> Tensor:
    """Masked ids (N, T) -> log-probabilities (N, T, V) of the token at each position, or only at the positions `at`."""
    hidden = model(ids, torch.ones_like(ids, dtype=torch.bool), causal=False)
    return model.logits(hidden[at])[..., :-1].log_softmax(-1)


def hide(model: GPT, text: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mask a random share of the text.  Returns ids and mask, (N, T) each, with at least one gap."""
    hidden = torch.rand(text.shape, generator=generator, device=text.device) < share
    hidden[0, 0] |= ~hidden.any()
    return text.masked_fill(hidden, model.config.vocab_size - 1), hidden


def denoise_step(learner: Learner, text: Tensor, config: TextConfig) -> Figures:
    """The cross-entropy of the masked tokens."""
    ids, hidden = hide(learner.model, text, config.mask_share, learner.generator)
    loss = F.nll_loss(fill(learner.model, ids, hidden), text[hidden])
    loss.backward()
    learner.tokens += text.numel()
    return {"loss": loss.item(), "grad_norm": learner.descend(config.max_grad_norm)}


@torch.no_grad()
def unmask(model: GPT, N: int, T: int, steps: int, generator: torch.Generator) -> Tensor:
    """Generate (N, T) from masks alone: each step fills all gaps and keeps a growing share, the surest first."""
    mask_id = model.config.vocab_size - 1
    ids = torch.full((N, T), mask_id, device=model.device)
    for step in range(1, steps + 1):
        log_probs = fill(model, ids)  # (N, T, V)
        drawn = torch.multinomial(log_probs.exp().flatten(0, 1), 1, generator=generator).view(N, T)
        filled = torch.where(ids == mask_id, drawn, ids)
        sure = log_probs.gather(2, filled[:, :, None])[:, :, 0].masked_fill(ids != mask_id, math.inf)
        kept = sure.topk(math.ceil(T * step / steps), 1).indices
        ids = torch.full_like(ids, mask_id).scatter(1, kept, filled.gather(1, kept))
    return ids


Step = Callable[[Learner, Tensor, TextConfig], Figures]
STEPS: dict[str, Step] = {"supervised": supervised_step, "grpo": grpo_step, "ppo": ppo_step, "denoise": denoise_step}


def learn(learner: Learner, corpus: Corpus, config: TextConfig) -> Iterator[Figures]:
    """Train for --steps steps; yields each step's figures."""

    def take() -> Figures:
        text = draw_windows(corpus.train, config.horizon, config.batch_size, config.seed, learner.step)
        return STEPS[config.algo](learner, text, config)

    return grpo.run_steps(learner, take, config.steps, decay=config.lr_decay)


# ---------------------------------------------------------------------------------------------------------------------
# Held-out report

Report = dict[str, Any]


def guesses_at_gaps(model: LanguageModel, windows: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities (m, V) at masked tokens of the windows (N, T), the same for every model, and right ids (m,).

    A counting model predicts a masked token from its left neighbour, which it is given even where that is masked too.
    """
    generator = torch.Generator(windows.device).manual_seed(0)
    hidden = torch.rand(windows.shape, generator=generator, device=windows.device) < share
    hidden[:, 0] = False  # it has no left neighbour
    hidden[0, -1] |= ~hidden.any()  # at least one
    if isinstance(model, GPT):
        log_probs = fill(model, windows.masked_fill(hidden, model.config.vocab_size - 1), hidden)
    else:
        log_probs = model.logits(model(windows.roll(1, 1)[hidden][None], hidden))[0]
    return log_probs, windows[hidden]


@torch.no_grad()
def evaluate(model: LanguageModel, corpus: Corpus, config: TextConfig) -> Report:
    """Bits per character, share and mean probability of right tokens, in held-out windows; for denoise, masked ones."""
    windows = corpus.held_out_windows(config.horizon, config.held_out)
    if config.algo == "denoise":
        guesses = iter([guesses_at_gaps(model, windows, config.mask_share)])
    else:  # a few at a time, because a vocabulary can be large
        guesses = ((score(model, whole_rows(part), 1.0)[1], part[:, 1:]) for part in windows.split(16))
    found, ids = list[Tensor](), list[int]()
    for log_probs, right in guesses:
        lp, likeliest = log_probs.gather(-1, right[..., None])[..., 0], log_probs.argmax(-1) == right
        found.append(torch.stack((lp, lp.exp(), likeliest)).flatten(1))
        ids += right.flatten().tolist()
    lp, p, likeliest = torch.cat(found, 1)
    bits = -lp.sum().item() / math.log(2) / len(corpus.tokens.decode(ids))
    return {"bits": bits, "right": likeliest.mean().item(), "p_right": p.mean().item()}


def generation_report(model: GPT, corpus: Corpus, config: TextConfig) -> Report:
    """What a model writes itself, with the same random numbers every time."""
    T, generator = config.horizon, torch.Generator(model.device).manual_seed(0)
    windows = corpus.held_out_windows(T, config.held_out)
    if config.algo == "denoise":
        ids, told = unmask(model, 16, T, UNMASK_STEPS, generator), Report()
    else:
        rows, _ = generate(model, windows[:, :1].tolist(), 1, Sampling(max_new_tokens=T), CharTokens.end, generator)
        ids = rows.answer_ids
        told = {"free_right": (ids == windows[:, 1:]).float().mean().item()}
    counts = ids.flatten().bincount()
    return told | {
        "commonest": corpus.tokens.decode([int(counts.argmax())]),
        "commonest_share": counts.max().item() / ids.numel(),
        "share_in_text": (corpus.train == counts.argmax()).float().mean().item(),
        "sample": corpus.tokens.decode(ids[0].tolist()),
    }


def collapse(report: Report) -> str | None:
    """A warning if the model writes little but one token: its share is nearer to 1 than to its share in the text."""
    if report["commonest_share"] < (1 + report["share_in_text"]) / 2:
        return None
    said = f"{report['commonest_share']:.0%} of what the model writes is {report['commonest']!r}"
    return f"collapsed: {said}, which is {report['share_in_text']:.0%} of the text"


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def make_model(config: TextConfig, V: int) -> GPT:
    """A model with GPT-2's start values; denoise has one more id, the mask."""
    torch.manual_seed(config.seed)
    latent = config.latent if config.attention == "mla" else 0
    size = V + (config.algo == "denoise")
    model = GPT(GptConfig(config.n_layer, config.n_head, config.n_embd, config.n_positions, size, latent=latent))
    say(f"{size} different tokens; a model of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    return model.to(device_of(config.device))


def likelihood_from(model: GPT, corpus: Corpus, config: TextConfig, steps: float, seconds: float, seed: int) -> GPT:
    """Train a model by likelihood: the warm start, and the baseline of equal time."""

    def draw(step: int) -> Rows:
        return whole_rows(draw_windows(corpus.train, config.horizon, config.batch_size, seed, step))

    return grpo.supervised(model, draw, config.warm_lr, steps, seconds, config.lr_decay)


def text_command(config: TextConfig) -> dict[str, Any]:
    """Warm start, training, likelihood from the same start for the same time; reports with counting baselines."""
    run = Run(config)
    corpus = build_corpus(config, run)
    start = make_model(config, corpus.tokens.size)
    if not run.checkpoint and config.warm_steps:  # on windows of its own, which training does not repeat
        say(f"warm start: {config.warm_steps} supervised steps")
        likelihood_from(start, corpus, config, config.warm_steps, math.inf, config.seed + 2**31)
    run.begin(start)
    if not run.checkpoint:
        run.extra["before"] = evaluate(start, corpus, config) | generation_report(start, corpus, config)
    before = run.extra["before"]
    unigram, bigram = (Counts(corpus.train, corpus.tokens.size, two) for two in (False, True))
    baselines = {"commonest": evaluate(unigram, corpus, config), "bigram": evaluate(bigram, corpus, config)}

    reference = bigram if config.reference == "bigram" else copy.deepcopy(start).requires_grad_(False)
    kl, critic_lr = grpo.KlController(config.kl_coef), config.critic_lr if config.algo == "ppo" else None
    learner = Learner(copy.deepcopy(start), reference, config.lr, config.seed, value_lr=critic_lr, kl=kl)

    flat = run.follow(learner, learn(learner, corpus, config), config.log_steps)
    after = evaluate(learner.model, corpus, config) | generation_report(learner.model, corpus, config)
    if config.control and config.algo in ("grpo", "ppo"):
        say(f"likelihood from the same start, for as long: {learner.seconds:.0f} s (--no-control: without)")
        control = likelihood_from(start, corpus, config, math.inf, learner.seconds, config.seed)
        baselines["supervised"] = evaluate(control, corpus, config)
    say(table("", ("bits", "right", "p_right", "free_right"), {"before": before, "after": after, **baselines}))
    say(f"before: {before['sample']!r}\nafter:  {after['sample']!r}")
    fallen = None if config.algo == "denoise" else collapse(after)  # its sampler keeps the surest first: mostly blanks
    if config.algo != "denoise":  # `sample` writes on from a prompt, as a denoiser does not
        say(flat or fallen or "no collapse to one token")
        save_model(learner.model, corpus.tokens, run.folder / "model")
    say(f"{run.folder}: {'' if config.algo == 'denoise' else 'model, '}checkpoint, tokens and curves")
    told = {"algo": config.algo, "before": before, "after": after, "baselines": baselines}
    return {**told, "collapse": fallen, "collapsed": flat, **run.result(learner)}
