"""What `gpt_2048_rl.py` and `mini/` use and do not explain, one subject a file.  Nothing in here imports them."""

from __future__ import annotations

import os
from pathlib import Path

VLLM = Path(__file__).resolve().parent.parent / ".venv-vllm"  # vLLM's environment: ./setup.sh --with vllm


class UsageError(Exception):
    """What was wrong and what to do, in one line; the program exits with code 2."""


def visible(text: object) -> str:
    """Text with every non-printable character escaped, except line breaks and tabs.

    Model-written text can hold characters that move a terminal's cursor or reorder the text around them.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in str(text))


def stage_name(size: int, target: int) -> str:
    """A stage of training, or a held-out game, for people."""
    return f"{size}x{size} {target}"


def cache_folder() -> Path:
    """Where the embedded model, compiled code and the key of the held-out boards are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt_2048_rl"
