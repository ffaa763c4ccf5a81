"""The options: one dataclass per command; the command line is generated from them.  No heavy imports here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from toolkit import UsageError

EMBEDDED_WARM_STEPS, EMBEDDED_LR = 42, 3e-4  # of the embedded model
PRETRAINED_LR = 1e-5  # with --init


@dataclass(kw_only=True)
class Options:
    """What chess, eval and sample share: a model, its sampling and its data."""

    init: Path | None = None  # folder with GPT-2 weights (Hugging Face safetensors); default: the embedded model
    data: Path | None = None  # corpus with one P or A line per line; default: shipped P lines and self-play
    data_lines: int = 200_000  # read at most this many lines of the corpus
    a_lines: int = 10_000  # A lines from self-play if no corpus is given
    warm_steps: int | None = None  # supervised steps before GRPO; default: 42, none with --init
    warm_batch: int = 32  # documents per supervised step
    warm_p_share: float = 0.75  # share of P documents: an A answer (a FEN) has four times the tokens of a P answer
    warm_lr: float = 3e-3  # learning rate of the supervised steps
    temperature: float = 0.8  # sampling temperature; 0: the likeliest token (eval and sample only)
    top_k: int | None = None  # sample among the k likeliest; 0: all; default: 200 chess tokens or 50 byte pairs
    top_p: float = 0.95  # of these, sample among the fewest with this total probability; 1: all
    max_new_tokens: int | None = None  # per completion; default: 73 chess tokens or 144 byte pairs
    held_out: int = 128  # held-out prompts per task
    reward_shaping: Literal["graduated", "linear", "binary"] = "graduated"  # how a raw score becomes a reward
    seed: int = 1  # for weights, training data and sampling; the held-out prompts have their own seed


@dataclass(kw_only=True)
class ChessConfig(Options):
    """Train a model on chess with GRPO; compare it with the start model and with supervised training of equal time."""

    steps: int = 40  # GRPO steps
    batch_size: int = 8  # prompts per step, half of them of each task
    k_samples: int = 8  # completions per prompt: a group
    lr: float | None = None  # learning rate; default: 3e-4 for the embedded model, 1e-5 with --init
    lr_warmup: int = 5  # steps of learning rate warm-up
    updates: int = 2  # passes over a step's completions, each with one optimizer step
    micro_batch: int = 16  # completions per forward and backward pass; a group stays together
    clip_range: float = 0.2  # clipping of the probability ratio; has an effect from the second update on
    kl_coef: float = 0.02  # weight of the KL divergence from the start model
    kl_type: Literal["forward", "reverse", "symmetric"] = "forward"  # which divergence; forward: KL(policy || start)
    adaptive_kl: bool = False  # adapt the weight so that the KL divergence approaches --kl-target
    kl_target: float = 0.01  # KL divergence in nats per token, for --adaptive-kl
    kl_horizon: float = 10_000.0  # completions after which the weight may have changed by a fifth
    kl_warmup: int = 0  # steps or tokens over which the weight rises linearly from 0
    kl_warmup_unit: Literal["steps", "tokens"] = "steps"
    baseline_type: Literal["group_mean", "ema", "adaptive", "rloo"] = "group_mean"  # subtracted from the rewards
    ema_alpha: float = 0.1  # how fast the ema baseline follows the rewards
    scale_by_std: bool = True  # group_mean: divide by the group's standard deviation
    use_gae: bool = False  # token-level advantages from a value head, instead of the baseline
    gae_lambda: float = 0.95
    value_loss_coef: float = 0.1  # weight of the value head's loss, for --use-gae
    entropy_coef: float = 0.0  # bonus for the policy's entropy over all tokens, including those outside top-k
    max_grad_norm: float = 1.0  # gradient clipping
    control: bool = True  # afterwards, train the start model supervised for the same time: what RL has to beat
    track: Literal["tensorboard", "wandb", "none"] = "tensorboard"  # where the curves go
    log_dir: Path | None = None  # folder of curves, checkpoints and models; default: outputs/mini-chess-TIME
    save_steps: int = 10  # steps between checkpoints
    resume: bool = False  # continue from the checkpoint in --log-dir
    json: bool = False  # the last line of stdout is one JSON object; everything else goes to stderr


@dataclass(kw_only=True)
class EvalConfig(Options):
    """Evaluate a model on the held-out prompts."""

    json: bool = False  # the last line of stdout is one JSON object; everything else goes to stderr


@dataclass(kw_only=True)
class SampleConfig(Options):
    """Print completions of one prompt, with verdicts where the right answer is known."""

    prompt: str = "A: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1+e2e4+e2e4+"  # begins with P: or A:
    k_samples: int = 4  # number of completions


@dataclass(kw_only=True)
class DataConfig:
    """Write a.txt and p.txt.  The same seed gives the same files."""

    out: Path = Path("outputs/mini-data")  # folder to write to
    a_lines: int = 10_000  # lines from self-play
    p_lines: int = 1_000  # positions for stockfish to analyse; without stockfish, shipped lines to write
    stockfish: Path | None = None  # the program; default: the one on PATH or in /usr/games
    depth: int = 8  # search depth in half moves
    multipv: int = 5  # moves per position: 1 to 5
    seed: int = 1  # of the games


@dataclass(kw_only=True)
class TextConfig:
    """Train a small GPT on a text in one of four ways; report before and after, with baselines that need no reward."""

    algo: Literal["supervised", "grpo", "ppo", "denoise"] = "supervised"  # what the model learns from
    data: Path | None = None  # a UTF-8 text; default: the help topics of Python's standard library
    tokens: Literal["char", "gpt2"] = "char"  # characters, or GPT-2's byte pairs
    vocabulary: Path | None = None  # for gpt2: the folder with vocab.bpe and encoder.json
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384  # width
    block: int = 256  # context length
    attention: Literal["mha", "mla"] = "mha"  # multi-head attention, or multi-head latent attention
    latent: int = 64  # width of mla's latent: numbers cached per token and layer
    horizon: int | None = None  # tokens per window and rollout; default: 70, 32 with ppo or byte pairs
    batch_size: int = 32  # windows per step (alias: --batch)
    iters: int = 200  # training steps
    seconds: float | None = None  # end training after this much processor time
    lr: float | None = None  # learning rate; default: 3e-4 for supervised and denoise, 1e-5 for grpo, 3e-5 for ppo
    lr_decay: float = 0.0  # final share of the steps or seconds in which the rate falls to 0, in every training
    warm_steps: int = 0  # supervised steps before training
    warm_lr: float = 3e-4  # learning rate of the warm start and of the supervised baseline
    context: Literal["data", "model"] = "data"  # rollouts read the text's tokens, or their own
    k_samples: int = 4  # rollouts per window: a group
    reward_mode: Literal["plus1", "pm1"] = "plus1"  # a wrong token gets 0, or -1 (alias of pm1: --neg-reward)
    partial_logprob: float = 0.0  # weight of the right token's log-probability in the reward
    reference: Literal["bigram", "random"] = "bigram"  # reference of the KL (alias: --ref-type)
    beta_kl: float = 1e-3  # weight of the KL divergence
    kl_warmup_tokens: int = 200_000  # sampled tokens over which this weight rises from 0
    clip_range: float = 0.2  # clipping of the probability ratio; has an effect with ppo
    critic_lr: float = 1e-4  # ppo: learning rate of the value head
    gamma: float = 1.0  # ppo: discount of later rewards; 0 is better with --context data, where no choice affects them
    gae_lambda: float = 0.95  # ppo: lambda of the advantage estimation
    epochs: int = 4  # ppo: passes over a step's rollouts
    minibatches: int = 4  # ppo: optimizer steps per pass
    value_loss_coef: float = 0.5  # ppo: weight of the value head's loss
    mask_share: float = 0.15  # denoise: share of tokens that are masked
    unmask_steps: int = 5  # denoise: steps of sampling
    max_grad_norm: float = 1.0  # gradient clipping
    held_out: int = 256  # windows from the last tenth of the text, for the reports
    control: bool = True  # afterwards, train the start model supervised for the same time
    track: Literal["tensorboard", "wandb", "none"] = "tensorboard"  # where the curves go
    seed: int = 1
    log_dir: Path | None = None  # folder of curves and checkpoints; default: outputs/mini-text-TIME
    save_steps: int = 100  # steps between checkpoints
    log_steps: int = 20  # steps between printed lines
    resume: bool = False  # continue from the checkpoint in --log-dir
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
    """Raise UsageError for the first option that is out of range or contradicts another."""
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
    """Raise UsageError for the first option of text that contradicts another."""
    if config.n_embd % config.n_head:
        raise UsageError(f"--n-embd {config.n_embd} cannot be shared by --n-head {config.n_head}")
    if config.tokens == "gpt2" and config.vocabulary is None:
        raise UsageError("--tokens gpt2 needs --vocabulary: the folder of vocab.bpe and encoder.json")
    if config.algo == "grpo" and config.k_samples == 1:
        raise UsageError("--k-samples 1 leaves GRPO nothing to compare")
