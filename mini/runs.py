"""A run's folder: its config, its checkpoints, and the printed line of a step."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import time
from collections.abc import Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from mini.config import ChessConfig, TextConfig
from mini.files import write_whole
from toolkit import UsageError

# Options that may change when a run is resumed.
MAY_DIFFER = {"steps", "iters", "seconds", "resume", "json", "control", "log_dir", "save_steps", "log_steps", "track"}


def settings(config: ChessConfig | TextConfig) -> dict[str, Any]:
    """The config as values that JSON can hold."""
    return {name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(config).items()}  # fmt: skip


def open_run(config: ChessConfig | TextConfig) -> Path:
    """The run's folder: a new one, or with --resume the existing one."""
    name = "chess" if isinstance(config, ChessConfig) else "text"
    folder = config.log_dir or Path("outputs") / f"mini-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not config.resume:
        if (folder / "checkpoint.pt").exists():
            raise UsageError(f"{folder} has a run in it already: add --resume, or choose another --log-dir")
        write_whole(folder / "config.json", methodcaller("write", json.dumps(settings(config), indent=2).encode()))
    elif not (folder / "checkpoint.pt").is_file():
        raise UsageError(f"{folder} has no checkpoint to resume from")
    return folder


def save_checkpoint(folder: Path, config: ChessConfig | TextConfig, state: Mapping[str, Any]) -> None:
    """Replace the run's checkpoint."""
    content = {"config": settings(config), **state}
    write_whole(folder / "checkpoint.pt", lambda file: torch.save(content, file))


def load_checkpoint(folder: Path, config: ChessConfig | TextConfig) -> dict[str, Any]:
    """The run's checkpoint.  Raises UsageError if the run had other options."""
    path = folder / "checkpoint.pt"
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        before = state["config"]
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError):
        raise UsageError(f"{path} cannot be read as a checkpoint") from None
    now = settings(config)
    for name in sorted(now.keys() - MAY_DIFFER):
        if now[name] != before.get(name):
            flag = name.replace("_", "-")
            raise UsageError(f"the run in {folder} had --{flag} {before.get(name)}, not {now[name]}")
    return state


def resident_memory() -> float:
    """GiB of memory that the process uses now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def step_line(number: int, steps: int, figures: Mapping[str, float]) -> str:
    """One printed line for a step of chess."""
    by_task = {kind: "  ".join(f"{name[-1]} {value:.2f}" for name, value in figures.items()
                               if name.startswith(f"{kind}/")) for kind in ("reward", "valid")}  # fmt: skip
    return (f"step {number:{len(str(steps))}}/{steps}  reward {by_task['reward']}  valid {by_task['valid']}"
            f"  kl {figures['kl']:.4f} x {figures['kl_coef']:.4g}  clip {figures['clip_share']:.3f}"
            f"  entropy {figures['entropy']:.2f}  no spread {figures['zero_spread']:.0%}"
            f"  {figures['seconds']:.1f} s ({figures['seconds/generate']:.1f} generate"
            f" + {figures['seconds/score']:.1f} score + {figures['seconds/train']:.1f} train)")  # fmt: skip
