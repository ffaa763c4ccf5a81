"""The embedded model: a gpt-oss of about 1 M parameters that learns the task's format in a minute on two CPU cores.

It has the architecture, the special tokens and the chat format of gpt-oss-20b, so training and evaluation take the same
path with both.  `warm_start` makes it from nothing: it composes random programs, trains a tokenizer on them, trains
the model to answer prompts with such programs, and caches the result.  The game's side (prompts, keys, the code of a
move) comes in as a `Task`.

Shapes: B answers, P tokens of the prompt, T tokens of the longest answer, V tokens of the vocabulary.
"""

from __future__ import annotations

import random
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import cache_folder
from toolkit.programs import moves_source

if TYPE_CHECKING:
    import torch
    from transformers import GptOssForCausalLM, PreTrainedTokenizerFast

VERSION = 3  # part of the cache folder's name: raise it with every change that changes the weights
SEED = 3407


@dataclass(frozen=True)
class Task:
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


# ---------------------------------------------------------------------------------------------------------------------
# Composed programs.  Their parts are independent, so most combinations never appear in the warm start.

SCORE_FUNCTION = """
    def score(k):
        board = after[k]
        flat = sum(board, [])
        return {total}
"""
FEATURES = ("flat.count(0)", "len(set(flat))", "max(flat)", "board[0][0]", "board[-1][-1]", "sum(board[0])",
            "sum(board[-1])", "sum(r[0] for r in board)", "sum(x * x for x in flat)",
            "sum(x * i for i, x in enumerate(flat))", "sum(r == sorted(r) for r in board)",
            "sum(x == y for r in board for x, y in zip(r, r[1:]))")  # fmt: skip
FEATURE_WEIGHTS = (1, 2, 3, 5, 8, 20, 50, 100)

# Ways to choose a key, and how often each is composed.  On 6x6 about one program in five reaches 2048: those that draw
# from 3 or 4 keys, and more than half of the searches.  Searches are common because training loses whatever is rare:
# benchmarks/LOG.md.
KEY_CHOICES = {"constant": 8, "cycle": 26, "draw2": 22, "draw3": 2, "draw4": 1, "first": 15, "search": 26}


def weighted_sum(rng: random.Random, count: int) -> str:
    """An expression: the weighted sum of `count` FEATURES of a `board` and its cells `flat`."""
    first, *rest = (f"{rng.choice(FEATURE_WEIGHTS)} * {feature}" for feature in rng.sample(FEATURES, count))
    return first + "".join(rng.choice((" + ", " + ", " - ")) + part for part in rest)


def some_keys(rng: random.Random, keys: str, count: int) -> str:
    """`count` different keys in random order."""
    return "".join(rng.sample(keys, count))


def key_expression(rng: random.Random, kind: str, keys: str) -> str:
    """An expression for the next key; `kind` is one of KEY_CHOICES."""
    if kind == "constant":
        return f'"{rng.choice(keys)}"'
    if kind == "cycle":
        count = rng.choice((2, 3, 4))
        return f'"{some_keys(rng, keys, count)}"[n % {count}]'
    if kind in ("draw2", "draw3", "draw4"):
        count = int(kind[-1])
        return f'"{some_keys(rng, keys, count)}"[random.randrange({count})]'
    if kind == "first":
        return rng.choice(("moves[0]", "moves[0]", "moves[-1]"))
    return "max(moves, key=score)"


def compose_strategy(rng: random.Random, task: Task) -> str:
    """The source of one random strategy.

    It chooses its key in one or two of the KEY_CHOICES; a test of the board decides between two.
    """
    kinds = rng.choices(list(KEY_CHOICES), list(KEY_CHOICES.values()), k=rng.choice((1, 1, 1, 2)))
    choices = [key_expression(rng, kind, task.keys) for kind in kinds]
    body = f"    return {choices[-1]}\n"
    if len(choices) == 2:
        test = f"{rng.choice(FEATURES)} > {rng.choice((1, 2, 4, 8, 16, 32, 64))}"
        body = f"    if {test}:\n        return {choices[0]}\n{body}"
    if "cycle" in kinds:
        body = f"    n = {weighted_sum(rng, rng.choice((1, 1, 2)))}\n{body}"
    if "flat" in body:
        body = f"    flat = sum(board, [])\n{body}"
    if {"first", "search"} & set(kinds):
        head = moves_source(task.keys, some_keys(rng, task.keys, 4))
        if "search" in kinds:
            tie_break = rng.choice(("", " + random.random()"))  # without it, max takes the first of equal moves
            head += SCORE_FUNCTION.format(total=weighted_sum(rng, rng.choice((1, 2, 3))) + tie_break)
        body = f"{head}\n{body}"
    imports = "import random\n\n" if "random." in body else ""
    return f"{imports}def strategy(board):\n{body}"


def conversation(rng: random.Random, task: Task) -> list[dict[str, str]]:
    """One training example: a random prompt of the task, answered with a composed strategy."""
    prompt = task.prompt(rng.randint(3, 8), 1 << rng.randint(9, 16), wording=rng.randrange(task.wordings))
    answer = f"```python\n{compose_strategy(rng, task)}```"
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


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
    conversations: list[list[dict[str, str]]], alphabet: str, vocab_size: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with harmony's special tokens.

    Merges cross words and lines, so a program is about 30 tokens long.  Statements, numbers and the keys in a string of
    keys are never merged with each other: each choice of a program is a token of its own.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    key = "[" + "".join(sorted(set(alphabet))) + "]"
    number = r"(?<=[ x(])\d+(?=[ x),.;:])"
    end = rf'\n {{0,4}}(?! )|{number}|{key}+"|$'  # a line break inside an indented block does not end a piece
    pieces = rf'\n {{0,4}}(?! )|{number}|{key}(?={key}*")|[\s\S]+?(?={end})'
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    all_bytes = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS),
                                  initial_alphabet=all_bytes, max_token_length=256, show_progress=False)  # fmt: skip
    programs = [answer["content"] for _, answer in conversations]
    prompts = [prompt["content"] for prompt, _ in conversations[::8]]  # few, so most merges are spent on programs
    tokenizer.train_from_iterator(programs + prompts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|return|>", pad_token="<|endoftext|>",
        padding_side="left", model_max_length=1024, chat_template=CHAT_TEMPLATE)  # fmt: skip


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
    corpus: int = 3000  # conversations for the tokenizer
    steps: int = 320  # of the warm start, each with new conversations
    batch: int = 48  # answers per step, all to the same prompt
    lr: float = 3e-3
    temperature: float = 0.9  # the head's weights are divided by it: a third as many sampled programs are broken


DEFAULT_CONFIG = WarmStartConfig()


def untrained_model(config: WarmStartConfig, tokenizer: PreTrainedTokenizerFast) -> GptOssForCausalLM:
    """The model with random weights."""
    from transformers import GptOssConfig, GptOssForCausalLM

    shape = GptOssConfig(
        vocab_size=config.vocab, hidden_size=config.hidden, intermediate_size=config.hidden,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.hidden // config.heads, num_local_experts=config.experts,
        num_experts_per_tok=config.experts_per_token, max_position_embeddings=1024, initializer_range=config.init,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, router_aux_loss_coef=0.0,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)  # fmt: skip
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
    folder: Path, task: Task, seed: int, config: WarmStartConfig, progress: Callable[[int, int, float], None]
) -> None:
    """Train tokenizer and model from nothing and save both as a Hugging Face folder.

    The weights depend on the arguments alone: the number of steps is fixed and everything runs in one thread.
    """
    import torch

    torch.set_num_threads(1)  # the model is so small that a second thread costs more than it gains
    rng = random.Random(seed)
    tokenizer = train_tokenizer([conversation(rng, task) for _ in range(config.corpus)], task.alphabet, config.vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = untrained_model(config, tokenizer).float()
    model.set_experts_implementation("eager")  # the default, grouped_mm, sums in no fixed order
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.lr, total_steps=config.steps, pct_start=0.1, cycle_momentum=False
    )
    for step in range(1, config.steps + 1):
        batch = [conversation(rng, task) for _ in range(config.batch)]
        text = tokenizer.apply_chat_template(batch[0][:1], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text + task.final_channel)["input_ids"]
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
    task: Task,
    seed: int = SEED,
    config: WarmStartConfig = DEFAULT_CONFIG,
    folder: Path | None = None,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> Path:
    """Train the embedded model unless its folder is there already.  Returns the folder.

    `folder` None is the user's cache, which only keeps models with the default config.  `progress` gets (step, steps,
    loss) after each step.  The folder is written next to its final place and then renamed, so it is never incomplete.
    """
    if folder is None:
        if config != DEFAULT_CONFIG:
            raise ValueError("the cache only keeps models with the default config: name a folder")
        folder = folder_of(task.layout, seed)
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".tiny-", dir=folder.parent))
    try:
        train_model(unfinished, task, seed, config, progress)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another run was faster, and its model is the same
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
