"""Trackers: where --report-to sends a run's curves.  transformers' own callbacks do the work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolkit import UsageError

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
PROJECT = "gpt_2048_rl"  # of runs in wandb and trackio, and the experiment in mlflow


def named(report_to: str) -> list[str]:
    """The trackers of --report-to, which has commas between them, or is none.

    Raises UsageError for one that is unknown or not installed.
    """
    names = [] if report_to == "none" else [name.strip() for name in report_to.split(",")]
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--report-to {name}: name none, or some of {','.join(TRACKERS)}")
        found = find_spec(name)
        if not found or not found.origin:  # without an origin it is a folder of that name, such as wandb leaves
            raise UsageError(f"--report-to {name} needs the library {name}: run ./setup.sh --with trackers")
    return names


def keep_in(run: Path, report_to: str) -> None:
    """Keep the files of --report-to's trackers in a run's folder, unless the environment says otherwise.

    Call it before TRL is imported, which imports wandb and trackio.
    """
    place = run.resolve()
    settings: dict[str, dict[str, object]] = {
        "wandb": {"WANDB_DIR": place, "WANDB_MODE": "offline", "WANDB_PROJECT": PROJECT},
        "trackio": {"TRACKIO_DIR": place / "trackio"},
        "mlflow": {
            "MLFLOW_TRACKING_URI": f"sqlite:///{place / 'mlflow.db'}",
            "MLFLOW_EXPERIMENT_NAME": PROJECT,
            "MLFLOW_DISABLE_TELEMETRY": "true",
        },
    }
    for tracker in named(report_to):
        for name, value in settings.get(tracker, {}).items():
            os.environ.setdefault(name, str(value))


def report(trainer: Any, report_to: str, run: Path) -> None:
    """Let a trainer report to all trackers of --report-to but TensorBoard, whose writer is shared with pictures."""
    from transformers.integrations import get_reporting_integration_callbacks

    names = [name for name in named(report_to) if name != "tensorboard"]
    trainer.args.report_to, trainer.args.run_name, trainer.args.project = names, run.name, PROJECT
    for kind in get_reporting_integration_callbacks(names):
        trainer.add_callback(kind)


@contextlib.contextmanager
def blaming_the_tracker() -> Iterator[None]:
    """Raise a UsageError of one line if a tracker fails, such as one whose server does not answer."""
    try:
        yield
    except Exception as error:
        name = type(error).__module__.partition(".")[0]
        if name not in TRACKERS:
            raise
        raise UsageError(
            f"--report-to {name}: {error}; fix that, or name another tracker, and start again with --resume"
        ) from error
