"""What `gpt_2048_rl.py` and `mini/` use and do not explain, one subject a file.  Nothing in here imports them."""

from __future__ import annotations

import os
import re
from pathlib import Path

VLLM = Path(__file__).resolve().parent.parent / ".venv-vllm"  # vLLM's environment: ./setup.sh --with vllm


class UsageError(Exception):
    """What was wrong and what to do, in one line; the program exits with code 2."""


BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
                   "\U00016fe4\U0001d159\U000e0100-\U000e01ef]")  # fmt: skip
"""Characters that isprintable() lets pass and nobody sees, as in gpt_2048_rl.py, which plays without this folder."""


def visible(text: object) -> str:
    """Text with every non-printable or invisible character escaped, except line breaks and tabs.

    Model-written text can hold characters that move a terminal's cursor or reorder the text around them.
    """

    def is_visible(character: str) -> bool:
        return character in "\n\t" or (character.isprintable() and not BLANK.match(character))

    return "".join(c if is_visible(c) else ascii(c)[1:-1] for c in str(text))


def stage_name(size: int, target: int) -> str:
    """A stage of training, or a held-out game, for people."""
    return f"{size}x{size} {target}"


def cache_folder() -> Path:
    """Where the embedded model, compiled code and the key of the held-out boards are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt_2048_rl"
