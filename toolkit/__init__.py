"""What `gpt_2048_rl.py` and `mini/` use and do not explain, one subject a file.  Nothing in here imports them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

VLLM = Path(__file__).resolve().parent.parent / ".venv-vllm"  # vLLM's environment: ./setup.sh --with vllm


class UsageError(Exception):
    """What was wrong and what to do, in one line; the program exits with code 2."""

    exit_code = 2


class OutOfMemory(UsageError):
    """The GPU's or the machine's memory ran out.  `resume_with` are options with which the run can go on, if any."""

    exit_code = 4

    def __init__(self, doing: str, remedy: str, resume_with: str = "") -> None:
        super().__init__(f"memory ran out while {doing}: take {remedy}")
        self.resume_with = resume_with


class ServerFailed(UsageError):
    """A vLLM server failed.  A run goes on with the next one, and with the same options."""


BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
                   "\U00016fe4\U0001d159\U000e0100-\U000e01ef]")  # fmt: skip
"""Characters that isprintable() lets pass and nobody sees: fillers, joiners, variation selectors, blank symbols."""


def visible(text: object) -> str:
    """Text with every non-printable or invisible character escaped, except line breaks and tabs.

    Model-written text can hold characters that move a terminal's cursor or reorder the text around them.
    """

    def is_visible(character: str) -> bool:
        return character in "\n\t" or (character.isprintable() and not BLANK.match(character))

    return "".join(c if is_visible(c) else ascii(c)[1:-1] for c in str(text))


def fits(value: object, hint: Any) -> bool:
    """Whether a value that was read from JSON has a type."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(fits(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind is tuple:
        return isinstance(value, list | tuple) and all(fits(item, parts[0]) for item in value)
    return type(value) in ((int, float) if hint is float else (hint,))


def checked(value: Any, hint: Any) -> Any:
    """A value that was read from JSON, which anyone may have written.  Raises TypeError if it has not this type."""
    if not fits(value, hint):
        raise TypeError(f"{value!r:.100} is no {hint}")
    return value


def stage_name(size: int, target: int) -> str:
    """A stage of training, or a held-out game, for people."""
    return f"{size}x{size} {target}"


def cache_folder() -> Path:
    """Where the embedded model, compiled code and the key of the held-out boards are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt_2048_rl"


def spelled(name: str) -> str:
    """A field's name as an option."""
    return "--" + name.replace("_", "-")
