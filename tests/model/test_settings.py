"""What is switched for a machine, and why."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any, Literal

import pytest

import gpt_2048_rl as program
from tests.model.conftest import CPU, DEFAULTS, GB10, H100, RTX_4090, RTX_5080, settings_of
from toolkit import UsageError
from toolkit.model.machine import Machine
from toolkit.model.settings import rows_at_once, settings_table


@pytest.mark.parametrize("machine", [GB10, H100, RTX_4090, RTX_5080])
@pytest.mark.parametrize(("name", "packed"), [("unsloth/gpt-oss-20b", False), ("openai/gpt-oss-120b", False),
                                              ("unsloth/gpt-oss-20b-BF16", True), ("Qwen/Qwen3-8B", True)])  # fmt: skip
def test_four_bits_are_the_default_but_for_what_is_published_in_them(name: str, packed: bool, machine: Machine) -> None:
    """gpt-oss's own MXFP4 generates faster.  But training in it takes more memory than a small GPU has."""
    packed = packed or machine is RTX_5080
    load = settings_of(machine, DEFAULTS, name).load
    assert load["load_in_4bit"] is packed
    assert not load["load_in_16bit"]


@pytest.mark.parametrize(("options", "rows"), [({}, 32), ({"batch_size": 16}, 64), ({"eval_batch_size": 48}, 48)])
def test_all_completions_that_are_generated_together_count(options: dict[str, int], rows: int) -> None:
    assert rows_at_once(program.TrainConfig(**options)) == rows  # type: ignore[arg-type]


def test_sixteen_bits_unpack_the_experts() -> None:
    load = program.TrainConfig(weights="16bit")
    assert settings_of(H100, load).environment == {"UNSLOTH_MXFP4_KEEP_PACKED": "0"}


def test_without_a_gpu_nothing_is_packed_and_nothing_recomputed() -> None:
    import torch

    settings = settings_of(CPU, program.TrainConfig(weights="16bit"))
    assert settings.load == {"dtype": torch.float32, "load_in_4bit": False, "use_gradient_checkpointing": False}
    assert settings.environment == {}


@pytest.mark.parametrize(("name", "loader", "has_it", "computes_in"), [
    ("smollm2", "transformers", True, "bfloat16"), ("smollm2", "transformers", False, "float32"),
    ("smollm2", "unsloth", True, "float32"), ("tiny", "transformers", True, "float32")])  # fmt: skip
def test_a_processor_computes_in_bfloat16_if_it_has_instructions(
    name: str, loader: Literal["unsloth", "transformers"], has_it: bool, computes_in: str
) -> None:
    """But the embedded model in float32 on all, so that its figures do not depend on the processor."""
    settings = settings_of(dataclasses.replace(CPU, bfloat16=has_it), program.TrainConfig(loader=loader), name)
    assert str(settings.load["dtype"]) == f"torch.{computes_in}"
    assert computes_in in [how for what, how, _ in settings.rows if what == "precision"]


def test_transformers_alone_are_told_nothing_of_unsloth() -> None:
    settings = settings_of(H100, program.TrainConfig(loader="transformers"))
    assert [*settings.load] == ["dtype"]
    assert settings.environment == {}
    assert ("precision", "bfloat16", "--loader transformers") in settings.rows


@pytest.mark.parametrize("spread", [False, True])
def test_shards_are_named_with_fsdp(spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.model.settings.SHARDED", spread)
    rows = settings_of(H100, program.TrainConfig(loader="transformers")).rows
    assert any("shard" in why for _, _, why in rows) is spread


def test_embeddings_move_to_ram_only_if_that_frees_gpu_memory() -> None:
    assert settings_of(GB10, DEFAULTS).load["offload_embedding"] is False
    assert settings_of(H100, DEFAULTS).load["offload_embedding"] == "auto"


def test_sixteen_bits_need_eighty_gigabytes() -> None:
    config = program.TrainConfig(weights="16bit")
    for machine in (GB10, H100):
        load = settings_of(machine, config).load
        assert load["load_in_16bit"]
        assert not load["load_in_4bit"]
    with pytest.raises(UsageError, match="--weights 16bit needs a GPU of 80 GB, and NVIDIA GeForce RTX 4090 has 25"):
        settings_of(RTX_4090, config)


def test_the_compiler_is_named_only_if_triton_needs_it() -> None:
    """From 3.6 on triton has its own for these GPUs and would ignore the variable."""
    old = dataclasses.replace(GB10, triton=(3, 5))
    assert settings_of(GB10, DEFAULTS).environment == {}
    assert settings_of(H100, DEFAULTS).environment == {}
    assert settings_of(dataclasses.replace(H100, triton=(3, 5)), DEFAULTS).environment == {}
    assert settings_of(old, DEFAULTS).environment == {
        "TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas", "TORCH_CUDA_ARCH_LIST": "12.1a"}  # fmt: skip


@pytest.fixture
def printed() -> Callable[[Any], str]:
    """What `main`'s console, which has no markup, prints."""
    from rich.console import Console

    def as_text(renderable: Any) -> str:
        console = Console(width=200, file=io.StringIO(), record=True, markup=False, emoji=False, highlight=False)
        console.print(renderable)
        return console.export_text()

    return as_text


def test_every_setting_is_printed_with_its_reason(printed: Callable[[Any], str]) -> None:
    text = printed(settings_table(settings_of(GB10, DEFAULTS)))
    for word in ("GB10 (12.1), aarch64", "128 GB", "MXFP4", "checkpointing", "embeddings", "attention", "ptxas"):
        assert word in text


def test_cells_are_printed_as_they_are(printed: Callable[[Any], str]) -> None:
    """No brackets are taken for rich's markup, no colons for an emoji."""
    named = dataclasses.replace(GB10, gpu="[bold]GB10[/bold] :boom: [/red] [42]")
    assert "[bold]GB10[/bold] :boom: [/red] [42] (12.1)" in printed(settings_table(settings_of(named, DEFAULTS)))
