"""Exports: what is written loads again in PEFT and transformers, without this program, and computes the same."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import gpt_2048_rl as program
from tests import preloaded
from tests.conftest import Run
from tests.fake_hub import FakeHub
from tests.helpers import HELD_OUT, ROOT, run, run_python
from tests.model.test_families import SMALL, gpt2, save_random
from toolkit import UsageError
from toolkit.model import adapters, smollm2, tiny
from toolkit.run.card import model_card
from toolkit.serve import export, verify

if TYPE_CHECKING:
    import torch

ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every eighth of the prompts by which an export is verified."""
    whole = verify.held_out_prompts
    monkeypatch.setattr(verify, "held_out_prompts", lambda spec: whole(spec)[::8])


@pytest.fixture(scope="module")
def learned(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose adapter has learned a lot: B matrices with noise instead of two steps' change."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(trained.folder, tmp_path_factory.mktemp("learned") / "run")
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "adapter" / ADAPTER)
    for name, tensor in weights.items():
        if "lora_B" in name:
            tensor.normal_(std=0.03, generator=generator)
    save_file(weights, folder / "adapter" / ADAPTER)
    return folder


def logits_of(model: Any) -> torch.Tensor:
    """A model's answer to some tokens, in float32."""
    import torch

    with torch.no_grad():
        return model.float()(torch.arange(1, 200)[None]).logits  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected(learned: Path) -> torch.Tensor:
    """What the trained model computes, by PEFT."""
    from peft import AutoPeftModelForCausalLM

    return logits_of(AutoPeftModelForCausalLM.from_pretrained(learned / "adapter"))


def exported(source: Path, format: str, folder: Path, **more: Any) -> str:
    """What the command prints.  It runs in this process, which has loaded torch already, and compares only if asked."""
    from rich.console import Console

    console = Console(record=True, file=io.StringIO())
    config = export.ExportConfig(source, format, folder, **{"verify": False} | more)  # type: ignore[arg-type]
    result = export.export(config, console, program.game_spec)
    assert result["folder"] == str(folder)
    return console.export_text()


@pytest.fixture(scope="module")
def mxfp4(learned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in MXFP4."""
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    exported(learned, "mxfp4", folder)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# MXFP4


def some_codes() -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of a matrix (96, 8), every code among them."""
    import torch

    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (8, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (8, 3), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_mxfp4_means_what_transformers_reads() -> None:
    import torch
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    blocks, scales = some_codes()
    theirs = _convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0]
    assert torch.equal(adapters.dequantize_mxfp4(blocks, scales), theirs)


def test_weights_that_were_mxfp4_come_back_exactly() -> None:
    import torch

    weights = adapters.dequantize_mxfp4(*some_codes())
    assert torch.equal(adapters.dequantize_mxfp4(*adapters.quantize_mxfp4(weights)), weights)


def test_rounding_is_to_the_nearest_value_of_the_better_scale() -> None:
    """Against an exhaustive search over all values and nearby scales."""
    import torch

    weights = torch.randn(32, 40, generator=torch.Generator().manual_seed(3))
    ours = (adapters.dequantize_mxfp4(*adapters.quantize_mxfp4(weights)) - weights).square().sum(0)  # a group a column
    values = torch.tensor([*adapters.FP4_MAGNITUDES, *(-value for value in adapters.FP4_MAGNITUDES)])
    errors = [((weights[..., None] - values * 2.0**e).abs().amin(-1)).square().sum(0) for e in range(-12, 8)]
    assert torch.allclose(ours, torch.stack(errors).amin(0), rtol=1e-5)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (0.26, 0.5), (4.9, 4.0)],
)
def test_ties_go_to_the_even_code(value: float, rounded: float) -> None:
    import torch

    group = torch.tensor([[value], [-value], [6.0], *[[0.0]] * 29])
    assert adapters.dequantize_mxfp4(*adapters.quantize_mxfp4(group))[:3, 0].tolist() == [rounded, -rounded, 6.0]


def test_a_group_of_zeros_stays_zero() -> None:
    import torch

    blocks, scales = adapters.quantize_mxfp4(torch.zeros(64, 2))
    assert blocks.eq(0).all()
    assert adapters.dequantize_mxfp4(blocks, scales).eq(0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Adapters


def test_an_adapter_with_a_pair_for_each_expert_becomes_one_that_peft_loads(learned: Path, tmp_path: Path) -> None:
    """In 4 bits every expert is a layer of its own.  In the released layout each gets its own change, no other's."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from peft.tuners.lora.layer import ParamWrapper
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(learned / "adapter", tmp_path / "adapter")
    config = json.loads((source / "adapter_config.json").read_text())
    weights, changes, rank = load_file(source / ADAPTER), {}, config["r"]
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in weights if ".experts." in name]:
        experts, inner = name.split(".lora_")[0].removesuffix(".base_layer"), ".base_layer" in name
        if "lora_B" in name:
            continue
        inputs, outputs = weights.pop(name).shape[1], weights.pop(name.replace("lora_A", "lora_B")).shape[0]
        for expert in range(4):
            a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
            layer = f"{experts}.{'gate_up' if inner else 'down'}_projs.{expert}"
            weights |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
            changes[layer] = config["lora_alpha"] / rank * (b @ a).T
    save_file(weights, source / ADAPTER)
    targets = [f"{kind}_projs.{expert}" for kind in ("gate_up", "down") for expert in range(4)]
    config |= {"target_parameters": None, "target_modules": [*config["target_modules"], *targets]}
    (source / "adapter_config.json").write_text(json.dumps(config))

    exported(source, "lora", tmp_path / "lora")
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "lora")
    wrappers = {name.replace(".base_layer", "") + f".{module.parameter_name}": module
                for name, module in model.named_modules() if isinstance(module, ParamWrapper)}  # fmt: skip
    assert len(wrappers) * 4 == len(changes)
    for layer, change in changes.items():
        name, _, number = layer.rpartition("s.")
        assert torch.allclose(wrappers[name].get_delta_weight("default")[int(number)], change, atol=1e-5)


@pytest.mark.usefixtures("few_prompts")
def test_the_default_is_an_adapter_in_the_run_and_can_be_repeated(
    learned: Path,
    expected: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exports landed in the current folder, and the second one was refused."""
    import torch
    from peft import AutoPeftModelForCausalLM

    run, here = Path(shutil.copytree(learned, tmp_path / "run")), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for more in ([], ["--no-verify"]):
        assert program.main(["export", str(run), "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])["verified"]
        assert found is None if more else found["equal"] == 1.0
    assert torch.equal(logits_of(AutoPeftModelForCausalLM.from_pretrained(run / "export" / "lora")), expected)
    assert not list(here.iterdir())


def test_an_export_says_how_threads_wait() -> None:
    """With PyTorch's own setting, beside busy neighbours, a merge of 13 s of processor time was not done after 50."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_WAIT", "GOMP_SPIN"))}
    code = "import os, gpt_2048_rl as p; p.main(['export', '/']); print(os.environ['GOMP_SPINCOUNT'])"
    assert run_python(code, env=env | {"PYTHONPATH": str(ROOT)}).stdout == "10000\n"


@pytest.mark.parametrize("name", [ADAPTER, "tokenizer.json", "training_config.json"])
def test_a_damaged_adapter_gets_one_line(
    name: str, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer that was cut short ended in a traceback; a config, after the merge or never."""
    adapter = Path(shutil.copytree(learned / "adapter", tmp_path / "adapter"))
    os.truncate(adapter / name, 200)
    assert program.main(["export", str(adapter)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {adapter / name} is missing or damaged: restore it")
    assert not (adapter / "export").exists()


def test_a_checkpoint_can_be_exported(learned: Path, tmp_path: Path) -> None:
    exported(learned / "checkpoint-1", "lora", tmp_path / "lora")
    card = (tmp_path / "lora" / "README.md").read_text()
    assert '"run_name": "run"' in card
    assert "after training" not in card  # these results are of other weights


def test_an_adapter_without_a_tokenizer_has_its_models(learned: Path, tmp_path: Path) -> None:
    """As the one that a run began from.  A killed export's folder, the size of a model, goes with the next one."""
    adapter = Path(shutil.copytree(learned / "adapter", tmp_path / "adapter"))
    for file in adapter.glob("tokenizer*"):
        file.unlink()
    left = tmp_path / ".export-killed"
    left.mkdir()
    exported(adapter, "lora", tmp_path / "lora")
    assert (tmp_path / "lora" / "tokenizer_config.json").is_file()
    assert not left.exists()


def test_an_embedded_model_that_left_the_cache_is_made_again(
    learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base model was checked first, and the message said that there is no such folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = shutil.copytree(learned / "adapter", tmp_path / "adapter")
    config = json.loads((source / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tiny.folder_of("wasd"))
    (source / "adapter_config.json").write_text(json.dumps(config))
    made: list[tiny.GameSpec] = []
    monkeypatch.setattr(tiny, "warm_start", lambda spec, **_: made.append(spec))
    exported(source, "lora", tmp_path / "lora")
    assert [each.keys for each in made] == [program.LAYOUTS["wasd"]]
    assert "# The embedded model playing 2048" in (tmp_path / "lora" / "README.md").read_text()


def test_the_card_tells_results_config_and_seed(learned: Path, tmp_path: Path) -> None:
    exported(learned, "lora", tmp_path / "lora")
    card = (tmp_path / "lora" / "README.md").read_text()
    result = json.loads((learned / "result.json").read_text())
    assert f"| after training | {result['scores']['3x3']['after']['won']:.0%} |" in card
    assert '"seed": 3407' in card
    assert "It was not compared with the model as trained." in card
    (tmp_path / "result.json").write_text('{"scores": {"4x4": {"target": 2048}}}')
    with pytest.raises(UsageError, match=r"result\.json is damaged"):
        model_card("base", "lora", tmp_path)
    assert str(tmp_path) not in card
    (tmp_path / "result.json").unlink()
    (tmp_path / "origin.json").write_text(
        '{"start": {"digests": {"adapter_model.safetensors": "`)\\n# Mine\\n<img>"}}}'
    )
    with pytest.raises(UsageError, match=r"origin\.json is damaged"):  # it wrote into the card
        model_card("base", "lora", tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Whole models


def loaded(folder: Path) -> Any:
    """The model of a folder as transformers loads it: nothing missing, nothing left over."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    packed = "quantization_config" in json.loads((folder / "config.json").read_text())
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True) if packed else None, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def test_the_merged_model_has_the_weights_of_the_adapted_one(
    learned: Path, expected: torch.Tensor, tmp_path: Path
) -> None:
    """It computes the same up to bfloat16's rounding, which sends a few tokens to another expert."""
    import torch
    from peft import AutoPeftModelForCausalLM

    exported(learned, "merged_16bit", tmp_path / "merged")
    model = loaded(tmp_path / "merged")
    weights = AutoPeftModelForCausalLM.from_pretrained(learned / "adapter").merge_and_unload().state_dict()
    assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in model.state_dict().items())
    assert (logits_of(model) - expected).abs().median() < expected.abs().median() * 2**-8  # bfloat16's resolution


def test_mxfp4_is_really_written_and_loads_in_transformers(learned: Path, mxfp4: Path, tmp_path: Path) -> None:
    """Attention as in the merged model, experts rounded to four bits; nothing is missing and nothing new."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file

    exported(learned, "merged_16bit", tmp_path / "merged")
    stored, merged = load_file(mxfp4 / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert json.loads((mxfp4 / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    weights = loaded(mxfp4).state_dict()
    experts = {name for name in merged if name.endswith(("gate_up_proj", "down_proj"))}
    assert weights.keys() == merged.keys()
    assert {name for name in stored if stored[name].dtype == torch.uint8} == {
        f"{name}_{part}" for name in experts for part in ("blocks", "scales")
    }
    exact = AutoPeftModelForCausalLM.from_pretrained(learned / "adapter").merge_and_unload().state_dict()
    for name in merged:
        if name in experts:
            rounded = [adapters.dequantize_mxfp4(*adapters.quantize_mxfp4(expert)) for expert in exact[name]]
            assert torch.equal(weights[name].float(), torch.stack(rounded))
        else:
            assert torch.equal(weights[name], merged[name])


def test_a_model_that_came_in_mxfp4_can_be_exported_too(learned: Path, mxfp4: Path, tmp_path: Path) -> None:
    """gpt-oss is published in MXFP4.  transformers saved such a model without any layer's experts."""
    import torch
    from peft import PeftModel

    expected = PeftModel.from_pretrained(loaded(mxfp4), learned / "adapter").merge_and_unload().state_dict()
    exported(learned, "merged_16bit", tmp_path / "merged", base=str(mxfp4))
    merged = loaded(tmp_path / "merged").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.items())
    exported(learned, "mxfp4", tmp_path / "again", base=str(mxfp4))
    assert torch.isfinite(logits_of(loaded(tmp_path / "again"))).all()


def test_rounding_that_undoes_the_training_is_said(learned: Path, mxfp4: Path, tmp_path: Path) -> None:
    """Weights on the grid of four bits stay where they are when an adapter moves them by less than half a step."""
    from safetensors.torch import load_file, save_file

    weights = load_file(learned / "adapter" / ADAPTER)
    for name, scale, base, said in (("large", 1.0, "", (90, 110)), ("small", 1e-3, str(mxfp4), (0, 2))):
        source = shutil.copytree(learned / "adapter", tmp_path / name)
        save_file(
            {key: tensor * (scale if "lora_B" in key else 1) for key, tensor in weights.items()}, source / ADAPTER
        )
        told = exported(source, "mxfp4", tmp_path / f"{name}-out", base=base)
        left = re.search(r"rounding keeps (-?\d+)% of the adapter's change", told)
        assert left, told
        assert said[0] <= int(left[1]) <= said[1]


@pytest.mark.slow
@pytest.mark.usefixtures("few_prompts")
def test_an_exported_model_can_be_evaluated(mxfp4: Path, learned: Path, tmp_path: Path) -> None:
    exported(learned, "merged_16bit", tmp_path / "merged")
    done = preloaded.run("eval", tmp_path / "merged", "--games", "4", *HELD_OUT, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scores"]["3x3"]["model"]["games"] == 4


def test_a_merged_model_samples_as_in_training(learned: Path, tmp_path: Path) -> None:
    """A server without options takes temperature, top-k and top-p from this file; transformers' own top-k is 50."""
    run = Path(shutil.copytree(learned, tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"temperature": 0.8}))
    exported(run, "merged_16bit", tmp_path / "merged")
    found = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert [found[name] for name in ("do_sample", "temperature", "top_k", "top_p")] == [True, 0.8, 0, 1.0]


# ---------------------------------------------------------------------------------------------------------------------
# transformers 4

TRANSFORMERS4 = ROOT / ".venv-transformers4"
needs_transformers4 = pytest.mark.skipif(
    not (TRANSFORMERS4 / "gpt-2048-rl.stamp").exists(), reason="needs ./setup.sh --with transformers4"
)
GREEDY = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, base, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
if Path(folder, "adapter_config.json").exists():
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
answers = []
for prompt in prompts:
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answers.append(model.generate(**ids, do_sample=False, max_new_tokens=32)[0].tolist())
print(json.dumps(answers))
"""


def other_rope(kind: str, folder: Path) -> None:
    """A random model whose RoPE is not the default of transformers 4."""
    import transformers

    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 99,
                             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 256}
    rope = {"rope_type": "default", "rope_theta": 1e6} if kind == "Qwen3" else yarn
    config = getattr(transformers, f"{kind}Config")(rope_parameters=rope, max_position_embeddings=1024, **small)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)


def test_an_export_names_what_transformers_4_reads(learned: Path, tmp_path: Path) -> None:
    """transformers 4 knows no TokenizersBackend, and took its default of 150000 for a missing rope_theta."""
    for format in ("lora", "merged_16bit"):
        exported(learned, format, tmp_path / format)
        tokenizer = json.loads((tmp_path / format / "tokenizer_config.json").read_text())
        assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]  # token_type_ids stopped `generate`
    config = json.loads((tmp_path / "merged_16bit" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (tiny.ROPE_THETA, None)


@pytest.mark.parametrize("kind", ["Qwen3", "GptOss"])
def test_transformers_5_still_reads_its_own_rope(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    other_rope(kind, tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).rope_parameters
    export.for_transformers_4(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == before


@pytest.mark.slow
@pytest.mark.optional
@needs_transformers4
@pytest.mark.parametrize("kind", ["Qwen3", "GptOss"])
def test_transformers_4_reads_the_rope_of_transformers_5(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    other_rope(kind, tmp_path)
    export.for_transformers_4(tmp_path)
    code = (
        "import json, sys; from transformers import AutoConfig; c = AutoConfig.from_pretrained(sys.argv[1]); "
        "print(json.dumps({'rope_type': 'default', **(c.rope_scaling or {}), 'rope_theta': c.rope_theta}))"
    )
    words = [str(TRANSFORMERS4 / "bin/python"), "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == AutoConfig.from_pretrained(tmp_path).rope_parameters


@pytest.mark.slow
@pytest.mark.optional
@needs_transformers4
@pytest.mark.parametrize("format", ["lora", "merged_16bit"])
def test_transformers_4_gives_the_same_greedy_answers(learned: Path, format: str, tmp_path: Path) -> None:
    """Equal token by token, in float32 so that nothing ties.  The adapter is one to attention: PEFT takes the sides of
    expert matrices the other way round under transformers 4, and refuses pairs for experts."""
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(learned / "adapter", tmp_path / "adapter")
    if format == "lora":
        config = json.loads((source / "adapter_config.json").read_text())
        (source / "adapter_config.json").write_text(json.dumps(config | {"target_parameters": None}))
        weights = load_file(source / ADAPTER)
        save_file({name: tensor for name, tensor in weights.items() if ".experts" not in name}, source / ADAPTER)
    exported(source, format, tmp_path / "out")
    base = Path(shutil.copytree(tiny.folder_of("bepo"), tmp_path / "base"))
    export.for_transformers_4(base)
    prompts = json.dumps(verify.held_out_prompts(program.game_spec())[::8])
    arguments = [tmp_path / "out", base if format == "lora" else tmp_path / "out", prompts]
    answers = []
    for python in (sys.executable, TRANSFORMERS4 / "bin/python"):
        words = [str(python), "-c", GREEDY, *map(str, arguments)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == 8


# ---------------------------------------------------------------------------------------------------------------------
# Comparison with the trained model


def answers_of(shift: float) -> list[verify.Answer]:
    """Random logits of a base model, and of a trained one that is shifted by about `shift`."""
    import torch

    generator = torch.Generator().manual_seed(5)
    base, change = torch.randn(2, 20, 50, generator=generator)
    return [verify.Answer(list(range(30)), 10, base, base + shift * change)]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_of_the_shift_that_is_kept_is_told(share: float) -> None:
    """Whatever constant is added to all logits of a token, which changes no probability."""
    (answer,) = answers = answers_of(2.0)
    found = verify.compare(answers, lambda ids, start: answer.base + share * (answer.trained - answer.base) + 7)
    assert found.kept == pytest.approx(share, abs=1e-4)
    assert (found.equal == 1.0) == (share == 1.0)
    assert (abs(found.kl) < 1e-6) == (share == 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["lora", "merged_16bit"])
def test_what_loses_nothing_is_found_equal(trained: Run, tmp_path: Path, format: str) -> None:
    """The figures are printed and in the card.  A model that is hardly trained has ties, which bfloat16 decides."""
    told = exported(trained.folder, format, tmp_path / "out", verify=True)
    equal = re.search(r"([\d.]+)% of \d+ most likely tokens are equal, ([\d.]+)% tie", told)
    assert equal, told
    assert float(equal[1]) + float(equal[2]) >= 99
    card = (tmp_path / "out" / "README.md").read_text()
    assert equal[0] in card
    assert f"transformers {version('transformers')}" in card  # which program was used


def damage(made: Path) -> None:
    """Swap gate and up in a merged model; empty an adapter."""
    from safetensors.torch import load_file, save_file

    file = next(made.glob("*model.safetensors"))
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith("gate_up_proj"):
            weights[name] = tensor.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).contiguous()
        elif "lora_B" in name:
            tensor.zero_()
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.usefixtures("few_prompts")
@pytest.mark.parametrize("format", ["lora", "merged_16bit"])
def test_a_damaged_export_is_refused_and_the_older_one_stays(
    learned: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(learned, tmp_path / "run"))
    older = run / "export" / format / "older"
    older.mkdir(parents=True)
    intact = export.write_format

    def damaged(*given: Any) -> None:
        intact(*given)
        damage(given[4])

    monkeypatch.setattr(export, "write_format", damaged)
    with pytest.raises(UsageError, match="is not what was trained"):
        exported(run, format, None, verify=True)  # type: ignore[arg-type]
    assert list((run / "export").iterdir()) == [older.parent]
    assert list(older.parent.iterdir()) == [older]


@pytest.mark.usefixtures("few_prompts")
def test_what_rounding_loses_is_said_with_the_format_that_keeps_it(learned: Path, mxfp4: Path, tmp_path: Path) -> None:
    """An adapter to experts alone that moves few weights off the grid of four bits."""
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(learned / "adapter", tmp_path / "adapter")
    weights = load_file(source / ADAPTER)
    save_file({name: tensor * (".experts" in name) * (0.1 if "lora_B" in name else 1)
               for name, tensor in weights.items()}, source / ADAPTER)  # fmt: skip
    told = exported(source, "mxfp4", tmp_path / "out", base=str(mxfp4), verify=True)
    assert "of what was trained: --format merged_16bit keeps it" in told


def test_without_memory_an_adapter_is_written_and_not_compared(
    learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "available_memory", lambda: 10**6)
    told = exported(learned, "lora", tmp_path / "lora", verify=True)
    assert "the export is not verified: holding" in told
    assert (tmp_path / "lora" / ADAPTER).exists()


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be


def other_model(folder: Path) -> None:
    """A model of another family."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=99
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("format", "arrange", "said"),
    [
        ("lora", lambda run, here: {"output_dir": run}, "already exists: choose another --output-dir"),
        ("mxfp4", lambda run, here: {"base": str(here / "other")}, "use --format merged_16bit"),
        ("merged_16bit", lambda run, here: {"base": str(here / "nowhere")}, "nowhere"),
        ("lora", lambda run, here: {"push_to_hub": "me/mine"}, "set HF_TOKEN"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_gets_one_line(
    learned: Path, tmp_path: Path, format: str, arrange: Callable[[Path, Path], dict[str, Any]], said: str
) -> None:
    other_model(tmp_path / "other")
    out = tmp_path / "out"
    more = arrange(learned, tmp_path)
    with pytest.raises(UsageError, match=said):
        exported(learned, format, more.pop("output_dir", out), **more)
    assert not out.exists()


def test_a_folder_without_an_adapter_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["export", str(tmp_path), "--output-dir", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{tmp_path} holds no adapter" in said


@pytest.mark.parametrize("lacking", ["disk", "memory"])
def test_too_little_room_is_said_before_anything_is_loaded(
    learned: Path, tmp_path: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    if lacking == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 10**4))
    else:
        monkeypatch.setattr(export, "available_memory", lambda: 10**6)
    config = export.ExportConfig(learned, "merged_16bit", tmp_path / "out")
    with pytest.raises(UsageError, match="free"):
        export.export(config, Console(quiet=True), program.game_spec)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_one_line(learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors has an error of its own for it, which was taken for damaged weights."""
    from rich.console import Console
    from safetensors import SafetensorError

    def fill(*_: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(export, "write_adapter", fill)
    config = export.ExportConfig(learned, "lora", tmp_path / "out", verify=False)
    with pytest.raises(UsageError, match=r"out cannot be written \(No space left .*: choose another --output-dir$"):
        export.export(config, Console(quiet=True), program.game_spec)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_export_reaches_the_hub(learned: Path, tmp_path: Path) -> None:
    """To a server that speaks the part of the hub's protocol that uploads need."""
    folder = tmp_path / "lora"
    with FakeHub(token="hf_right") as hub:
        done = run("export", learned, "--output-dir", folder, "--push-to-hub", "me/mine", "--no-verify", "--json",
                   env=hub.environment(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    base = str(tiny.folder_of("bepo"))
    assert json.loads(done.stdout) == {
        "format": "lora", "base": base, "folder": str(folder), "hub": "me/mine", "verified": None}  # fmt: skip
    assert hub.repositories["me/mine"]["private"]
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.repositories["me/mine"]["files"] == files


def test_the_base_has_the_name_that_it_has_in_training(learned: Path, tmp_path: Path) -> None:
    """`--base tiny` was looked for on the hub, and ended in a traceback."""
    for name, words in (("default", {}), ("named", {"base": "tiny"})):
        exported(learned, "merged_16bit", tmp_path / name, **words)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("default", "named")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("other", "format"), [
    ("another family", "merged_16bit"), ("other names", "merged_16bit"), ("fewer layers", "lora"),
])  # fmt: skip
def test_a_base_that_an_adapter_does_not_fit_is_named(other: str, format: str, learned: Path, tmp_path: Path) -> None:
    """It was a traceback over every shape that differs; a layer that is missing went unnoticed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own, base = tiny.folder_of("bepo"), tmp_path / "base"
    if other == "another family":
        save_random("Llama", own, base, **SMALL)
    elif other == "other names":
        gpt2(own, base)
    else:
        model = AutoModelForCausalLM.from_pretrained(own)
        del model.model.layers[2:]
        model.config.num_hidden_layers, model.config.layer_types = 2, model.config.layer_types[:2]
        for part in (model, AutoTokenizer.from_pretrained(own)):
            part.save_pretrained(base)
    with pytest.raises(UsageError, match=rf"the adapter does not fit {base} \(.+\): name another --base"):
        exported(learned, format, tmp_path / "out", base=str(base), verify=True)
    assert not (tmp_path / "out").exists()


def test_an_export_holds_nothing_from_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What links in a strange folder lead to was copied into the export, and --push-to-hub would have published it."""
    adapter = tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "nowhere"}')
    (adapter / "adapter_model.safetensors").touch()
    (tmp_path / "secret").write_text("key")
    (adapter / "chat_template.jinja").symlink_to(tmp_path / "secret")
    assert program.main(["export", str(tmp_path / "run")]) == 2
    assert "chat_template.jinja is a link: remove it" in capsys.readouterr().err


def test_an_export_replaces_nothing_behind_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of the format's name, where a link in someone else's run leads to, was removed."""
    (tmp_path / "mine" / "lora").mkdir(parents=True)
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    (tmp_path / "run" / "adapter" / "adapter_model.safetensors").touch()
    (tmp_path / "run" / "export").symlink_to(tmp_path / "mine")
    assert program.main(["export", str(tmp_path / "run")]) == 2
    assert f"{tmp_path / 'run' / 'export'} is a link: remove it" in capsys.readouterr().err
    assert (tmp_path / "mine" / "lora").is_dir()


@pytest.mark.parametrize(("supported", "free", "computes_in"), [(False, 1e9, "float32"), (False, 100.0, "bfloat16"),
                                                                (True, 1e9, "bfloat16")])  # fmt: skip
def test_a_processor_without_bfloat16_compares_in_float32(
    monkeypatch: pytest.MonkeyPatch, supported: bool, free: float, computes_in: str
) -> None:
    """It emulates bfloat16: SmolLM2's comparison had not ended after ten minutes.  What is written stays as it is."""
    import torch

    monkeypatch.setattr(verify, "multiplies_bfloat16", lambda: supported)
    monkeypatch.setattr(verify, "available_memory", lambda: free)
    model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    found = verify.quick(model)
    assert found.weight.dtype == getattr(torch, computes_in)
    assert model.weight.dtype == torch.bfloat16
    assert found.weight.bfloat16().equal(model.weight)


@pytest.mark.parametrize(("words", "said"), [
    ({"format": "mxfp4"}, "mxfp4 is a format for gpt-oss, but .* is smollm2: use --format merged_16bit"),
    ({"format": "gguf", "experts": "mxfp4"}, "--experts is for a model with experts, and smollm2 has none"),
])  # fmt: skip
def test_what_smollm2_lacks_is_named(words: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = export.ExportConfig(tmp_path, **words)
    with pytest.raises(UsageError, match=said):
        export.check_export(config, str(smollm2.folder()), tmp_path, print)


def test_a_family_counts_only_where_a_format_asks(tmp_path: Path) -> None:
    """An adapter is written for a model that transformers does not know yet."""
    (tmp_path / "config.json").write_text('{"model_type": "made_up"}')
    said: list[str] = []
    assert not export.check_export(export.ExportConfig(tmp_path, "lora"), str(tmp_path), tmp_path / "out", said.append)
    assert "not verified" in said[0]
