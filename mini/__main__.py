"""The command line: `python -m mini COMMAND`."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import mini
from mini.config import (
    ALIASES,
    ChessConfig,
    Config,
    DataConfig,
    EvalConfig,
    SampleConfig,
    TextConfig,
    UsageError,
    check_config,
)

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
    import tyro

    argv = spelled_out(argv) if command == "text" else argv
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            config: Config = tyro.cli(KINDS[command], args=argv, prog=f"python -m mini {command}")
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        lines = [line.strip("│ ") for line in complaint.getvalue().splitlines()[1:]]
        said = " ".join(takewhile(lambda line: line and not line.startswith("─"), lines))
        raise UsageError(f"{said} (see python -m mini {command} --help)") from None
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


def run(config: Config) -> dict[str, Any] | None:
    """Run a command.  Returns what --json prints."""
    if isinstance(config, DataConfig):
        from mini.chess_data import write_data

        write_data(config)
        return None
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
            return None


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 2 for an error that the user can fix (printed as one line); 130 for Ctrl-C."""
    try:
        config = parse_arguments(list(sys.argv[1:] if argv is None else argv))
        as_json = getattr(config, "json", False)
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            result = run(config)
        if as_json:
            print(json.dumps(result))
    except UsageError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
