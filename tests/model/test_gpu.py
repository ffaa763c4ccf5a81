"""The GPU's path through Unsloth, on a CPU that says it is a GPU (`gpu_on_cpu.py` says what that leaves out).

The hub on this machine has a gpt-oss-20b of the embedded model's size in both forms in which Unsloth publishes it: the
experts in MXFP4, and one 4-bit layer for each of them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.fake_hub import FakeHub
from tests.helpers import HELD_OUT, ROOT
from tests.preloaded import SCRIPT, Server, run
from toolkit.model import decoding, settings
from toolkit.run.reading import read_curves

pytestmark = pytest.mark.long

ADAPTER = Path("adapter", "adapter_model.safetensors")
MODEL = ("--model", "unsloth/gpt-oss-20b")
SMALL = ("--generations", 2, "--batch-size", 2, "--accumulation", 1, "--save-steps", 1, "--games", 2,
         "--ladder", "4:2048", "--eval-batch-size", 2, "--best-of", 2, *HELD_OUT)  # fmt: skip
SHORT = (*SMALL, "--steps", 2, "--max-new-tokens", 48)  # room for programs: rewards differ, so the second step learns


def on_gpu(server: Server, *arguments: object, script: Path | str = SCRIPT) -> str:
    """What the program, or another script or function, prints on such a GPU, on both streams; it must succeed."""
    done = run(*arguments, script=script, server=server)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def publish(hub: FakeHub, base: Path, folder: Path) -> None:
    """Put the embedded model on the hub under gpt-oss-20b's names."""
    from safetensors.torch import load_file, save_file

    checkpoints = importlib.import_module("benchmarks.checkpoints")
    config = json.loads((base / "config.json").read_text()) | {"dtype": "bfloat16"}
    weights = load_file(base / "model.safetensors")
    for name, form in (("unsloth/gpt-oss-20b", "mxfp4"), ("unsloth/gpt-oss-20b-unsloth-bnb-4bit", "nf4")):
        place = shutil.copytree(base, folder / name)
        tensors = {key: tensor.contiguous() for name, weight in weights.items()
                   for key, tensor in checkpoints.stored(name, weight.bfloat16(), form).items()}  # fmt: skip
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps(config | {"quantization_config": checkpoints.FORMS[form]}))
        hub.publish(name, place)


@pytest.fixture(scope="module")
def env(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment with that hub, and a place of its own for what Unsloth compiles."""
    home = tmp_path_factory.mktemp("gpu")
    with FakeHub() as hub:
        publish(hub, base, home / "models")
        yield {**hub.environment(home), "UNSLOTH_COMPILE_LOCATION": str(home / "compiled"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def server(env: dict[str, str]) -> Iterator[Server]:
    """The process that has such a GPU and the libraries."""
    with contextlib.closing(Server(f"gpu-{os.getpid()}", "gpu", env=env)) as started:
        yield started


@pytest.fixture(scope="module")
def four_bits(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps in 4 bits."""
    out = tmp_path_factory.mktemp("runs")
    on_gpu(server, "train", *MODEL, "--weights", "4bit", "--output-dir", out, "--run-name", "run", *SHORT)
    return out / "run"


@pytest.fixture(scope="module")
def two_gpus(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same on two GPUs, with what the processes printed from their first import on."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2,
               "tests/gpu_on_cpu.py", SCRIPT, "train", *MODEL, "--weights", "4bit", "--output-dir", out,
               "--run-name", "run", *SHORT]  # fmt: skip
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "run", done.stdout + done.stderr


def test_every_expert_has_an_adapter_in_four_bits(four_bits: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(four_bits / ADAPTER)
    for name in ("gate_up_projs.0", "gate_up_projs.3", "down_projs.0", "down_projs.3"):
        assert f"base_model.model.model.layers.2.mlp.experts.{name}.lora_B.weight" in weights
    assert any(weight.any() for name, weight in weights.items() if ".experts." in name and "lora_B" in name)


def test_unsloth_does_as_it_is_told(two_gpus: tuple[Path, str]) -> None:
    """It recomputes activations as its loader was told.  It does not warn at each generation that our length overrides
    the one that it has put into the model's configuration."""
    assert "Unsloth 2026" in two_gpus[1]
    assert "gradient checkpointing stays off" not in two_gpus[1]
    assert "max_length" not in two_gpus[1]


def test_a_run_goes_on_to_the_same_weights(server: Server, four_bits: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(four_bits, tmp_path / "run", symlinks=True)
    for later in ("checkpoint-2", "adapter"):
        shutil.rmtree(folder / later)
    (folder / "result.json").unlink()
    said = on_gpu(server, "train", *MODEL, "--output-dir", tmp_path, "--run-name", "run", *SHORT)
    assert "resuming after step 1" in said
    assert (folder / ADAPTER).read_bytes() == (four_bits / ADAPTER).read_bytes()


def test_two_gpus_end_with_the_same_adapter(two_gpus: tuple[Path, str], four_bits: Path) -> None:
    """Unsloth's trainer goes past DDP and averages gradients itself; the program refuses adapters that differ."""
    steps = (two_gpus[0] / "rollouts.jsonl").read_text().splitlines()
    assert [len(json.loads(step)["completions"]) for step in steps] == [4, 4]
    assert (two_gpus[0] / ADAPTER).read_bytes() != (four_bits / ADAPTER).read_bytes()


def test_the_benchmark_runs(server: Server, base: Path) -> None:
    said = on_gpu(server, "--model", base, "--batches", 2, "--steps", 1, "--tokens", 80,
                  script=ROOT / "benchmarks" / "bench_gpu.py")  # fmt: skip
    assert json.loads(said[said.index('{"batches"') :].splitlines()[0])["device"] == "NVIDIA H200"


def check_the_adapter(folder: str) -> None:
    from safetensors.torch import load_file

    model, _ = program.load_model(folder, program.EvalConfig(model=folder), print)
    loaded = {name.replace(".default", ""): weight for name, weight in model.named_parameters() if ".lora_" in name}
    written = load_file(Path(folder, ADAPTER.name))
    assert loaded.keys() == written.keys()
    assert [name for name, weight in written.items() if not weight.equal(loaded[name].to(weight))] == []


def test_an_exported_adapter_is_not_repacked(server: Server, four_bits: Path, tmp_path: Path) -> None:
    """Unsloth left a note in the configuration, mistook the adapter for its old layout by it, and shuffled it."""
    lora = tmp_path / "lora"
    on_gpu(server, "export", four_bits, "--output-dir", lora)
    said = on_gpu(server, lora, script=f"{__name__}:{check_the_adapter.__name__}")
    assert "repacked" not in said


@pytest.mark.parametrize("released", [True, False], ids=["mxfp4", "fused-4bit"])
def test_what_was_trained_can_be_evaluated(released: bool, server: Server, base: Path, tmp_path: Path) -> None:
    """An adapter to fused experts was refused if its base had been trained in 4 bits."""
    options = (*MODEL, "--weights", "stored") if released else ("--model", base)
    on_gpu(server, "train", *options, "--output-dir", tmp_path, "--run-name", "run", *SMALL, "--steps", 1,
           "--max-new-tokens", 8)  # fmt: skip
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    said = on_gpu(server, "eval", tmp_path / "run", *HELD_OUT, "--games", 2, "--max-new-tokens", 8)
    assert "3x3, held out" in said


@pytest.mark.parametrize("form", ["4bit", "stored"])
def test_a_run_begins_from_an_adapter(form: str, server: Server, tmp_path: Path) -> None:
    """With a pair for each expert, and with one for all.  The form of the weights need not be named again."""
    on_gpu(server, "train", *MODEL, "--weights", form, "--output-dir", tmp_path, "--run-name", "first", *SHORT)
    said = on_gpu(server, "train", "--model", tmp_path / "first", "--output-dir", tmp_path, "--run-name", "second",
                  *SHORT)  # fmt: skip
    assert settings.FORMS[form][:9] in said
    assert "repacked" not in said
    scores = [json.loads((tmp_path / name / "result.json").read_text())["scores"] for name in ("first", "second")]
    for name, stage in scores[0].items():
        assert scores[1][name]["before"] == stage["after"]
    assert read_curves(tmp_path / "second")["sampled/kl"][1] == pytest.approx(0.0, abs=1e-6)


def count_forwards(*arguments: str) -> None:
    import torch

    add, recomputed = program.add_adapters, list[bool]()

    def counted(model: Any, config: program.TrainConfig) -> Any:
        adapted = add(model, config)
        layer = adapted.get_base_model().model.layers[0]

        def note(*_: object) -> None:
            if torch.is_grad_enabled():
                recomputed.append(layer._gradient_checkpointing_func.keywords["use_reentrant"])

        adapted.register_forward_pre_hook(note)
        return adapted

    program.add_adapters = counted
    assert program.main(["train", *arguments]) == 0
    print(f"{len(recomputed)} forward passes with a gradient, {sum(recomputed)} of them recomputed as Unsloth needs it")
    trained = decoding.record.replays  # type: ignore[attr-defined]
    folder = str(Path(arguments[-1], "run"))
    assert program.main(["eval", folder, *map(str, HELD_OUT), "--games", "2"]) == 0
    print(f"replayed in training: {trained > 0}, after it: {decoding.record.replays > trained}")  # type: ignore[attr-defined]


def test_a_micro_batch_is_one_forward_pass(server: Server, tmp_path: Path) -> None:
    """Each row had its own: eight times the work, since every pass unpacks all experts.  After generating, TRL switched
    checkpointing on in PyTorch's own way, in which Unsloth's experts keep what they compute."""
    words = (*SMALL, "--generations", 4, "--batch-size", 4, "--accumulation", 2, "--steps", 1, "--max-new-tokens", 8)
    script = f"{__name__}:{count_forwards.__name__}"
    said = on_gpu(server, *MODEL, *words, "--run-name", "run", "--output-dir", tmp_path, script=script)
    assert "2 forward passes with a gradient, 2 of them recomputed" in said
    assert "replayed in training: True, after it: True" in said


def show_the_weights(*options: str) -> None:
    config = program.parse_arguments(["train", *options])
    model, _ = program.load_model(config.model, config, lambda _: None)
    held = {f"{type(weights).__name__} {weights.dtype}" for name, weights in model.named_parameters()
            if "experts" in name and weights.ndim > 1 and "bias" not in name}  # fmt: skip
    print("experts:", *sorted(held))


@pytest.mark.parametrize(("options", "held"), [((), "Mxfp4ExpertParam torch.uint8"),
                                               (("--weights", "4bit",), "Params4bit torch.uint8"),
                                               (("--weights", "16bit",), "Parameter torch.bfloat16"),
                                               (("--weights", "stored",), "Mxfp4ExpertParam torch.uint8")])  # fmt: skip
def test_weights_are_held_as_the_settings_say(options: tuple[str, ...], held: str, server: Server) -> None:
    """With 16 bits asked for, the experts stayed in MXFP4."""
    said = on_gpu(server, *MODEL, *options, script=f"{__name__}:{show_the_weights.__name__}")
    (line,) = (line for line in said.splitlines() if line.startswith("experts:"))
    assert held in line
