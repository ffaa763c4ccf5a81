"""The command as its user runs it: reports, resumption, aliases, and what is said to bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mini.text
from mini.__main__ import main, parse_arguments
from mini.config import TextConfig, text_defaults
from mini.grpo import supervised
from mini.model import GPT, GptConfig, Rows
from mini.runs import CharTokens
from mini.text import STEPS, Corpus, Counts, Report, collapse, evaluate, generation_report
from tests.mini.helpers import run_mini

SHAPE = "--n-layer 1 --n-head 2 --n-embd 16 --horizon 8 --latent 4"
TINY = SHAPE + " --steps 4 --batch-size 4 --held-out 8 --track none --log-steps 1 --warm-steps 0"
TEXT = "the cat sat on the mat; " * 60


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: object, name: str = "run") -> dict[str, Any]:
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["text", *TINY.split(), "--data", tmp_path / "text.txt", "--log-dir", tmp_path / name, "--json", *options]
    assert main([str(word) for word in words]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


@pytest.mark.parametrize("attention", ["mha", "mla"])
@pytest.mark.parametrize("algo", ["supervised", "grpo", "ppo", "denoise"])
def test_every_algorithm_reports_before_after_and_baselines(
    algo: str, attention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path, capsys, "--algo", algo, "--attention", attention)
    assert {"before", "after", "baselines", "seconds"} <= result.keys()
    for report in (result["before"], result["after"]):
        assert {"bits", "right", "p_right", "sample"} <= report.keys()
        assert len(report["sample"]) == 8
    baselines = {"commonest", "bigram"} | ({"supervised"} if algo in ("grpo", "ppo") else set())
    assert set(result["baselines"]) == baselines
    assert result["before"]["bits"] == pytest.approx(math.log2(len(set(TEXT))), abs=0.2)
    assert result["before"] != result["after"]


@pytest.mark.parametrize("algo", ["grpo", "denoise"])
def test_byte_pairs_are_reported_by_the_character(
    algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All bytes and one pair, in the form of GPT-2's files: two `th` in 24 characters make 22 tokens of them."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    letters = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    (tmp_path / "encoder.json").write_text(json.dumps({text: i for i, text in enumerate([*letters, "th"])}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nt h\n")
    more = ("--vocabulary", tmp_path, "--held-out", 100, "--mask-share", 0.9)
    result = run(tmp_path, capsys, "--algo", algo, *more)
    assert result["before"]["bits"] == pytest.approx(math.log2(258) * 22 / 24, abs=0.3)
    assert result["baselines"]["bigram"]["bits"] < result["baselines"]["commonest"]["bits"]


def test_bits_per_character_by_hand() -> None:
    """Four tokens with chances of a half, a quarter, an eighth and 1: 1 + 2 + 3 + 0 bits of four characters."""
    corpus = Corpus(CharTokens("ab"), torch.zeros(1), torch.tensor([0, 0, 1, 1, 0]))

    class Table(Counts):
        def logits(self, hidden: Tensor) -> Tensor:
            return torch.tensor([[[0.5, 0.5], [0.75, 0.25], [0.875, 0.125], [1.0, 0.0]]]).log()

    expected = {"bits": 1.5, "right": 0.5, "p_right": 1.875 / 4}
    assert evaluate(Table(corpus.held_out, 2), corpus, TextConfig(horizon=4, held_out=1)) == pytest.approx(expected)


def test_a_model_is_judged_token_by_token_as_alone() -> None:
    torch.manual_seed(0)
    model, ids = GPT(GptConfig(1, 2, 16, 32, 3)), torch.randint(3, (100,))
    corpus = Corpus(CharTokens("abc"), ids, ids)
    windows = corpus.held_out_windows(6, 5)
    bits, hits = 0.0, 0.0
    for window in windows:
        probs = model.logits(model(window[None, :-1], torch.ones(1, 6)))[0].softmax(1)
        bits -= sum(math.log2(probs[t, token].item()) for t, token in enumerate(window[1:].tolist()))
        hits += sum(int(probs[t].argmax()) == token for t, token in enumerate(window[1:].tolist()))
    report = evaluate(model, corpus, TextConfig(horizon=6, held_out=5))
    assert (report["bits"], report["right"]) == pytest.approx((bits / 30, hits / 30))


def test_a_collapse_is_named() -> None:
    """A model whose every state points at one letter, and the same model with no such wish."""
    torch.manual_seed(0)
    ids = torch.randint(4, (400,))
    corpus, config = Corpus(CharTokens("abcd"), ids, ids), TextConfig(horizon=8)
    model = GPT(GptConfig(1, 2, 16, 32, 4))
    assert collapse(generation_report(model, corpus, config)) is None
    with torch.no_grad():
        model.ln_f.bias.copy_(50 * model.wte.weight[2])
        model.wte.weight[2] *= 100
    said = collapse(generation_report(model, corpus, config))
    assert said is not None
    assert said.startswith("collapsed: 100% of what the model writes is 'c', which is 2")


def test_free_rollouts_collapse_to_the_commonest_character(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Letters drawn at random, a third of them 'e': where nothing can be foretold, always saying it pays best."""
    draws = torch.randint(12, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "random.txt").write_text("".join("eeeeabcdfghi"[i] for i in draws))
    words = ["--algo", "grpo", "--no-teacher-forcing", "--data", tmp_path / "random.txt", "--lr", "1e-2",
             "--steps", "30", "--batch-size", "16", "--kl-coef", "0", "--k-samples", "8", "--no-control"]  # fmt: skip
    result: Report = run(tmp_path, capsys, *words)
    assert result["collapse"] is not None
    assert result["after"]["commonest"] == "e"
    assert result["after"]["bits"] > result["baselines"]["commonest"]["bits"]


def test_every_algorithm_draws_the_same_windows_and_a_warm_start_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed of the warm start once differed in bits only that torch drops, and sampling shifted all windows."""
    seen: list[Any] = []
    draw = mini.text.draw_windows

    def spy(*arguments: Any) -> Tensor:
        windows = draw(*arguments)
        seen.append(windows.tolist())
        return windows

    monkeypatch.setattr(mini.text, "draw_windows", spy)
    drawn: dict[str, list[Any]] = {}
    for algo in STEPS:
        seen.clear()
        run(tmp_path, capsys, "--algo", algo, "--warm-steps", 4, name=algo)
        warm, drawn[algo], control = seen[:4], seen[4:8], seen[8:]
        assert drawn[algo] == drawn["supervised"]
        assert control[:1] == (drawn[algo][:1] if algo in ("grpo", "ppo") else [])
        assert not any(windows in drawn[algo] for windows in warm)


def test_likelihood_as_a_baseline_has_the_same_start_and_as_much_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[list[Tensor], float, float]] = []

    def spy(model: GPT, draw: Callable[[int], Rows], lr: float, steps: float, seconds: float, decay: float) -> GPT:
        trained.append(([part.detach().clone() for part in model.parameters()], steps, seconds))
        return supervised(model, draw, lr, steps, seconds, decay)

    monkeypatch.setattr("mini.grpo.supervised", spy)
    result = run(tmp_path, capsys, "--algo", "grpo", "--warm-steps", 2)
    (_, warm, _), (start, steps, seconds) = trained
    assert (warm, steps, seconds) == (2, math.inf, result["train_seconds"])
    assert all(map(torch.equal, start, torch.load(tmp_path / "run" / "start.pt", weights_only=True).values()))


@pytest.mark.parametrize("options", [
    "--algo supervised", "--algo ppo --reference start", "--algo grpo --no-teacher-forcing", "--algo denoise",
])  # fmt: skip
def test_a_resumed_run_has_the_same_numbers(options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*options.split(), "--no-control", "--warm-steps", "2"]
    whole = run(tmp_path, capsys, *words)
    run(tmp_path, capsys, *words, "--steps", 2, name="other")
    resumed = run(tmp_path, capsys, *words, "--resume", name="other")
    assert (resumed["before"], resumed["after"]) == (whole["before"], whole["after"])
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"] for name in ("run", "other")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(("gone", "said"), [("start.pt", "start.pt: No such file"), ("tokens.bin", "is not the one")])
def test_a_run_that_lost_a_file_is_not_resumed(
    gone: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, capsys)
    (tmp_path / "run" / gone).unlink()
    words = f"text {TINY} --data {tmp_path / 'text.txt'} --log-dir {tmp_path / 'run'} --resume"
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_a_run_writes_on_from_a_prompt(attention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, capsys, "--algo", "grpo", "--attention", attention)
    first, again, other = (
        run_mini("sample", "--init", tmp_path / "run", "--k-samples", 3, "--seed", seed, "--prompt", "the ")
        for seed in (1, 1, 2)
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout != other.stdout
    rows = first.stdout.partition("\n")[2].split("\n---\n")[:-1]  # behind a line about the model
    assert [len(row) for row in rows] == [4 + 64] * 3
    assert set("".join(rows)) <= set(TEXT)
    assert all(row.startswith("the ") for row in rows)
    assert run_mini("sample", "--init", tmp_path / "run").returncode == 0  # from the text's first character


def test_a_texts_model_takes_any_prompt_and_no_more_tokens_than_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt that begins like one of chess was taken for one, and a short model needed --max-new-tokens."""
    text = tmp_path / "chess.txt"
    text.write_text("P: 8/8/8/4k3 w\nA: e2e4\n" * 40)
    run(tmp_path, capsys, "--data", text, "--n-positions", 32)
    for prompt in ("P: 8/8", "A: e"):
        done = run_mini("sample", "--init", tmp_path / "run", "--prompt", prompt, "--k-samples", 1)
        assert done.returncode == 0, done.stderr
        assert done.stdout.partition("\n")[2].startswith(prompt)


def test_a_share_too_small_to_mask_anything_masks_one_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, capsys, "--algo", "denoise", "--mask-share", 1e-5)
    assert result["after"]["right"] in (0, 1)


def test_ppo_can_learn_from_a_single_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its advantage has no standard deviation, and the run ended with a gradient that is not finite."""
    result = run(tmp_path, capsys, "--algo", "ppo", "--horizon", 1, "--k-samples", 1, "--batch-size", 1)
    assert (result["steps"], result["tokens"]) == (4, 4)
    assert math.isfinite(result["after"]["bits"])


def test_a_run_without_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its config.json was called damaged."""
    run(tmp_path, capsys, "--algo", "denoise")
    done = run_mini("sample", "--init", tmp_path / "run")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is a run without a model" in done.stderr


@pytest.mark.parametrize(("words", "complaint"), [
    (["sample", "--prompt", "the Cat"], "--prompt: the text has no 'C'"),
    (["sample", "--prompt", ""], "--prompt is empty"),
    (["sample", "--prompt", "the " * 32], "lower --max-new-tokens"),
    (["eval"], "has the model of a text: only sample can read it"),
])  # fmt: skip
def test_what_a_texts_model_cannot_do_is_one_line(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, capsys)
    done = run_mini(*words, "--init", tmp_path / "run")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert complaint in done.stderr


def test_defaults_depend_on_the_algorithm_and_yield_to_what_is_given() -> None:
    config = parse_arguments(["text", "--algo", "grpo", "--batch_size=7", "--kl_coef", "0.5", "--no-teacher-forcing"])
    assert isinstance(config, TextConfig)
    assert (config.batch_size, config.kl_coef, config.teacher_forcing) == (7, 0.5, False)
    assert (config.steps, config.warm_steps, config.lr) == (700, 900, 1e-3)
    assert parse_arguments(["text", "--algo=ppo"]) == text_defaults("ppo") != text_defaults("grpo")


@pytest.mark.parametrize(("options", "complaint"), [
    ("--horizon 128", "--n-positions 128 has no room for windows of --horizon 128"),
    ("--n-embd 50 --n-head 3", "--n-embd 50 cannot be shared by --n-head 3"),
    ("--vocabulary /nowhere", "/nowhere has no GPT-2 vocabulary"),
    ("--algo grpo --k-samples 1", "--k-samples 1 leaves GRPO nothing to compare"),
    ("--data missing.txt", "missing.txt: No such file or directory"),
    ("--data {bytes}", "is no text in UTF-8"),
    ("--data {short}", "the text has 5 tokens"),
    ("--mask-share 2", "--mask-share must lie between"),
    ("--resume", "--resume needs the --log-dir"),
    ("--algo magic", "magic"),
    ("--log-dir {bytes}/run", "/run/tokens.bin cannot be written: Not a directory"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    options: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("hello")
    words = options.format(bytes=tmp_path / "bytes", short=tmp_path / "short").split()
    assert main(["text", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert complaint in said
    assert len(said.splitlines()) == 1
