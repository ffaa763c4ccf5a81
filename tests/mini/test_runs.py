"""Models read from transformers and by transformers; a run's checkpoints and curves; what is wrong, in one line.

A module stands in for wandb where it is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import mini.text
from mini.config import RunOptions, TextConfig
from mini.grpo import Learner
from mini.model import Diverged
from mini.runs import LineTokens, Run, curves, load_model, load_tokens, read_state, save_model, write
from tests.mini.helpers import ROOT, run_mini, small_model
from toolkit import UsageError

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Any]:
    """A GPT-2 that transformers has saved, and itself."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=48, n_layer=3, n_head=4, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # biases and norms too, which begin at 0 and 1
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    return tmp_path, model


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder)
    with torch.no_grad():
        return model.logits(model(IDS, torch.ones_like(IDS)))


def test_logits_equal_those_of_transformers(published: tuple[Path, Any]) -> None:
    folder, theirs = published
    with torch.no_grad():
        torch.testing.assert_close(logits(folder), theirs(IDS).logits, atol=1e-5, rtol=0)


def test_openai_file_with_bare_names_and_old_masks(published: tuple[Path, Any]) -> None:
    """The first published file has no `transformer.`, and each layer's causal mask."""
    folder, theirs = published
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor.clone() for name, tensor in tensors.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    safetensors.torch.save_file(bare, folder / "model.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(logits(folder), theirs(IDS).logits, atol=1e-5, rtol=0)


def test_what_is_saved_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    model = small_model()
    save_model(model, LineTokens(), tmp_path)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours = model.logits(model(IDS, torch.ones_like(IDS)))
        torch.testing.assert_close(theirs(IDS).logits, ours, atol=1e-5, rtol=0)
    assert theirs.config.eos_token_id == 0
    torch.testing.assert_close(load_model(tmp_path).state_dict(), model.state_dict(), atol=0, rtol=0)


def test_folder_says_which_vocabulary_is_its_own(tmp_path: Path) -> None:
    """Chess tokens that were others, as in an older version's run, are refused."""
    save_model(small_model(), LineTokens(), tmp_path)
    size, config = LineTokens().size, json.loads((tmp_path / "config.json").read_text())
    for other in (50, size + 1):
        (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": other}))
        with pytest.raises(UsageError, match=f"a vocabulary of {size} tokens, but a model of {other}"):
            load_tokens(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    assert isinstance(load_tokens(tmp_path), LineTokens)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"model_type": "llama"}, "is a llama model"), ({"n_embd": 64}, "safetensors is damaged or"),
     ({"activation_function": "gelu"}, "activation_function is gelu"), ({"n_layer": 2}, "safetensors is damaged or"),
     ({"n_inner": 7}, "n_inner is 7"), ({"n_head": 5}, "48 columns cannot be shared by 5 heads")],
)  # fmt: skip
def test_config_that_does_not_fit(published: tuple[Path, Any], change: dict[str, Any], complaint: str) -> None:
    folder, _ = published
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=complaint):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_or_missing_file(published: tuple[Path, Any], name: str) -> None:
    folder, _ = published
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(UsageError, match=name):
        load_model(folder)
    (folder / name).unlink()
    with pytest.raises(UsageError, match="No such file"):
        load_model(folder)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write(path, b"old")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("toolkit.base.files.flush", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write(path, "new")
    assert path.read_bytes() == b"old"


# ---------------------------------------------------------------------------------------------------------------------
# Runs

TINY = ("--n-layer", 1, "--n-head", 2, "--n-embd", 16, "--horizon", 8, "--batch-size", 4, "--held-out", 8,
        "--track", "none", "--log-steps", 1, "--warm-steps", 2, "--algo", "grpo")  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the cat sat on the mat; " * 60)
    return file


@pytest.fixture
def words(text: Path, tmp_path: Path) -> tuple[object, ...]:
    """The command line of a text run, but for its length."""
    return ("text", *TINY, "--data", text, "--log-dir", tmp_path / "run")


def learner() -> Learner:
    return Learner(small_model(), small_model(), 1e-3, 0)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    ours, run = learner(), Run(TextConfig(log_dir=tmp_path))
    run.save(ours)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with torch.no_grad():
        ours.model.wte.weight[3, 4] = torch.inf
    with pytest.raises(Diverged, match="weight"):
        run.save(ours)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def interrupting(monkeypatch: pytest.MonkeyPatch, at: int, how: BaseException) -> None:
    """Let this happen in a step."""
    step = mini.text.STEPS["grpo"]

    def do(learner: Learner, text: Any, config: TextConfig) -> Any:
        if learner.step + 1 == at:
            raise how
        return step(learner, text, config)

    monkeypatch.setitem(mini.text.STEPS, "grpo", do)


@pytest.mark.parametrize("save_steps", [10, 2])
def test_an_interrupted_run_says_how_it_goes_on(
    save_steps: int, words: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a checkpoint after the first step, whatever --save-steps says."""
    whole = run_mini(*words, "--steps", 4, "--json", "--no-control", "--log-dir", tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupting(patch, 3, KeyboardInterrupt())
        done = run_mini(*words, "--steps", 4, "--save-steps", save_steps)
    assert done.returncode == 130
    kept = 2 if save_steps == 2 else 1
    assert f"stopped at step 2: go on from step {kept} " in done.stdout
    assert f"--log-dir {tmp_path / 'run'} and --resume" in done.stdout
    assert read_state(tmp_path / "run" / "checkpoint.pt")["step"] == kept
    done = run_mini(*words, "--steps", 4, "--json", "--no-control", "--resume")
    assert done.returncode == 0, done.stderr
    ours, theirs = (json.loads(part.stdout.splitlines()[-1])["after"] for part in (done, whole))
    assert ours == theirs


def test_a_run_that_is_interrupted_in_its_first_step_says_so(
    words: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, 1, KeyboardInterrupt())
    done = run_mini(*words, "--steps", 4)
    assert done.returncode == 130
    assert f"no step is finished in {tmp_path / 'run'}" in done.stdout


@pytest.mark.parametrize(("at", "said"), [
    (3, "step 3: a gradient is not finite: lower --lr; "),
    (1, "step 1: a gradient is not finite: lower --lr"),
])  # fmt: skip
def test_a_run_that_diverges_is_one_line_and_keeps_its_checkpoint(
    at: int, said: str, words: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, at, Diverged("gradient"))
    done = run_mini(*words, "--steps", 4)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
    if at == 3:
        assert f"{tmp_path / 'run'} has the checkpoint of step 1" in done.stderr
        assert read_state(tmp_path / "run" / "checkpoint.pt")["step"] == 1


def test_a_warm_start_that_diverges_is_one_line(words: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(learner: Learner, max_grad_norm: float) -> float:
        raise Diverged("gradient")

    monkeypatch.setattr(Learner, "descend", diverge)
    done = run_mini(*words, "--steps", 4)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "lower --warm-lr" in done.stderr


DAMAGES: dict[str, Any] = {
    "a tensor": lambda state: torch.zeros(3), "a list": lambda state: [state], "nothing": lambda state: {},
    "no model": lambda state: {name: part for name, part in state.items() if name != "model"},
    "no config": lambda state: {name: part for name, part in state.items() if name != "config"},
    "other shapes": lambda state: {**state, "model": {name: part[:1] for name, part in state["model"].items()}},
    "other weights": lambda state: {**state, "model": {"x": torch.zeros(1)}},
    "no optimizer": lambda state: {**state, "optimizer": {}},
    "another rng": lambda state: {**state, "rng": (1, 2)},
    "another generator": lambda state: {**state, "generator": torch.zeros(3)},
}  # fmt: skip


@pytest.fixture(scope="module")
def two_steps(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run_mini("text", *TINY, "--data", text, "--log-dir", folder, "--steps", 2, "--no-control").returncode == 0
    return folder


@pytest.fixture
def trained(words: tuple[object, ...], two_steps: Path, tmp_path: Path) -> tuple[object, ...]:
    """The command line of such a run, whose files a test may damage."""
    shutil.copytree(two_steps, tmp_path / "run")
    return words


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_line(damage: str, trained: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "run" / "checkpoint.pt"
    torch.save(DAMAGES[damage](torch.load(path, weights_only=True)), path)
    done = run_mini(*trained, "--steps", 3, "--resume")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{path} is damaged or does not fit: " in done.stderr


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_damaged_start_is_one_line(content: bytes | None, trained: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "run" / "start.pt"
    if content is None:
        torch.save({name: part[:1] for name, part in torch.load(path, weights_only=True).items()}, path)
    else:
        path.write_bytes(content)
    done = run_mini(*trained, "--steps", 3, "--resume")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert str(path) in done.stderr


def test_a_run_does_not_go_back_to_fewer_steps(trained: tuple[object, ...]) -> None:
    """The report was of the steps that it had, as if they were those asked for."""
    done = run_mini(*trained, "--steps", 0, "--resume")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "steps: --steps must not be fewer" in done.stderr


@pytest.mark.parametrize("more", [("--data", "/nowhere"), ("--track", "wandb"), ("--horizon", 9999)], ids=str)
def test_a_failed_start_leaves_no_folder(
    more: tuple[object, ...], words: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    done = run_mini(*words, *more)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Curves

FIGURES = [(1, {"loss": 2.5, "kl": 0.25}), (2, {"loss": 1.5, "kl": 0.5})]


def draw(kind: str, folder: Path, first_step: int = 0) -> None:
    with curves(kind, folder, {"lr": 0.1}, first_step) as write_figures:
        for step, figures in FIGURES:
            write_figures(step, figures)


def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    draw("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
    assert [event.value for event in events.Scalars("kl")] == [0.25, 0.5]


def test_a_folder_that_wandb_leaves_is_no_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes it for a package, so the run began, and ended in a traceback."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UsageError, match="wandb is not installed"):
        RunOptions(track="wandb").check()


def test_none_writes_nothing(tmp_path: Path) -> None:
    draw("none", tmp_path)
    assert list(tmp_path.iterdir()) == []


def stand_in(calls: list[Any]) -> ModuleType:
    module = ModuleType("wandb")

    def init(**options: Any) -> SimpleNamespace:
        calls.append(options)
        run = {"log": lambda figures, step: calls.append((step, figures)), "finish": lambda: calls.append("end")}
        return SimpleNamespace(**run)

    module.init = init  # type: ignore[attr-defined]
    module.Error = type("Error", (Exception,), {})  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(("first_step", "resume"), [(0, None), (5, "allow")])
def test_wandb_is_told_the_run_each_step_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_step: int, resume: str | None
) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", stand_in(calls))
    draw("wandb", tmp_path / "a-run", first_step)
    assert calls[0]["config"] == {"lr": 0.1}
    assert (calls[0]["id"], calls[0]["resume"]) == ("a-run", resume)
    assert calls[1:] == [*FIGURES, "end"]


def test_wandb_that_is_missing_or_unwilling_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    done = run_mini("text", "--track", "wandb", "--log-dir", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "wandb is not installed" in done.stderr
    module = stand_in([])
    monkeypatch.setattr(module, "init", lambda **_: (_ for _ in ()).throw(module.Error("no API key")), raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(UsageError, match="--track wandb: no API key"):
        draw("wandb", tmp_path)


@pytest.mark.optional
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    draw("wandb", tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_wandb_is_not_imported_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by another tracker nor, indented by nothing, by any module."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # its import fails
    draw("none", tmp_path)
    draw("tensorboard", tmp_path)
    sources = "\n".join(path.read_text() for path in (ROOT / "mini").glob("*.py"))
    assert not re.search("^(import|from) wandb", sources, re.MULTILINE)
