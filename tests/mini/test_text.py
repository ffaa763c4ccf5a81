"""A text in tokens; rewards, groups and losses against plain loops over tokens; gaps and the order of filling them."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mini.text
from mini.config import TextConfig
from mini.grpo import KlController, LanguageModel, Learner, score
from mini.model import GPT, GptConfig
from mini.runs import CharTokens, Run
from mini.text import (
    STEPS,
    Corpus,
    Counts,
    Rollouts,
    build_corpus,
    denoise_step,
    draw_windows,
    evaluate,
    fill,
    generation_report,
    group_advantages,
    grpo_step,
    guesses_at_gaps,
    hide,
    learn,
    ppo_step,
    read_text,
    roll_out,
    token_rewards,
    unmask,
    whole_rows,
)
from tests.mini.helpers import LATENT, SMALL, elsewhere, log_probs_of, small_model
from toolkit import UsageError

SENTENCES = "the cat sat on the mat; " * 20


def corpus_of(folder: Path, T: int, text: str = SENTENCES, **options: Any) -> Corpus:
    path = folder / "text.txt"
    path.write_text(text)
    config = TextConfig(data=path, log_dir=folder, horizon=T, **options)
    return build_corpus(config, Run(config))


def test_characters_round_trip() -> None:
    text = read_text(None)
    assert len(text) > 400_000
    tokens = CharTokens(text)
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert max(ids) == tokens.size - 1


def test_the_last_tenth_is_held_out_and_windows_do_not_leave_their_part(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 7)
    assert corpus.tokens.decode([*corpus.train.tolist(), *corpus.held_out.tolist()]) == SENTENCES
    assert len(corpus.held_out) == len(SENTENCES) // 10
    windows = corpus.held_out_windows(7, 100)
    assert windows.shape == ((len(corpus.held_out) - 1) // 7, 8)
    assert corpus.tokens.decode(windows[:, 1:].flatten().tolist()) == SENTENCES[-48:][1:43]


def test_every_window_can_be_drawn_and_none_that_is_cut_off() -> None:
    ids = torch.arange(12)
    drawn = draw_windows(ids, 3, 500, seed=0, step=0)
    assert {tuple(window) for window in drawn.tolist()} == {(i, i + 1, i + 2, i + 3) for i in range(9)}


def test_tokens_bin_has_16_bits_a_token_and_a_resumed_run_holds_to_it(tmp_path: Path) -> None:
    corpus_of(tmp_path, 7)
    data = (tmp_path / "tokens.bin").read_bytes()
    ids = CharTokens(SENTENCES).encode(SENTENCES)
    assert data == b"".join(i.to_bytes(2, "little") for i in ids)
    Run(TextConfig(data=tmp_path / "text.txt", log_dir=tmp_path, horizon=7)).save(learner_and_config()[0])
    corpus_of(tmp_path, 7, resume=True)
    with pytest.raises(UsageError, match="not the one that the run"):
        corpus_of(tmp_path, 7, SENTENCES[::-1], resume=True)


def test_a_text_too_short_for_its_windows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="windows of 70 need 720"):
        corpus_of(tmp_path, 70)


def test_counts_with_one_added() -> None:
    """a b a b a c: after a, b twice and c once; after b, a twice; after c, nothing."""
    ids, mask = torch.tensor([0, 1, 0, 1, 0, 2]), torch.ones(1, 3)
    after = [[1 / 6, 3 / 6, 2 / 6], [3 / 5, 1 / 5, 1 / 5], [1 / 3, 1 / 3, 1 / 3]]
    bigram = Counts(ids, 3)
    torch.testing.assert_close(bigram.logits(bigram(torch.tensor([[0, 1, 2]]), mask)).exp(), torch.tensor([after]))
    unigram = Counts(ids, 3, bigram=False)
    expected = torch.tensor([3, 3, 2]) / 8  # of b a b a c, the first letter being nobody's successor
    torch.testing.assert_close(unigram.logits(unigram(torch.tensor([[2, 0]]), mask))[0, 1].exp(), expected)
    scored = score(bigram, whole_rows(torch.tensor([[0, 1, 2]])), 1.0)[0].exp()
    assert scored[0].tolist() == pytest.approx([1 / 2, 1 / 5])


@pytest.mark.parametrize("name", ["gpt", "latent", "bigram", "unigram"])
def test_no_model_or_reference_sees_a_later_token(name: str) -> None:
    ids = torch.randint(SMALL.vocab_size, (300,), generator=torch.Generator().manual_seed(0))
    models: dict[str, LanguageModel] = {
        "gpt": small_model(), "latent": small_model(config=LATENT), "bigram": Counts(ids, SMALL.vocab_size),
        "unigram": Counts(ids, SMALL.vocab_size, bigram=False),
    }  # fmt: skip
    text = draw_windows(ids, 12, 1, seed=1, step=0)
    for changed in range(13):
        other = text.clone()
        other[0, changed] = (other[0, changed] + 1) % SMALL.vocab_size
        before, after = (score(models[name], whole_rows(rows), 1.0)[1][0] for rows in (text, other))  # (T, V)
        # Row t is about token t + 1 of the window, and has read those up to t.
        assert torch.equal(before[:changed], after[:changed])


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts and algorithms

T, B, K = 6, 3, 4
IDS = torch.randint(SMALL.vocab_size, (400,), generator=torch.Generator().manual_seed(0))
CORPUS = Corpus(CharTokens("".join(map(chr, range(97, 97 + SMALL.vocab_size)))), IDS, IDS)
TEXT = draw_windows(IDS, T, B, seed=1, step=0)


def learner_for(model: GPT, reference: LanguageModel, config: TextConfig) -> Learner:
    """As the text command makes it."""
    return Learner(model, reference, config.lr, config.seed, value_lr=config.critic_lr,
                        kl=KlController(config.kl_coef))  # fmt: skip


def learner_and_config(**options: Any) -> tuple[Learner, TextConfig]:
    config = TextConfig(**{"algo": "grpo", "n_embd": SMALL.n_embd, "kl_warmup_tokens": 0, "kl_coef": 0.3, "lr": 1e-3,
                           "max_grad_norm": 1e9, "batch_size": B, "horizon": T, **options})  # fmt: skip
    return learner_for(small_model(spread=3), Counts(IDS, SMALL.vocab_size), config), config


def test_rewards_by_hand() -> None:
    log_probs = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]]).log2()  # in bits: any numbers do
    rollouts = Rollouts(whole_rows(torch.tensor([[0, 0, 1]])), torch.tensor([[[0, 2], [0, 1]]]), torch.tensor([[0, 1]]),
                        log_probs, torch.empty(0))  # fmt: skip
    plus1 = token_rewards(rollouts, TextConfig())
    assert plus1.tolist() == [[[1, 0], [0, 1]]]
    both = token_rewards(rollouts, TextConfig(reward_mode="pm1"))
    assert both.tolist() == [[[1, -1], [-1, 1]]]
    partial = token_rewards(rollouts, TextConfig(partial_logprob=2.0))
    credit = 2 * torch.tensor(0.75).log2().item()
    assert partial.flatten().tolist() == pytest.approx([-1, -2, credit, 1 + credit])


@pytest.mark.parametrize("forced", [True, False])
def test_a_group_is_the_rollouts_of_a_window_at_one_place(forced: bool) -> None:
    shape = (B, T, K) if forced else (B * K, T, 1)
    rewards = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    advantages = group_advantages(learner_and_config()[0], rewards, K)
    for b in range(B):
        for t in range(T):
            group = [(b, t, k) if forced else (b * K + k, t, 0) for k in range(K)]
            mean = sum(rewards[at].item() for at in group) / K
            expected = [rewards[at].item() - mean for at in group]
            assert [advantages[at].item() for at in group] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("forced", [True, False])
def test_rollouts_read_what_they_should_and_say_what_the_policy_says(forced: bool) -> None:
    learner, config = learner_and_config(teacher_forcing=forced, k_samples=600)
    rollouts = roll_out(learner, TEXT[:1], config)
    if forced:
        assert torch.equal(rollouts.rows.ids, TEXT[:1])
        first, right = rollouts.chosen[0, 0], rollouts.right
    else:
        assert torch.equal(rollouts.rows.ids[:, 1:, None], rollouts.chosen)
        assert (rollouts.rows.ids[:, 0] == TEXT[0, 0]).all()
        first, right = rollouts.chosen[:, 0, 0], rollouts.right[::600]
    assert torch.equal(right, TEXT[:1, 1:])
    expected = torch.tensor(log_probs_of(learner.model, TEXT[0, :1].tolist())[0]).exp()
    share = first.bincount(minlength=SMALL.vocab_size) / 600
    assert (share - expected).abs().sum() / 2 < 0.15  # as far apart as 600 draws may be from what they are drawn by


def plain_loss(learner: Learner, rollouts: Rollouts, config: TextConfig) -> Tensor:
    """-advantage * log p + beta * KL, context by context, place by place; its gradient is GRPO's."""
    K, (R, T, A) = config.k_samples, rollouts.chosen.shape
    table, total = Counts(IDS, SMALL.vocab_size), torch.zeros(())
    rewards = {(r, t, a): float(rollouts.chosen[r, t, a] == rollouts.right[r, t])
               for r in range(R) for t in range(T) for a in range(A)}  # fmt: skip
    for r in range(R):
        ids = rollouts.rows.ids[r : r + 1]
        log_probs = learner.model.logits(learner.model(ids, torch.ones_like(ids)))[0].log_softmax(1)
        for t in range(T):
            reference = table.logits(ids[:, t])[0]
            total = total + config.kl_coef * (log_probs[t].exp() * (log_probs[t] - reference)).sum() / (R * T)
            for a in range(A):
                group = [(r, t, k) for k in range(K)] if A == K else [(r // K * K + k, t, 0) for k in range(K)]
                advantage = rewards[r, t, a] - sum(rewards[at] for at in group) / K
                total = total - advantage * log_probs[t, rollouts.chosen[r, t, a]] / (R * T * A)
    return total


@pytest.mark.parametrize("forced", [True, False])
def test_gradient_of_grpo_is_that_of_the_plain_loss(forced: bool) -> None:
    """Adam's first mean is a tenth of the gradient."""
    learner, config = learner_and_config(teacher_forcing=forced, k_samples=K)
    state = learner.generator.get_state()
    rollouts = roll_out(learner, TEXT, config)
    learner.generator.set_state(state)
    rollouts.right[:, ::2] = rollouts.chosen[:: len(rollouts.chosen) // B, ::2, 0].repeat_interleave(
        len(rollouts.chosen) // B, 0
    )  # or hardly any would be right
    text = torch.cat((TEXT[:, :1], rollouts.right[:: len(rollouts.right) // B]), 1)
    if forced:  # where the text is what is read: the draws have to be made again
        rollouts = roll_out(learner, text, config)
        learner.generator.set_state(state)
    expected = torch.autograd.grad(plain_loss(learner, rollouts, config), list(learner.model.parameters()),
                                   allow_unused=True)  # fmt: skip
    grpo_step(learner, text, config)
    found = [learner.optimizer.state[parameter]["exp_avg"] * 10 for parameter in learner.model.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, atol=2e-5, rtol=1e-3)


def test_kl_weight_rises_with_the_sampled_tokens() -> None:
    learner, config = learner_and_config(kl_warmup_tokens=200, k_samples=K)
    coefs = [grpo_step(learner, TEXT, config)["kl_coef"] for _ in range(5)]
    assert coefs == pytest.approx([0.3 * min(1, i * B * T * K / 200) for i in range(5)])


def test_value_loss_of_ppo_by_hand() -> None:
    """The value head says 0 at first, so that returns are discounted sums of rewards, and nothing is clipped."""
    learner, config = learner_and_config(algo="ppo", epochs=1, minibatches=1, gamma=0.9, gae_lambda=0.5, k_samples=K)
    state = learner.generator.get_state()
    rollouts = roll_out(learner, TEXT, config)
    learner.generator.set_state(state)
    hit = (rollouts.chosen == rollouts.right[:, :, None]).float()  # (B, T, K)
    squares = [
        sum(0.45**later * hit[b, t + later, k].item() for later in range(T - t)) ** 2
        for b in range(B) for t in range(T) for k in range(K)
    ]  # fmt: skip
    figures = ppo_step(learner, TEXT, config)
    assert figures["value_loss"] == pytest.approx(sum(squares) / len(squares), abs=1e-6)
    assert figures["clip_share"] == 0


@pytest.mark.parametrize(("algo", "forced"), [("grpo", True), ("ppo", True), ("ppo", False)])
def test_rewards_teach_a_text(algo: str, forced: bool) -> None:
    """0 1 2 3 0 1 2 3 ...: that the next number follows is learnt from rewards alone."""
    ids = torch.arange(4).repeat(100)
    corpus = Corpus(CharTokens("0123"), ids, ids)
    config = TextConfig(algo="ppo" if algo == "ppo" else "grpo", teacher_forcing=forced,
                        n_embd=32, kl_coef=0.0, batch_size=16, k_samples=16, critic_lr=5e-4, gamma=0.0, epochs=2,
                        minibatches=2, lr=3e-3, horizon=6, steps=25)  # fmt: skip
    torch.manual_seed(0)
    model = GPT(GptConfig(1, 2, 32, 16, 4))
    rewards = [figures["reward"] for figures in learn(learner_for(model, model, config), corpus, config)]
    assert rewards[0] < 0.4
    assert sum(rewards[-5:]) / 5 > 0.6


def test_ppo_clips_once_the_policy_has_moved() -> None:
    learner, config = learner_and_config(algo="ppo", clip_range=0.01)
    assert ppo_step(learner, TEXT, config)["clip_share"] > 0


def test_the_learning_rate_falls_to_the_end() -> None:
    """In the last half of four steps, as asked for; of a critic's rate too."""
    learner, config = learner_and_config(lr_decay=0.5, algo="ppo", critic_lr=2e-3, steps=4)
    rates = [[group["lr"] for group in learner.optimizer.param_groups]
             for _ in learn(learner, Corpus(CharTokens("a"), IDS, IDS), config)]  # fmt: skip
    assert rates == [pytest.approx([share * 1e-3, share * 2e-3]) for share in (1, 1, 1, 0.5)]


# ---------------------------------------------------------------------------------------------------------------------
# Denoising

MASK = SMALL.vocab_size - 1
GAPPED = torch.randint(MASK, (4, 13), generator=torch.Generator().manual_seed(0))


def test_the_stated_share_is_hidden_and_at_least_one() -> None:
    text, generator = torch.zeros(100, 100, dtype=torch.long), torch.Generator().manual_seed(0)
    ids, hidden = hide(small_model(), text, 0.15, generator)
    assert hidden.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(ids == MASK, hidden)
    assert hide(small_model(), text, 1e-9, generator)[1].sum() == 1


def test_loss_is_the_cross_entropy_of_the_gaps_alone() -> None:
    model, config = small_model(), TextConfig(algo="denoise", n_embd=SMALL.n_embd, lr=0.0)
    learner = learner_for(model, model, config)
    ids, hidden = hide(model, GAPPED, config.mask_share, torch.Generator().manual_seed(config.seed))
    costs = []
    for n, t in hidden.nonzero().tolist():
        logits = model.logits(model(ids[n : n + 1], torch.ones(1, 13), causal=False))[0, t, :MASK]
        costs.append(math.log(logits.exp().sum().item()) - logits[GAPPED[n, t]].item())
    assert denoise_step(learner, GAPPED, config)["loss"] == pytest.approx(sum(costs) / len(costs), abs=1e-4)


def test_the_mask_is_never_said() -> None:
    model = small_model()
    with torch.no_grad():
        model.wte.weight[MASK] *= 100
    assert fill(model, GAPPED).shape == (4, 13, MASK)
    written = unmask(model, 4, 12, 5, torch.Generator().manual_seed(0))
    assert written.max() < MASK


def test_every_model_is_asked_for_the_same_gaps() -> None:
    """A denoiser sees both sides of them; a counting model its left neighbour alone, which may be one."""
    hidden = torch.rand(GAPPED.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    model, table = small_model(), Counts(GAPPED.flatten(), MASK)
    bits = {"model": 0.0, "table": 0.0}
    count = 0
    for n, t in hidden.nonzero().tolist():
        if t == 0:  # it has no left neighbour
            continue
        gaps = GAPPED[n].masked_fill(hidden[n] & (torch.arange(13) > 0), MASK)[None]
        logits = model.logits(model(gaps, torch.ones_like(gaps), causal=False))[0, t, :MASK]
        bits["model"] -= logits.log_softmax(0)[GAPPED[n, t]].item() / math.log(2)
        bits["table"] -= table.logits(GAPPED[n, t - 1][None])[0, GAPPED[n, t]].item() / math.log(2)
        count += 1
    for asked, name in ((model, "model"), (table, "table")):
        log_probs, right = guesses_at_gaps(asked, GAPPED, 0.3)
        assert len(right) == count
        found = -log_probs.gather(1, right[:, None]).sum().item() / math.log(2)
        assert found == pytest.approx(bits[name], abs=1e-3)


def test_sampling_fills_a_fifth_more_in_each_step_and_keeps_what_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(mini.text, "fill", lambda model, ids: seen.__iadd__([ids]) and fill(model, ids))
    written = unmask(small_model(), 3, 12, 5, torch.Generator().manual_seed(0))
    assert [(ids == MASK).sum(1).tolist() for ids in seen] == [[gaps] * 3 for gaps in (12, 9, 7, 4, 2)]
    for earlier, later in zip(seen, [*seen[1:], written], strict=True):
        stands = earlier != MASK
        assert torch.equal(earlier[stands], later[stands])


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("algo", STEPS)
def test_every_tensor_of_a_step_and_a_report_is_made_where_the_model_is(
    algo: Any, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made elsewhere has no content here.  Places of windows may be drawn anywhere: they are only looked up."""
    for name in ("randint", "randperm", "linspace"):
        monkeypatch.setattr(torch, name, partial(getattr(torch, name), device="cpu"))
    found = []
    for place in (contextlib.nullcontext, elsewhere):
        learner, config = learner_and_config(algo=algo, teacher_forcing=forced, steps=2, held_out=4, critic_lr=1e-2)
        with place():
            losses = [figures["loss"] for figures in learn(learner, CORPUS, config)]
            found.append(
                [*losses, evaluate(learner.model, CORPUS, config), generation_report(learner.model, CORPUS, config)]
            )
    assert found[0] == found[1]
