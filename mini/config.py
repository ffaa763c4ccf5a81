"""The commands' options: a dataclass each, from which the command line is made.  Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

EMBEDDED_WARM_STEPS, EMBEDDED_LR = 42, 3e-4  # of the embedded model
PRETRAINED_LR = 1e-5  # with --init


class UsageError(Exception):
    """What the user can mend: one line that says what."""


@dataclass(kw_only=True)
class Options:
    """What chess, eval and sample share: a model, how it samples, and the data beside it."""

    init: Path | None = None  # folder of GPT-2 weights (Hugging Face safetensors); without it the embedded model
    data: Path | None = None  # corpus of P and A lines, a line each; without it shipped P lines and self-play
    data_lines: int = 200_000  # lines of the corpus that are read at most
    a_lines: int = 10_000  # A lines made by self-play where no corpus is given
    warm_steps: int | None = None  # supervised steps before all else; by default 42, with --init none
    warm_batch: int = 32  # documents of a supervised step
    warm_p_share: float = 0.75  # of them are P: a new FEN has four times the tokens of an answer with moves
    warm_lr: float = 3e-3  # learning rate of the supervised steps
    temperature: float = 0.8  # of sampling; 0 takes the likeliest token (eval and sample only)
    top_k: int | None = None  # sample among the k likeliest; 0: all; by default 200 chess tokens, or 50 byte pairs
    top_p: float = 0.95  # of these, among the fewest that have this probability together; 1: all
    max_new_tokens: int | None = None  # of a completion; by default 73 chess tokens, or 144 byte pairs
    held_out: int = 128  # held-out prompts of each task
    reward_shaping: Literal["graduated", "linear", "binary"] = "graduated"  # how a raw score becomes a reward
    seed: int = 1  # of weights, training data and sampling; the held-out prompts have a seed of their own


@dataclass(kw_only=True)
class ChessConfig(Options):
    """Teach a model chess with GRPO; hold it against itself before, and against as much time of supervised training."""

    steps: int = 40  # of GRPO
    batch_size: int = 8  # prompts of a step, half of each task
    k_samples: int = 8  # completions of each prompt: a group
    lr: float | None = None  # by default 3e-4 for the embedded model, 1e-5 with --init
    lr_warmup: int = 5  # steps in which the learning rate rises to it
    updates: int = 2  # passes over a step's completions, each with an optimizer step
    micro_batch: int = 16  # completions of a forward and backward pass; those of a prompt stay together
    clip_range: float = 0.2  # how far a probability ratio counts; acts from the second update on
    kl_coef: float = 0.02  # weight of the KL divergence from the model at the start
    kl_type: Literal["forward", "reverse", "symmetric"] = "forward"  # forward: KL(policy || start)
    adaptive_kl: bool = False  # steer the weight so that the KL divergence comes to --kl-target
    kl_target: float = 0.01  # nats a token
    kl_horizon: float = 10_000.0  # completions over which the weight may change by a fifth
    kl_warmup: int = 0  # the weight rises linearly over so many steps or tokens
    kl_warmup_unit: Literal["steps", "tokens"] = "steps"
    baseline_type: Literal["group_mean", "ema", "adaptive", "rloo"] = "group_mean"  # taken off the rewards
    ema_alpha: float = 0.1  # how fast the ema baseline follows
    scale_by_std: bool = True  # group_mean: divide by the group's standard deviation
    use_gae: bool = False  # advantages token by token from a value head, which takes the baseline's place
    gae_lambda: float = 0.95
    value_loss_coef: float = 0.1  # weight of the value head's loss, with --use-gae
    entropy_coef: float = 0.0  # bonus for the policy's entropy, of all tokens, also of those that top-k leaves out
    max_grad_norm: float = 1.0  # longer gradients are cut to it
    control: bool = True  # afterwards, train the start supervised for the same time: what RL has to beat
    track: Literal["tensorboard", "wandb", "none"] = "tensorboard"  # who draws the curves
    log_dir: Path | None = None  # curves, checkpoints and models; by default outputs/mini-chess-TIME
    save_steps: int = 10  # steps between checkpoints
    resume: bool = False  # go on from the checkpoint in --log-dir
    json: bool = False  # the last line of stdout is one JSON object; everything else goes to stderr


@dataclass(kw_only=True)
class EvalConfig(Options):
    """Hold a model against the held-out prompts."""

    json: bool = False  # the last line of stdout is one JSON object; everything else goes to stderr


@dataclass(kw_only=True)
class SampleConfig(Options):
    """Print completions of one prompt, and how each is judged where the right answer can be worked out."""

    prompt: str = "A: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1+e2e4+e2e4+"  # begins with P: or A:
    k_samples: int = 4  # completions


@dataclass(kw_only=True)
class DataConfig:
    """Write a.txt and p.txt.  The same seed gives the same files."""

    out: Path = Path("outputs/mini-data")  # folder
    a_lines: int = 10_000  # lines of self-play
    p_lines: int = 1_000  # positions analysed by stockfish; without it, the shipped lines are written
    stockfish: Path | None = None  # the program; by default the one on PATH or in /usr/games
    depth: int = 8  # of the search, in half moves
    multipv: int = 5  # moves of each position: 1 to 5
    seed: int = 1  # of the games


@dataclass(kw_only=True)
class TextConfig:
    """Teach a small GPT a text in one of four ways; before and after, beside baselines that need no reward."""

    algo: Literal["supervised", "grpo", "ppo", "denoise"] = "supervised"  # likelihood, rewards, or filling gaps
    data: Path | None = None  # a UTF-8 text; without it the help topics of Python's standard library
    tokens: Literal["char", "gpt2"] = "char"  # characters, or GPT-2's byte pairs
    vocabulary: Path | None = None  # for gpt2: the folder of vocab.bpe and encoder.json
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384  # width
    block: int = 256  # positions that the model has
    attention: Literal["mha", "mla"] = "mha"  # keys and values of every head, or one latent of all
    latent: int = 64  # width of mla's latent: what is kept of a token and layer
    horizon: int | None = None  # tokens of a window, and of a rollout; by default 70, 32 with ppo or byte pairs
    batch_size: int = 32  # windows of a step (alias: --batch)
    iters: int = 200  # steps
    seconds: float | None = None  # processor time of training, after which it ends earlier
    lr: float | None = None  # by default 3e-4 supervised and denoise, 1e-5 grpo, 3e-5 ppo
    lr_decay: float = 0.0  # the last share of steps or seconds, in which the rate falls to 0; in all that is trained
    warm_steps: int = 0  # supervised steps before all else
    warm_lr: float = 3e-4  # of the warm start, and of the supervised baseline
    context: Literal["data", "model"] = "data"  # rollouts read the text's own tokens, or what they wrote themselves
    k_samples: int = 4  # rollouts of a window: a group
    reward_mode: Literal["plus1", "pm1"] = "plus1"  # a wrong token: 0, or -1 (alias of pm1: --neg-reward)
    partial_logprob: float = 0.0  # reward times the right token's log-probability; cancels out with --context data
    reference: Literal["bigram", "random"] = "bigram"  # of the KL; random: the start itself (alias: --ref-type)
    beta_kl: float = 1e-3  # weight of the KL divergence
    kl_warmup_tokens: int = 200_000  # sampled tokens over which the weight rises from 0
    clip_range: float = 0.2  # how far a probability ratio counts; acts with ppo
    critic_lr: float = 1e-4  # ppo: of the value head
    gamma: float = 1.0  # ppo: what later rewards are worth; with --context data no choice changes them, and 0 is better
    gae_lambda: float = 0.95  # ppo
    epochs: int = 4  # ppo: passes over a step's rollouts
    minibatches: int = 4  # ppo: optimizer steps of an epoch
    value_loss_coef: float = 0.5  # ppo
    mask_share: float = 0.15  # denoise: of the tokens, to be filled in
    unmask_steps: int = 5  # denoise: of sampling
    max_grad_norm: float = 1.0  # longer gradients are cut to it
    held_out: int = 256  # windows of the last tenth of the text, for the reports
    control: bool = True  # afterwards, train the start supervised for the same time
    track: Literal["tensorboard", "wandb", "none"] = "tensorboard"  # who draws the curves
    seed: int = 1
    log_dir: Path | None = None  # curves and checkpoints; by default outputs/mini-text-TIME
    save_steps: int = 100  # steps between checkpoints
    log_steps: int = 20  # steps between printed lines
    resume: bool = False  # go on from the checkpoint in --log-dir
    json: bool = False  # the last line of stdout is one JSON object; everything else goes to stderr


ALIASES = {"--batch": ["--batch-size"], "--ref-type": ["--reference"], "--neg-reward": ["--reward-mode", "pm1"]}  # text

Config = ChessConfig | EvalConfig | SampleConfig | DataConfig | TextConfig

RANGES: dict[str, tuple[float, float]] = {
    "data_lines": (1, 1e9), "a_lines": (1, 1e7), "p_lines": (1, 1e7), "warm_steps": (0, 1e7), "warm_batch": (1, 4096),
    "warm_p_share": (0, 1), "warm_lr": (1e-9, 1), "temperature": (0, 100), "top_k": (0, 1e6), "top_p": (1e-6, 1),
    "max_new_tokens": (1, 1024), "held_out": (1, 1e6), "seed": (0, 2**62), "steps": (0, 1e7), "batch_size": (1, 4096),
    "k_samples": (1, 4096), "lr": (0, 1), "lr_warmup": (0, 1e7), "updates": (1, 100), "micro_batch": (1, 4096),
    "clip_range": (1e-6, 1), "kl_coef": (0, 1e3), "kl_target": (1e-9, 1e3), "kl_horizon": (1, 1e12),
    "kl_warmup": (0, 1e12), "ema_alpha": (0, 1), "gae_lambda": (0, 1), "value_loss_coef": (0, 1e3),
    "entropy_coef": (0, 1e3), "max_grad_norm": (1e-9, 1e9), "save_steps": (1, 1e7), "depth": (1, 50),
    "multipv": (1, 5),
    "n_layer": (1, 100), "n_head": (1, 100), "n_embd": (1, 1e5), "block": (2, 1e5), "latent": (1, 1e5),
    "horizon": (1, 1e5), "iters": (0, 1e9), "seconds": (0, 1e9), "partial_logprob": (-1e3, 1e3), "beta_kl": (0, 1e3),
    "kl_warmup_tokens": (0, 1e12), "critic_lr": (0, 1), "gamma": (0, 1), "epochs": (1, 100), "minibatches": (1, 4096),
    "lr_decay": (0, 1), "mask_share": (1e-6, 1), "unmask_steps": (1, 1e5), "log_steps": (1, 1e7),
}  # fmt: skip


def check_config(config: Config) -> None:
    """Raise UsageError for the first option that makes no sense."""
    for field in fields(config):
        value = getattr(config, field.name)
        low, high = RANGES.get(field.name, (0, 0))
        if field.name in RANGES and value is not None and not low <= value <= high:
            flag = field.name.replace("_", "-")
            raise UsageError(f"--{flag} must lie between {low:g} and {high:g}, not {value}")
    if isinstance(config, ChessConfig):
        if config.temperature == 0:
            raise UsageError("--temperature must be above 0 in training: the likeliest answers alone have no spread")
        if config.k_samples == 1 and config.baseline_type != "ema" and not config.use_gae:
            raise UsageError(f"--k-samples 1 leaves {config.baseline_type} nothing to compare: use ema, or --use-gae")
    if isinstance(config, TextConfig):
        check_text(config)
    if isinstance(config, ChessConfig | TextConfig) and config.resume and config.log_dir is None:
        raise UsageError("--resume needs the --log-dir of the run that is to go on")


def check_text(config: TextConfig) -> None:
    """Raise UsageError for the first of text's options that does not fit another."""
    if config.n_embd % config.n_head:
        raise UsageError(f"--n-embd {config.n_embd} cannot be shared by --n-head {config.n_head}")
    if config.tokens == "gpt2" and config.vocabulary is None:
        raise UsageError("--tokens gpt2 needs --vocabulary: the folder of vocab.bpe and encoder.json")
    if config.algo == "grpo" and config.k_samples == 1:
        raise UsageError("--k-samples 1 leaves GRPO nothing to compare")
