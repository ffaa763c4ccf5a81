"""Who draws a run's curves: TensorBoard, Weights & Biases, or nobody, behind one small interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mini.config import UsageError


class Tracker(Protocol):
    """Takes a step's figures."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Nobody:
    """--track none."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Forget them."""

    def close(self) -> None:
        """Nothing is open."""


class TensorBoard:
    """--track tensorboard: event files in the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run wrote after its last checkpoint is about to be written again.
        self.writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
        self.writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """A scalar each."""
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self.writer.close()


class Wandb:
    """--track wandb: a run named after the folder, which a resumed run goes on with.  WANDB_MODE=offline is heeded."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> None:
        try:
            import wandb
        except ImportError:
            raise UsageError("--track wandb: wandb is not installed (./setup.sh --with cloud)") from None
        try:
            self.run = wandb.init(project="mini", id=folder.name, name=folder.name, dir=str(folder),
                                  config=dict(settings), resume="allow" if first_step else None)  # fmt: skip
        except wandb.Error as error:
            raise UsageError(f"--track wandb: {error}") from None

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """All in one row."""
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        """Upload, or leave for `wandb sync`."""
        self.run.finish()


def open_tracker(kind: str, folder: Path, settings: Mapping[str, Any], first_step: int) -> Tracker:
    """By the name that --track takes.  Raises UsageError where wandb is asked for and cannot be had."""
    if kind == "none":
        return Nobody()
    return (TensorBoard if kind == "tensorboard" else Wandb)(folder, settings, first_step)
