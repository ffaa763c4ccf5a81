"""A run's folder: starting, resuming, the game of a program in it, interruptions.

A run writes these files to OUTPUT_DIR/RUN_NAME:

    config.json         its config                          origin.json    when, with which versions, from which commit
    start/              the adapter from which it began, if there was one; origin.json has that one's origin too
    checkpoint-STEP/    the newest ones, and `best`, a link to one of them; adapter/ after the last step.  Each has the
                        config in training_config.json
    before.json         the untrained model's scores, measured after training
    rollouts.jsonl      one line per step: every completion with its reward and its games (`Step.of` reads a line)
    events.out.*        TensorBoard's curves; wandb/, trackio/, mlflow.db    other trackers'
    result.json         the scores on the held-out boards; a run without it can be resumed, one with it needs more steps
    result-STEPS.json   the result before more steps
    best_strategy.py, best_game.json, report.html
    best_of_n.py, best_of_n.json    the best programs of the untrained model
    vllm.log            with --sampler vllm, what the server said
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

from toolkit import UsageError, fits, spelled
from toolkit.base.files import check_links, naming, no_link, point, read_json, write_whole
from toolkit.model import tiny
from toolkit.model.machine import library_versions
from toolkit.model.models import adapter_base, base_of
from toolkit.run.checkpoints import START, TRAINING, checkpoints, keep_start, newest_checkpoint, step_of
from toolkit.run.steps import first_lines

BEST_PROGRAM = "best_strategy.py"
SPLIT = ("batch_size", "accumulation")  # how a step's completions are split: it may change when a run is resumed

# ---------------------------------------------------------------------------------------------------------------------
# Starting and resuming a run


class RunConfig(Protocol):
    """A dataclass with the fields that a run's folder depends on."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    output_dir: Path
    run_name: str
    model: str


AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def git_state() -> dict[str, Any]:
    """The commit of this program and whether its files were changed since; empty outside of git."""

    def ask(*words: str) -> str:
        here = str(Path(__file__).resolve().parent)
        command = ["git", "-c", "safe.directory=*", "-C", here, *words]  # whoever owns it: its code runs already
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    with contextlib.suppress(OSError):  # git is not installed
        if commit := ask("rev-parse", "HEAD"):
            return {"commit": commit, "changed": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    return {}


@cache  # keeps the file open, and so the lock, until this process ends
def lock(run: Path) -> io.TextIOBase:
    """Claim a run's folder for this process.  Raises UsageError if another process trains in it."""
    file = open(run / ".lock", "a", opener=no_link)  # noqa: SIM115 - as above; open until the end
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"another process trains in {run}: wait for it, or choose another --run-name") from None
    return file


def make_latest(run: Path) -> None:
    """Let `latest`, beside a run, point to it: once its model is loaded, so that a start that fails changes nothing."""
    point(run.parent / "latest", run.name)


def check_pointers(run: Path) -> None:
    """Raise UsageError where a copy has followed the links that this program makes, so that it could not move them."""
    for link in (run / "best", run.parent / "latest"):
        if link.is_dir() and not link.is_symlink():
            raise UsageError(f"{link} is a folder, and was a link: remove it")


def open_run(config: RunConfig) -> Path:
    """The run's folder: a new one with its config.json, or an existing one to resume.

    A finished run goes on if the config has more steps, and so does one that --minutes ended before its last step.  Its
    result.json is then renamed to result-STEPS.json.  Raises UsageError if the run is finished, another process trains
    in it, or the folder cannot be written.
    """
    name = config.run_name or f"{Path(base_of(config.model)).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = config.output_dir / name
    try:
        run.mkdir(parents=True, exist_ok=True)
        check_pointers(run)
        stored, steps = read_json(run / "config.json"), getattr(config, "steps", 0)
        result = read_json(run / "result.json") if stored else {}
        with naming(run / "result.json"):
            early = not result.get("collapsed") and steps > int(result.get("steps", steps))
        longer = early or steps > stored.get("steps", math.inf)
        if (run / "result.json").exists() and not longer:
            raise UsageError(f"{run} is finished: train on with more --steps, or choose another --run-name")
        new = not (run / "config.json").exists()
        if new and any(path.name not in ("origin.json", START) and path.name[0] != "." for path in run.iterdir()):
            raise UsageError(f"{run} exists already, and is no run of this program: choose another --run-name")
        lock(run)  # before its config is written, which would be that of the last to start
        if new and (run / "config.json").exists():
            raise UsageError(f"another process has just begun {run}: choose another --run-name")
        if new:
            began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            versions = {name: version for name, version in library_versions().items() if version != "0.0"}
            origin = {"started": began, "versions": versions, "git": git_state(), "tiny": tiny.VERSION}
            if adapter_base(config.model):
                origin["start"] = keep_start(Path(config.model), run)
            write_whole(run / "origin.json", json.dumps(origin, indent=2) + "\n")
            write_whole(run / "config.json", json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n")
        check_links(run)
        if newest := newest_checkpoint(run, lambda _: None):  # a damaged run is left as it is
            first_lines(run / "rollouts.jsonl", step_of(newest))
        elif result:
            which = "only damaged checkpoints" if checkpoints(run) else "no checkpoint to train on from"
            raise UsageError(f"{run} has {which}: choose another --run-name")
        if longer and result:
            with naming(run / "result.json"):  # its steps become part of a name
                (run / "result.json").rename(run / f"result-{int(result['steps'])}.json")
        kept = read_json(run / "config.json")
        split = {name: value for name in SPLIT if (value := getattr(config, name, None))}
        changed = kept | split | ({"steps": steps} if longer else {})
        if getattr(config, "unsafe_no_jail", False):  # once without the jail: every later result says so
            changed["unsafe_no_jail"] = True
        if changed != kept:
            write_whole(run / "config.json", json.dumps(changed, indent=2) + "\n")
    except OSError as error:
        place = run if os.access(run, os.F_OK) else config.output_dir
        raise UsageError(f"{place} cannot be written ({error.strerror}): choose another --output-dir") from None
    return run


def run_to_resume(name: str, output_dir: Path, resume: bool) -> Path | None:
    """The folder of the run to resume: the one named, or with `resume` alone the newest; None for a new run.

    Raises UsageError if `resume` is set and there is no such run, or if a link leads out of `output_dir`.
    """
    run = output_dir / (name or "latest")
    if (name or resume) and os.access(run / "config.json", os.F_OK):  # False also for a name that no file can have
        if run.resolve().parent != output_dir.resolve():
            raise UsageError(f"{run} leads out of {output_dir}: name the run with --output-dir and --run-name")
        return run.resolve()
    if resume:
        raise UsageError(f"there is no run {run} to resume: leave --resume out")
    return None


# What reaches beyond a run's folder is decided on the command line each time and never by a file, which may be someone
# else's: whether programs are jailed, and where completions and curves go.  Each option's harmless values, the default
# first.  No other stored option names a place: a model is data (weights, not code), and the output is where the run is.
PERMISSIONS: dict[str, tuple[Any, ...]] = {
    "unsafe_no_jail": (False,), "vllm_server": ("",), "report_to": ("tensorboard", "none"),
}  # fmt: skip


def stored_config(run: Path, kind: type[AnyConfig]) -> AnyConfig:
    """A run's config, without permissions.  Fields that its version did not have get their defaults.

    Raises UsageError for a value of another type than its field.
    """
    stored, known = read_json(run / "config.json"), dict[str, Any]()
    for name, hint in get_type_hints(kind).items():
        if name not in stored or name in ("output_dir", "run_name", "resume", "json"):
            continue
        value = stored[name]
        if not fits(value, hint):
            raise UsageError(f"{run / 'config.json'}: {name} cannot be {value!r}: restore it, or begin a new run")
        if value in PERMISSIONS.get(name, (value,)):
            known[name] = tuple(value) if isinstance(value, list) else value
    return kind(**known | {"output_dir": run.parent, "run_name": run.name})


def permissions(config: Any) -> list[str]:
    """The permissions that a config has, as words of a command line."""
    words: list[str] = []
    for name, harmless in PERMISSIONS.items():
        if (value := getattr(config, name)) not in harmless:
            words += [spelled(name), *([] if value is True else [value])]
    return words


def forgotten(run: Path, config: RunConfig) -> list[str]:
    """The permissions with which a run began and which this config does not have, as options."""
    stored = read_json(run / "config.json")
    return [
        spelled(name)
        for name, harmless in PERMISSIONS.items()
        if stored.get(name, harmless[0]) not in harmless and getattr(config, name) in harmless
    ]


def check_unchanged(config: RunConfig, stored: RunConfig, changeable: Container[str]) -> None:
    """Raise UsageError if a resumed run would get another embedded model, or another value for a field."""
    origin = read_json(stored.output_dir / stored.run_name / "origin.json")
    if config.model == "tiny" and origin.get("tiny", tiny.VERSION) != tiny.VERSION:
        raise UsageError(
            f"{stored.run_name} began with version {origin['tiny']} of the embedded model, and this is "
            f"{tiny.VERSION}: choose another --run-name"
        )
    for name, value in vars(stored).items():
        asked = getattr(config, name)
        if name in changeable or name in ("output_dir", "run_name"):
            continue
        if name == "steps":
            if asked >= value:
                continue
            raise UsageError(
                f"{stored.run_name} has {value} steps, and {asked} are fewer: name more, or another --run-name"
            )
        if asked != value:
            raise UsageError(
                f"{spelled(name)} was {value} when {stored.run_name} began: leave it out, or choose another --run-name"
            )


# ---------------------------------------------------------------------------------------------------------------------
# The game of a program or an adapter

MADE_FOR = "# made for "  # first words of a program's file; the game follows as JSON
GAME_OPTIONS = ("held_out", "size", "target", "keys", "example", "timeout", "reasoning", "temperature",
                "max_new_tokens")  # fmt: skip


def write_program(file: Path, source: str, config: Any) -> None:
    """Write a program that a run has found, below a comment that names its game."""
    game = {"held_out": config.held_out, "keys": config.keys, "timeout": config.timeout}
    write_whole(file, f"{MADE_FOR}{json.dumps(game)}\n{source}\n")


def options_of(path: Path, names: Container[str]) -> list[str]:
    """The options of a command line, as far as they have one of `names`, with which a program or an adapter was made.

    Empty for programs and models from elsewhere.  Raises UsageError if the file that says it is damaged.
    """
    game: dict[str, Any] = {}
    if path.suffix == ".py":
        with contextlib.suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
            first = file.readline()
            if first.startswith(f"{MADE_FOR}{{"):  # a person may write the same words
                with naming(path):
                    game = json.loads(first.removeprefix(MADE_FOR))
    else:
        game = read_json(path / TRAINING)
    words: list[str] = []
    with naming(path):
        if game:
            game["size"], game["target"] = game["held_out"][0].split(":")
        for name in (name for name in GAME_OPTIONS if name in game and name in names):
            values = game[name] if name == "held_out" else [game[name]]
            if not all(re.fullmatch(r"[\w.:]+", str(value)) for value in values):  # or it could name another option
                raise ValueError
            words += [spelled(name), *map(str, values)]
    return words


# ---------------------------------------------------------------------------------------------------------------------
# Interruptions


def may_be_a_removal(error: Exception, run: Path) -> bool:
    """Whether an error is about a missing file or names a file of the run; libraries have their own types for it."""
    return isinstance(error, FileNotFoundError) or "No such file" in str(error) or str(run) in str(error)


@contextlib.contextmanager
def blaming_the_folder(run: Path) -> Iterator[None]:
    """Raise a UsageError of one line if a run fails because its folder was removed or the disk is full."""
    try:
        yield
    except Exception as error:
        if may_be_a_removal(error, run):
            time.sleep(1)  # a removal that is still under way may not have reached config.json
        if not (run / "config.json").exists():
            trouble = f"{run} was removed"
        elif shutil.disk_usage(run).free < 50e6:
            trouble = f"the disk that {run} is on is full"
            time.sleep(1)  # TensorBoard's thread may still be printing its traceback: the one line comes after it
        else:
            raise
        kept = newest_checkpoint(run, lambda _: None)
        where = f"after step {step_of(kept)}" if kept else "from the start"
        raise UsageError(f"{trouble}: fix that and start again; the run resumes {where}") from error


class Interruption:
    """Handles Ctrl-C, SIGTERM, and SIGHUP of a terminal that closes.

    During training the first one lets the step end, and a second Ctrl-C or SIGTERM stops at once.  A closing terminal
    sends SIGHUP twice, by its shell and by the kernel, so only the first one counts.  Under nohup none does.
    """

    def __init__(self) -> None:
        self.signal = 0  # the first that came
        self.waits = False  # whether a step is under way

    def __enter__(self) -> Interruption:
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = (signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,)))
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if signal.SIGHUP in self._before:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if self.signal or not self.waits:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.signal = number
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(2, b"\nending this step; interrupt again to stop at once\n")
