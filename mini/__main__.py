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
from typing import Any, get_args

from mini import config as options
from toolkit import UsageError, cli

KINDS = {kind.__name__.removesuffix("Config").lower(): kind for kind in get_args(options.Config)}


def parse_arguments(argv: list[str]) -> options.Config:
    """The command's config.  Raises UsageError; SystemExit(0) after --help."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(__doc__)
        raise SystemExit(0)
    command = argv.pop(0)
    if command not in KINDS:
        raise UsageError(f"no command {command!r}: one of {', '.join(KINDS)}")
    cli.check_empty(KINDS[command], argv)
    algo = cli.chosen(argv, {"algo": "supervised"}, "resume")["algo"]  # the other options' defaults depend on it
    default = options.text_defaults(algo) if command == "text" else None
    config: options.Config = cli.parse(KINDS[command], argv, f"python -m mini {command}", default)
    return config


def run(config: options.Config) -> dict[str, Any]:
    """Run a command.  Returns what --json prints, and nothing for a command without --json."""
    from mini import chess_lines, pretrain, text
    from mini.model import Diverged
    from toolkit.model.memory import naming_memory

    commands: dict[type[options.Config], Callable[[Any], dict[str, Any]]] = {
        options.ChessConfig: chess_lines.chess_command,
        options.EvalConfig: chess_lines.eval_command,
        options.SampleConfig: chess_lines.sample_command,
        options.DataConfig: pretrain.data_command,
        options.PretrainConfig: pretrain.pretrain_command,
        options.PlayConfig: pretrain.play_command,
        options.TextConfig: text.text_command,
    }
    try:
        with naming_memory("computing", "a smaller model or batch"), cli.while_it_is_read():
            return commands[type(config)](config)
    except Diverged as what:
        raise UsageError(f"a {what} is not finite: lower --warm-lr or --control-lr, or take another --init") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit code: see toolkit/cli.py."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return cli.main(partial(parse_arguments, arguments), lambda config, _: run(config))


if __name__ == "__main__":
    sys.exit(main())
