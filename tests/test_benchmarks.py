"""The GPU benchmark: it runs on this machine, its figures are consistent, and its wheels can be carried along."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.preloaded import run


@pytest.mark.long
def test_whole_steps_are_measured_on_a_cpu_too(base: Path) -> None:
    done = run("--batches", 1, 4, "--steps", 1, "--tokens", 150, script=ROOT / "benchmarks" / "bench_gpu.py")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    one, four = told["measured"]
    assert (one["completions"], four["completions"]) == (1, 4)
    assert one["update"] == 0 < four["update"]
    assert 4 * 90 <= four["tokens"] <= 4 * 150
    for row in (one, four):
        assert 0 < row["tokens"] / row["generate"] < row["bound"]


@pytest.mark.parametrize("packed", [True, False])
def test_a_made_up_gpt_oss_loads(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small shape here; in MXFP4 as it is published, and in bfloat16."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench_gpu = importlib.import_module("bench_gpu")
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 32, "vocab_size": 1024}  # fmt: skip
    monkeypatch.setattr(transformers, "GptOssConfig", lambda **more: GptOssConfig(**(more | small)))
    bench_gpu.made_up_gpt_oss(tmp_path, 2, packed)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, quantization_config=Mxfp4Config(dequantize=True) if packed else None
    )
    assert not any(report.values()), report
    assert len(model.model.layers) == 2
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
    assert model.model.layers[0].mlp.experts.down_proj.abs().max() > 0


def test_a_stripped_wheel_installs_without_what_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    wheels = importlib.import_module("wheels")
    about = "bitsandbytes-1.0.dist-info"
    files = {"bitsandbytes/__init__.py": "", "bitsandbytes/libbitsandbytes_cuda130.so": "x",
             "bitsandbytes/libbitsandbytes_cuda128.so": "x" * 1000, "studio/index.html": "x" * 1000,
             f"{about}/METADATA": "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 1.0\n",
             f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}  # fmt: skip
    wheel = tmp_path / "bitsandbytes-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**files, f"{about}/RECORD": "".join(f"{name},,\n" for name in files)}.items():
            archive.writestr(name, content)
    wheels.strip(wheel)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(wheel)], check=True, timeout=300)
    there = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.*") if path.is_file()}
    assert {"bitsandbytes/__init__.py", "bitsandbytes/libbitsandbytes_cuda130.so"} <= there
    assert not there & {"bitsandbytes/libbitsandbytes_cuda128.so", "studio/index.html"}


def test_every_wheel_is_of_the_pinned_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    wheels = importlib.import_module("wheels")
    assert sorted(line.partition("==")[0] for line in wheels.pinned()) == sorted(wheels.NAMES)
