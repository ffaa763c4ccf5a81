"""A run's folder: files and checkpoints are whole or absent, and runs resume as they began.  Statistics."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from rich.console import Console

import gpt_2048_rl as program
from tests.helpers import ORDINARY, run_python
from tests.record_run import RECORDED, write_curves
from toolkit import UsageError
from toolkit.base import files
from toolkit.games import evaluation
from toolkit.run import checkpoints, reading, results, runs, steps


@dataclass
class Config:
    """What a run's folder needs of a config, and two more fields."""

    output_dir: Path
    run_name: str = ""
    model: str = "owner/name"
    learning_rate: float = 5e-5
    keep: int = 3
    resume: bool = False
    json: bool = False


def checkpoint(run: Path, step: int, best: bool = False, keep: int = 9) -> Path:
    """A finished checkpoint of one small file."""
    written = run / checkpoints.UNFINISHED / f"checkpoint-{step}"
    written.mkdir(parents=True)
    (written / "weights").write_text(f"of step {step}")
    checkpoints.finish_checkpoint(written, run, keep, best)
    return run / written.name


def steps_in(run: Path) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in checkpoints.checkpoints(run)]


# ---------------------------------------------------------------------------------------------------------------------
# Files and checkpoints


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    files.write_whole(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_whole(tmp_path / "file", "new\ud800")
    assert (tmp_path / "file").read_text() == "old"


def test_a_write_to_a_full_disk_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part took the last of the disk's room."""

    def fill(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    files.write_whole(tmp_path / "file", "old")
    monkeypatch.setattr(files, "flush", fill)
    with pytest.raises(OSError, match="No space"):
        files.write_whole(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file outside of the run, which links in the run's folder point to."""
    file = tmp_path / "precious"
    file.write_text("mine")
    return file


def test_a_write_replaces_a_link_and_what_it_points_to_stays(tmp_path: Path, precious: Path) -> None:
    """`python -m toolkit.run.report RUN` overwrote any file that someone else's folder had a link to."""
    for link in ("report.html", ".report.html.unfinished"):
        (tmp_path / link).symlink_to(precious)
    files.write_whole(tmp_path / "report.html", "page")
    assert precious.read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "page"
    assert not (tmp_path / "report.html").is_symlink()


def test_a_lock_is_no_link(tmp_path: Path, precious: Path) -> None:
    """It was opened for writing, which emptied the file behind a link."""
    (tmp_path / ".lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        runs.lock(tmp_path)
    assert precious.read_text() == "mine"


def test_steps_are_not_appended_through_a_link(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "rollouts.jsonl").symlink_to(precious)
    rollouts = program.Rollouts(tmp_path / "rollouts.jsonl", program.TrainConfig(), program.Ladder([(4, 64)]))  # type: ignore[list-item]
    with pytest.raises(OSError, match="symbolic links"):
        rollouts.write({"step": 1})
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["adapter", ".unfinished", ".sampler", "trackio", "mlflow.db", "adapter/weights"])
def test_training_refuses_a_folder_with_links(name: str, tmp_path: Path, precious: Path) -> None:
    """Checkpoints, adapters and trackers' files would be written to where they point."""
    run = begun(tmp_path)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(precious)
    with pytest.raises(UsageError, match=rf"{name} is a link: remove it"):
        runs.open_run(Config(tmp_path, run_name="run"))


def test_training_refuses_a_folder_with_a_pipe(tmp_path: Path) -> None:
    """Whoever opens one waits for ever."""
    os.mkfifo(begun(tmp_path) / "rollouts.jsonl")
    with pytest.raises(UsageError, match="is a special file: remove it"):
        runs.open_run(Config(tmp_path, run_name="run"))


HIDDEN_LINK = f"""
import os, pathlib, tempfile
from toolkit import UsageError
from toolkit.base import files
if os.geteuid() == 0:  # root may list any folder
    {ORDINARY}
run = pathlib.Path(tempfile.mkdtemp(), "run")
(run / "adapter").mkdir(parents=True)
(run / "adapter" / "chat_template.jinja").symlink_to("/etc/hostname")
os.chmod(run / "adapter", 0o300)
try:
    files.check_links(run)
except UsageError as error:
    print(error)
os.chmod(run / "adapter", 0o700)
"""


def test_a_folder_that_cannot_be_listed_hides_no_link() -> None:
    """With mode 0300 its files can be written all the same: training wrote its chat template into a ~/.bashrc."""
    done = run_python(HIDDEN_LINK)
    assert "adapter cannot be listed (Permission denied): remove it, or change its mode" in done.stdout, done.stderr


def test_a_page_waits_for_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.out.tfevents.1.pipe")
    with pytest.raises(UsageError, match="is no file: remove it"):
        reading.read_curves(tmp_path)


def test_the_links_of_this_program_are_no_hindrance(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run / "config.json").write_text("{}")
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to("offline-run-1")
    checkpoint(run, 1, best=True)
    (run / "rollouts.jsonl").write_text((RECORDED / "rollouts.jsonl").read_text())
    assert runs.open_run(Config(tmp_path, run_name="run")) == run


def test_the_name_of_an_old_result_stays_in_the_folder(tmp_path: Path) -> None:
    """`steps` is part of that name, and came from the file as it was."""
    run = begun(tmp_path)
    checkpoint(run, 1)
    (run / "rollouts.jsonl").write_text((RECORDED / "rollouts.jsonl").read_text())
    (run / "config.json").write_text('{"steps": 1}')
    (run / "result.json").write_text('{"steps": "x/../../elsewhere"}')
    (run / "result-x").mkdir()
    config = Config(tmp_path, run_name="run")
    config.steps = 2  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"result\.json is damaged"):
        runs.open_run(config)
    assert (run / "result.json").is_file()
    assert not (tmp_path / "elsewhere.json").exists()


def test_json_is_read_or_its_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    assert files.read_json(file) == {}
    file.write_text('{"a": 1}')
    assert files.read_json(file) == {"a": 1}
    for damaged in ("", '{"a": ', "[1]", "null", "\udcff", "[" * 200_000):
        file.write_bytes(damaged.encode("utf-8", "surrogateescape"))
        with pytest.raises(UsageError, match=r"file\.json is damaged"):
            files.read_json(file)


def test_the_newest_checkpoints_stay_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10, 11):
        checkpoint(tmp_path, step, best=step == 2, keep=2)
    assert steps_in(tmp_path) == [11, 10, 2]
    assert (tmp_path / "best").resolve().name == "checkpoint-2"
    checkpoint(tmp_path, 12, best=True, keep=2)
    checkpoint(tmp_path, 13, keep=2)
    assert steps_in(tmp_path) == [13, 12]


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    for name in ("checkpoint-last", "checkpoint-", "checkpoint-4-old"):
        (tmp_path / name).mkdir()
    assert steps_in(tmp_path) == [3]


@pytest.mark.parametrize("damage", ["changed", "shortened", "missing", "added", "no digests", "bad digests"])
def test_a_damaged_checkpoint_is_skipped(damage: str, tmp_path: Path) -> None:
    whole, damaged = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    match damage:
        case "changed":
            (damaged / "weights").write_text("of step 3")
        case "shortened":
            os.truncate(damaged / "weights", 3)
        case "missing":
            (damaged / "weights").unlink()
        case "added":
            (damaged / "more").touch()
        case "no digests":
            (damaged / checkpoints.DIGESTS).unlink()
        case _:
            (damaged / checkpoints.DIGESTS).write_text("{")
    said: list[str] = []
    assert checkpoints.newest_checkpoint(tmp_path, said.append) == whole
    assert said == [f"{damaged} is damaged: skipping it"]


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_done_again(tmp_path: Path) -> None:
    (checkpoint(tmp_path, 1) / "weights").unlink()
    assert checkpoints.newest_checkpoint(tmp_path, lambda _: None) is None
    again = checkpoint(tmp_path, 1)
    assert checkpoints.newest_checkpoint(tmp_path, pytest.fail) == again


class WritesCheckpoints:
    """The part of a transformers Trainer that AtomicCheckpoints needs.  It may fail between its two files."""

    def __init__(self, step: int, rank: int = 0, fails: bool = False) -> None:
        self.state, self.fails = SimpleNamespace(global_step=step), fails
        self.accelerator = SimpleNamespace(is_main_process=rank == 0, wait_for_everyone=lambda: None)

    def _get_output_dir(self, trial: Any) -> str:
        raise NotImplementedError

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(f"of step {self.state.global_step}")
        if self.fails:
            raise OSError(28, "No space left on device")
        (folder / "optimizer").touch()


def trainer_in(run: Path) -> Any:
    """A class of trainers whose checkpoints of even steps are the best."""

    class Trainer(checkpoints.AtomicCheckpoints, WritesCheckpoints):
        run_folder, keep_checkpoints = run, 1

        def is_best(self) -> bool:
            return bool(self.state.global_step % 2 == 0)

    return Trainer


def test_a_damaged_checkpoint_takes_no_place_from_whole_ones(tmp_path: Path) -> None:
    """The one of step 60 was removed by the call that wrote it, because a damaged one of step 100 was the newest."""
    for step in (40, 100):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-100" / "weights").write_text("")
    checkpoint(tmp_path, 60, keep=1)
    assert steps_in(tmp_path) == [60]


def test_a_run_without_a_checkpoint_forgets_its_steps(tmp_path: Path) -> None:
    """Steps 1 to 3 of a run that was killed before its first checkpoint stood before steps 1 to 5 of the next start."""
    kept = ["before.json", "config.json"]
    for name in (*kept, "rollouts.jsonl", "events.out.tfevents.1"):
        (tmp_path / name).touch()
    assert checkpoints.forget_steps(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert not checkpoints.forget_steps(tmp_path)


def test_a_checkpoint_appears_when_it_is_complete(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    trainer(1)._save_checkpoint(None, None)
    assert checkpoints.newest_checkpoint(tmp_path, pytest.fail) == tmp_path / "checkpoint-1"
    with pytest.raises(OSError, match="No space left"):
        trainer(2, fails=True)._save_checkpoint(None, None)
    assert steps_in(tmp_path) == [1]
    assert not (tmp_path / "best").exists()
    trainer(2)._save_checkpoint(None, None)
    trainer(3)._save_checkpoint(None, None)
    assert steps_in(tmp_path) == [3, 2]
    assert (tmp_path / "best").resolve().name == "checkpoint-2"
    written = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert written == {"weights", "optimizer", checkpoints.DIGESTS}
    assert list((tmp_path / checkpoints.UNFINISHED).iterdir()) == []


def test_only_the_first_rank_moves_a_checkpoint(tmp_path: Path) -> None:
    trainer_in(tmp_path)(1, rank=1)._save_checkpoint(None, None)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoints.UNFINISHED]


# ---------------------------------------------------------------------------------------------------------------------
# Starting and resuming


def begun(folder: Path, name: str = "run") -> Path:
    """The folder of a run that has begun."""
    runs.make_latest(run := runs.open_run(Config(folder, run_name=name, learning_rate=0.5)))
    return run


def test_a_new_run_has_its_config_its_origin_and_a_name(tmp_path: Path) -> None:
    run = runs.open_run(Config(tmp_path, learning_rate=0.5))
    assert run.name.startswith("name-2")  # the model's name and the time
    assert json.loads((run / "config.json").read_text())["learning_rate"] == 0.5
    assert set(json.loads((run / "origin.json").read_text())) == {"started", "versions", "git", "tiny"}


def test_a_start_that_fails_leaves_latest_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged package made an empty run, and then `eval outputs/latest` failed."""

    def fails(*_: object, **__: object) -> NoReturn:
        raise UsageError("the package is damaged")

    run = begun(tmp_path)
    monkeypatch.setattr(program, "load_model", fails)
    monkeypatch.setattr(program, "held_out_games", lambda _: None)  # they would be played beside other tests
    with pytest.raises(UsageError, match="the package is damaged"):
        program.train(dataclasses.replace(program.train_defaults("tiny"), output_dir=tmp_path), Console(quiet=True))
    assert (tmp_path / "latest").resolve() == run


def test_a_run_keeps_what_it_began_from(tmp_path: Path) -> None:
    """The other run's folder may go, and what trained it is known nevertheless."""
    adapter = tmp_path / "first" / "adapter"
    adapter.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "training_config.json", "tokenizer.json"):
        (adapter / name).write_text('{"base_model_name_or_path": "owner/base"}')
    (tmp_path / "first" / "origin.json").write_text('{"started": "before"}')
    half = tmp_path / "base" / "start" / "adapter"  # by a start that was killed
    half.mkdir(parents=True)
    run = runs.open_run(Config(tmp_path, run_name="base", model=str(adapter)))
    shutil.rmtree(tmp_path / "first")
    kept = {"adapter_config.json", "adapter_model.safetensors", "training_config.json"}
    assert {path.name for path in (run / "start").iterdir()} == kept
    start = json.loads((run / "origin.json").read_text())["start"]
    assert start == {"digests": checkpoints.digests(run / "start"), "origin": {"started": "before"}}
    other = runs.open_run(Config(tmp_path, model=str(run / "start")))
    assert other.name.startswith("base-2")  # the name of the model that the adapter was trained on


def test_a_run_that_has_begun_keeps_its_config(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert runs.open_run(Config(tmp_path, run_name="run")) == run
    assert runs.stored_config(run, Config) == Config(tmp_path, run_name="run", learning_rate=0.5)


def test_of_two_that_start_at_once_only_one_writes_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wrote it and only then asked for the lock: one trained, and its folder had the other's options."""
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process trains in"):
            begun(tmp_path)
    assert not (tmp_path / "run" / "config.json").exists()

    def ends_meanwhile(run: Path) -> None:
        (run / "config.json").write_text("{}")

    monkeypatch.setattr(runs, "lock", ends_meanwhile)
    with pytest.raises(UsageError, match="another process has just begun"):
        begun(tmp_path)


@dataclass
class Longer(Config):
    """With steps."""

    steps: int = 2


def test_a_run_that_its_time_ended_goes_on_to_its_own_steps(tmp_path: Path) -> None:
    """It was told to take more steps than its schedule has, which would have changed the learning rates."""
    run = begun(tmp_path)
    (run / "config.json").write_text('{"steps": 2}')
    checkpoint(run, 1)
    shutil.copy(RECORDED / "rollouts.jsonl", run)
    for result, goes_on in (
        ({"steps": 2, "collapsed": False}, False),
        ({"steps": 1, "collapsed": True}, False),
        ({"steps": 1, "collapsed": False, "ended": "its time was up (--minutes)"}, True),
    ):
        (run / "result.json").write_text(json.dumps(result))
        with contextlib.nullcontext() if goes_on else pytest.raises(UsageError, match="is finished"):
            runs.open_run(Longer(tmp_path, run_name="run"))
    assert (run / "result-1.json").exists()
    assert not (run / "result.json").exists()


@pytest.mark.parametrize(("file", "said"), [("result.json", "is finished: train on"), ("thesis.txt", "no run of this")])
def test_other_folders_are_left_alone(file: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / file).touch()
    with pytest.raises(UsageError, match=said):
        begun(tmp_path)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [file]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_finished_run_whose_checkpoints_are_damaged_says_so(damaged: bool, tmp_path: Path) -> None:
    """It was told that it has none."""
    run = begun(tmp_path)
    (run / "config.json").write_text('{"steps": 1}')
    (run / "result.json").write_text('{"steps": 1}')
    if damaged:
        (checkpoint(run, 1) / "weights").write_text("")
    with pytest.raises(UsageError, match=f"has {'only damaged checkpoints' if damaged else 'no checkpoint'}"):
        runs.open_run(Longer(tmp_path, run_name="run"))
    assert (run / "result.json").exists()


@pytest.mark.parametrize("link", ["run/best", "latest"])
def test_a_copy_that_followed_the_links_is_named_before_anything_is_done(link: str, tmp_path: Path) -> None:
    """It ended in a traceback after a step, and left a link for which the next start was refused."""
    (tmp_path / link).mkdir(parents=True)
    with pytest.raises(UsageError, match=f"{link} is a folder, and was a link: remove it"):
        begun(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written \(Not a directory\): choose another --output-dir"):
        begun(tmp_path / "file")


def test_the_run_to_resume_is_the_one_named_or_the_newest(tmp_path: Path) -> None:
    first, second = begun(tmp_path, "first"), begun(tmp_path, "second")
    assert runs.run_to_resume("first", tmp_path, resume=False) == first
    assert runs.run_to_resume("first", tmp_path, resume=True) == first
    assert runs.run_to_resume("", tmp_path, resume=True) == second
    assert runs.run_to_resume("", tmp_path, resume=False) is None
    assert runs.run_to_resume("third", tmp_path, resume=False) is None
    with pytest.raises(UsageError, match=f"there is no run {tmp_path / 'third'} to resume: leave --resume out"):
        runs.run_to_resume("third", tmp_path, resume=True)


def test_a_config_of_an_older_version_gets_defaults(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run / "config.json").write_text('{"learning_rate": 0.25, "gone": 1, "resume": true, "json": true}')
    assert runs.stored_config(run, Config) == Config(tmp_path, run_name="run", learning_rate=0.25)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "config.json is damaged"), ("7", "config.json is damaged"),
     ('{"keep": "three"}', "config.json: keep cannot be 'three'"),
     ('{"model": null}', "config.json: model cannot be None")],
)  # fmt: skip
def test_a_config_of_wrong_types_is_named(text: str, said: str, tmp_path: Path) -> None:
    """With an empty list, other options were said to have been auto when the run began."""
    run = begun(tmp_path)
    (run / "config.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        runs.stored_config(run, Config)


STRANGE = {"unsafe_no_jail": True, "vllm_server": "http://192.0.2.1:8000", "report_to": "tensorboard,wandb"}


def strange_run(folder: Path, **stored: Any) -> Path:
    """A run of the embedded model that someone else has made."""
    runs.make_latest(run := runs.open_run(program.TrainConfig(model="tiny", output_dir=folder, run_name="strange")))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | stored))
    return run


def test_no_file_gives_a_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--resume of a run whose config.json said unsafe_no_jail ran its model's programs on the host, without a word.

    A server would get the prompts and a key, and answer for the model; a tracker would get the curves."""
    strange_run(tmp_path, **STRANGE)
    config = program.parse_arguments(["--resume", "--output-dir", str(tmp_path)])
    assert (config.unsafe_no_jail, config.vllm_server, config.report_to) == (False, "", "tensorboard")
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == [
        f"strange began with --{name}" for name in ("unsafe-no-jail", "vllm-server", "report-to")]  # fmt: skip


def test_the_command_line_gives_a_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With and without the jail, a run can go on either way."""
    strange_run(tmp_path, unsafe_no_jail=True)
    resume = ["--resume", "--output-dir", str(tmp_path)]
    assert program.parse_arguments([*resume, "--unsafe-no-jail"]).unsafe_no_jail is True
    assert capsys.readouterr().err == ""
    assert program.parse_arguments([*resume, "--no-unsafe-no-jail"]).unsafe_no_jail is False


def test_the_command_that_goes_on_with_a_run_has_its_permissions(tmp_path: Path) -> None:
    config = program.TrainConfig(unsafe_no_jail=True, report_to="wandb", vllm_server="")
    words = "--run-name run --unsafe-no-jail --report-to wandb"
    assert results.again(tmp_path / "run", config) == f"python gpt_2048_rl.py --output-dir {tmp_path} {words}"


def test_eval_and_play_take_the_game_alone_from_a_folder(tmp_path: Path) -> None:
    stored = {"held_out": ["4:64"], "keys": "wasd", "served_name": "x", "api_key_file": "x", "model": "x", **STRANGE}
    (tmp_path / checkpoints.TRAINING).write_text(json.dumps(stored))
    for kind in (program.EvalConfig, program.PlayConfig):
        names = {field.name for field in dataclasses.fields(kind)}
        taken = {word for word in runs.options_of(tmp_path, names) if word.startswith("--")}
        assert taken <= {"--held-out", "--size", "--target", "--keys"}


def test_every_start_without_the_jail_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    program.start_players(program.GameOptions(unsafe_no_jail=True))
    assert capsys.readouterr().err.startswith("warning: --unsafe-no-jail: model-written code runs with all your rights")
    program.start_players(program.GameOptions())
    assert capsys.readouterr().err == ""


def test_a_run_that_was_once_without_the_jail_says_so_for_ever(tmp_path: Path) -> None:
    """Its result said what the last process did."""
    strange_run(tmp_path)
    unsafe = program.TrainConfig(model="tiny", output_dir=tmp_path, run_name="strange", unsafe_no_jail=True)
    for config in (unsafe, program.TrainConfig(model="tiny", output_dir=tmp_path, run_name="strange")):
        run = runs.open_run(config)
        assert files.read_json(run / "config.json")["unsafe_no_jail"] is True


def test_the_newest_run_lies_where_it_was_looked_for(tmp_path: Path) -> None:
    """`latest` is a link, so in a strange folder it could lead to any run of the reader's."""
    mine = begun(tmp_path / "mine")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "latest").symlink_to(mine)
    with pytest.raises(UsageError, match=r"latest leads out of .*strange: name the run"):
        runs.run_to_resume("", tmp_path / "strange", resume=True)
    (tmp_path / "strange" / "named").symlink_to(mine)
    with pytest.raises(UsageError, match="named leads out of"):
        runs.run_to_resume("named", tmp_path / "strange", resume=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("keys", "bébé"), ("reasoning", "much"), ("games", True), ("games", 2.5), ("ladder", [4]), ("ladder", "4:64"),
     ("unsafe_no_jail", "no"), ("timeout", None), ("recipe", {})],
)  # fmt: skip
def test_a_stored_option_has_the_type_of_its_field(name: str, value: object, tmp_path: Path) -> None:
    """Only numbers and texts were looked at; the rest was a traceback later on."""
    run = strange_run(tmp_path, **{name: value})
    with pytest.raises(UsageError, match=f"config.json: {name} cannot be"):
        runs.stored_config(run, program.TrainConfig)


def test_what_may_not_change_is_named(tmp_path: Path) -> None:
    stored = Config(tmp_path, run_name="run", learning_rate=0.5)
    runs.check_unchanged(Config(tmp_path / "moved", learning_rate=0.5, keep=1), stored, {"keep"})
    for config, said in ((Config(tmp_path), "--learning-rate was 0.5 when run began: leave it out"),
                         (Config(tmp_path, learning_rate=0.5, keep=1), "--keep was 3")):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            runs.check_unchanged(config, stored, ())


# ---------------------------------------------------------------------------------------------------------------------
# Interruptions


def test_an_error_of_its_own_is_raised_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="out of memory"), runs.blaming_the_folder(tmp_path):
        raise RuntimeError("out of memory")
    assert time.monotonic() - started < 0.5


@pytest.mark.parametrize("error", [FileNotFoundError(), RuntimeError("No such file or directory (os error 2)"),
                                   ValueError("Can't find a valid checkpoint at {run}/checkpoint-2")])  # fmt: skip
def test_a_removal_under_way_is_waited_for(error: Exception, tmp_path: Path) -> None:
    """Removal takes a while, and the file missed first need not be the last one removed."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").touch()
    error.args = tuple(str(text).format(run=run) for text in error.args)
    threading.Timer(0.2, shutil.rmtree, [run]).start()
    with pytest.raises(UsageError, match="was removed"), runs.blaming_the_folder(run):
        raise error


def test_a_missing_file_of_a_run_that_is_there_is_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    (tmp_path / "config.json").touch()
    with pytest.raises(FileNotFoundError), runs.blaming_the_folder(tmp_path):
        (tmp_path / "none").open()


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    checkpoint(tmp_path, 7)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with (
        pytest.raises(UsageError, match=r"^the disk that .* is full: .*the run resumes after step 7$"),
        runs.blaming_the_folder(tmp_path),
    ):
        raise OSError(28, "No space left on device")


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP as at the start of a program, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
def test_the_first_interruption_waits_for_the_step_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with runs.Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):  # no step is under way
            signal.raise_signal(signal.SIGINT)
        interruption.waits = True
        signal.raise_signal(signal.SIGTERM)
        assert interruption.signal == signal.SIGTERM
        with pytest.raises(SystemExit) as stop:
            signal.raise_signal(signal.SIGTERM)
        assert stop.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("hangup")
def test_a_terminal_that_closes_says_so_twice_and_stops_nothing_at_once() -> None:
    """Its shell sends SIGHUP, and so does the kernel: a second signal used to end the program without a checkpoint."""
    with runs.Interruption() as interruption:
        interruption.waits = True
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert interruption.signal == signal.SIGHUP
    signal.raise_signal(signal.SIGHUP)  # while the report is written


@pytest.mark.usefixtures("hangup")
def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with runs.Interruption() as interruption:
        signal.raise_signal(signal.SIGHUP)
        assert interruption.signal == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


# ---------------------------------------------------------------------------------------------------------------------
# Reading runs


def test_a_curve_without_numbers_is_left_out(tmp_path: Path) -> None:
    """If the loss is not a number, the page still has the other curves."""
    write_curves(tmp_path / "events.out.tfevents.0", {"reward": {1: 1.0, 2: math.nan, 3: 3.0}})
    assert reading.read_curves(tmp_path) == {"reward": {1: 1.0, 3: 3.0}}


def test_rollouts_are_cut_off_at_a_checkpoint(tmp_path: Path) -> None:
    """What a killed run logged after its checkpoint is done again; fewer steps than the checkpoint's are damage."""
    file = Path(shutil.copy(RECORDED / "rollouts.jsonl", tmp_path))
    whole = file.read_text()
    file.write_text(whole[:-100])  # the kill cut the sixth line off
    assert [row["step"] for row in steps.rewind(file, 4)] == [1, 2, 3, 4]
    assert file.read_text() == "".join(whole.splitlines(keepends=True)[:4])
    with pytest.raises(UsageError, match=r"rollouts\.jsonl is damaged"):
        steps.rewind(file, 5)


def test_a_damaged_run_is_left_as_it_is(tmp_path: Path) -> None:
    """More steps renamed its result.json and changed its config.json before the damage was found."""
    run = begun(tmp_path)
    checkpoint(run, 4)
    (run / "config.json").write_text('{"steps": 6}')
    (run / "result.json").write_text('{"steps": 6}')
    (run / "rollouts.jsonl").write_text("damaged\n" * 6)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    config = Config(tmp_path, run_name="run")
    config.steps = 8  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"rollouts\.jsonl is damaged"):
        runs.open_run(config)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_programs_of_the_last_stage_are_raced_first(tmp_path: Path) -> None:
    """Then by their mean reward there, then the newest.  What cheats or does not load is left out."""
    file = tmp_path / "rollouts.jsonl"
    tries = [(6, "early", 20, "load", ""), (6, "both", 20, "load", ""), (4, "cheats", 9, "load", "imports os"),
             (4, "both", 3, "load", ""), (4, None, 9, "none", ""), (4, "fails", 9, "fail", ""),
             (4, "once", 5, "load", ""), (4, "twice", 8, "load", ""), (4, "twice", 2, "load", "")]  # fmt: skip
    with file.open("w") as log:
        for step, (size, source, reward, works, cheating) in enumerate(tries, 1):
            done = {"source": source, "reward": reward, "works": works, "cheating": cheating}
            step_of_one = {"step": step, "size": size, "target": 128, "completions": [done | {"results": []}]}
            log.write(json.dumps(step_of_one) + "\n")
    assert steps.programs_to_race(file) == ["twice", "once", "both", "early"]


def test_a_score_is_written_and_read_with_the_same_fields() -> None:
    run = reading.read_run(RECORDED)
    entry, played = run.result["scores"]["4x4"], run.held_out["4x4"]
    after = played.scores[evaluation.AFTER]
    assert vars(after) == entry["after"] | {"tiles": after.tiles}
    assert list(played.by_board(evaluation.AFTER).items()) == list(zip(entry["boards"], after.tiles, strict=True))
    assert evaluation.score(after.tiles, played.target) == after


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


def test_a_game_is_won_when_its_target_was_made() -> None:
    tiles = 64, 128, 256, 4
    assert evaluation.score(tiles, 128) == evaluation.Score(4, 0.5, 0.15, 0.85, 64, 5.75, tiles)
    assert evaluation.score((), 128) == evaluation.Score(0, 0.0, 0.0, 1.0, 0.0, 0.0, ())


@pytest.mark.parametrize(
    ("won", "games", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (0, 0, 0.0, 1.0)],
)
def test_wilson_interval_against_published_values(won: int, games: int, low: float, high: float) -> None:
    assert evaluation.wilson_interval(won, games) == pytest.approx((low, high), abs=5e-5)


def test_players_are_compared_on_the_boards_of_both() -> None:
    a, b = {"x": 256, "y": 64, "z": 32, "only a": 512}, {"x": 64, "y": 128, "z": 32, "only b": 2}
    for target, won in ((128, (1, 1)), (64, (0, 0)), (256, (1, 0))):
        pair = evaluation.Pair("4x4", target, "a", "b", 3, *won, 1.0, 1, 1, 1.0)
        assert evaluation.compare_players("4x4", target, "a", a, "b", b) == pair


@pytest.mark.parametrize("count", range(9))
def test_the_sign_test_counts_every_outcome(count: int) -> None:
    """The share of all falls of `count` fair coins that are at least as uneven."""
    falls = [sum(fall) for fall in itertools.product((0, 1), repeat=count)]
    for above in range(count + 1):
        uneven = sum(abs(2 * fall - count) >= abs(2 * above - count) for fall in falls) / len(falls)
        assert evaluation.sign_test(above, count - above) == pytest.approx(uneven)


@pytest.mark.parametrize("count", range(1, 13))
def test_the_interval_of_the_median_is_the_narrowest_that_holds(count: int) -> None:
    """Values fall below the median as coins do.  Over all their falls the interval holds it in at least 95%, and the
    next narrower one does not."""

    def holds(k: int) -> float:
        falls = itertools.product((0, 1), repeat=count)
        return float(sum(k <= sum(fall) <= count - k for fall in falls) / 2**count)

    interval = evaluation.median_interval(range(1, count + 1))
    if interval is None:
        assert holds(1) < 0.95
    else:
        k = int(interval[0])
        assert interval == (k, count + 1 - k)
        assert holds(k) >= 0.95 > holds(k + 1)
