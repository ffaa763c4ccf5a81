"""GRPO with nothing hidden: a GPT-2 and its reinforcement learning in plain PyTorch, for chess and for texts.

    python -m mini chess        trains a small model on chess with GRPO, evaluates before and after
    python -m mini play         games against random moves, and against stockfish if it is installed
    python -m mini eval         evaluates a model on the held-out prompts
    python -m mini sample       prints completions of one prompt
    python -m mini text         the same small GPT learns a text: supervised, with GRPO, with PPO, by denoising
    python -m mini data         writes chess data: A lines from self-play, P lines from stockfish if it is installed
    python -m mini pretrain     makes the small model from such data, by likelihood alone
    python -m mini COMMAND --help

Read grpo.py first: the formulas and the loop.  Then model.py, chess_lines.py and text.py.  README.md has the maths;
each formula links to its line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mini import config as options
from mini.config import (
    ChessConfig,
    Config,
    DataConfig,
    EvalConfig,
    PlayConfig,
    PretrainConfig,
    SampleConfig,
    TextConfig,
)
from toolkit import UsageError, cli

KINDS: dict[str, Any] = {"chess": ChessConfig, "play": PlayConfig, "eval": EvalConfig, "sample": SampleConfig,
                         "text": TextConfig, "data": DataConfig, "pretrain": PretrainConfig}  # fmt: skip


def parse_arguments(argv: list[str]) -> Config:
    """The command's config.  Raises UsageError; SystemExit(0) after --help."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(__doc__)
        raise SystemExit(0)
    command = argv.pop(0)
    if command not in KINDS:
        raise UsageError(f"no command {command!r}: one of {', '.join(KINDS)}")
    default: Config | None = None
    if command == "text":
        argv = spelled_out(argv)
        given = cli.chosen(argv, {"algo": "supervised", "recipe": "stable", "tokens": "char"}, "resume")
        if given["algo"] in options.ALGORITHMS.get(given["recipe"], ()):
            default = options.text_defaults(given["algo"], given["recipe"], given["tokens"])
    config: Config = cli.parse(KINDS[command], argv, f"python -m mini {command}", default)
    return config


def spelled_out(argv: list[str]) -> list[str]:
    """Replace aliases of options by the options' own names."""
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        name, *implied = options.ALIASES.get(flag.replace("_", "-"), [flag])
        words += [name + equals + value, *implied]
    return words


def run(config: Config) -> dict[str, Any]:
    """Run a command.  Returns what --json prints, and nothing for a command without --json."""
    from mini import chess_lines, pretrain, text
    from mini.model import Diverged

    if isinstance(config, SampleConfig) and text.is_run(config.init):
        return text.sample_command(config)
    commands: dict[type[Config], Callable[[Any], dict[str, Any]]] = {
        ChessConfig: chess_lines.chess_command, TextConfig: text.text_command, EvalConfig: chess_lines.eval_command,
        SampleConfig: chess_lines.sample_command, DataConfig: pretrain.write_data,
        PlayConfig: pretrain.play_command, PretrainConfig: pretrain.pretrain_command,
    }  # fmt: skip
    try:
        return commands[type(config)](config)
    except Diverged as what:
        raise UsageError(f"a {what} is not finite: lower --warm-lr or --control-lr, or take another --init") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit code: see toolkit/cli.py."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return cli.main(partial(parse_arguments, arguments), lambda config, _: run(config))


if __name__ == "__main__":
    sys.exit(main())
