"""Weights as they are held, and models that are loaded without Unsloth and without the Python of their folders."""

from __future__ import annotations

import ast
import gc
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import ROOT, run_python
from toolkit import UsageError
from toolkit.model.loading import check_weights, import_libraries, load_plain


def model_with(kind: str, dtype: str) -> Any:
    """A model with one weight of this class and type."""
    import torch

    weight = type(kind, (), {"dtype": getattr(torch, dtype)})()
    return SimpleNamespace(parameters=lambda: iter([weight]))


NF4, PACKED, WHOLE = ("Params4bit", "uint8"), ("Parameter", "uint8"), ("Parameter", "bfloat16")


@pytest.mark.parametrize(("load", "held", "named"), [
    ({"load_in_4bit": True, "load_in_16bit": False}, NF4, ""),
    ({"load_in_4bit": True, "load_in_16bit": False}, WHOLE, "bitsandbytes does not work here"),
    ({"load_in_4bit": True, "load_in_16bit": False}, PACKED, "are in MXFP4, not in 4 bits"),
    ({"load_in_4bit": False, "load_in_16bit": True}, WHOLE, ""),
    ({"load_in_4bit": False, "load_in_16bit": True}, PACKED, "are in MXFP4, not in 16 bits"),
    ({"load_in_4bit": False, "load_in_16bit": False}, PACKED, ""),
    ({"load_in_4bit": False, "load_in_16bit": False}, WHOLE, "not in MXFP4 as stored"),
    ({}, WHOLE, ""),
])  # fmt: skip
def test_weights_that_are_held_otherwise_are_refused(
    load: dict[str, bool], held: tuple[str, str], named: str, tmp_path: Path
) -> None:
    """With 16 bits asked for, the experts of gpt-oss stayed in MXFP4, and nothing said so."""
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=named) if named else nullcontext():
        check_weights(model_with(*held), str(tmp_path), load)


@pytest.mark.long
def test_an_adapter_loads_without_unsloth(base: Path, tmp_path: Path) -> None:
    """On a CPU.  Its folder has no config.json, so `eval` of a run of SmolLM2 ended with an error."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    loaded, _ = load_plain(str(tmp_path / "adapter"), torch.float32)
    assert any("lora_A" in name for name, _ in loaded.named_parameters())


def test_what_a_model_left_behind_can_be_collected_after_the_next_one_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model is a cycle of references, and a notebook loads one again: frozen, it would never leave a GPU's memory."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    gc.unfreeze()
    import_libraries(lambda _: None, local=True, plain=True)
    frozen, model = gc.get_freeze_count(), [[] for _ in range(1000)]  # type: ignore[var-annotated]
    import_libraries(lambda _: None, local=True, plain=True)
    assert 0 < gc.get_freeze_count() <= frozen
    del model


@pytest.mark.parametrize("path", [ROOT / "gpt_2048_rl.py", *(ROOT / "toolkit").rglob("*.py")], ids=lambda f: f.stem)
def test_no_loader_runs_the_code_of_a_model_folder(path: Path) -> None:
    """Unless a call says no, transformers asks a terminal whether to run it, and one `y` runs it outside the jail."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    loaders = [call for call in calls if re.match(r"Auto\w+\.from_|unsloth\.", ast.unparse(call.func))]
    guarded = [bool({None, "trust_remote_code"} & {keyword.arg for keyword in call.keywords}) for call in loaders]
    assert all(guarded), [ast.unparse(call) for call in loaders]


LOADS = """
import sys
from toolkit.model import loading, models
{loads}
"""


@pytest.mark.long
@pytest.mark.parametrize("loads", ["loading.load_plain(sys.argv[1], 'auto')", "models.config_of(sys.argv[1])"])
def test_a_models_folder_runs_no_python(loads: str, tmp_path: Path) -> None:
    """A folder can name a file of its own as the model's code.  transformers asked, and a "y" in stdin ran it."""
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    done = run_python(LOADS.format(loads=loads), str(tmp_path), input="y\n" * 9)
    assert "custom code" in done.stderr
    assert not (tmp_path / "ran").exists()
