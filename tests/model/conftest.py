"""What the tests of models share: GPUs, gpt-oss-20b's shape, little memory, and models in folders and on a hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpt_2048_rl as program
from tests.fake_hub import FakeHub
from tests.helpers import NO_TENSORS
from toolkit.model.machine import Machine
from toolkit.model.models import uses_transformers
from toolkit.model.settings import Settings, choose_settings, choose_weights

GB10 = Machine("NVIDIA GB10", (12, 1), 128_000_000_000, unified=True, processor="aarch64", triton=(3, 7))
H100 = Machine("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000, triton=(3, 7))
RTX_4090 = Machine("NVIDIA GeForce RTX 4090", (8, 9), 25_000_000_000, triton=(3, 7))
RTX_5080 = Machine("NVIDIA GeForce RTX 5080", (12, 0), 16_600_000_000, triton=(3, 7))
CPU = Machine(memory=16_000_000_000)
DEFAULTS = program.TrainConfig()


def settings_of(
    machine: Machine, config: program.TrainConfig | program.EvalConfig, name: str = "unsloth/gpt-oss-20b"
) -> Settings:
    """The settings of a model on a machine."""
    return choose_settings(machine, name, choose_weights(machine, name, config), uses_transformers(config))


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of gpt-oss-20b, with empty files for the weights and the tokenizer."""
    from transformers import GptOssConfig

    folder = tmp_path_factory.mktemp("gpt-oss")
    GptOssConfig(num_hidden_layers=24, num_local_experts=32).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GB of a GPU's own memory are free, and 40 GB of RAM."""
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (16_000_000_000, 16_000_000_000))
    monkeypatch.setattr("toolkit.model.memory.available_memory", lambda: 40_000_000_000)


def save_model(folder: Path, tokenizer: object) -> Path:
    """The files of a model's folder that are read before anything is loaded."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """This process's hub, with an empty cache."""
    from huggingface_hub import constants

    with FakeHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        yield server
