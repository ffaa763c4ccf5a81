"""The doctor command: what this machine has, what is switched and why, whether a model can train; and how fast."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from toolkit import UsageError
from toolkit.base.files import read_json, write_whole
from toolkit.games import duration
from toolkit.games.evaluation import board_key
from toolkit.model import smollm2
from toolkit.model.machine import Machine, find_machine, library_versions, prepare_environment
from toolkit.model.memory import memory_needed, too_little_memory
from toolkit.model.models import MADE_HERE, check_model, resolve_model, stays_as_stored, uses_transformers
from toolkit.model.settings import (
    ROOM_FOR_16_BITS,
    choose_settings,
    choose_weights,
    has_room_for_mxfp4,
    rows_at_once,
    speed_key,
    speeds,
)

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class DoctorConfig:
    """Say what this machine has, what is switched for it and why, and whether the model can train."""

    model: str = "auto"  # as in training
    weights: Literal["auto", "4bit", "stored", "16bit"] = "auto"  # as in training
    measure: bool = False  # load the model in each form that fits, and keep the one that generates fastest, for auto
    json: bool = False  # print one JSON object as the last line of stdout, and everything else to stderr


# ---------------------------------------------------------------------------------------------------------------------
# Speed


class Program(Protocol):
    """What of the script is measured (loading, adapters, sampling) or checked (the players' pool)."""

    def train_defaults(self, model: str, /) -> Any: ...
    def shared_pool(self) -> object: ...
    def load_model(self, name: str, config: Any, say: Callable[[Any], None], /) -> tuple[Any, Any]: ...
    def add_adapters(self, model: Any, config: Any, /) -> Any: ...
    def sample_completions(self, model: Any, tokenizer: Any, prompts: list[str], config: Any, /) -> list[str]: ...
    def build_prompt(self) -> str: ...


Speed = dict[str, float]  # tokens_per_s, and the seconds that a step's completions take


def speed_of(name: str, config: Any, program: Program) -> Speed:
    """How fast a model with adapters generates, all completions of a step together.  The first answers warm up."""
    model, tokenizer = program.load_model(name, config, lambda _: None)
    model = program.add_adapters(model, config)
    prompts = [program.build_prompt()] * rows_at_once(config)
    seconds, tokens = 0.0, 0
    for _ in range(2):
        started = time.perf_counter()
        texts = program.sample_completions(model, tokenizer, prompts, config)
        seconds = time.perf_counter() - started
        tokens = sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    return {"tokens_per_s": tokens / seconds, "seconds": seconds}


def forms(machine: Machine, name: str) -> list[str]:
    """The forms of the weights that a GPU has room for."""
    if not machine.gpu or stays_as_stored(name):
        return []
    stored = ["stored"] if has_room_for_mxfp4(machine, name) else []
    return ["4bit", *stored, *(["16bit"] if machine.memory >= ROOM_FOR_16_BITS else [])]


def compare_forms(machine: Machine, name: str, console: Console) -> dict[str, Speed]:
    """The speed of each form, each in a process of its own.  The fastest is kept for this GPU and model."""
    found: dict[str, Speed] = {}
    if not forms(machine, name):
        console.print(f"{name} has one form on this machine: there is nothing to choose", soft_wrap=True)
    for weights in forms(machine, name):
        command = [sys.executable, sys.argv[0], "doctor", "--model", name, "--weights", weights, "--measure", "--json"]
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        if done.returncode:
            console.print(f"{weights}: failed ({(done.stderr.splitlines() or ['no output'])[-1]})", soft_wrap=True)
            continue
        found[weights] = json.loads(done.stdout.splitlines()[-1])["speeds"][weights]
        console.print(f"{weights}: {found[weights]['tokens_per_s']:.0f} tokens/s")
    if found:
        fastest = max(found, key=lambda weights: found[weights]["tokens_per_s"])
        known = read_json(speeds()) | {speed_key(machine, name): {"weights": fastest, **found[fastest]}}
        speeds().parent.mkdir(parents=True, exist_ok=True)
        write_whole(speeds(), json.dumps(known, indent=1) + "\n")
    return found


def measured(
    config: DoctorConfig, machine: Machine, name: str, planned: Any, program: Program, console: Console
) -> dict[str, Speed]:
    """What --measure finds: the speed by form, of the named form alone or of all that fit."""
    if not config.measure:
        return {}
    if config.weights == "auto":
        return compare_forms(machine, name, console)
    return {choose_weights(machine, name, planned).weights: speed_of(name, planned, program)}


def time_row(config: Any, seconds: float) -> tuple[str, str, str]:
    """For the table of settings: how long a run generates, where a step's completions take so many seconds."""
    if not seconds:
        return "time", "not measured", "doctor --measure finds how long a run generates; docs/gpu.md has estimates"
    boards = config.games + (len(config.held_out) - 1) * math.ceil(config.games / 4)
    asked = duration.answers(config.best_of, config.steps * config.batch_size * config.accumulation, boards)
    batches = config.steps + math.ceil(asked / config.eval_batch_size)
    why = f"{config.steps} steps and {batches - config.steps} batches of evaluation, {seconds:.1f} s each as measured"
    return "time", f"{batches * seconds / 3600:.1f} h of generating", f"{why}; games and updates come on top"


# ---------------------------------------------------------------------------------------------------------------------
# The command


def show(
    console: Console,
    rows: Sequence[tuple[str, ...]],
    versions: Mapping[str, str],
    checks: Mapping[str, str],
    marks: Mapping[str, str],
) -> None:
    """Print settings, libraries, and what each check says; "ok" has no entry in `marks`."""
    from rich.table import Table

    table = Table("", "", "", box=None, show_header=False)
    found = {library: "not installed" if version == "0.0" else version for library, version in versions.items()}
    for row in (*rows, *((library, version, "") for library, version in found.items())):
        table.add_row(*row)
    for part, text in checks.items():
        if part != "settings" or part in marks:  # otherwise the table has begun with them
            table.add_row("fits" if part == "memory" else part, marks.get(part, "ok"), text)
    console.print(table)


def doctor(config: DoctorConfig, console: Console, program: Program) -> dict[str, Any]:
    """The doctor command.  Returns what --json prints; `fit` says whether training can start.

    `program` is the script.
    """
    name = resolve_model(config.model)
    prepare_environment(offline=name in MADE_HERE)
    machine, versions = find_machine(), library_versions()
    planned = dataclasses.replace(program.train_defaults(name), weights=config.weights)
    told = measured(config, machine, name, planned, program, console)
    choice = choose_weights(machine, name, planned)
    planned = dataclasses.replace(planned, weights=choice.weights)
    kept = read_json(speeds()).get(speed_key(machine, name), {})
    speed = told.get(choice.weights) or (kept if kept.get("weights") == choice.weights else {})
    rows: list[tuple[str, ...]] = []
    warnings: list[str] = []

    def players() -> str:
        program.shared_pool()  # raises UsageError if the jail does not hold
        return f"holds, {len(os.sched_getaffinity(0))} workers"

    def boards() -> str:
        board_key()  # raises UsageError if it cannot be kept
        return "have a key that only this user can read"

    def settings() -> str:
        rows.extend(choose_settings(machine, name, choice, uses_transformers(planned)).rows)
        if machine.gpu or speed:
            rows.append(time_row(planned, speed.get("seconds", 0.0)))
        return "as above"

    def model() -> str:
        check_model(name, "none")
        also = f"; --model smollm2 is a real language model ({smollm2.SET_UP})" if name == "tiny" else ""
        return f"{name} is available{also}"

    def memory() -> str:
        needed = memory_needed(name, planned)
        if warning := too_little_memory(name, machine, needed):
            warnings.append("memory")
            return warning
        return f"about {sum(needed.values()) / 1e9:.0f} GB needed" if needed else "not known for this model"

    checks: dict[str, str] = {}
    wrong: list[str] = []
    known = {"settings": settings, "jail": players, "boards": boards, "model": model}
    known |= {"memory": memory} if machine.gpu else {}
    for part, check in known.items():
        try:
            checks[part] = check()
        except UsageError as error:
            checks[part] = str(error)
            wrong.append(part)
    show(console, rows, versions, checks, dict.fromkeys(warnings, "warning") | dict.fromkeys(wrong, "NO"))
    return {
        "machine": dataclasses.asdict(machine),
        "settings": rows,
        "versions": versions,
        "checks": checks,
        "warnings": warnings,
        "speeds": told,
        "fit": not wrong,
    }
