"""What a model's name stands for, and which models are refused before their weights are loaded, in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.fake_hub import FakeHub
from tests.helpers import HELD_OUT, NO_TENSORS, run
from tests.model.conftest import save_model
from toolkit import UsageError
from toolkit.model.models import (
    adapter_base,
    check_model,
    instruct_variant,
    is_in_mxfp4,
    positions_of,
    resolve_model,
    stays_as_stored,
)
from toolkit.model.tiny import folder_of


def test_auto_is_gpt_oss_with_a_gpu_and_the_embedded_model_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.model.machine.gpu_is_there", lambda: True)
    assert [resolve_model(name) for name in ("auto", "tiny", "a/b")] == ["unsloth/gpt-oss-20b", "tiny", "a/b"]
    monkeypatch.setattr("toolkit.model.machine.gpu_is_there", lambda: False)
    assert resolve_model("auto") == "tiny"


def test_models_that_are_not_loaded_in_four_bits(tmp_path: Path) -> None:
    """The embedded model, and adapters to fused experts."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "unsloth/gpt-oss-20b"}))
    assert not stays_as_stored(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"target_parameters": ["mlp.experts.down_proj"]}))
    assert stays_as_stored(str(tmp_path))
    assert stays_as_stored("tiny")
    assert not stays_as_stored("unsloth/gpt-oss-20b")


def test_a_folders_own_config_says_how_its_experts_are_stored(tmp_path: Path) -> None:
    folder = tmp_path / "gpt-oss-20b"
    folder.mkdir()
    for stored in ({}, {"quantization_config": {"quant_method": "mxfp4"}}):
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **stored}))
        assert is_in_mxfp4(str(folder)) is bool(stored)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    assert not is_in_mxfp4(str(tmp_path))  # its experts may be apart, as in 4 bits
    (tmp_path / "config.json").write_text('{"quantization_config": null}')  # as some programs write it
    assert not is_in_mxfp4(str(tmp_path))


def test_a_value_of_a_wrong_type_is_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": "x"}')
    with pytest.raises(UsageError, match=r"config\.json is damaged"):
        positions_of(str(tmp_path), 9)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": 5}')
    with pytest.raises(UsageError, match=r"adapter_config\.json is damaged"):
        adapter_base(str(tmp_path))


# ---------------------------------------------------------------------------------------------------------------------
# Models from folders and from the hub


def save_adapter(folder: Path, base: object) -> str:
    """The same files of an adapter's folder."""
    (folder / "adapter_model.safetensors").write_bytes(NO_TENSORS)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return str(folder)


def test_a_base_model_is_refused_with_the_name_to_try(tmp_path: Path, hub: FakeHub) -> None:
    folder = save_model(tmp_path / "Nano-Base", {})
    with pytest.raises(UsageError, match=r"has no chat template, so it cannot chat: take its instruct variant$"):
        check_model(str(folder), "none")
    hub.publish("someone/Nano-2-1B", folder)
    with pytest.raises(UsageError, match=r"^someone/Nano-2-1B has no chat template.* try someone/Nano-2-1B-Instruct$"):
        check_model("someone/Nano-2-1B", "none")


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"])
def test_a_chat_template_has_three_places(place: str, tmp_path: Path, hub: FakeHub) -> None:
    folder = save_model(tmp_path / "Nano", {})
    (folder / place).write_text('{"chat_template": "hi"}')
    check_model(str(folder), "low")
    hub.publish("someone/Nano", folder)
    check_model("someone/Nano", "low")


@pytest.mark.parametrize(
    ("base", "instruct"),
    [("Qwen/Qwen3-4B-Base", "Qwen/Qwen3-4B"), ("google/gemma-3-1b-pt", "google/gemma-3-1b-it"),
     ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct")],
)  # fmt: skip
def test_instruct_variants_go_by_the_family_s_habit(base: str, instruct: str) -> None:
    assert instruct_variant(base) == instruct


def test_the_hub_s_refusals_say_what_to_do(tmp_path: Path, hub: FakeHub) -> None:
    with pytest.raises(UsageError, match=r"the hub has no model 'no/where', or it is private: .*HF_TOKEN"):
        check_model("no/where", "none")
    hub.publish("meta/Llama", save_model(tmp_path / "Llama", {"chat_template": "hi"}))
    hub.repositories["meta/Llama"]["gated"] = True
    with pytest.raises(UsageError, match="meta/Llama is gated: accept its licence on its page, then set HF_TOKEN"):
        check_model("meta/Llama", "none")


def test_a_folder_that_is_not_there_is_no_matter_of_the_hub(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`eval outputs/nope` said that the hub cannot be reached."""
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no folder outputs/nope: the hub has no model"):
        check_model("outputs/nope", "none")


def test_without_a_hub_a_cached_model_is_used(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    hub.publish("someone/Nano", save_model(tmp_path / "Nano", {"chat_template": "hi"}))
    huggingface_hub.hf_hub_download("someone/Nano", "config.json")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # the port that discards
    with pytest.raises(UsageError, match="the hub cannot be reached for 'someone/Other': go online"):
        check_model("someone/Other", "none")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    check_model("someone/Nano", "none")
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_name_that_is_no_model_is_refused(tmp_path: Path) -> None:
    for name in ("nowhere", "/no/where", "a/b/c", "owner/na me"):
        with pytest.raises(UsageError, match="is neither auto, tiny, smollm2, a folder that exists nor a hub id like"):
            check_model(name, "none")
    with pytest.raises(UsageError, match=r"holds no model: it needs a model's config\.json or an adapter_config\.json"):
        check_model(str(tmp_path), "none")
    (tmp_path / "config.json").write_text('{"steps": 1}')  # of a run
    with pytest.raises(UsageError, match="holds no model"):
        check_model(str(tmp_path), "none")


def test_an_adapter_needs_its_base_model(tmp_path: Path) -> None:
    check_model(save_adapter(tmp_path, tmp_path), "none")
    check_model(save_adapter(tmp_path, "someone/Nano"), "none")  # the hub is asked later
    check_model(save_adapter(tmp_path, folder_of("wasd")), "none")  # warm-started again if missing
    with pytest.raises(UsageError, match="is an adapter to /no/where, which does not exist any more"):
        check_model(save_adapter(tmp_path, "/no/where"), "none")


def test_the_embedded_model_cannot_reason(tmp_path: Path) -> None:
    check_model("tiny", "none")
    for name in ("tiny", save_adapter(tmp_path, folder_of("bepo"))):
        with pytest.raises(UsageError, match="--reasoning none"):
            check_model(name, "low")


SHORT = ("--steps", "1", "--generations", "2", "--batch-size", "2", "--accumulation", "1", "--boards", "1",
         "--ladder", "4:64", "--games", "2", "--max-new-tokens", "16", "--eval-batch-size", "2", "--json",
         *HELD_OUT)  # fmt: skip


@pytest.fixture(scope="module")
def qwen(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another family, with random weights, the embedded model's tokenizer and a template that thinks."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "Qwen-nano"
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\\n{% endfor %}assistant:"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    size: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32,
                            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1024}  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**size, eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder)
    return folder


@pytest.mark.long
def test_a_model_of_another_family_comes_from_the_hub(qwen: Path, tmp_path: Path) -> None:
    """It trains.  After one download the hub is no longer needed."""
    with FakeHub() as server:
        server.publish("someone/Qwen-nano", qwen)
        environment = server.environment(tmp_path)
        done = run("--model", "someone/Qwen-nano", "--output-dir", tmp_path, "--run-name", "one", *SHORT,
                   env=environment)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1
    assert (tmp_path / "one" / "adapter" / "adapter_model.safetensors").is_file()
    done = run("eval", "someone/Qwen-nano", "--games", "2", *SHORT[-8:], env=environment)
    assert done.returncode == 0, done.stderr
