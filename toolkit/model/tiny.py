"""The embedded model: a gpt-oss of about 1 M parameters that learns the task's format in a minute on two CPU cores.

It has the architecture, the special tokens and the chat format of gpt-oss-20b, so training and evaluation take the same
path with both.  `warm_start` makes it from nothing: it composes random programs (compose.py), trains a tokenizer on
them, trains the model to answer prompts with such programs, and caches the result.  The game's side (prompts, keys)
comes in as a `GameSpec`.  The default layout's model stands beside this file, because processors round differently, and
after the warm start their models have little in common.

Shapes: B answers, P tokens of the prompt, T tokens of the longest answer, V tokens of the vocabulary.
"""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import cache_folder
from toolkit.base.cached_models import made_once
from toolkit.model import compose

if TYPE_CHECKING:
    import torch
    from transformers import GptOssForCausalLM, PreTrainedTokenizerFast

VERSION = 11  # part of the cache folder's name: raise it with every change that changes the weights
SEED = 3407
POSITIONS = 1024  # tokens of a prompt with its answer, at most
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class GameSpec:
    """What the warm start needs to know about the game."""

    layout: str  # name of the keyboard layout
    layouts: Mapping[str, str]  # by name: the keys for up, down, left, right
    final_channel: str  # the special tokens that end a prompt, so that the answer starts at once
    prompt: Callable[..., str]  # (size, target, wording=) -> a user message
    wordings: int  # how many of them training uses

    @property
    def keys(self) -> str:
        """The keys for up, down, left, right."""
        return self.layouts[self.layout]

    @property
    def alphabet(self) -> str:
        """The keys of all layouts.  Each becomes a token of its own."""
        return "".join(self.layouts.values())


def random_prompt(rng: random.Random, spec: GameSpec, garbled: float) -> str:
    """A prompt of the game.  A share of them is `garbled`: words in random order, a third of them with their letters.

    Otherwise the model would know its sentences only, and write nonsense in answer to a new one.
    """
    prompt = spec.prompt(rng.randint(3, 8), 1 << rng.randint(7, 16), wording=rng.randrange(spec.wordings))
    wording, line, rules = prompt.partition("\n")
    if rng.random() < garbled:
        words = ["".join(rng.sample(word, len(word))) if rng.random() < 1 / 3 else word for word in wording.split(" ")]
        wording = " ".join(rng.sample(words, len(words)))
    return wording + line + rules


def conversation(rng: random.Random, spec: GameSpec) -> list[dict[str, str]]:
    """One training example: a random prompt of the game, answered with a composed strategy."""
    answer = f"```python\n{compose.strategy(rng, spec.keys)}```"
    return [{"role": "user", "content": random_prompt(rng, spec, 0.5)}, {"role": "assistant", "content": answer}]


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer

SPECIAL_TOKENS = ("<|return|>", "<|endoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>",
                  "<|constrain|>", "<|call|>")  # harmony's, the chat format of gpt-oss  # fmt: skip
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""


def train_tokenizer(
    prompts: Sequence[str], programs: Sequence[str], alphabet: str, vocab_size: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on prompts, with harmony's special tokens and a token for each part of programs.

    `programs` are marked (compose.py).  A program is 5 to 50 tokens long, and each of its choices is one token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    counts = Counter(part for source in programs for part in f"```python\n{source}```".split("¦") if len(part) > 1)
    parts = [part for part, count in counts.items() if count > len(programs) / 1000]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    every_byte = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(parts),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=every_byte,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*prompts, *alphabet * 1000], trainer)
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in sorted(parts)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|start|>",
        eos_token="<|return|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Model


@dataclass(frozen=True)
class WarmStartConfig:
    """The embedded model and its warm start.  The numbers were chosen by measurement: benchmarks/LOG.md."""

    layers: int = 3
    hidden: int = 128  # width of the residual stream and of each expert
    heads: int = 4
    kv_heads: int = 2
    experts: int = 4
    experts_per_token: int = 2
    vocab: int = 1024
    init: float = 0.06  # standard deviation of the initial weights; gpt-oss's 0.02 is too small for this width
    corpus: int = 3000  # programs for the tokenizer, and an eighth as many prompts
    steps: int = 320  # of the warm start, each with new conversations
    batch: int = 48  # answers per step, all to the same prompt
    lr: float = 3e-3
    temperature: float = 0.85  # the head's weights are divided by it: fewer sampled programs are broken


DEFAULT_CONFIG = WarmStartConfig()


def draw_corpus(rng: random.Random, spec: GameSpec, config: WarmStartConfig) -> tuple[list[str], list[str]]:
    """Prompts and marked programs for the tokenizer.  The model's own conversations are drawn after them."""
    prompts = [random_prompt(rng, spec, 1.0) for _ in range(config.corpus // 8)]
    return prompts, [compose.marked_strategy(rng, spec.keys) for _ in range(config.corpus)]


def untrained_model(config: WarmStartConfig, tokenizer: PreTrainedTokenizerFast) -> GptOssForCausalLM:
    """The model with random weights."""
    from transformers import GptOssConfig, GptOssForCausalLM

    shape = GptOssConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden // config.heads,
        num_local_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        max_position_embeddings=POSITIONS,
        initializer_range=config.init,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        router_aux_loss_coef=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GptOssForCausalLM(shape)


def answer_loss(model: GptOssForCausalLM, prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    """Summed cross-entropy of B answers to one prompt, whose keys and values are computed once for all of them."""
    import torch

    cache = model(input_ids=torch.tensor([prompt[:-1]]), use_cache=True).past_key_values  # (1, P - 1)
    cache.batch_repeat_interleave(len(answers))
    width = max(map(len, answers))
    ids = torch.tensor([prompt[-1:] + answer + [-100] * (width - len(answer)) for answer in answers])  # (B, 1 + T)
    logits = model(input_ids=ids[:, :-1].clamp(min=0), past_key_values=cache).logits  # (B, T, V)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def train_model(
    folder: Path, spec: GameSpec, seed: int, config: WarmStartConfig, progress: Callable[[int, int, float], None]
) -> None:
    """Train tokenizer and model from nothing and save both as a Hugging Face folder.

    The weights depend on the arguments alone: the number of steps is fixed and everything runs in one thread.
    """
    import torch

    torch.set_num_threads(1)  # the model is so small that a second thread costs more than it gains
    rng = random.Random(seed)
    tokenizer = train_tokenizer(*draw_corpus(rng, spec, config), spec.alphabet, config.vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = untrained_model(config, tokenizer).float()
    model.set_experts_implementation("eager")  # the default, grouped_mm, sums in no fixed order
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.lr, total_steps=config.steps, pct_start=0.1, cycle_momentum=False
    )
    for step in range(1, config.steps + 1):
        batch = [conversation(rng, spec) for _ in range(config.batch)]
        text = tokenizer.apply_chat_template(batch[0][:1], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text + spec.final_channel)["input_ids"]
        answers = sorted(tokenizer([answer["content"] + "<|return|>" for _, answer in batch])["input_ids"], key=len)
        tokens, mean = sum(map(len, answers)), 0.0
        for half in (answers[: config.batch // 2], answers[config.batch // 2 :]):  # short and long: less padding
            loss = answer_loss(model, prompt, half) / tokens
            loss.backward()
            mean += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress(step, config.steps, mean)
    model.lm_head.weight.data /= config.temperature
    model.generation_config.update(do_sample=True, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Cache


def folder_of(layout: str, seed: int = SEED) -> Path:
    """Where the embedded model with the default config is cached."""
    return cache_folder() / f"tiny-v{VERSION}-{layout}-{seed}"


def layout_of(folder: Path | None) -> str | None:
    """The layout of the embedded model that a folder of the cache is for; None for any other folder."""
    match = re.fullmatch(rf"tiny-v{VERSION}-(\w+)-{SEED}", folder.name) if folder else None
    return match[1] if match and folder == folder_of(match[1]) else None


def every_tenth(say: Callable[[str], None]) -> Callable[[int, int, float], None]:
    """A progress function for `warm_start` that says something after every tenth of the steps."""

    def progress(step: int, steps: int, loss: float) -> None:
        if step % max(1, steps // 10) == 0:
            say(f"warm start {step:4d}/{steps}  loss {loss:.3f}")

    return progress


def warm_start(
    spec: GameSpec,
    seed: int = SEED,
    config: WarmStartConfig = DEFAULT_CONFIG,
    folder: Path | None = None,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> Path:
    """Train the embedded model, or copy the one that is shipped, unless its folder is there already, undamaged.
    Returns the folder.

    `folder` None is the user's cache, which only keeps models with the default config.  `progress` gets (step, steps,
    loss) after each step.
    """
    if folder is None:
        if config != DEFAULT_CONFIG:
            raise ValueError("the cache only keeps models with the default config: name a folder")
        folder = folder_of(spec.layout, seed)
        shipped = Path(__file__).parent / folder.name
        if shipped.is_dir():
            return made_once(folder, lambda unfinished: shutil.copytree(shipped, unfinished, dirs_exist_ok=True))
    return made_once(folder, lambda unfinished: train_model(unfinished, spec, seed, config, progress))
