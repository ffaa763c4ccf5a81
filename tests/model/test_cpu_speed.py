"""What makes a step fast on a CPU changes nothing else: equal prompts are computed once, adapters are merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolkit.model import cpu_speed
from toolkit.model.cpu_speed import ROOM, generate_merged, share_prefixes, speed_up

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
}
SHORT, LONG = [5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]
PROMPTS = [SHORT] * 3 + [LONG] * 3


def small_model(kind: str) -> Any:
    """A random model.  gpt-oss has layers that see the last 4 tokens only."""
    from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.3)).eval()
    config = GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1, sliding_window=4, initializer_range=0.3)
    return GptOssForCausalLM(config).eval()


def left_padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (B, T)."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, (ids > 0).long()


def computed(model: Any) -> list[int]:
    """Grows by the tokens of every pass through the model's first layer."""
    tokens: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, out: tokens.append(ids[0].numel()))
    return tokens


def sample(model: Any, new: int) -> torch.Tensor:
    ids, mask = left_padded(PROMPTS)
    torch.manual_seed(1)
    made: torch.Tensor = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=True)
    return made


@pytest.mark.parametrize("kind", ["llama", "gpt-oss"])
def test_samples_are_the_same(kind: str) -> None:
    """Longer than the room that the cache begins with, and with prompts of two lengths in the batch."""
    plain, shared = small_model(kind), small_model(kind)
    share_prefixes(shared)
    assert sample(plain, ROOM + 5).equal(sample(shared, ROOM + 5))


def test_prefill_computes_each_prompt_once() -> None:
    model = small_model("llama")
    share_prefixes(model)
    tokens = computed(model)
    sample(model, 3)
    assert tokens == [2 * len(LONG), 6, 6]  # two prompts, padded to the same length; then a token for each row


def score(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of 5 tokens after each prompt, (B, 5), and a gradient that depends on all of them."""
    ids, mask = left_padded([[*prompt, 20 + i, 30 - i, 40, 41, 42] for i, prompt in enumerate(PROMPTS)])
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=6, use_cache=False).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(2, ids[:, -5:, None])[..., 0]
    logps.square().mean().backward()
    return logps.detach(), model.model.layers[0].self_attn.k_proj.weight.grad


@pytest.mark.parametrize("kind", ["llama", "gpt-oss"])
def test_scores_and_gradients_are_the_same(kind: str) -> None:
    """Prompts' keys and values depend on the weights too, so gradients have to flow through what is shared."""
    plain, shared = small_model(kind), small_model(kind)
    share_prefixes(shared)
    tokens = computed(shared)
    for one, other in zip(score(plain), score(shared), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert tokens == [2 * (len(LONG) - 1), 6 * 6]


def test_a_mask_that_differs_is_no_equal_row() -> None:
    """Two rows with the same ids, of which one hides its first token."""
    plain, shared = small_model("llama"), small_model("llama")
    share_prefixes(shared)
    ids, mask = torch.tensor([LONG, LONG]), torch.ones(2, len(LONG), dtype=torch.long)
    mask[1, 0] = 0
    with torch.no_grad():
        one, other = (model(input_ids=ids, attention_mask=mask, logits_to_keep=2).logits for model in (plain, shared))
    torch.testing.assert_close(one, other)
    assert not torch.allclose(other[0], other[1])


def test_trl_still_finds_the_arguments_of_the_forward_pass() -> None:
    """TRL asks whether a model can return the last logits alone."""
    import inspect

    model = small_model("llama")
    share_prefixes(model)
    assert "logits_to_keep" in inspect.signature(model.forward).parameters


def adapted_model() -> Any:
    """A small Llama with a LoRA adapter that changes what it samples."""
    from peft import LoraConfig, get_peft_model

    model = small_model("llama")
    generate_merged(model)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return adapted.eval()


def test_merged_adapters_sample_the_same_and_leave_the_weights_as_they_were() -> None:
    """Subtracting the adapter again would leave rounding errors, which grow with every step."""
    model = adapted_model()
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    merged = sample(model, 20)
    assert all(weights.equal(before[name]) for name, weights in model.state_dict().items())
    plain = model.get_base_model()
    del plain.generate  # the class's own
    assert sample(model, 20).equal(merged)
    with model.disable_adapter():
        assert not sample(model, 20).equal(merged)


def test_in_bfloat16_adapters_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight's last bit is larger than what an adapter changes in the first steps."""
    from peft import LoraConfig, get_peft_model

    monkeypatch.setattr(cpu_speed, "keep_memory", lambda: None)  # it would last
    for kind, merged in ((torch.bfloat16, False), (torch.float32, True)):
        model, calls = small_model("llama").to(kind), list[int]()
        speed_up(model)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).eval()
        adapted.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default").register_forward_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        sample(adapted, 3)
        assert (calls == []) is merged


def test_without_adapters_none_is_merged() -> None:
    """The untrained model is evaluated with its adapter switched off."""
    model = adapted_model()
    with model.disable_adapter():
        off = sample(model, 20)
    assert off.equal(sample(model.unload(), 20))


def test_one_matrix_is_multiplied_while_completions_are_generated() -> None:
    model, calls = adapted_model(), list[int]()
    model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default").register_forward_hook(
        lambda *_: calls.append(1)
    )
    sample(model, 3)
    assert calls == []


def adapted_experts() -> Any:
    """A small gpt-oss with an adapter to its fused experts and to a linear layer."""
    from peft import LoraConfig, get_peft_model

    model = small_model("gpt-oss")
    generate_merged(model, experts_alone=True)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
    return get_peft_model(model, config).eval()


def test_experts_are_added_up_once_for_a_completion_and_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT adds them up for each token, which was half of the time in which the embedded model generated."""
    import peft.tuners.lora.layer as lora

    model = adapted_experts()
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    ids, mask = left_padded(PROMPTS)
    whole, calls = lora.ParamWrapper._activate_lora, list[int]()

    def counted(*args: Any) -> Any:
        calls.append(1)
        return whole(*args)

    def scores() -> torch.Tensor:
        torch.manual_seed(1)
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=True,
                              output_scores=True, return_dict_in_generate=True)  # fmt: skip
        return torch.stack(made.scores)

    monkeypatch.setattr(lora.ParamWrapper, "_activate_lora", counted)
    merged = scores()
    assert not calls
    plain = model.get_base_model()
    del plain.generate  # the class's own
    assert scores().equal(merged)
    assert calls
    assert all(weights.equal(before[name]) for name, weights in model.state_dict().items())
