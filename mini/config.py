"""The options: one dataclass per command; the command line is generated from them.  No heavy imports here."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from toolkit import UsageError

BaselineType = Literal["group_mean", "ema", "adaptive", "rloo", "best"]
Shaping = Literal["capped", "graduated", "linear", "binary"]
KlType = Literal["exact", "squared", "forward", "reverse", "symmetric"]
LR = {"lines": 2e-4, "bpe": 1e-5}  # by the tokens: small models, and large ones like RookWorld-LM


def check_heads(n_embd: int, n_head: int) -> None:
    """Raise UsageError for heads of a width that is no whole number."""
    if n_embd % n_head:
        raise UsageError(f"--n-embd {n_embd} cannot be shared by --n-head {n_head}")


@dataclass(kw_only=True)
class DeviceOptions:
    """What every command with a model has."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one


@dataclass(kw_only=True)
class SeedOptions:
    """Random numbers.  Held-out prompts and the answers to them have their own."""

    seed: Annotated[int, (0, 2**62)] = 1  # of weights, training data and sampling


@dataclass(kw_only=True)
class RunOptions:
    """A run's folder, its end, and what is printed."""

    log_dir: Path | None = None  # folder of curves, checkpoints and models; default: outputs/mini-COMMAND-TIME-PROCESS
    resume: bool = False  # continue from the checkpoint in --log-dir
    save_steps: Annotated[int, (1, 1e7)] = 50  # steps between checkpoints; one comes after the first step
    track: Literal["tensorboard", "wandb", "none"] = "tensorboard"  # where the curves go
    json: bool = False  # the last line of stdout is one JSON object; everything else goes to stderr

    def check(self) -> None:
        """Raise UsageError where the run's folder or its tracker is missing."""
        if self.track == "wandb" and not getattr(importlib.util.find_spec("wandb"), "origin", None):
            raise UsageError("--track wandb: wandb is not installed (./setup.sh --with cloud)")
        if self.resume and self.log_dir is None:
            raise UsageError("--resume needs the --log-dir of the run that is to go on")


@dataclass(kw_only=True)
class RewardOptions(RunOptions):
    """A run that learns from rewards."""

    control: bool = True  # afterwards, train the start in the ways that RL has to beat
    patience: Annotated[int, (1, 1e7)] = 20  # end, with exit code 3, after so many steps without any advantage (GRPO)


@dataclass(kw_only=True)
class SamplingOptions(DeviceOptions):
    """The chess model and sampling."""

    init: Path | None = None  # folder with GPT-2 weights (Hugging Face safetensors), or a run; default: shipped weights
    temperature: Annotated[float, (0, 100)] = 0.8  # of sampling; 0: the likeliest token (not to train with GRPO)
    top_k: Annotated[int, (0, 1e6)] = 50  # sample among the k likeliest; 0: all
    top_p: Annotated[float, (1e-6, 1)] = 0.95  # of these, among the fewest with this total probability; 1: all
    max_new_tokens: Annotated[int | None, (1, 1024)] = None  # default: 98 chess tokens or 144 byte pairs


@dataclass(kw_only=True)
class JudgeOptions(SamplingOptions):
    """The chess model, sampling and the judge."""

    grammar: Literal["strict", "published"] = "strict"  # strict: a FEN has to parse, and legal moves count
    reward_shaping: Shaping | None = None  # from raw score to reward; default: capped, or graduated if published


@dataclass(kw_only=True)
class ChessOptions(JudgeOptions):
    """The chess model, its data, sampling and the judge."""

    data: Path | None = None  # corpus with one P or A line per line; default: shipped P lines and self-play
    held_out: Annotated[int, (1, 1e6)] = 128  # held-out prompts per task


@dataclass(kw_only=True)
class GrpoOptions(SeedOptions):
    """The prompts and the algorithm."""

    a_lines: Annotated[int, (1, 1e7)] = 10_000  # A lines from self-play if no corpus is given
    p_share: Annotated[float, (0, 1)] = 0.6  # share of P among the prompts
    steps: Annotated[int, (0, 1e7)] = 120  # GRPO steps
    batch_size: Annotated[int, (1, 4096)] = 16  # prompts per step
    k_samples: Annotated[int, (1, 4096)] = 8  # completions per prompt: a group
    lr: Annotated[float | None, (0, 1)] = None  # default: 2e-4 with chess tokens, 1e-5 with byte pairs
    lr_warmup: Annotated[int, (0, 1e7)] = 5  # steps of learning rate warm-up
    lr_decay: Annotated[float, (0, 1)] = 0.3  # final share of the steps in which the learning rate falls to 0
    updates: Annotated[int, (1, 100)] = 1  # passes over a step's completions, each with one optimizer step
    micro_batch: Annotated[int, (1, 4096)] = 16  # completions per forward and backward pass; a group stays together
    clip_range: Annotated[float, (1e-6, 1)] = 0.2  # of the probability ratio; has an effect from the second update on
    kl_coef: Annotated[float, (0, 1e3)] = 0.0  # weight of the KL divergence from the start; 0: it is not computed
    kl_type: KlType = "exact"  # exact: KL(policy || start) over the vocabulary; the others estimate from the samples
    adaptive_kl: bool = False  # adapt the weight so that the KL divergence approaches --kl-target
    kl_target: Annotated[float, (1e-9, 1e3)] = 0.01  # KL divergence in nats per token, for --adaptive-kl
    kl_horizon: Annotated[float, (1, 1e12)] = 10_000.0  # completions after which the weight may have changed by a fifth
    kl_warmup: Annotated[int, (0, 1e12)] = 0  # steps over which the weight rises linearly from 0
    baseline_type: BaselineType = "group_mean"  # subtracted from the rewards
    scale_by_std: bool = True  # group_mean: divide by the group's standard deviation
    use_gae: bool = False  # token-level advantages from a value head, instead of the baseline
    gae_lambda: Annotated[float, (0, 1)] = 0.95
    value_loss_coef: Annotated[float, (0, 1e3)] = 0.1  # weight of the value head's loss, for --use-gae
    entropy_coef: Annotated[float, (0, 1e3)] = 0.0  # bonus for the entropy over all tokens, also those outside top-k
    max_grad_norm: Annotated[float, (1e-9, 1e9)] = 1.0  # gradient clipping
    control_lr: Annotated[float, (1e-9, 1)] = 5e-4  # learning rate of the supervised control


@dataclass(kw_only=True)
class ChessConfig(GrpoOptions, ChessOptions, RewardOptions):
    """Train a model on chess with GRPO; compare it with its start, with controls and with likelihood for as long."""

    def check(self) -> None:
        """Raise UsageError where two options contradict each other."""
        if self.temperature == 0:
            raise UsageError("--temperature must be above 0 in training: the likeliest answers alone have no spread")
        if self.adaptive_kl and not self.kl_coef:
            raise UsageError("--adaptive-kl has no weight to adapt: add --kl-coef 0.02")
        if self.adaptive_kl and self.kl_horizon <= (completions := self.batch_size * self.k_samples) / 5:
            raise UsageError(f"--kl-horizon must be above a fifth of a step's {completions} completions")
        if self.k_samples == 1 and self.baseline_type != "ema" and not self.use_gae:
            raise UsageError(f"--k-samples 1 leaves {self.baseline_type} nothing to compare: use ema, or --use-gae")


@dataclass(kw_only=True)
class PretrainOptions(ChessOptions, SeedOptions):
    """The corpus, the model and its training."""

    data: Path = Path("outputs/mini-data")  # a corpus, or a folder of them, as `mini data` writes it
    held_out: Annotated[int, (1, 1e6)] = 256  # held-out prompts per task, of the corpus and of the chess job each
    p_share: Annotated[float, (0, 1)] = 0.6  # share of P among the documents
    init: Path | None = None  # go on from this folder's model or run, instead of from GPT-2's own start values
    n_layer: Annotated[int, (1, 100)] = 8
    n_head: Annotated[int, (1, 100)] = 5
    n_embd: Annotated[int, (1, 1e5)] = 160  # width
    steps: Annotated[int, (0, 1e9)] = 2_800  # training steps
    batch_size: Annotated[int, (1, 4096)] = 512  # documents per step
    lr: Annotated[float, (0, 1)] = 2e-3  # learning rate
    lr_decay: Annotated[float, (0, 1)] = 0.5  # final share of the steps in which the rate falls to 0
    eval_steps: Annotated[int, (1, 1e7)] = 1_000  # steps between held-out losses


@dataclass(kw_only=True)
class PretrainConfig(PretrainOptions, RunOptions):
    """Train a new GPT-2 on chess lines by likelihood, with GPT-2's start values.  Its model/ is for --init."""

    def check(self) -> None:
        """Raise UsageError where two options contradict each other."""
        check_heads(self.n_embd, self.n_head)
        shape, usual = ((kind.n_layer, kind.n_head, kind.n_embd) for kind in (self, PretrainConfig))
        if self.init and shape != usual:
            raise UsageError("--n-layer, --n-head and --n-embd are of a new model: --init has its own")


@dataclass(kw_only=True)
class EvalConfig(ChessOptions):
    """Evaluate a model on the held-out prompts."""

    json: bool = False  # the last line of stdout is one JSON object; everything else goes to stderr


@dataclass(kw_only=True)
class SampleConfig(JudgeOptions, SeedOptions):
    """Print completions of one prompt, with verdicts where the right answer is known."""

    prompt: str | None = None  # P: or A: and a position, or a text to go on with; default: 1. e4, or one character
    k_samples: Annotated[int, (1, 4096)] = 4  # number of completions


@dataclass(kw_only=True)
class PlayConfig(SamplingOptions, SeedOptions):
    """Play games against random moves, and against stockfish at its lowest level if it is installed."""

    games: Annotated[int, (2, 1e5)] = 50  # against each opponent, with each colour in turn
    out: Path = Path("outputs/mini-games.pgn")  # the games
    temperature: Annotated[float, (0, 100)] = 0.0  # of sampling; 0: the likeliest answer
    stockfish: Path | None = None  # the program; default: the one on PATH or in /usr/games
    json: bool = False  # the last line of stdout is one JSON object; everything else goes to stderr


@dataclass(kw_only=True)
class DataConfig:
    """Write a.txt, p.txt and, with stockfish, games.txt.  The same seed gives the same files."""

    out: Path = Path("outputs/mini-data")  # folder to write to
    a_lines: Annotated[int, (1, 1e7)] = 10_000  # lines from self-play
    p_lines: Annotated[int, (1, 1e7)] = 1_000  # its positions to analyse; without stockfish, shipped lines to write
    p_moves: Annotated[int, (1, 150)] = 20  # these are from its first moves: later ones are mostly the king's
    game_lines: Annotated[int, (0, 1e8)] = 0  # P and A lines from games with one of stockfish's moves at each turn
    stockfish: Path | None = None  # the program; default: the one on PATH or in /usr/games
    depth: Annotated[int, (1, 50)] = 8  # search depth in half moves
    multipv: Annotated[int, (1, 5)] = 5  # moves per position
    seed: Annotated[int, (0, 2**62)] = 1  # of the games


@dataclass(kw_only=True)
class TextOptions(DeviceOptions, SeedOptions):
    """The text, the model and the four algorithms."""

    algo: Literal["supervised", "grpo", "ppo", "denoise"] = "supervised"  # what the model learns from
    data: Path | None = None  # a UTF-8 text; default: the help topics of Python's standard library
    vocabulary: Path | None = None  # folder of GPT-2's byte pairs; default: characters
    n_layer: Annotated[int, (1, 100)] = 4
    n_head: Annotated[int, (1, 100)] = 4
    n_embd: Annotated[int, (1, 1e5)] = 128  # width
    n_positions: Annotated[int, (2, 1e5)] = 128  # context length
    attention: Literal["mha", "mla"] = "mha"  # multi-head attention, or multi-head latent attention
    latent: Annotated[int, (1, 1e5)] = 64  # width of mla's latents: numbers cached per token and layer
    horizon: Annotated[int, (1, 1e5)] = 64  # tokens per window and rollout
    batch_size: Annotated[int, (1, 4096)] = 12  # windows per step
    steps: Annotated[int, (0, 1e9)] = 2000  # training steps
    lr: Annotated[float, (0, 1)] = 2e-3  # learning rate
    lr_decay: Annotated[float, (0, 1)] = 0.5  # final share of each training in which the rate falls to 0
    warm_steps: Annotated[int, (0, 1e7)] = 0  # supervised steps before training
    warm_lr: Annotated[float, (1e-9, 1)] = 2e-3  # learning rate of the warm start and of the supervised baseline
    teacher_forcing: bool = True  # rollouts read the text's own tokens, or what they sampled themselves
    k_samples: Annotated[int, (1, 4096)] = 4  # rollouts per window: a group
    reward_mode: Literal["plus1", "pm1"] = "plus1"  # a wrong token gets 0, or -1
    partial_logprob: Annotated[float, (-1e3, 1e3)] = 0.0  # weight of the right token's log-probability in the reward
    reference: Literal["bigram", "start"] = "bigram"  # of the KL divergence: counted bigrams, or the model's own start
    kl_coef: Annotated[float, (0, 1e3)] = 1e-3  # weight of the KL divergence
    kl_warmup_tokens: Annotated[int, (0, 1e12)] = 200_000  # sampled tokens over which this weight rises from 0
    clip_range: Annotated[float, (1e-6, 1)] = 0.2  # clipping of the probability ratio; has an effect with ppo
    critic_lr: Annotated[float, (0, 1)] = 1e-4  # ppo: learning rate of the value head
    gamma: Annotated[float, (0, 1)] = 1.0  # ppo: discount of later rewards, which teacher forcing makes mere noise
    gae_lambda: Annotated[float, (0, 1)] = 0.95  # ppo: lambda of the advantage estimation
    epochs: Annotated[int, (1, 100)] = 4  # ppo: passes over a step's rollouts
    minibatches: Annotated[int, (1, 4096)] = 4  # ppo: optimizer steps per pass
    value_loss_coef: Annotated[float, (0, 1e3)] = 0.5  # ppo: weight of the value head's loss
    mask_share: Annotated[float, (1e-6, 1)] = 0.15  # denoise: share of tokens that are masked
    max_grad_norm: Annotated[float, (1e-9, 1e9)] = 1.0  # gradient clipping
    held_out: Annotated[int, (1, 1e6)] = 256  # windows from the last tenth of the text, for the reports
    log_steps: Annotated[int, (1, 1e7)] = 100  # steps between printed lines


@dataclass(kw_only=True)
class TextConfig(TextOptions, RewardOptions):
    """Train a small GPT on a text in one of four ways; report before and after, with baselines that need no reward."""

    def check(self) -> None:
        """Raise UsageError where two options contradict each other."""
        if self.horizon >= self.n_positions:
            raise UsageError(f"--n-positions {self.n_positions} has no room for windows of --horizon {self.horizon}")
        check_heads(self.n_embd, self.n_head)
        if self.algo == "grpo" and self.k_samples == 1:
            raise UsageError("--k-samples 1 leaves GRPO nothing to compare")


AFTER_LIKELIHOOD: dict[str, Any] = {"warm_steps": 900, "reference": "start", "kl_coef": 0.1}
PPO: dict[str, Any] = {"gamma": 0.0, "critic_lr": 1e-3, "epochs": 2, "minibatches": 2, "value_loss_coef": 0.1}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "supervised": {},
    "grpo": {**AFTER_LIKELIHOOD, "steps": 700, "lr": 1e-3},
    "ppo": {**AFTER_LIKELIHOOD, **PPO, "steps": 300, "lr": 5e-4},
    "denoise": {"warm_steps": 900, "steps": 1500},
}


def text_defaults(algo: str) -> TextConfig:
    """The defaults of an algorithm."""
    return TextConfig(**({"algo": algo, **ALGORITHMS[algo]} if algo in ALGORITHMS else {}))


Config = ChessConfig | PretrainConfig | EvalConfig | PlayConfig | SampleConfig | DataConfig | TextConfig
