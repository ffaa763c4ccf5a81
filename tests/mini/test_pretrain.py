"""Pretraining: what is drawn, the held-out loss, a run that is interrupted, and the weights that are shipped."""

from __future__ import annotations

import json
import math
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mini.chess_lines import (
    PRETRAINED,
    SHIPPED,
    ChessTask,
    Corpus,
    best_first,
    parse_line,
    prompts_of,
    self_play,
    usual_held_out,
)
from mini.config import ChessConfig, EvalConfig, PretrainConfig
from mini.model import GPT, GptConfig, Sampling, generate
from mini.pretrain import POSITIONS, documents, held_out_loss, read_lines, take_out
from mini.runs import LineTokens, digest, load_model, load_tokens
from tests.mini.helpers import run_mini
from toolkit import UsageError

QUICK = ("--n-layer", 1, "--n-head", 2, "--n-embd", 16, "--batch-size", 4, "--held-out", 4, "--eval-steps", 2,
         "--save-steps", 1, "--track", "none", "--max-new-tokens", 8)  # fmt: skip
DIGEST = "021e091301c594a164e97d8ce9344fafbb151ec62117d9fae676460b3b0335fb"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text("".join(f"{line}\n" for line in islice(self_play(random.Random(7)), 300)))
    (folder / "p.txt").write_text("".join(f"{line}\n" for line in SHIPPED.read_text().splitlines()[-100:]))
    return folder


def test_a_step_draws_the_same_documents_again_and_no_held_out_ones(data: Path) -> None:
    tokens, config = LineTokens(), PretrainConfig(data=data, batch_size=40)
    lines = read_lines(data)
    lines["A"].append("A: no line\n")
    held_out = take_out(lines, 8, tokens)
    assert [len(held_out[kind]) for kind in ("P", "A")] == [8, 8]
    steps = [documents(lines, prompts_of(held_out), tokens, config, step) for step in range(5)]
    assert steps[3] == documents(lines, prompts_of(held_out), tokens, config, 3) != steps[4]
    assert {item.kind for item in steps[0]} == {"P", "A"}
    assert not {item.prompt for step in steps for item in step} & prompts_of(held_out)


def test_a_model_that_knows_nothing_pays_a_tokens_share_for_each_character() -> None:
    tokens, held_out = LineTokens(), usual_held_out(3)
    task = ChessTask(tokens, EvalConfig(), Corpus({}, held_out))
    model = GPT(GptConfig(1, 1, 8, POSITIONS, tokens.size))
    torch.nn.init.zeros_(model.wte.weight)
    told = held_out_loss(model, task)
    answers = {"P": [best_first(item).answer for item in held_out["P"]], "A": [item.answer for item in held_out["A"]]}
    for kind, texts in answers.items():
        count = sum(len(tokens.encode(text)) + 1 for text in texts)
        expected = count * math.log(tokens.size) / sum(len(text) + 1 for text in texts)
        assert told[f"nats a character, {kind}"] == pytest.approx(expected, rel=1e-5)


def test_an_interrupted_run_goes_on_to_the_same_weights(data: Path, tmp_path: Path) -> None:
    words = ("pretrain", *QUICK, "--data", data, "--lr-decay", 0, "--json")  # the decay would depend on --steps
    told = dict[str, Any]()
    for name, steps, more in (("whole", 4, ()), ("parts", 3, ()), ("parts", 4, ("--resume",))):
        done = run_mini(*words, "--steps", steps, "--log-dir", tmp_path / name, *more)
        assert done.returncode == 0, done.stderr
        told[name] = json.loads(done.stdout.splitlines()[-1])
        assert digest(tmp_path / name / "model") in done.stderr
        losses = done.stderr.count("nats a character, P")  # every --eval-steps, and the last
        assert done.stderr.count("step ") == losses
    assert [point["step"] for point in told["whole"]["curve"]] == [2, 4]
    assert told["whole"]["the corpus"] == told["parts"]["the corpus"]
    assert told["whole"]["the chess job, likeliest"] == told["parts"]["the chess job, likeliest"]
    assert digest(tmp_path / "whole" / "model") == digest(tmp_path / "parts" / "model")


def test_its_model_is_for_init(data: Path, tmp_path: Path) -> None:
    done = run_mini("pretrain", *QUICK, "--data", data, "--steps", 1, "--log-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float16"
    assert isinstance(load_tokens(tmp_path / "model"), LineTokens)
    done = run_mini("sample", "--init", tmp_path, "--k-samples", 2, "--max-new-tokens", 8)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("log-probability") == 2


def test_it_goes_on_from_a_model(data: Path, tmp_path: Path) -> None:
    """Nothing is trained, so the weights are those that it began from."""
    short = ("--held-out", 4, "--max-new-tokens", 8, "--track", "none", "--data", data)
    done = run_mini("pretrain", "--init", PRETRAINED, *short, "--steps", 0, "--log-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "model") == DIGEST
    done = run_mini("pretrain", "--init", PRETRAINED, *short, "--n-layer", 2)
    assert done.returncode == 2
    assert "--init has its own" in done.stderr


def test_data_that_cannot_be_used_is_one_line(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none: No such file"):
        read_lines(tmp_path / "none")
    with pytest.raises(UsageError, match="needs P and A lines"):
        read_lines(data / "a.txt")
    short = tmp_path / "short"
    short.mkdir()
    for name in ("a.txt", "p.txt"):  # it drew for ever
        (short / name).write_text("".join((data / name).open().readlines()[:5]))
    done = run_mini("pretrain", "--data", short, "--held-out", 5, "--steps", 1, "--log-dir", tmp_path / "run")
    assert (done.returncode, done.stderr.count("error:")) == (2, 1)
    assert "short: no P line is left to train on: lower --held-out 5" in done.stderr
    (short / "p.txt").write_text("P: nonsense\n")  # with --p-share 0 it divided by zero, after the last step
    done = run_mini("pretrain", "--data", short, "--p-share", 0, "--log-dir", tmp_path / "run")
    assert (done.returncode, done.stderr.count("error:")) == (2, 1)
    assert "no P line can be used" in done.stderr


def test_the_shipped_weights_are_the_recorded_ones_and_know_chess() -> None:
    assert digest(PRETRAINED) == DIGEST
    assert sum(path.stat().st_size for path in PRETRAINED.iterdir()) < 6e6
    model, task = load_model(PRETRAINED), ChessTask(load_tokens(PRETRAINED), ChessConfig(), Corpus({}, {}))
    example = parse_line(next(self_play(random.Random(3))))
    assert example is not None
    rows, _ = generate(model, [task.prompt_ids(example)], 1, Sampling(0, max_new_tokens=96), task.end)
    assert task.tokens.decode(rows.answers(task.end)[0][0]) == example.answer
