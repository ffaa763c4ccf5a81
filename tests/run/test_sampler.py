"""The sampler is the model: ten ways to sample from another one are each caught in one step."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.conftest import Run
from tests.helpers import HELD_OUT
from tests.preloaded import call, run
from toolkit.run import sampler, watch
from toolkit.run.reading import read_curves
from toolkit.run.sampler import Recorder, rounding, sampled_curves, unended
from toolkit.run.watcher import Watcher

FAULTS = ("no adapter", "an adapter one step old", "an expert's adapter at another expert", "another template",
          "temperature ignored", "top-k left on", "another end token", "weights of another seed",
          "a 16-bit base instead of 4 bits", "logits truncated")  # fmt: skip


@contextlib.contextmanager
def changed(weights: dict[str, Any], change: Callable[[Any], Any]) -> Iterator[None]:
    """Other weights for a while."""
    import torch

    kept = {name: tensor.detach().clone() for name, tensor in weights.items()}
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(change(kept[name]))
        try:
            yield
        finally:
            for name, tensor in weights.items():
                tensor.copy_(kept[name])


@contextlib.contextmanager
def asked(trainer: Any, **options: Any) -> Iterator[None]:
    """Other options of generation for a while."""
    kept = {name: getattr(trainer.generation_config, name) for name in options}
    for name, value in options.items():
        setattr(trainer.generation_config, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(trainer.generation_config, name, value)


@contextlib.contextmanager
def generating(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Other arguments of `generate` for a while."""
    own = model.generate
    model.generate = lambda *args, **kwargs: own(*args, **change(kwargs))
    try:
        yield
    finally:
        model.generate = own


def truncated(ids: Any, scores: Any) -> Any:
    """Logits without the last tenth of the vocabulary."""
    scores[:, -scores.shape[1] // 10 :] = -math.inf
    return scores


def four_bits(weights: Any) -> Any:
    """Weights as NF4 keeps them."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weights.contiguous(), quant_type="nf4")) if weights.ndim > 1 else weights


def fault(name: str, trainer: Any, wrong: Any) -> AbstractContextManager[Any]:
    """A sampler with one of the FAULTS.  `wrong` is a torch.Generator."""
    import torch

    model, tokenizer = trainer.model, trainer.processing_class
    adapter = {name: weights for name, weights in model.named_parameters() if ".lora_" in name}
    base = {name: weights for name, weights in model.named_parameters() if ".lora_" not in name}

    def noise(weights: Any, size: float) -> Any:
        return weights + size * torch.randn(weights.shape, generator=wrong).sign()

    def other_prompt(kwargs: dict[str, Any]) -> dict[str, Any]:
        told = tokenizer("<|start|>system<|message|>Reasoning: high<|end|>", return_tensors="pt")["input_ids"]
        ids = kwargs["input_ids"].clone()
        ids[:, : told.shape[1]] = told
        return kwargs | {"input_ids": ids}

    def swapped(weights: Any) -> Any:
        rows = weights.clone()
        rows[:32], rows[32:64] = weights[32:64], weights[:32]  # rank 32: the adapters of two experts
        return rows

    one = {name: weights for name, weights in adapter.items() if "experts" in name and "lora_A" in name}
    faults: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "no adapter": model.disable_adapter,
        "an adapter one step old": partial(changed, adapter, lambda weights: noise(weights, 1.4e-3)),  # as Adam moves
        "an expert's adapter at another expert": partial(changed, dict(list(one.items())[:1]), swapped),
        "another template": partial(generating, model, other_prompt),
        "temperature ignored": partial(asked, trainer, temperature=1.0),
        "top-k left on": partial(asked, trainer, top_k=3),
        "another end token": partial(asked, trainer, eos_token_id=tokenizer("\n")["input_ids"][0]),
        "weights of another seed": partial(changed, adapter, lambda weights: weights.flip(0)),
        "a 16-bit base instead of 4 bits": partial(changed, base, four_bits),
        "logits truncated": partial(generating, model, lambda kwargs: kwargs | {"logits_processor": [truncated]}),
    }
    return faults[name]()


def loaded(config: program.TrainConfig, random: Any) -> tuple[Any, Any]:
    """The embedded model with an adapter as if it had trained, and its tokenizer."""
    model, tokenizer = program.load_model("tiny", config, lambda _: None)
    model = program.add_adapters(model, config)
    for name, weights in model.named_parameters():
        if "lora_B" in name:
            weights.data.normal_(std=0.02, generator=random)
    return model, tokenizer


def check_the_faults(folder: str) -> None:
    import torch

    config = program.train_defaults("tiny")
    config.temperature, config.generations, config.batch_size = 0.8, 4, 4
    random = torch.Generator().manual_seed(1)
    model, tokenizer = loaded(config, random)
    ladder = program.Ladder([program.Stage(3, 64)])
    rollouts = program.Rollouts(Path(folder) / "rollouts.jsonl", config, ladder)
    rows = program.training_set(config, ladder)
    trainer = program.make_trainer(model, tokenizer, config, Path(folder), rollouts, rows)
    recorder, batch = Recorder(model), [rows[0]] * 4

    def said(sampling: AbstractContextManager[Any]) -> str:
        recorder.start()
        with sampling:
            sampled = trainer._generate_and_score_completions(batch)
        curves = sampled_curves(trainer, sampled, recorder, exact=False)
        print({name: float(f"{value:.3g}") for name, value in curves.items()})
        return Watcher(config)._another_model(curves)

    assert [said(contextlib.nullcontext()) for _ in range(5)] == [""] * 5
    assert [name for name in FAULTS if not said(fault(name, trainer, random))] == []
    assert said(contextlib.nullcontext()) == ""


@pytest.mark.slow
def test_samplers_of_another_model_are_caught_in_one_step(base: Path, tmp_path: Path) -> None:
    """The adapter has trained; the temperature is not 1.  Without a fault nothing is said."""
    call(check_the_faults, tmp_path)


def check_the_divergence() -> None:
    import torch

    model, tokenizer = loaded(program.train_defaults("tiny"), torch.Generator().manual_seed(1))
    prompt, answers = (tokenizer(text)["input_ids"] for text in ("a board", ["up", "down it"]))
    total, width = 0.0, max(map(len, answers))
    for answer in answers:
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            now = model(ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
            with model.disable_adapter():
                start = model(ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        total += torch.nn.functional.kl_div(start, now, log_target=True, reduction="sum").item()
    batch = {
        "prompt_ids": torch.tensor([[0, *prompt]] * 2), "prompt_mask": torch.tensor([[0] + [1] * len(prompt)] * 2),
        "completion_ids": torch.tensor([answer + [0] * (width - len(answer)) for answer in answers]),
        "completion_mask": torch.tensor([[i < len(answer) for i in range(width)] for answer in answers]).long(),
    }  # fmt: skip
    trainer = SimpleNamespace(model=model, processing_class=tokenizer, num_generations=2, temperature=1.0,
                              max_completion_length=width, eos_token_ids=[tokenizer.eos_token_id],
                              use_vllm=False)  # fmt: skip
    curves = sampled_curves(trainer, batch, Recorder(model), exact=True)
    assert total > 0
    assert curves["sampled/kl"] == pytest.approx(total / sum(map(len, answers)), rel=1e-4)


def test_every_end_token_of_the_model_ends_an_answer() -> None:
    """gpt-oss has three.  An answer may also be as long as the limit."""
    import torch

    trainer = SimpleNamespace(processing_class=SimpleNamespace(pad_token_id=0), eos_token_ids=[1, 2],
                              max_completion_length=4, use_vllm=False)  # fmt: skip
    ids = torch.tensor([[7, 1, 0, 0], [7, 2, 0, 0], [7, 7, 7, 7], [7, 3, 0, 0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    assert unended(trainer, {"completion_ids": ids, "completion_mask": mask}) == 0.25


@pytest.mark.parametrize(("ids", "use_vllm"), [
    ([[7, 0, 7]], False), ([[7, 7, 0]], False), ([[7, 0, 0], [0, 7, 7]], False), ([[7, 0, 0]], True),
])  # fmt: skip
def test_a_sampled_pad_token_ends_nothing(ids: list[list[int]], use_vllm: bool) -> None:
    """A model of random weights samples it like any other, and its run ended at the first step.  Another one, whose
    answers were all cut off, had one as its last token once in 29 steps.  vLLM pads nothing."""
    import torch

    trainer = SimpleNamespace(processing_class=SimpleNamespace(pad_token_id=0), eos_token_ids=[1],
                              max_completion_length=3, use_vllm=use_vllm)  # fmt: skip
    batch = {"completion_ids": torch.tensor(ids), "completion_mask": torch.ones(len(ids), 3, dtype=torch.long)}
    assert unended(trainer, batch) == 0.0
    trainer.max_completion_length = 4
    assert unended(trainer, batch) == 1.0


def test_the_divergence_is_that_of_two_distributions(base: Path) -> None:
    """Against torch's own over whole rows, with a nonzero adapter.  Padding changes nothing."""
    call(check_the_divergence)


def test_a_sound_run_is_far_from_the_limit(trained: Run) -> None:
    curves = read_curves(trained.folder)
    assert max(curves["sampler/gap"].values()) < min(curves["sampler/limit"].values()) / 10
    assert max(curves["sampler/unended"].values()) == 0


def test_a_gap_that_grows_is_caught_below_the_limit() -> None:
    watcher = Watcher(program.TrainConfig())
    usual = {"sampler/gap": 1e-3, "sampler/limit": 0.1}
    assert [watcher._another_model(usual) for _ in range(9)] == [""] * 9
    assert "another model" in watcher._another_model(usual | {"sampler/gap": 0.02})
    assert "another model" in watcher._another_model(usual | {"sampler/gap": math.nan})
    assert watcher._another_model(usual) == ""


def test_a_run_that_goes_on_in_another_precision_is_not_accused() -> None:
    """In float32 the gaps were 1e-6; on a processor with instructions for bfloat16 rounding alone makes them 0.03."""
    watcher = Watcher(program.TrainConfig())
    for gap, limit in [(1e-6, 1e-3)] * 5 + [(0.03, 0.4)] * 5:
        assert watcher._another_model({"sampler/gap": gap, "sampler/limit": limit}) == ""
    assert "another model" in watcher._another_model({"sampler/gap": 0.35, "sampler/limit": 0.4})


def check_untold_tokens() -> None:
    """A server gave no log-probability of the first token, and none at all in the second case."""
    import torch

    model, tokenizer = loaded(program.train_defaults("tiny"), torch.Generator().manual_seed(1))
    ids = tokenizer(["a board"] * 2, return_tensors="pt")["input_ids"]
    batch = {"prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_ids": ids,
             "completion_mask": torch.ones_like(ids)}  # fmt: skip
    trainer = SimpleNamespace(model=model, processing_class=tokenizer, num_generations=2, temperature=1.0,
                              max_completion_length=ids.shape[1], eos_token_ids=[], use_vllm=True)  # fmt: skip
    told = torch.zeros(ids.shape)
    told[0, 0] = torch.nan
    curves = sampled_curves(trainer, batch | {"sampling_per_token_logps": told}, Recorder(model), exact=False)
    assert math.isfinite(curves["sampler/gap"])
    assert curves["sampler/untold"] == pytest.approx(1 / told.numel())
    none = torch.full(ids.shape, torch.nan)
    curves = sampled_curves(trainer, batch | {"sampling_per_token_logps": none}, Recorder(model), exact=False)
    assert "sampler/gap" not in curves
    assert curves["sampler/untold"] == 1.0


def test_tokens_that_a_server_leaves_out_are_counted_and_not_compared(base: Path) -> None:
    """vLLM answers null for some (trl 6166), which is NaN here: one such token made the whole gap NaN."""
    call(check_untold_tokens)


@pytest.mark.parametrize(("stored", "dtype", "most"), [("uint8", "bfloat16", 0.4), ("uint8", "float32", 0.4),
                                                       ("bfloat16", "bfloat16", 0.4),
                                                       ("float32", "float32", 1e-3)])  # fmt: skip
def test_the_limit_is_that_of_the_weights(stored: str, dtype: str, most: float) -> None:
    """An H200's steps of 24 layers had gaps of 0.22 to 0.31 in MXFP4, and 0.24 to 0.29 in 16 bits: with a limit of 0.1
    the third one would have ended a paid run."""

    class Model:
        def __init__(self) -> None:
            self.dtype = f"torch.{dtype}"

        def parameters(self) -> list[object]:
            return [type("Parameter", (), {"dtype": f"torch.{stored}"})()]

    assert rounding(Model()) == most
    assert rounding(Model(), served=True) == max(most, 0.1)


def train_without_the_adapter_from_step_3(*arguments: str) -> None:
    """The trained model is compared in training mode: its forward may differ from that of generation."""
    begin, probabilities = watch.Progress.begin_step, sampler.log_probabilities

    def while_training(model: Any, *rest: Any) -> Any:
        assert model.training
        return probabilities(model, *rest)

    def begin_step(self: watch.Progress) -> None:
        begin(self)
        if self.steps == 2:
            model = self._trainer.model
            own = model.generate

            def generate(*args: Any, **kwargs: Any) -> Any:
                with model.disable_adapter():
                    return own(*args, **kwargs)

            model.generate = generate

    watch.Progress.begin_step = begin_step  # type: ignore[method-assign]
    sampler.log_probabilities = while_training  # type: ignore[assignment]
    sys.exit(program.main(arguments))


@pytest.mark.slow
def test_a_run_that_samples_from_another_model_ends_at_once(base: Path, tmp_path: Path) -> None:
    numbers = {"steps": 9, "generations": 8, "batch-size": 8, "accumulation": 1, "games": 2, "ladder": "4:64",
               "learning-rate": 0.01, "warmup-steps": 0, "best-of": 0}  # fmt: skip
    flags = [*HELD_OUT, *(text for name, value in numbers.items() for text in (f"--{name}", str(value)))]
    done = run("--model", "tiny", "--output-dir", tmp_path, "--run-name", "lost", "--json", *flags,
               script=f"{__name__}:{train_without_the_adapter_from_step_3.__name__}")  # fmt: skip
    assert done.returncode == 3, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["steps"], result["collapsed"]) == (3, True)
    assert "stopped at step 3: completions were sampled from another model" in done.stderr
    assert "look for a lost or old adapter" in result["ended"]
