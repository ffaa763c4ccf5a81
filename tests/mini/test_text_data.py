"""Windows, tokens.bin and the counting baselines, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mini.config import TextConfig
from mini.text_data import CharTokens, Counts, build_corpus, draw_windows, read_text
from mini.text_rl import whole_rows
from mini.train import LanguageModel, score
from tests.mini.helpers import LATENT, SMALL, small_model
from toolkit import UsageError

TEXT = "the cat sat on the mat; " * 20


def config(tmp_path: Path, text: str = TEXT, **options: Any) -> TextConfig:
    path = tmp_path / "text.txt"
    path.write_text(text)
    return TextConfig(data=path, log_dir=tmp_path, **options)


def test_characters_round_trip() -> None:
    text = read_text(None)
    assert len(text) > 400_000
    tokens = CharTokens(text)
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert max(ids) == tokens.size - 1


def test_the_last_tenth_is_held_out_and_windows_do_not_leave_their_part(tmp_path: Path) -> None:
    corpus = build_corpus(config(tmp_path), 7, tmp_path)
    assert corpus.tokens.decode([*corpus.train.tolist(), *corpus.held_out.tolist()]) == TEXT
    assert len(corpus.held_out) == len(TEXT) // 10
    windows = corpus.held_out_windows(7, 100)
    assert windows.shape == ((len(corpus.held_out) - 1) // 7, 8)
    assert corpus.tokens.decode(windows[:, 1:].flatten().tolist()) == TEXT[-48:][1:43]


def test_every_window_can_be_drawn_and_none_that_is_cut_off() -> None:
    ids = torch.arange(12)
    drawn = draw_windows(ids, 3, 500, seed=0, step=0)
    assert {tuple(window) for window in drawn.tolist()} == {(i, i + 1, i + 2, i + 3) for i in range(9)}


def test_tokens_bin_has_16_bits_a_token_and_a_resumed_run_holds_to_it(tmp_path: Path) -> None:
    build_corpus(config(tmp_path), 7, tmp_path)
    data = (tmp_path / "tokens.bin").read_bytes()
    ids = CharTokens(TEXT).encode(TEXT)
    assert data == b"".join(i.to_bytes(2, "little") for i in ids)
    build_corpus(config(tmp_path, resume=True), 7, tmp_path)
    with pytest.raises(UsageError, match="not the one that the run"):
        build_corpus(config(tmp_path, TEXT[::-1], resume=True), 7, tmp_path)


def test_a_text_too_short_for_its_windows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="windows of 70 need 720"):
        build_corpus(config(tmp_path), 70, tmp_path)


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
