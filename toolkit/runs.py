"""A run's folder: checkpoints, the lock, resuming, and reading it back.

A run writes these files to OUTPUT_DIR/RUN_NAME:

    config.json         its config                          origin.json    when, with which versions, from which commit
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
import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

from toolkit import UsageError, checked, fits, stage_name
from toolkit.evaluation import HeldOut, read_scores
from toolkit.ranks import RANK

BEST_PROGRAM = "best_strategy.py"
OUTCOMES = ("success", "lost", "stuck", "timeout", "error", "invalid_move", "no_function")  # how a game can end

# ---------------------------------------------------------------------------------------------------------------------
# Files


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turn any error that a damaged file causes into a UsageError that names the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        raise UsageError(f"{file} is damaged: restore it, or use another folder") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file.  Raises UsageError if the file is damaged."""
    with naming(file):
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError
        return found


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_link(path: str | Path, flags: int) -> int:
    """An opener for `open`.  It refuses a link, which in a strange folder can lead anywhere, and waits at no pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: after a kill the old content is still there.  A link is replaced and not followed."""
    content = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.unfinished")
    aside.unlink(missing_ok=True)
    with open(aside, "xb", opener=no_link) as file:
        file.write(content)
    flush(aside)
    aside.replace(path)


def check_links(run: Path) -> None:
    """Raise UsageError for a link in a run's folder, because training writes to where it points and an export reads
    from there; for a pipe, and for a folder that cannot be listed, which could hide them.

    This program makes one link, `best`.  wandb makes its own, anew in each run.
    """

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be listed ({error.strerror}): remove it, or change its mode")

    for folder, folders, files in os.walk(run, onerror=refuse):
        for path in (Path(folder, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            if path != run / "best" and run / "wandb" not in path.parents and not (S_ISREG(mode) or S_ISDIR(mode)):
                kind = "link" if S_ISLNK(mode) else "special file"
                raise UsageError(f"{path} is a {kind}: remove it, because a run's folder holds its own files alone")


def point(link: Path, name: str) -> None:
    """Make a symbolic link to a neighbour, or redirect an existing one."""
    aside = link.with_name(f".{link.name}-{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    aside.replace(link)


# ---------------------------------------------------------------------------------------------------------------------
# Steps


@dataclass(frozen=True)
class Attempt:
    """One completion of a training step."""

    source: str | None
    reward: float
    tiles: tuple[int, ...]  # the largest tile of each game
    plays: bool  # its program loads and does not cheat
    cheating: str  # what the program does that it may not, or ""

    def __str__(self) -> str:
        tile = f"largest tile {statistics.fmean(self.tiles):.0f}"
        return f"reward {self.reward:.1f}, " + (f"does not play: it {self.cheating}" if self.cheating else tile)


@dataclass(frozen=True)
class Step:
    """One training step."""

    stage: str  # board and target
    attempts: tuple[Attempt, ...]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Step:
        """One line of rollouts.jsonl.  Any error means that it is damaged."""
        attempts = (
            Attempt(checked(done["source"], str | None), checked(done["reward"], float),
                    tuple(checked(game["max_tile"], int) for game in done["results"]),
                    done["works"] == "load" and not done["cheating"], checked(done["cheating"], str))
            for done in row["completions"])  # fmt: skip
        return cls(stage_name(checked(row["size"], int), checked(row["target"], int)), tuple(attempts))


def read_rollouts(file: Path) -> dict[int, Step]:
    """The steps by their number.  A resumed run may log a step twice: the last one counts.

    A last line without its line break was cut off by a kill and is skipped.
    """
    steps: dict[int, Step] = {}
    if not file.is_file():
        return steps
    with naming(file), file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                row = json.loads(line)
                steps[int(row["step"])] = Step.of(row)
    return steps


def first_lines(file: Path, steps: int) -> list[str]:
    """The lines of rollouts.jsonl for so many steps.  Raises UsageError if it has fewer, or damaged ones."""
    with naming(file), file.open(encoding="utf-8") as lines:
        kept = list(islice(lines, steps))
        if len([Step.of(json.loads(line)) for line in kept]) < steps:
            raise ValueError
    return kept


def rewind(file: Path, steps: int) -> list[dict[str, Any]]:
    """Cut rollouts.jsonl off after so many steps, and return them.  Raises UsageError if it has fewer."""
    kept = first_lines(file, steps)
    if RANK == 0:
        write_whole(file, "".join(kept))
    return [json.loads(line) for line in kept]


def programs_to_race(file: Path) -> list[str]:
    """The distinct programs of rollouts.jsonl that load and do not cheat, the most promising first.

    The order is by the last stage that a program was judged at, its mean reward there, and its newest step.
    """
    steps = read_rollouts(file)
    order = {stage: i for i, stage in enumerate(dict.fromkeys(step.stage for step in steps.values()))}
    rewards: dict[str, dict[int, list[float]]] = {}  # of each program by stage
    newest: dict[str, int] = {}
    for number, step in steps.items():
        for attempt in step.attempts:
            if attempt.source and attempt.plays:
                rewards.setdefault(attempt.source, {}).setdefault(order[step.stage], []).append(attempt.reward)
                newest[attempt.source] = number

    def promise(source: str) -> tuple[int, float, int]:
        last = max(rewards[source])
        return last, statistics.fmean(rewards[source][last]), newest[source]

    return sorted(rewards, key=promise, reverse=True)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints

UNFINISHED = ".unfinished"  # the folder in which a checkpoint is written
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


def finish_checkpoint(written: Path, run: Path, keep: int, best: bool) -> None:
    """Move a checkpoint into the run's folder once all of it is on the disk, then remove the oldest ones.

    `best` makes the link `best` point to it.  The checkpoint behind that link is never removed.
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
    for old in checkpoints(run)[keep:]:
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
        done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=False)
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


def open_run(config: RunConfig) -> Path:
    """The run's folder: a new one with its config.json, or an existing one to resume.  `latest` points to it.

    A finished run goes on if the config has more steps.  Its result.json is then renamed to result-STEPS.json.  Raises
    UsageError if the run is finished, another process trains in it, or the folder cannot be written.
    """
    from toolkit import tiny
    from toolkit.machine import library_versions  # machine.py imports this file

    name = config.run_name or f"{Path(config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = config.output_dir / name
    try:
        run.mkdir(parents=True, exist_ok=True)
        stored, steps = read_json(run / "config.json"), getattr(config, "steps", 0)
        longer = steps > stored.get("steps", math.inf)
        if (run / "result.json").exists() and not longer:
            raise UsageError(f"{run} is finished: train on with more --steps, or choose another --run-name")
        if not (run / "config.json").exists():
            if any(path.name != "origin.json" and path.name[0] != "." for path in run.iterdir()):
                raise UsageError(f"{run} exists already, and is no run of this program: choose another --run-name")
            began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            origin = {"started": began, "versions": library_versions(), "git": git_state(), "tiny": tiny.VERSION}
            write_whole(run / "origin.json", json.dumps(origin, indent=2) + "\n")
            write_whole(run / "config.json", json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n")
        lock(run)
        check_links(run)
        result = read_json(run / "result.json")
        if newest := newest_checkpoint(run, lambda _: None):  # a damaged run is left as it is
            first_lines(run / "rollouts.jsonl", step_of(newest))
        elif result:
            raise UsageError(f"{run} has no checkpoint to train on from: choose another --run-name")
        if longer and result:
            with naming(run / "result.json"):  # its steps become part of a name
                (run / "result.json").rename(run / f"result-{int(result['steps'])}.json")
        kept = read_json(run / "config.json")
        changed = kept | ({"steps": steps} if longer else {})
        if getattr(config, "unsafe_no_jail", False):  # once without the jail: every later result says so
            changed["unsafe_no_jail"] = True
        if changed != kept:
            write_whole(run / "config.json", json.dumps(changed, indent=2) + "\n")
        point(config.output_dir / "latest", name)
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
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    return words


def forgotten(run: Path, config: RunConfig) -> list[str]:
    """The permissions with which a run began and which this config does not have, as options."""
    stored = read_json(run / "config.json")
    return [f"--{name.replace('_', '-')}" for name, harmless in PERMISSIONS.items()
            if stored.get(name, harmless[0]) not in harmless and getattr(config, name) in harmless]  # fmt: skip


def check_unchanged(config: RunConfig, stored: RunConfig, changeable: Container[str]) -> None:
    """Raise UsageError if a resumed run would get another embedded model, or another value for a field."""
    from toolkit import tiny

    origin = read_json(stored.output_dir / stored.run_name / "origin.json")
    if config.model == "tiny" and origin.get("tiny", tiny.VERSION) != tiny.VERSION:
        raise UsageError(f"{stored.run_name} began with version {origin['tiny']} of the embedded model, and this is "
                         f"{tiny.VERSION}: choose another --run-name")  # fmt: skip
    for name, value in vars(stored).items():
        asked = getattr(config, name)
        if name in changeable or name in ("output_dir", "run_name"):
            continue
        if name == "steps" and asked >= value:
            continue
        if name == "steps":
            raise UsageError(f"{stored.run_name} has {value} steps, and {asked} are fewer: name more, or another "
                             "--run-name")  # fmt: skip
        if asked != value:
            raise UsageError(f"--{name.replace('_', '-')} was {value} when {stored.run_name} began: leave it out, or "
                             "choose another --run-name")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The game of a program or an adapter

MADE_FOR = "# made for "  # first words of a program's file; the game follows as JSON
GAME_OPTIONS = ("held_out", "size", "target", "keys", "timeout", "reasoning", "temperature", "max_new_tokens")


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
            if first.startswith(MADE_FOR):
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
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
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


# ---------------------------------------------------------------------------------------------------------------------
# Reading runs


@dataclass(frozen=True)
class Run:
    """Everything that pages and comparisons need of a run."""

    name: str
    config: dict[str, Any]
    result: dict[str, Any]  # result.json; empty if the run has not ended
    held_out: dict[str, HeldOut]  # by stage, the result first; empty if the run has not ended
    curves: dict[str, dict[int, float]]  # value by step
    steps: dict[int, Step]
    best: str  # source of the best program, or ""
    best_of_n: str  # of the untrained model, or ""
    game: dict[str, Any]  # its best game, or empty


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    """A run's curves by name, of its newest checkpoint's log and of TensorBoard, without values that are not finite."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in folder.glob("*tfevents*"):  # all of them are opened, and a pipe would never end
        if not file.is_file():
            raise UsageError(f"{file} is no file: remove it")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # that a resumed run repeats steps is no matter
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: keep all
    events.Reload()
    points: list[tuple[str, int, float]] = []
    for file in (checkpoint / "trainer_state.json" for checkpoint in checkpoints(folder)[:1]):
        with contextlib.suppress(UsageError), naming(file):  # TensorBoard may have what a damaged checkpoint lacks
            points += [(name, logs["step"], value) for logs in read_json(file)["log_history"] if "loss" in logs
                       for name, value in logs.items() if isinstance(value, int | float)]  # fmt: skip
    for tag in events.Tags()["scalars"]:
        points += [(tag.removeprefix("train/"), event.step, event.value) for event in events.Scalars(tag)]
    curves: dict[str, dict[int, float]] = {}
    for name, step, value in points:  # of several values for a step, the last counts
        if math.isfinite(value):
            curves.setdefault(name, {})[step] = value
    return curves


def read_game(file: Path) -> dict[str, Any]:
    """A recorded game.  Its numbers are checked here, because the page's script trusts them."""
    game = read_json(file)
    with naming(file):
        if game:
            cells, tiles = range(game["size"] ** 2), (0, 2, 4)
            moves = all(way in range(4) and cell in cells and tile in tiles[1:] for way, cell, tile in game["moves"])
            for name in ("score", "max_tile"):
                checked(game[name], int)
            if len(game["start"]) != len(cells) or not set(game["start"]) <= set(tiles) or not moves:
                raise ValueError
    return game


def read_run(folder: Path) -> Run:
    """A run, finished or not.  Raises UsageError if the folder holds no run or a file is damaged."""
    config, result = (read_json(folder / f"{name}.json") for name in ("config", "result"))
    if not {"recipe", "held_out", "steps"} <= config.keys():
        raise UsageError(f"{folder} is no run of this version: it has no config.json of one")
    with naming(folder / "result.json"):
        scores = read_scores(result)
    sources = {}
    for name in (BEST_PROGRAM, "best_of_n.py"):
        with naming(file := folder / name):
            source = file.read_text(encoding="utf-8") if file.is_file() else ""
            sources[name] = source.partition("\n")[2] if source.startswith(MADE_FOR) else source
    steps = read_rollouts(file := folder / "rollouts.jsonl")
    with naming(file):
        if file.is_file() and max(steps, default=0) < result.get("steps", 0):
            raise ValueError
    return Run(folder.resolve().name, config, result, scores, read_curves(folder), steps,
               sources[BEST_PROGRAM], sources["best_of_n.py"], read_game(folder / "best_game.json"))  # fmt: skip


def read_runs(folders: Sequence[Path]) -> dict[str, Run]:
    """Several runs by name, or by path if two have the same name.  Raises UsageError."""
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise UsageError("name the folders of at least two different runs")
    runs = [read_run(folder) for folder in folders]
    distinct = len({run.name for run in runs}) == len(runs)
    return {run.name if distinct else str(folder): run for folder, run in zip(folders, runs, strict=True)}
