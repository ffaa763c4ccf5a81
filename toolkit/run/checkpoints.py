"""Checkpoints: written whole or not at all, the newest and the best kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit import UsageError
from toolkit.base.files import flush, point, read_json, write_whole
from toolkit.model.adapters import CONFIG, WEIGHTS

UNFINISHED = ".unfinished"  # the folder in which a checkpoint is written
START = "start"  # the folder of the adapter from which a run began, if there was one
TRAINING = "training_config.json"  # a run's config.json, in its checkpoints and its adapter
DIGESTS = "digests.json"  # SHA-256 of a checkpoint's files


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a folder, by its path in the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != DIGESTS:
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints, newest first."""
    found = (path for path in run.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal())
    return sorted(found, key=step_of, reverse=True)


def newest_checkpoint(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose digests are right; None if there is none.  `say` is told which ones are damaged."""
    for checkpoint in checkpoints(run):
        with contextlib.suppress(UsageError, OSError):
            if digests(checkpoint) == read_json(checkpoint / DIGESTS) != {}:
                return checkpoint
        say(f"{checkpoint} is damaged: skipping it")
    return None


def check_one_adapter(checkpoint: str | Path | None) -> None:
    """Raise UsageError for a checkpoint of an earlier version with --beta.  It has TRL's second adapter, too, and
    transformers would load that one alone."""
    if checkpoint and Path(checkpoint, "ref").is_dir():
        raise UsageError(f"{checkpoint} has two adapters and cannot be resumed: begin anew with --model {checkpoint}")


def forget_steps(run: Path) -> bool:
    """Remove the steps and curves of a run without a checkpoint.  Whether there were any."""
    files = [file for file in (run / "rollouts.jsonl", *run.glob("events.out.*")) if file.is_file()]
    for file in files:
        file.unlink()
    return bool(files)


def keep_config(run: Path, folder: Path) -> None:
    """Leave a run's config in an adapter's folder, which so knows its game wherever it is copied to."""
    config = read_json(run / "config.json")
    config.pop("output_dir", None)  # a path on this machine
    if folder.is_dir() and config:
        write_whole(folder / TRAINING, json.dumps(config, indent=2) + "\n")


def keep_start(adapter: Path, run: Path) -> dict[str, Any]:
    """Copy an adapter into the folder of a run that begins from it, and so needs no other folder.

    Returns what origin.json says of it.
    """
    shutil.rmtree(run / START, ignore_errors=True)  # half a copy
    (run / START).mkdir()
    for name in (CONFIG, WEIGHTS, TRAINING):
        if (adapter / name).is_file():
            write_whole(run / START / name, (adapter / name).read_bytes())
    return {"digests": digests(run / START), "origin": read_json(adapter.resolve().parent / "origin.json")}


def finish_checkpoint(written: Path, run: Path, keep: int, best: bool) -> None:
    """Move a checkpoint into the run's folder once all of it is on the disk, then remove the oldest ones.

    `best` makes the link `best` point to it.  The checkpoint behind that link is never removed.  One of a later step is
    a damaged one, before which the run went on: it is removed, and does not count among those to keep.
    """
    keep_config(run, written)
    write_whole(written / DIGESTS, json.dumps(digests(written), indent=2) + "\n")
    for part in (*written.rglob("*"), written):
        flush(part)
    place = run / written.name
    shutil.rmtree(place, ignore_errors=True)  # a damaged checkpoint of the same step
    if (run / "rollouts.jsonl").exists():  # a run resumes from both
        flush(run / "rollouts.jsonl")
    written.rename(place)
    if best:
        point(run / "best", written.name)
    flush(run)
    newest_first = checkpoints(run)
    here = newest_first.index(place)
    for old in newest_first[:here] + newest_first[here + keep :]:
        if old.resolve() != (run / "best").resolve():
            shutil.rmtree(old, ignore_errors=True)


class AtomicCheckpoints:
    """Mixin for a transformers Trainer: a checkpoint is written in `.unfinished` and moved when it is complete.

    Name it before the trainer, set both class attributes and override `is_best`:
    `class Trainer(AtomicCheckpoints, GRPOTrainer): run_folder, keep_checkpoints = run, 3`
    """

    run_folder: Path
    keep_checkpoints: int  # how many of the newest stay, besides the best
    accelerator: Any  # the trainer sets these two
    state: Any

    def is_best(self) -> bool:
        """Whether the checkpoint about to be written is the best so far.  Called once per checkpoint, on every rank."""
        return False

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run_folder / UNFINISHED)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        place = self.run_folder / UNFINISHED
        if self.accelerator.is_main_process:
            shutil.rmtree(place, ignore_errors=True)
            if place.exists():  # what is left could be links
                raise UsageError(f"{place} cannot be removed: remove it")
        self.accelerator.wait_for_everyone()
        best = self.is_best()
        super()._save_checkpoint(model, trial)  # type: ignore[misc]  # the trainer's, which comes next in the MRO
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            written = place / f"checkpoint-{self.state.global_step}"
            finish_checkpoint(written, self.run_folder, self.keep_checkpoints, best)
