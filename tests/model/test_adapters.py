"""A run that begins from an adapter: its options, its weights, and what the untrained model then is."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import gpt_2048_rl as program
from tests.conftest import Run, flags
from tests.preloaded import call, run
from toolkit import UsageError
from toolkit.model import adapters, models, smollm2
from toolkit.model.tiny import folder_of
from toolkit.run.reading import read_curves

EVERYTHING = [*models.ATTENTION, "gate_proj", "up_proj", "down_proj"]


def adapter_in(folder: Path, **config: object) -> Path:
    """The folder of an adapter, with one weight."""
    folder.mkdir(parents=True)
    known = {"base_model_name_or_path": str(folder_of("wasd")), "r": 8, "lora_alpha": 24, "target_modules": EVERYTHING}
    (folder / adapters.CONFIG).write_text(json.dumps(known | config))
    save_file({"weight": np.zeros(1)}, folder / adapters.WEIGHTS)
    return folder


def parsed(*arguments: object) -> program.TrainConfig:
    config = program.parse_arguments(list(map(str, arguments)))
    assert isinstance(config, program.TrainConfig)
    return config


def test_the_adapter_decides_its_shape_and_its_base_the_recipe(tmp_path: Path) -> None:
    adapter_in(tmp_path / "run" / "adapter")
    config, usual = parsed("--model", tmp_path / "run", "--steps", 9), program.train_defaults("tiny")
    assert config.model == str(tmp_path / "run" / "adapter")
    assert (config.lora_rank, config.lora_alpha, config.adapt) == (8, 24, "all")
    same = ("generations", "learning_rate", "ladder", "max_new_tokens", "loader")
    assert [getattr(config, name) for name in same] == [getattr(usual, name) for name in same]
    assert config.steps == 9
    attention = adapter_in(tmp_path / "checkpoint-1", base_model_name_or_path=str(smollm2.folder()),
                           target_modules=list(models.ATTENTION))  # fmt: skip
    config = parsed("--model", attention)
    assert (config.adapt, config.example, config.lora_rank) == ("attention", "random", 8)
    bases = [models.base_of(str(folder)) for folder in (tmp_path / "run" / "adapter", attention, tmp_path)]
    assert bases == ["tiny", "smollm2", str(tmp_path)]


def test_a_run_begins_from_the_run_that_latest_named(tmp_path: Path) -> None:
    """The new run's folder became the latest before the adapter was read, so `--model outputs/latest` failed."""
    adapter = adapter_in(tmp_path / "run" / "adapter")
    (tmp_path / "latest").symlink_to("run")
    assert parsed("--model", tmp_path / "latest").model == str(adapter)


def test_a_run_plays_the_game_of_the_adapter_that_it_begins_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for other keys than it has learned, the adapter would look untrained before training."""
    adapter = adapter_in(tmp_path / "adapter")
    made_for = {"held_out": ["4:256"], "keys": "wasd", "max_new_tokens": 48, "steps": 7, "unsafe_no_jail": True}
    (adapter / "training_config.json").write_text(json.dumps(made_for))
    config = parsed("--model", adapter, "--max-new-tokens", 32)
    assert (config.held_out, config.keys, config.max_new_tokens) == (("4:256",), "wasd", 32)
    assert (config.steps, config.unsafe_no_jail) == (80, False)
    assert capsys.readouterr().err.startswith(f"options taken from {adapter}: --held-out 4:256 --keys wasd")


@pytest.mark.parametrize(
    ("fault", "words", "said"),
    [
        ("rm adapter_model.safetensors", [], "adapter_model.safetensors is missing or damaged"),
        ("truncate -s 20 adapter_model.safetensors", [], "adapter_model.safetensors is missing or damaged"),
        ("ln -s /etc/hostname link", [], "link is a link: remove it"),
        ("rm adapter_config.json", [], "holds no model: it needs a model's config.json or an adapter_config.json"),
        ("sed -i s/lora_alpha/alpha/ adapter_config.json", [], "adapter_config.json is damaged"),
        ("true", ["--lora-rank", "4"], "--lora-rank is 8 in "),
        ("true", ["--adapt", "attention"], "--adapt is all in "),
    ],
)  # fmt: skip
def test_what_no_run_can_begin_from_gets_one_line(
    fault: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(fault.split(), cwd=adapter_in(tmp_path / "adapter"), check=True)
    out = tmp_path / "outputs"
    assert program.main(["--model", str(tmp_path / "adapter"), "--output-dir", str(out), *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_shards_begin_from_whole_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would need its part of the weights from before training."""
    monkeypatch.setattr("toolkit.cli.SHARDED", True)
    with pytest.raises(UsageError, match="merge the adapter"):
        parsed("--model", adapter_in(tmp_path / "adapter"), "--loader", "transformers")


def check_the_start(adapter: str, folder: str, loader: str) -> None:
    """From here on in a process with the libraries."""
    import torch

    config = program.train_defaults(adapter)
    config.loader = loader  # type: ignore[assignment]
    whole, tokenizer = program.load_model(adapter, config, lambda _: None)
    model, _ = program.load_model(adapter, config, lambda _: None, trains=True)
    model = program.add_adapters(model, config)
    asked = tokenizer("def strategy(board):", return_tensors="pt")["input_ids"]

    def logits() -> Any:
        with torch.no_grad():
            return model(asked).logits

    base = logits()
    with torch.no_grad():  # a benchmark with a training's options once evaluated the base alone
        assert not torch.allclose(whole(asked).logits, base)
    adapters.begin_from(model, Path(adapter))
    start, stored = logits(), load_file(Path(adapter, adapters.WEIGHTS))
    assert not torch.allclose(start, base)
    model.save_pretrained(folder)
    assert {name: weights.tobytes() for name, weights in load_file(Path(folder, adapters.WEIGHTS)).items()} == {
        name: weights.tobytes() for name, weights in stored.items()}  # fmt: skip
    trained = [weights for weights in model.parameters() if weights.requires_grad]
    assert len(trained) == len(stored)
    with torch.no_grad():
        for weights in trained:
            weights.add_(0.1)
    learned = logits()
    assert not torch.allclose(learned, start)
    with contextlib.suppress(KeyboardInterrupt), model.disable_adapter():
        assert torch.equal(logits(), start)
        raise KeyboardInterrupt
    assert torch.equal(logits(), learned)
    known = json.loads(Path(adapter, adapters.CONFIG).read_text())
    Path(folder, adapters.CONFIG).write_text(json.dumps(known | {"use_rslora": True, "use_dora": True}))
    with pytest.raises(UsageError, match="no adapter like those made here: use_dora, use_rslora differs"):
        adapters.begin_from(model, Path(folder))
    Path(folder, adapters.CONFIG).write_text(json.dumps(known))
    for wrong in (dict(list(stored.items())[1:]), {name: weights[:1] for name, weights in stored.items()}):
        save_file(wrong, Path(folder, adapters.WEIGHTS))
        with pytest.raises(UsageError, match="does not fit the model"):
            adapters.begin_from(model, Path(folder))


@pytest.mark.parametrize("loader", ["unsloth", "transformers"])
def test_without_what_it_learned_the_model_is_the_one_it_began_with(trained: Run, loader: str, tmp_path: Path) -> None:
    """And not the base: what the first run has learned would count twice.  An interruption brings the weights back."""
    call(check_the_start, trained.folder / "adapter", tmp_path / "adapter", loader)


@pytest.mark.slow
def test_a_run_goes_on_without_the_run_that_it_began_from(trained: Run, tmp_path: Path) -> None:
    """It begins where the other ended, with the same score, and needs its folder no more."""
    first = Path(shutil.copytree(trained.folder, tmp_path / "first", symlinks=True))
    numbers = {"save_steps": 1, "best_of": 4, "output_dir": tmp_path, "run_name": "second", "beta": 0.1}
    done = run(*flags(steps=1, **numbers | {"model": first}))
    assert done.returncode == 0, done.stderr
    second, stages = tmp_path / "second", json.loads((tmp_path / "second" / "result.json").read_text())["scores"]
    assert {name: stage["before"] for name, stage in stages.items()} == {
        name: stage["after"] for name, stage in trained.result["scores"].items()}  # fmt: skip
    assert read_curves(second)["sampled/kl"][1] == pytest.approx(0.0, abs=1e-6)
    assert read_curves(second)["kl"][1] == pytest.approx(0.0, abs=1e-6)
    shutil.rmtree(first)
    done = run("--output-dir", tmp_path, "--run-name", "second", "--steps", 2)
    assert done.returncode == 0, done.stderr
    assert "resuming after step 1" in done.stdout
    result = json.loads((second / "result.json").read_text())
    assert {name: stage["before"] for name, stage in result["scores"].items()} == {
        name: stage["before"] for name, stage in stages.items()}  # fmt: skip
    origin = json.loads((second / "origin.json").read_text())["start"]
    assert origin["origin"] == json.loads((trained.folder / "origin.json").read_text())
    assert origin["digests"][adapters.WEIGHTS] in (second / "README.md").read_text()
    base = json.loads((second / "adapter" / adapters.CONFIG).read_text())["base_model_name_or_path"]
    assert base == str(folder_of("bepo"))
    done = run("eval", second, "--games", 4, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])["scores"]
    assert {name: stage["model"] for name, stage in told.items()} == {
        name: stage["after"] for name, stage in result["scores"].items()}  # fmt: skip
