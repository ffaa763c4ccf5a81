"""Models beyond one GPU: accelerate's FSDP with two CPU processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import conftest
from tests.helpers import HELD_OUT, ROOT, run_python
from tests.preloaded import call, run
from toolkit.model import loading, tiny
from toolkit.run.reading import read_curves


def launch(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script in two processes, as cluster/fsdp.yaml says, but in 32 bits."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "cluster" / "fsdp.yaml"),
               "--mixed_precision", "no", "--main_process_port", str(port), str(script),
               *map(str, arguments)]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400, check=False)


NUMBERS = ("--model", "tiny", "--steps", 2, "--generations", 4, "--accumulation", 1, "--boards", 2,
           "--save-steps", 1, "--games", 4, "--ladder", "4:128", "--max-new-tokens", 48,
           *HELD_OUT)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, result and stderr."""

    folder: Path
    result: dict[str, Any]
    stderr: str


@pytest.fixture(scope="module")
def spread(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of the embedded model, half of its weights in each process."""
    out = tmp_path_factory.mktemp("fsdp")
    done = launch(ROOT / "tests" / "fsdp_on_cpu.py", *NUMBERS, "--batch-size", 4, "--loader", "transformers",
                  "--output-dir", out, "--run-name", "spread", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Run(out / "spread", json.loads(done.stdout.splitlines()[-1]), done.stderr)


@pytest.mark.long
def test_a_model_is_trained_that_is_spread_over_processes(spread: Run) -> None:
    assert (spread.result["ranks"], spread.result["steps"]) == (2, 2)
    calls = [int(count) for count in re.findall(r"calls of fully_shard: (\d+)", spread.stderr)]
    assert len(calls) == 2
    assert min(calls) >= 4  # a layer each, the embeddings, the head, and the rest
    assert [line.split()[1] for line in spread.stderr.splitlines() if line.startswith("step ")] == ["1/2", "2/2"]


@pytest.mark.long
def test_the_model_that_is_spread_is_the_one_that_samples(spread: Run) -> None:
    gaps = read_curves(spread.folder)["sampler/gap"]
    assert len(gaps) == 2
    assert max(gaps.values()) < 1e-4


@pytest.mark.long
def test_the_adapter_is_whole(spread: Run) -> None:
    """Training moved both halves of every matrix.  LoRA's B starts at 0."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    weights = load_file(spread.folder / "adapter" / "adapter_model.safetensors")
    config = AutoConfig.from_pretrained(tiny.folder_of("bepo"))
    experts = [name for name in weights if ".experts." in name]
    assert len(experts) == 4 * config.num_hidden_layers
    queries = next(matrix for name, matrix in weights.items() if "q_proj.lora_B" in name)
    assert len(queries) == config.num_attention_heads * config.head_dim
    half = len(queries) // 2
    assert queries[:half].abs().max() > 0 < queries[half:].abs().max()


@pytest.mark.long
def test_the_rest_of_the_program_takes_the_adapter(spread: Run) -> None:
    done = run("eval", str(spread.folder / "adapter"), "--games", "4", *HELD_OUT, "--json")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_transformers_alone_start_from_the_same_model(spread: Run, trained: conftest.Run) -> None:
    """The untrained model, spread over two processes, writes the same programs as Unsloth's."""
    assert spread.result["scores"]["3x3"]["before"] == trained.result["scores"]["3x3"]["before"]


@pytest.mark.slow
def test_unsloth_refuses_to_be_spread(base: Path, tmp_path: Path) -> None:
    done = launch(ROOT / "gpt_2048_rl.py", *NUMBERS, "--batch-size", 4, "--output-dir", tmp_path)
    assert "FSDP needs --loader transformers: Unsloth keeps the whole model in one process" in done.stderr
    assert not list(tmp_path.iterdir())


def check_how_experts_decode(base: str) -> None:
    import torch
    from transformers import GenerationMixin

    model, _ = loading.load_plain(base, torch.float32)
    type(model).device = property(lambda _: torch.device("cuda"))
    with GenerationMixin._optimize_model_for_decode(model):
        assert "batched_mm" in model.get_experts_implementation().values()
    with model._optimize_model_for_decode():
        assert "batched_mm" not in model.get_experts_implementation().values()


def test_experts_decode_without_copies_of_their_weights(base: Path) -> None:
    """On a GPU transformers copies those of each row for each token: 6.4 GB a layer with 32 rows of gpt-oss-20b."""
    call(check_how_experts_decode, base)


@pytest.mark.parametrize("value", ["", "true"])
def test_fsdp_is_known_by_what_accelerate_sets(value: str) -> None:
    done = run_python("from toolkit.base import ranks; print(ranks.SHARDED)",
                      env={**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_FSDP": value})  # fmt: skip
    assert done.stdout == f"{bool(value)}\n"
