"""What is on disk: a run's folder, checkpoints, curves, vocabularies, and models in Hugging Face's format.

Every file is written whole under another name, flushed, then renamed: a run that is killed leaves the last good state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from torch import Tensor

from mini.config import ChessConfig, PretrainConfig, TextConfig
from mini.grpo import Learner
from mini.model import GPT, Diverged, GptConfig
from toolkit import UsageError, spelled
from toolkit.base.files import write_whole

say = partial(print, flush=True)


def write(path: Path, content: str | bytes | dict[str, Any]) -> None:
    """Write a file atomically; a dict as torch does.  Raises UsageError if it cannot be written."""
    if isinstance(content, dict):
        torch.save(content, buffer := io.BytesIO())
        content = buffer.getvalue()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with a file into one line that names it: a UsageError."""
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8") from None
    except Exception as error:  # torch and safetensors raise nothing narrower
        said = " ".join(str(error).split())[:200]
        remedy = "begin again with another --log-dir" if path.suffix == ".pt" else "get the model's folder again"
        raise UsageError(f"{path} is damaged or does not fit: {remedy} ({type(error).__name__}: {said})") from None


def table(title: str, measures: Sequence[str], reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Reports, one a row."""
    rows = {title: list(measures)}
    for label, told in reports.items():
        rows[label] = ["" if told.get(name) is None else f"{told[name]:.3f}" for name in measures]
    return "\n".join(f"{label:24}" + "".join(f"{cell:>16}" for cell in cells) for label, cells in rows.items())


# ---------------------------------------------------------------------------------------------------------------------
# A run

# Options that may change when a run is resumed.
MAY_DIFFER = {"steps", "resume", "json", "control", "log_dir", "save_steps", "log_steps", "track",
              "patience", "eval_steps"}  # fmt: skip
Figures = Mapping[str, float]


class Run:
    """A run's folder.  A new one is made when everything that it needs has been read."""

    def __init__(self, config: ChessConfig | PretrainConfig | TextConfig) -> None:
        kind = type(config).__name__.removesuffix("Config").lower()
        self.config, self.began = config, time.perf_counter()
        name = f"mini-{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"  # of two runs begun in one second, too
        self.folder = config.log_dir or Path("outputs") / name
        self.saved = self.folder / "checkpoint.pt"
        device_of(config.device)  # an error before anything is written
        self.extra: dict[str, Any] = {}  # goes with each checkpoint
        values = dataclasses.asdict(config)
        self.settings = {"command": kind} | {n: str(v) if isinstance(v, Path) else v for n, v in values.items()}
        if not config.resume and self.saved.exists():
            raise UsageError(f"{self.folder} has a run in it already: add --resume, or choose another --log-dir")
        if config.resume and not self.saved.is_file():
            raise UsageError(f"{self.folder} has no checkpoint to resume from")
        self.checkpoint = self.load() if config.resume else None

    def begin(self, start: GPT) -> None:
        """Store the config and the start of a new run; give a resumed one's start the weights that it had."""
        path = self.folder / "start.pt"
        write(self.folder / "config.json", json.dumps(self.settings, indent=2))  # a resumed one may have more steps
        if self.checkpoint:
            with naming(path):
                start.load_state_dict(read_state(path))
        else:
            write(path, dict(start.state_dict()))

    def save(self, learner: Learner) -> None:
        """Replace the checkpoint.  Raises Diverged before it writes a weight that is not finite."""
        if not all(bool(weight.isfinite().all()) for weight in learner.model.parameters()):
            raise Diverged("weight")
        write(self.saved, {"config": self.settings, "extra": self.extra, **learner.state()})

    def load(self) -> dict[str, Any]:
        """The checkpoint to resume.  Raises UsageError if the run had other options."""
        with naming(self.saved):
            state = read_state(self.saved)
            had, self.extra, done = dict(state["config"]), dict(state["extra"]), int(state["step"])
        if (command := had.get("command")) != (ours := self.settings["command"]):
            raise UsageError(f"{self.folder} has a run of {command} in it, not of {ours}")
        if done > self.settings["steps"]:
            raise UsageError(f"the run in {self.folder} has {done} steps: --steps must not be fewer")
        for name in sorted(self.settings.keys() - MAY_DIFFER):
            if (now := self.settings[name]) != had.get(name):
                raise UsageError(f"the run in {self.folder} had {spelled(name)} {had.get(name)}, not {now}")
        return state

    def follow(
        self, learner: Learner, steps: Iterable[Figures], every: int = 1, shown: Sequence[str] = ()
    ) -> str | None:
        """Train to the end: curves, checkpoints, and every so many steps a line with the figures `shown`, or with all.

        Returns why there was nothing left to learn, if so.
        """
        if self.checkpoint:
            with naming(self.saved):
                learner.restore(self.checkpoint)
        kept, patience = learner.step, getattr(self.config, "patience", math.inf)
        reports = getattr(self.config, "eval_steps", every)  # with the held-out loss
        try:
            with curves(self.config.track, self.folder, self.settings, learner.step) as draw:
                for figures in steps:
                    draw(learner.step, figures)
                    if any(learner.step % n == 0 for n in (every, reports, self.config.steps)):
                        told = (f"  {name} {figures[name]:.4g}" for name in shown or figures if name in figures)
                        say(f"step {learner.step}/{self.config.steps}" + "".join(told))
                    if learner.flat >= patience:
                        break
                    if learner.step == 1 or learner.step % self.config.save_steps == 0:
                        self.save(learner)
                        kept = learner.step
            self.save(learner)
        except Diverged as what:
            rest = f"; {self.folder} has the checkpoint of step {kept}" if kept else ""
            raise UsageError(f"step {learner.step + 1}: a {what} is not finite: lower --lr{rest}") from None
        except KeyboardInterrupt:
            again = f"go on from step {kept} with the same options, --log-dir {self.folder} and --resume"
            say(f"stopped at step {learner.step}: " + (again if kept else f"no step is finished in {self.folder}"))
            raise
        if learner.flat < patience:
            return None
        return f"nothing to learn: in {learner.flat} steps all rewards of every group were equal"

    def result(self, learner: Learner) -> dict[str, Any]:
        """What --json says of every run."""
        spent = {"train_seconds": learner.seconds, "seconds": time.perf_counter() - self.began}
        return {"steps": learner.step, "tokens": learner.tokens, **spent}


@contextlib.contextmanager
def curves(
    kind: str, folder: Path, settings: Mapping[str, Any], first_step: int
) -> Iterator[Callable[[int, Figures], None]]:
    """Takes each step's figures to where --track sends them: TensorBoard, Weights & Biases, or nowhere."""
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats the steps after its last checkpoint, so their old values are purged.
        with SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None) as writer:
            writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

            def draw(step: int, figures: Figures) -> None:
                for name, value in figures.items():
                    writer.add_scalar(name, value, step)

            yield draw
    elif kind == "wandb":  # the run has the folder's name, so a resumed run continues it
        import wandb

        try:
            place = {"project": "mini", "id": folder.name, "name": folder.name, "dir": str(folder)}
            run = wandb.init(**place, config=dict(settings), resume="allow" if first_step else None)
        except wandb.Error as error:
            raise UsageError(f"--track wandb: {error}") from None
        try:
            yield lambda step, figures: run.log(dict(figures), step=step)
        finally:
            run.finish()
    else:
        yield lambda step, figures: None


def read_state(path: Path) -> dict[str, Any]:
    """A dict that torch.save wrote."""
    return dict(torch.load(path, map_location="cpu", weights_only=True))


def device_of(name: str) -> torch.device:
    """The device that --device names.  Raises UsageError if it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Models in Hugging Face's format: config.json, model.safetensors, and the files of the vocabulary

END = "<|endoftext|>"  # before and after each document


class CharTokens:
    """One token per character of a text, in code point order.  A text does not end, so no token ends it.

    Each vocabulary has a name, the id `end` of END, a size, the most tokens of an answer, and files for a folder.
    """

    name, longest, end = "chars", 64, -1

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self.size = len(self.alphabet)
        self.files = {"alphabet.txt": "".join(self.alphabet).encode()}
        self._ids = {character: i for i, character in enumerate(self.alphabet)}

    def encode(self, text: str) -> list[int]:
        """One id per character.  Raises ValueError for one that the text has not."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as unknown:
            raise ValueError(f"the text has no {unknown}") from None

    def decode(self, ids: list[int]) -> str:
        """The text of any ids."""
        return "".join(self.alphabet[i] for i in ids)


class BpeTokens:
    """GPT-2's byte pairs, from a folder with vocab.bpe and encoder.json, or merges.txt and vocab.json."""

    name, longest = "bpe", 144
    NAMES = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"))

    def __init__(self, folder: Path) -> None:
        from tokenizers import ByteLevelBPETokenizer

        pair = next((pair for pair in self.NAMES if all((folder / name).is_file() for name in pair)), None)
        if pair is None:
            either = ", or ".join(" and ".join(pair) for pair in self.NAMES)
            raise UsageError(f"{folder} has no GPT-2 vocabulary: {either}")
        try:
            self.files = {name: (folder / name).read_bytes() for name in pair}  # for the models that use it
            self._bpe = ByteLevelBPETokenizer(str(folder / pair[1]), str(folder / pair[0]))
        except Exception:  # the library raises nothing narrower
            raise UsageError(f"{folder}: {' and '.join(pair)} are no GPT-2 vocabulary, or not of one another") from None
        self._bpe.add_special_tokens([END])
        self.end, self.size = self._bpe.token_to_id(END), self._bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of any text; END in it is END's id."""
        ids: list[int] = self._bpe.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Invalid UTF-8 becomes U+FFFD, as do ids beyond the vocabulary, which a padded head can produce."""
        invalid = self._bpe.token_to_id("\N{LATIN SMALL LETTER Y WITH DIAERESIS}")  # how the byte 255 is spelled
        text: str = self._bpe.decode([i if i < self.size else invalid for i in ids], skip_special_tokens=False)
        return text


class LineTokens:
    """Characters of P and A lines, with a token for each empty square, each named square and a number's decimals.

    Each field of a position has its full width, and a history its ten moves, so a square, a clock's last digit and the
    last move always have the same place; `decode` takes the filling out.  Ruoss et al. (2024) spell positions like
    this.  Repeated blanks become single ones.
    """

    name, end, files = "lines", 0, dict[str, bytes]()
    longest = 98  # a position, its reward and flags, END
    FEN = re.compile(r"((?:[1-8pnbrqkPNBRQK]+/){7}[1-8pnbrqkPNBRQK]+) ([wb]) (-|K?Q?k?q?) (-|[a-h][36]) (\d+) (\d+)")
    HISTORY = re.compile(r"\+([^+]*)\+$")  # at the end of an A prompt
    TOKEN = re.compile(r"[AP]: |M:| [EB]:| ?[a-h][1-8]| [wb]|\.\d\d|.")
    VOCABULARY = (
        END, *"_~pnbrqkPNBRQK/ w-acdefgh0123456789+.", "A: ", "P: ", "M:", " E:", " B:", " w", " b",
        *(blank + file + rank for blank in ("", " ") for file in "abcdefgh" for rank in "12345678"),
        *(f".{number:02}" for number in range(100)),
    )  # fmt: skip
    size = len(VOCABULARY)
    IDS: ClassVar = {token: i for i, token in enumerate(VOCABULARY)}

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt or an answer, without the end token."""

        def widen(fen: re.Match[str]) -> str:
            board, side, castling, passing, *clocks = fen.groups()
            board = re.sub(r"\d", lambda digit: "_" * int(digit[0]), board)
            passing += "~" if passing == "-" else "~~"  # a blank and a dash are two tokens, a square with its blank one
            return f"{board} {side} {castling:~<4} {passing}" + "".join(f" {clock:~>3}" for clock in clocks)

        text = " ".join(text.split())
        if text.startswith("A:"):  # a move is two tokens
            text = self.HISTORY.sub(lambda moves: f"+{'~' * (20 - 2 * len(moves[1].split()))}{moves[1]}+", text)
        try:
            return [self.IDS[token] for token in self.TOKEN.findall(self.FEN.sub(widen, text))]
        except KeyError as unknown:
            raise ValueError(f"no chess token for {unknown.args[0]!r} in {text!r}") from None

    def decode(self, ids: list[int]) -> str:
        """The tokens one after the other, without filling, and with each row of empty squares as its number."""
        text = "".join(self.VOCABULARY[i] for i in ids).replace("~", "")
        return re.sub("_+", lambda gap: str(len(gap[0])), text).strip()


Tokens = CharTokens | BpeTokens | LineTokens

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored as (in, out), as in the TensorFlow original
SKIPPED = (".attn.bias", ".attn.masked_bias")  # causal masks in old files
ASSUMED = {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
           "add_cross_attention": False, "tie_word_embeddings": True}  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.  Raises UsageError unless it describes a GPT-2."""
    with naming(folder / "config.json"):
        config = dict(json.loads((folder / "config.json").read_bytes()))
        assumed = {**ASSUMED, "n_inner": config.get("n_inner") and 4 * config["n_embd"]}
        if config["model_type"] not in ("gpt2", "gpt2_mla"):
            raise UsageError(f"{folder} is a {config['model_type']} model; only GPT-2 can be read")
    for name, value in assumed.items():
        if config.get(name, value) != value:
            raise UsageError(f"{folder}: {name} is {config[name]}; only {value} can be read")
    return config


def load_model(folder: Path) -> GPT:
    """Load a GPT-2 from a folder."""
    config = read_config(folder)
    with naming(folder / "model.safetensors"):
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        shape = GptConfig(**{f.name: config[f.name] for f in dataclasses.fields(GptConfig) if f.name in config})
        if shape.n_embd % shape.n_head:
            raise ValueError(f"{shape.n_embd} columns cannot be shared by {shape.n_head} heads")
        model = GPT(shape)
        model.load_state_dict(from_published(tensors))
    return model


def load_tokens(folder: Path) -> Tokens:
    """The vocabulary of the model in a folder."""
    config = read_config(folder)
    name, size = config.get("mini_tokens", "bpe"), config.get("vocab_size", GptConfig.vocab_size)
    if name == "chars":
        with naming(folder / "alphabet.txt"):
            tokens: Tokens = CharTokens((folder / "alphabet.txt").read_bytes().decode())
    else:
        tokens = LineTokens() if name == "lines" else BpeTokens(folder)
    if tokens.size > size or (tokens.size < size and name != "bpe"):  # byte pairs may be padded
        raise UsageError(f"{folder}: a vocabulary of {tokens.size} tokens, but a model of {size}")
    return tokens


def from_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published names and layouts -> ours.  RookWorld-LM has the prefix `transformer.`, OpenAI's own file has not."""
    ours = {name.removeprefix("transformer."): part.float() for name, part in tensors.items()}
    kept = {name: part for name, part in ours.items() if not name.endswith(SKIPPED) and name != "lm_head.weight"}
    return {name: part.t().contiguous() if name.endswith(TRANSPOSED) else part for name, part in kept.items()}


def digest(folder: Path) -> str:
    """SHA-256 of a folder's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def save_model(model: GPT, tokens: Tokens, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a folder for load_model, load_tokens and transformers."""
    tensors = {}
    for name, part in model.state_dict().items():
        theirs = part.t() if name.endswith(TRANSPOSED) else part
        tensors[f"transformer.{name}"] = theirs.to("cpu", dtype).contiguous()
    kind, end = "gpt2_mla" if model.config.latent else "gpt2", None if tokens.end < 0 else tokens.end
    config = dataclasses.asdict(model.config) | ASSUMED | {"model_type": kind, "architectures": ["GPT2LMHeadModel"]}
    config |= {"bos_token_id": end, "eos_token_id": end, "mini_tokens": tokens.name}
    config["dtype"] = str(dtype).removeprefix("torch.")
    for name, content in tokens.files.items():
        write(folder / name, content)
    write(folder / "model.safetensors", safetensors.torch.save(tensors, {"format": "pt"}))
    write(folder / "config.json", json.dumps(config, indent=2))
