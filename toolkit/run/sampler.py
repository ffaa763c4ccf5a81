"""Is the model that samples the model that is trained?  At every step the log-probabilities of both are compared.

Public runs trained for hours on the completions of another model: the base without its adapter, old weights, another
template, damaged experts.  Rewards and losses do not show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROWS, TOKENS = 4, 64  # what is compared: a step's first completions, at most, and their first tokens
# Mean gaps, in nats, that rounding alone can explain: in float32, in float32 with a server in bfloat16, in fewer bits.
# An H200 had 0.05 to 0.07 with two layers of gpt-oss-20b's shape in MXFP4 and NF4, 0.22 to 0.31 with all 24.
EXACT, SERVED, ROUNDED = 1e-3, 0.1, 0.4


def add_last(model: Any, processor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Let `generate` call a logits processor after all that sampling adds itself: temperature, top-k and the like."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    processors = base._get_logits_processor  # the only place behind those

    def and_this(*args: Any, **kwargs: Any) -> Any:
        made = processors(*args, **kwargs)
        made.append(processor)
        return made

    base._get_logits_processor = and_this


class Recorder:
    """The log-probabilities with which a model's `generate` samples, after temperature and all other changes.

    It stands last among the model's logits processors, and notes the first rows of the first batch after `start`.
    """

    def __init__(self, model: Any) -> None:
        add_last(model, self)
        self.start(0)

    def start(self, rows: int = ROWS) -> None:
        """Forget what was noted, and note so many rows of the next batch."""
        self._rows, self._length = rows, 0
        self._last: torch.Tensor | None = None  # (rows, V), of the next token
        self._noted: list[torch.Tensor] = []  # (rows,) for each token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note the last token's log-probability.  input_ids (B, T), scores (B, V)."""
        if self._last is not None:
            if input_ids.shape[1] != self._length + 1 or len(self._noted) == TOKENS:
                self._rows = 0  # another batch begins, or there is enough
            else:
                self._noted.append(self._last.gather(1, input_ids[: self._rows, -1:])[:, 0])
        self._last = scores[: self._rows].float().log_softmax(-1) if self._rows else None
        self._length = input_ids.shape[1]
        return scores

    @property
    def noted(self) -> torch.Tensor | None:
        """Log-probabilities (rows, T); None if nothing was sampled here.  The last token of all is missing."""
        import torch

        return torch.stack(self._noted, 1) if self._noted else None


def rounding(model: Any, served: bool = False) -> float:
    """The largest mean gap that rounding explains for a model's weights, or for those of a server in bfloat16."""
    packed = any(str(weights.dtype) == "torch.uint8" for weights in model.parameters())
    if packed or str(model.dtype) != "torch.float32":
        return ROUNDED
    return SERVED if served else EXACT


def unended(trainer: Any, batch: dict[str, Any]) -> float:
    """The share of a batch's completions that ended before the length limit, and not with one of the end tokens.

    Where transformers samples, padding follows an unknown end token, and TRL's mask counts it as sampled.  But a model
    samples pad tokens too: where one stands inside a completion, or alone at an end, none of them counts as padding.
    """
    import torch

    ids, mask = batch["completion_ids"], batch["completion_mask"].bool()  # (B, T)
    places = torch.arange(1, ids.shape[1] + 1, device=ids.device)  # (T,)
    pads = mask & (ids == trainer.processing_class.pad_token_id)  # (B, T)
    whole, length = mask.sum(1), (places * (mask & ~pads)).amax(1)  # (B,) each, with and without pad tokens at the end
    sampled = (pads & (places < length[:, None])).any() | (whole - length == 1)  # (B,)
    length = whole.where(sampled | trainer.use_vllm, length)
    ended = (torch.isin(ids, torch.tensor(trainer.eos_token_ids, device=ids.device)) & mask).any(1)  # (B,)
    return float((~ended & (length < trainer.max_completion_length)).float().mean())


def log_probabilities(model: Any, batch: dict[str, Any], rows: int, temperature: float) -> torch.Tensor:
    """Log-probabilities (rows, T, V) of a batch's first completions, all to the same prompt, by the trained model."""
    import torch

    prompt = batch["prompt_ids"][0][batch["prompt_mask"][0].bool()]
    ids = torch.cat((prompt.expand(rows, -1), batch["completion_ids"][:rows, :TOKENS]), 1)  # (rows, P + T)
    with torch.no_grad():
        kept = ids.shape[1] - len(prompt) + 1
        logits = model(ids, logits_to_keep=kept).logits[:, :-1]  # what stands behind a completion does not change it
    torch.compiler.set_stance("default")  # Unsloth's forward without labels may have changed it
    log_probs: torch.Tensor = (logits.float() / temperature).log_softmax(-1)
    return log_probs


def sampled_curves(trainer: Any, batch: dict[str, Any], recorder: Recorder, exact: bool) -> dict[str, float]:
    """What a step's completions say of the policy.

    `sampler/gap` and `sampler/max`: mean and largest difference, in nats, between the log-probabilities with which
    tokens were sampled and those of the model that is trained; `sampler/limit`: the mean that rounding can explain;
    `sampler/untold`: the share of tokens for which the sampler gave none (TRL has NaN there); `sampler/unended`: the
    share of completions that ended without the end token.  With `exact`, over the whole
    vocabulary and in nats a token: `sampled/kl`, the KL divergence from the model that the run began with, and
    `sampled/entropy`.  TRL and Unsloth log these only with some losses, and on a GPU a `kl` of 0.
    """
    model, rows = trainer.model, min(ROWS, trainer.num_generations)  # one group has one prompt
    mask = batch["completion_mask"][:rows, :TOKENS].bool()  # (rows, T)
    sampled = recorder.noted if (given := batch.get("sampling_per_token_logps")) is None else given[:rows, :TOKENS]
    now = log_probabilities(model, batch, rows, trainer.temperature)  # (rows, T, V)
    curves = {"sampler/unended": unended(trainer, batch)}
    if sampled is not None:
        length = min(sampled.shape[1], mask.shape[1])
        chosen = now.gather(2, batch["completion_ids"][:rows, :length, None])[..., 0]  # (rows, length)
        told = ~sampled[:rows, :length].isnan() & mask[:, :length]  # a server may leave tokens out
        curves["sampler/untold"] = 1.0 - (told.sum() / mask[:, :length].sum()).item()
        if told.any():
            gaps = (chosen - sampled[:rows, :length]).abs()[told]
            curves |= {"sampler/gap": gaps.mean().item(), "sampler/max": gaps.max().item()}
            curves["sampler/limit"] = rounding(model, served=trainer.use_vllm)
    if exact:
        with model.disable_adapter():
            start = log_probabilities(model, batch, rows, trainer.temperature)
        kl, entropy = (now.exp() * (now - start)).sum(-1)[mask], -(now.exp() * now).sum(-1)[mask]
        curves |= {"sampled/kl": kl.mean().item(), "sampled/entropy": entropy.mean().item()}
    return curves
