"""Where a run's curves go: TensorBoard, Weights & Biases, or nowhere, behind one small interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from toolkit import UsageError


class Tracker(Protocol):
    """Receives a step's figures."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Nobody:
    """--track none."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Discard them."""

    def close(self) -> None:
        """Nothing to close."""


class TensorBoard:
    """--track tensorboard: event files in the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats the steps after its last checkpoint, so their old values are purged.
        self.writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
        self.writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write each figure as a scalar."""
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self.writer.close()


class Wandb:
    """--track wandb: the run has the folder's name, so a resumed run continues it.  WANDB_MODE=offline is respected."""

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
        """Write all figures in one row."""
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the upload, or leave the files for `wandb sync`."""
        self.run.finish()


def open_tracker(kind: str, folder: Path, settings: Mapping[str, Any], first_step: int) -> Tracker:
    """The tracker that --track names.  Raises UsageError if wandb is requested but not available."""
    if kind == "none":
        return Nobody()
    return (TensorBoard if kind == "tensorboard" else Wandb)(folder, settings, first_step)
