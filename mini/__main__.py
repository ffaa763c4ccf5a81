"""The command line: `python -m mini COMMAND`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import mini
from mini.config import ALIASES, ChessConfig, Config, DataConfig, EvalConfig, SampleConfig, TextConfig, check_config
from toolkit import UsageError, cli

KINDS: dict[str, Any] = {"chess": ChessConfig, "text": TextConfig, "data": DataConfig, "eval": EvalConfig,
                         "sample": SampleConfig}  # fmt: skip


def parse_arguments(argv: list[str]) -> Config:
    """The command's config.  Raises UsageError; SystemExit(0) after --help."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(mini.__doc__)
        raise SystemExit(0)
    command = argv.pop(0)
    if command not in KINDS:
        raise UsageError(f"no command {command!r}: one of {', '.join(KINDS)}")
    argv = spelled_out(argv) if command == "text" else argv
    config: Config = cli.parse(KINDS[command], argv, f"python -m mini {command}")
    check_config(config)
    return config


def spelled_out(argv: list[str]) -> list[str]:
    """Replace aliases of options by the options' own names."""
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        name, *implied = ALIASES.get(flag.replace("_", "-"), [flag])
        words += [name + equals + value, *implied]
    return words


def run(config: Config) -> dict[str, Any]:
    """Run a command.  Returns what --json prints, and nothing for a command without --json."""
    if isinstance(config, DataConfig):
        from mini.chess_data import write_data

        write_data(config)
        return {}
    if isinstance(config, TextConfig):
        from mini.text_task import text_command

        return text_command(config)
    from mini import chess_task

    match config:
        case ChessConfig():
            return chess_task.chess_command(config)
        case EvalConfig():
            return chess_task.eval_command(config)
        case SampleConfig():
            chess_task.sample_command(config)
            return {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.  Returns the exit code: see toolkit/cli.py."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return cli.main(partial(parse_arguments, arguments), lambda config, _: run(config))


if __name__ == "__main__":
    sys.exit(main())
