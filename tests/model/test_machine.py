"""What is found, what is switched and why; which models are refused, in one line; the doctor command."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

import gpt_2048_rl as program
from tests import preloaded
from tests.fake_hub import FakeHub
from tests.helpers import HELD_OUT, NO_TENSORS, ROOT, run, run_python
from toolkit import UsageError
from toolkit.model.doctor import DoctorConfig, doctor, forms, time_row
from toolkit.model.machine import (
    Machine,
    Settings,
    bound_memory,
    check_download,
    check_model,
    check_weights,
    choose_settings,
    choose_weights,
    fewer_completions,
    find_machine,
    gpu_is_there,
    instruct_variant,
    is_in_mxfp4,
    load_plain,
    memory_needed,
    memory_warning,
    prepare_environment,
    resolve_model,
    rows_at_once,
    settings_table,
    stays_as_stored,
)
from toolkit.model.tiny import folder_of

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
    return choose_settings(machine, config, choose_weights(machine, name, config))


# ---------------------------------------------------------------------------------------------------------------------
# Settings


@pytest.mark.parametrize("machine", [GB10, H100, RTX_4090, RTX_5080])
@pytest.mark.parametrize(("name", "packed"), [("unsloth/gpt-oss-20b", False), ("openai/gpt-oss-120b", False),
                                              ("unsloth/gpt-oss-20b-BF16", True), ("Qwen/Qwen3-8B", True)])  # fmt: skip
def test_four_bits_are_the_default_but_for_what_is_published_in_them(name: str, packed: bool, machine: Machine) -> None:
    """gpt-oss's own MXFP4 generates faster.  But training in it takes more memory than a small GPU has."""
    packed = packed or machine is RTX_5080
    load = settings_of(machine, DEFAULTS, name).load
    assert load["load_in_4bit"] is packed
    assert not load["load_in_16bit"]


def test_a_small_gpu_evaluates_in_mxfp4_and_measures_what_it_can_train() -> None:
    """Only training takes more memory there; a form that is measured is taken later without a further question."""
    assert not settings_of(RTX_5080, program.EvalConfig(model="")).load["load_in_4bit"]
    assert forms(RTX_5080, "unsloth/gpt-oss-20b") == ["4bit"]
    assert forms(RTX_4090, "unsloth/gpt-oss-20b") == ["4bit", "stored"]
    assert forms(H100, "unsloth/gpt-oss-20b") == ["4bit", "stored", "16bit"]


def test_a_folders_own_config_says_how_its_experts_are_stored(tmp_path: Path) -> None:
    folder = tmp_path / "gpt-oss-20b"
    folder.mkdir()
    for stored in ({}, {"quantization_config": {"quant_method": "mxfp4"}}):
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **stored}))
        assert is_in_mxfp4(str(folder)) is bool(stored)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    assert not is_in_mxfp4(str(tmp_path))  # its experts may be apart, as in 4 bits


@pytest.mark.parametrize(("options", "rows"), [({}, 32), ({"batch_size": 16}, 64), ({"eval_batch_size": 48}, 48)])
def test_all_completions_that_are_generated_together_count(options: dict[str, int], rows: int) -> None:
    assert rows_at_once(program.TrainConfig(**options)) == rows  # type: ignore[arg-type]


def test_sixteen_bits_unpack_the_experts() -> None:
    load = program.TrainConfig(weights="16bit")
    assert settings_of(H100, load).environment == {"UNSLOTH_MXFP4_KEEP_PACKED": "0"}


def test_without_a_gpu_nothing_is_packed_and_nothing_recomputed() -> None:
    settings = settings_of(CPU, program.TrainConfig(weights="16bit"))
    assert settings.load == {"load_in_4bit": False, "use_gradient_checkpointing": False}
    assert settings.environment == {}


def test_transformers_alone_are_told_nothing_of_unsloth() -> None:
    settings = settings_of(H100, program.TrainConfig(loader="transformers"))
    assert settings.load == settings.environment == {}
    assert ("precision", "bfloat16", "--loader transformers") in settings.rows


@pytest.mark.parametrize("spread", [False, True])
def test_shards_are_named_with_fsdp(spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.model.machine.SHARDED", spread)
    rows = settings_of(H100, program.TrainConfig(loader="transformers")).rows
    assert any("shard" in why for _, _, why in rows) is spread


def test_models_that_are_not_loaded_in_four_bits(tmp_path: Path) -> None:
    """The embedded model, and adapters to fused experts."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "unsloth/gpt-oss-20b"}))
    assert not stays_as_stored(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"target_parameters": ["mlp.experts.down_proj"]}))
    assert stays_as_stored(str(tmp_path))
    assert stays_as_stored("tiny")
    assert not stays_as_stored("unsloth/gpt-oss-20b")


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


# ---------------------------------------------------------------------------------------------------------------------
# Machine


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """To torch this machine has a GB10."""
    import torch

    properties = SimpleNamespace(name="NVIDIA GB10", major=12, minor=1, total_memory=128_000_000_000, is_integrated=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_described_as_torch_sees_it() -> None:
    found = find_machine()
    assert dataclasses.replace(found, processor=GB10.processor, triton=GB10.triton) == GB10


@pytest.mark.usefixtures("gpu")
def test_activations_are_recomputed_on_a_gpu_even_with_embeddings_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first parameter's device decided.  On a GPU with little memory that is the CPU.  And TRL switches it on again
    after each generation, without saying how: in PyTorch's own way an H200 took four times the memory."""
    import torch

    told: dict[str, Any] = {}
    base = SimpleNamespace(gradient_checkpointing_enable=lambda **options: told.update(options))
    adapted = SimpleNamespace(get_base_model=lambda: base)
    loader = SimpleNamespace(get_peft_model=lambda _, **options: told.update(options) or adapted)
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=loader))
    program.add_adapters(torch.nn.Embedding(4, 2), DEFAULTS)
    assert told["use_gradient_checkpointing"] is True
    base.gradient_checkpointing_enable()
    assert told["gradient_checkpointing_kwargs"] == {"use_reentrant": True}


def test_auto_is_gpt_oss_with_a_gpu_and_the_embedded_model_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.model.machine.gpu_is_there", lambda: True)
    assert [resolve_model(name) for name in ("auto", "tiny", "a/b")] == ["unsloth/gpt-oss-20b", "tiny", "a/b"]
    monkeypatch.setattr("toolkit.model.machine.gpu_is_there", lambda: False)
    assert resolve_model("auto") == "tiny"


@pytest.mark.parametrize(("visible", "there"), [(None, True), ("0", True), ("", False), ("-1", False)])
def test_a_gpu_is_known_by_its_device_node(visible: str | None, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(Path, "glob", lambda _, pattern: [Path("/dev/nvidia0")] if "nvidia" in pattern else [])
    assert gpu_is_there() is there
    monkeypatch.setattr(Path, "glob", lambda _, pattern: [])
    assert not gpu_is_there()


@pytest.mark.parametrize("offline", [False, True])
def test_variables_that_the_user_has_set_stay(offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"XDG_CACHE_HOME": "/cache", "UNSLOTH_GRPO_SEQ_PACKING": "1"}
    monkeypatch.setattr(os, "environ", environment)
    prepare_environment(offline)
    assert environment["UNSLOTH_GRPO_SEQ_PACKING"] == "1"
    assert environment["UNSLOTH_COMPILE_LOCATION"] == "/cache/gpt_2048_rl/unsloth_compiled"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == "/cache/gpt_2048_rl/torchinductor"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment.get("HF_HUB_OFFLINE") == ("1" if offline else None)


COMPILES = """
import json, os
from toolkit.model.machine import prepare_environment
prepare_environment(offline=True)
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir())
"""


@pytest.mark.long
def test_compiled_code_is_not_taken_from_where_others_can_write(tmp_path: Path) -> None:
    """torch runs what it finds in /tmp/torchinductor_USER, also if somebody else made that folder."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = run_python(COMPILES, env=environment)
    assert done.stdout.strip() == str(tmp_path / "gpt_2048_rl" / "torchinductor"), done.stderr


LOADS = """
import sys
from toolkit.model import machine
machine.{loads}
"""


@pytest.mark.long
@pytest.mark.parametrize("loads", ["load_plain(sys.argv[1], 'auto')", "config_of(sys.argv[1])"])
def test_a_models_folder_runs_no_python(loads: str, tmp_path: Path) -> None:
    """A folder can name a file of its own as the model's code.  transformers asked, and a "y" in stdin ran it."""
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    done = run_python(LOADS.format(loads=loads), str(tmp_path), input="y\n" * 9)
    assert "custom code" in done.stderr
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of gpt-oss-20b, with empty files for the weights and the tokenizer."""
    from transformers import GptOssConfig

    folder = tmp_path_factory.mktemp("gpt-oss")
    GptOssConfig(num_hidden_layers=24, num_local_experts=32).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


def test_the_memory_of_gpt_oss_20b(gpt_oss: Path) -> None:
    """20.9 billion parameters; 568 + 768 tokens of 32 completions at 49,152 bytes each."""
    four = memory_needed(str(gpt_oss), DEFAULTS)
    sixteen = memory_needed(str(gpt_oss), program.TrainConfig(weights="16bit"))
    assert four["weights"] == pytest.approx(12.5e9, rel=0.03)
    assert sixteen["weights"] == pytest.approx(2 * 20.91e9, rel=0.001)
    assert four["keys and values"] == 32 * 1336 * 49_152
    assert four["adapters"] == pytest.approx(46.2e6 * 16, rel=0.01)
    assert four["update"] == 2 * 8 * 768 * 201_088 * 2


@pytest.mark.parametrize(("weights", "packing", "took"),
                         [("stored", {"quantization_config": {"quant_method": "mxfp4"}}, 18.3e9),
                          ("4bit", {}, 18.2e9), ("16bit", {}, 46.2e9)])  # fmt: skip
def test_the_memory_of_training_is_what_an_h200_took(
    weights: Any, packing: dict[str, Any], took: float, tmp_path: Path
) -> None:
    """With the default options and a prompt of 30 tokens.  568 are provided for, and in 4 bits 24 GB have them."""
    from transformers import GptOssConfig

    config = GptOssConfig(num_hidden_layers=24, num_local_experts=32).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | packing))
    needed = memory_needed(str(tmp_path), dataclasses.replace(DEFAULTS, weights=weights))
    assert took < sum(needed.values()) - needed["CUDA"] < 1.15 * took
    assert weights == "16bit" or sum(needed.values()) < RTX_4090.memory


@pytest.mark.parametrize(("numbers", "fewer"), [((16, 8, 4), (16, 8, 2)), ((64, 64, 1), (32, 32, 1)),
                                                ((2, 1, 6), (3, 1, 3))])  # fmt: skip
def test_half_of_a_steps_completions_make_whole_groups(
    numbers: tuple[int, int, int], fewer: tuple[int, int, int]
) -> None:
    words = "another --run-name with --generations {} --batch-size {} --accumulation {}"
    assert fewer_completions(*numbers) == words.format(*fewer)
    assert fewer_completions(2, 2, 1) == "fewer --max-new-tokens"


def test_an_evaluation_needs_no_adapter_and_other_keys(gpt_oss: Path) -> None:
    config = program.EvalConfig(model="", eval_batch_size=8)
    needed = memory_needed(str(gpt_oss), config)
    assert needed["adapters"] == 0
    assert needed["keys and values"] == 8 * 1336 * 49_152


def check_the_adapters(base: str, adapt: Literal["all", "attention"]) -> None:
    config = dataclasses.replace(program.train_defaults("tiny"), adapt=adapt)
    model = program.add_adapters(program.load_model(base, config, lambda _: None)[0], config)
    adapters = {name: weights for name, weights in model.named_parameters() if weights.requires_grad}
    assert all(".lora_" in name for name in adapters)
    assert any("experts" in name for name in adapters) == (adapt == "all")
    assert {name.split(".")[6] for name in adapters if "self_attn" in name} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert memory_needed(base, config)["adapters"] == 16 * sum(weights.numel() for weights in adapters.values())


@pytest.mark.parametrize("adapt", ["all", "attention"])
def test_adapters_are_where_they_should_be_and_counted(adapt: str, base: Path) -> None:
    preloaded.call(check_the_adapters, base, adapt)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GB of a GPU's own memory are free, and 40 GB of RAM."""
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (16_000_000_000, 16_000_000_000))
    monkeypatch.setattr("toolkit.model.machine.available_memory", lambda: 40_000_000_000)


@pytest.mark.usefixtures("little_memory")
def test_too_little_memory_is_a_warning_that_names_what_takes_it(gpt_oss: Path) -> None:
    warning = memory_warning(str(gpt_oss), H100, DEFAULTS)
    for words in ("about 22 GB (weights 12.", "keys and values 2.1", "and 16 are free", "lower --batch-size"):
        assert words in warning
    assert "\n" not in warning


@pytest.mark.usefixtures("little_memory")
def test_memory_that_the_processor_shares_is_not_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 of the GB10's 128 GB are free.  A DGX Spark whose memory runs out has to be switched off."""
    import torch

    taken: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", taken.append)
    for machine in (GB10, H100, CPU):
        bound_memory(machine)
    assert taken == [pytest.approx(32 / 128)]


@pytest.mark.usefixtures("little_memory")
def test_no_warning_if_it_fits_or_nothing_is_known(gpt_oss: Path, tmp_path: Path) -> None:
    assert memory_warning(str(gpt_oss), GB10, DEFAULTS) == ""  # shares its memory with the processor
    assert memory_warning(str(gpt_oss), CPU, DEFAULTS) == ""
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert memory_warning(str(tmp_path), H100, DEFAULTS) == ""


# ---------------------------------------------------------------------------------------------------------------------
# The doctor


Examined = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Examined:
    """The doctor on a given machine: (what it returns, what it prints)."""
    from huggingface_hub import constants
    from rich.console import Console

    def examine(machine: Machine, config: DoctorConfig, jail: Callable[[], str] = lambda: "holds") -> tuple[Any, str]:
        monkeypatch.setattr("toolkit.model.doctor.find_machine", lambda: machine)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        console = Console(width=250, file=io.StringIO(), record=True, markup=False, emoji=False)
        monkeypatch.setattr(program, "train_defaults", lambda name: program.TrainConfig(model=name))
        monkeypatch.setattr(program, "shared_pool", jail)
        told = doctor(config, console, program)
        return json.loads(json.dumps(told)), console.export_text()

    return examine


def lines(text: str, verdict: str) -> list[str]:
    """The first words of a table's rows that have a verdict in their second column."""
    return [words[0] for words in map(str.split, text.splitlines()) if words[1:2] == [verdict]]


def test_the_doctor_finds_this_machine_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["doctor", "--model", "tiny", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["fit"]
    assert told["versions"]["trl"] == "1.14.2"
    assert told["checks"].keys() == {"settings", "jail", "model"}  # memory is a question of GPUs
    assert "unsloth" in err


def test_the_doctor_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["doctor", "--model", str(tmp_path)]) == 2
    assert lines(capsys.readouterr().out, "NO") == ["model"]


@pytest.mark.usefixtures("little_memory")
def test_memory_is_a_warning_and_no_refusal(gpt_oss: Path, examined: Examined) -> None:
    told, text = examined(H100, DoctorConfig(str(gpt_oss)))
    assert told["fit"]
    assert (told["warnings"], lines(text, "warning")) == (["memory"], ["fits"])
    assert lines(text, "ok") == ["jail", "model"]
    told, text = examined(GB10, DoctorConfig(str(gpt_oss)))
    assert told["warnings"] == []
    assert told["checks"]["memory"] == "about 22 GB needed"
    assert "4-bit NF4" in text


@pytest.mark.usefixtures("little_memory")
def test_the_doctor_examines_the_settings_that_were_asked_for(gpt_oss: Path, examined: Examined) -> None:
    told, text = examined(RTX_4090, DoctorConfig(str(gpt_oss), weights="16bit"))
    assert not told["fit"]
    assert lines(text, "NO") == ["settings"]
    assert "--weights 16bit needs a GPU of 80 GB" in told["checks"]["settings"]
    for model, weights in ((str(gpt_oss), "stored"), ("tiny", "auto")):
        told, text = examined(GB10, DoctorConfig(model, weights))  # type: ignore[arg-type]
        assert "as stored; gpt-oss's experts in MXFP4" in [row[1] for row in told["settings"]]


@pytest.mark.slow
def test_the_doctor_measures_a_form(base: Path) -> None:
    done = preloaded.run("doctor", "--model", "tiny", "--weights", "stored", "--measure", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["speeds"]["stored"]["tokens_per_s"] > 0
    assert "h of generating" in done.stderr


@pytest.mark.usefixtures("little_memory")
def test_the_fastest_form_is_kept_for_this_gpu_and_model(
    gpt_oss: Path, examined: Examined, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A form that fails is left out.  Another GPU has its own choice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speeds = {"4bit": {"tokens_per_s": 700.0, "seconds": 15.0}, "16bit": {"tokens_per_s": 800.0, "seconds": 12.0}}

    def run(command: list[str], **_: Any) -> Any:
        weights = command[command.index("--weights") + 1]
        speed = speeds.get(weights)
        told = json.dumps({"speeds": {weights: speed}})
        return SimpleNamespace(returncode=0 if speed else 2, stdout=told, stderr="error: it does not load")

    monkeypatch.setattr("toolkit.model.doctor.subprocess.run", run)
    told, text = examined(H100, DoctorConfig(str(gpt_oss), measure=True))
    assert told["speeds"] == speeds
    assert "stored: failed (error: it does not load)" in text
    assert "the fastest here: 800 tokens/s (doctor --measure)" in text
    assert "0.5 h of generating" in text
    assert "0.5 h of generating" in examined(H100, DoctorConfig(str(gpt_oss)))[1]
    for other, weights in ((H100, "4bit"), (GB10, "auto")):
        assert "not measured" in examined(other, DoctorConfig(str(gpt_oss), weights))[1]  # type: ignore[arg-type]
    kept = settings_of(H100, DEFAULTS, str(gpt_oss))
    assert kept.load["load_in_16bit"]
    assert kept.environment == {"UNSLOTH_MXFP4_KEEP_PACKED": "0"}
    assert settings_of(H100, program.TrainConfig(weights="4bit"), str(gpt_oss)).load["load_in_4bit"]
    assert settings_of(GB10, DEFAULTS, str(gpt_oss)).load["load_in_4bit"]


def test_without_a_gpu_there_is_nothing_to_choose(examined: Examined) -> None:
    told, text = examined(CPU, DoctorConfig("tiny", measure=True))
    assert told["speeds"] == {}
    assert "nothing to choose" in text


def test_the_time_of_a_run_counts_its_evaluations() -> None:
    """320 boards for each of two models, the 32 surest answers and 512 programs are 37 batches of 32."""
    what, time, why = time_row(DEFAULTS, 36.0)
    assert (what, time) == ("time", "1.6 h of generating")
    assert "120 steps and 37 batches of evaluation, 36.0 s each" in why
    assert "80 steps and 46 batches" in time_row(program.train_defaults("tiny"), 1.0)[2]


def test_a_jail_that_does_not_hold_is_told_beside_the_rest(examined: Examined) -> None:
    def jail() -> str:
        raise UsageError("no seccomp [here]")

    told, text = examined(CPU, DoctorConfig("tiny"), jail)
    assert not told["fit"]
    assert lines(text, "NO") == ["jail"]
    assert "no seccomp [here]" in text
    assert told["checks"]["model"].startswith("tiny is available; --model smollm2 is a real language model")


# ---------------------------------------------------------------------------------------------------------------------
# Models from folders and from the hub


def save_model(folder: Path, tokenizer: object) -> Path:
    """The files of a model's folder that are read before anything is loaded."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


def save_adapter(folder: Path, base: object) -> str:
    """The same files of an adapter's folder."""
    (folder / "adapter_model.safetensors").write_bytes(NO_TENSORS)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return str(folder)


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


@pytest.mark.parametrize("path", [ROOT / "gpt_2048_rl.py", *(ROOT / "toolkit").rglob("*.py")], ids=lambda f: f.stem)
def test_no_loader_runs_the_code_of_a_model_folder(path: Path) -> None:
    """Unless a call says no, transformers asks a terminal whether to run it, and one `y` runs it outside the jail."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    loaders = [call for call in calls if re.match(r"Auto\w+\.from_|unsloth\.", ast.unparse(call.func))]
    guarded = [bool({None, "trust_remote_code"} & {keyword.arg for keyword in call.keywords}) for call in loaders]
    assert all(guarded), [ast.unparse(call) for call in loaders]


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


def test_a_download_that_does_not_fit_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    files = [SimpleNamespace(file_size=13_800_000_000, will_download=True),
             SimpleNamespace(file_size=10**12, will_download=False)]  # fmt: skip
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: files)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000_000))
    with pytest.raises(UsageError, match=r"needs 13\.8 GB, and 5\.0 are free: set HF_HOME"):
        check_download("unsloth/gpt-oss-20b")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    check_download("unsloth/gpt-oss-20b")


def test_only_missing_files_take_room(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = save_model(tmp_path / "Nano", {"chat_template": "hi"})
    hub.publish("someone/Nano", folder)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        with pytest.raises(UsageError, match="are free"):
            check_download("someone/Nano")
        check_download(str(folder))
    huggingface_hub.snapshot_download("someone/Nano")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    check_download("someone/Nano")


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
    done = run("eval", "someone/Qwen-nano", "--size", "4", *SHORT[-7:], env=environment)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Weights as they are held


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
