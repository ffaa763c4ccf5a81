"""A run that was stopped, killed or damaged resumes from its last whole checkpoint with the same numbers."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pty
import random
import select
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from safetensors.numpy import load_file

import gpt_2048_rl as program
from tests.conftest import STEPS, Run, flags
from tests.helpers import alive, descendants, wait_until
from tests.helpers import run as run_fresh
from tests.preloaded import call, run, started
from toolkit import UsageError
from toolkit.games import programs
from toolkit.model import tiny
from toolkit.run import watch
from toolkit.run.checkpoints import UNFINISHED, check_one_adapter, finish_checkpoint, newest_checkpoint


def command(out: Path, **changes: object) -> list[str]:
    """Arguments of the run that all tests read, in a folder of its own."""
    return flags(output_dir=out, run_name="run", **{"best_of": None} | changes)


def steps_done(folder: Path) -> list[int]:
    """The steps of which there are checkpoints, in order."""
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def numbers_of(folder: Path) -> tuple[dict[str, bytes], list[Any]]:
    """What two runs must share to the last bit: the adapter, and every completion with its boards and rewards."""
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    adapter = {name: tensor.tobytes() for name, tensor in weights.items()}
    steps = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for step in steps:
        for row in step["completions"]:
            for game in row["results"]:
                del game["seconds"]
    return adapter, steps


@pytest.fixture(scope="module")
def undisturbed(trained: Run) -> Path:
    """The run without interruption."""
    return trained.folder


@pytest.fixture(scope="module")
def stopped(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, which Ctrl-C has ended in one of its first steps."""
    out = tmp_path_factory.mktemp("stopped")
    with started(*command(out), log=out / "log") as process:
        assert wait_until(lambda: steps_done(out / "run"), 120), (out / "log").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    assert "stopped after step" in (out / "log").read_text()
    assert not (out / "run" / "result.json").exists()
    return out / "run"


@pytest.fixture
def unfinished(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped, tmp_path / "run", symlinks=True))


def in_the_middle_of_a_step(folder: Path) -> bool:
    """Whether a step has been played and not yet saved."""
    return len((folder / "rollouts.jsonl").read_text().splitlines()) > steps_done(folder)[-1]


@dataclass(frozen=True)
class Resumed:
    """A copy of the stopped run that went on to its end, keeping two checkpoints."""

    folder: Path
    said: str
    children: set[int]  # the processes that it had under way


@pytest.fixture(scope="module")
def resumed(stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    folder = Path(shutil.copytree(stopped, tmp_path_factory.mktemp("resumed") / "run", symlinks=True))
    (folder.parent / "latest").symlink_to("run")
    log = folder.parent / "log"
    with started("--resume", "--output-dir", folder.parent, "--keep", 2, log=log) as process:
        assert wait_until(lambda: in_the_middle_of_a_step(folder), 120), log.read_text()
        children = descendants(process.pid)
        assert process.wait(300) == 0, log.read_text()
    return Resumed(folder, log.read_text(), children)


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_numbers_of_one_never_interrupted(
    resumed: Resumed, stopped: Path, undisturbed: Path
) -> None:
    before = steps_done(stopped)[-1]
    assert before < STEPS
    assert f"resuming after step {before}" in resumed.said
    assert numbers_of(resumed.folder) == numbers_of(undisturbed)
    results = [json.loads((folder / "result.json").read_text()) for folder in (resumed.folder, undisturbed)]
    for name in ("scores", "races", "steps", "stage", "distinct", "zero_spread"):
        assert results[0][name] == results[1][name]


def won_step(step: int, stage: program.Stage) -> dict[str, Any]:
    """A line of rollouts.jsonl whose two completions win their game."""
    game = {"board": str(step), "outcome": "success", "max_tile": stage.target, "steps": 9, "score": 9, "detail": ""}
    done = {"text": "", "source": "", "works": "load", "cheating": "", "reward": 22.0, "results": [game]}
    return {"step": step, **stage._asdict(), "completions": [done, done]}


class TrainsNoFurther:
    """Of TRL's trainer what Progress asks of it before the next step."""

    def __init__(self, step: int) -> None:
        self.state = SimpleNamespace(global_step=step)
        self.model, self.args = SimpleNamespace(_get_logits_processor=None), SimpleNamespace()
        self.remove_callback = self.add_callback = self.train = lambda *_, **__: None


def resume(run: Path, rows: list[dict[str, Any]], ladder: program.Ladder) -> watch.Progress:
    """The progress of a run that goes on after these lines of rollouts.jsonl, with a checkpoint every second step."""
    config = program.TrainConfig(generations=2, save_steps=2)
    (run / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint = run / UNFINISHED / f"checkpoint-{len(rows)}"
    checkpoint.mkdir(parents=True)
    logs = {"loss": 0.0, "games/random_won": 0.0, "seconds/spent": 1.0}
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": [logs] * len(rows)}))
    finish_checkpoint(checkpoint, run, keep=1, best=True)
    rollouts = program.Rollouts(run / "rollouts.jsonl", config, ladder)
    trainer: Any = TrainsNoFurther(len(rows))
    games = programs.BackgroundGames([(6, 64)], partial(program.Evaluator, config))
    progress = watch.Progress(rollouts, games, run, Console(quiet=True))
    newest = progress.begin(trainer)
    with progress.watching():
        trainer.train(resume_from_checkpoint=newest)
    return progress


def check_the_ladder(folder: str) -> None:
    stages = [program.Stage(6, 64), program.Stage(4, 64)]
    original, resumed = (program.Ladder(stages, 0.9, 2) for _ in range(2))
    for step in range(7):
        original.record(step, original.at(step), 1.0)
    resume(Path(folder), [won_step(step + 1, original.at(step)) for step in range(7)], resumed)
    assert [stage for _, stage in original.since] == [(6, 64), (4, 64), (4, 128)]
    assert resumed.since == original.since
    assert resumed.recent == original.recent


def test_a_run_goes_on_at_the_stage_that_it_had_reached(tmp_path: Path) -> None:
    """No checkpoint holds the ladder: its stage follows from the steps in rollouts.jsonl."""
    call(check_the_ladder, tmp_path)


def check_the_best_checkpoint(folder: str) -> None:
    large, small = program.Stage(6, 64), program.Stage(4, 64)
    runs = (("new", [64, 64, 64, 16], True), ("up", [64, 8, 8, 16], True), ("down", [64, 8, 4, 4], False))
    for name, tiles, best in runs:
        run = Path(folder) / name
        run.mkdir()
        rows = [won_step(step, large if tile == 64 else small) for step, tile in enumerate(tiles, 1)]
        for row, tile in zip(rows, tiles, strict=True):
            row["completions"][0]["results"][0]["max_tile"] = tile
        assert resume(run, rows, program.Ladder([large, small])).is_best() is best


def test_the_best_checkpoint_has_the_largest_tiles_of_the_last_stage(tmp_path: Path) -> None:
    """Tiles are larger on a larger board, so an earlier stage would always be the best."""
    call(check_the_best_checkpoint, tmp_path)


def test_one_good_step_behind_a_checkpoint_makes_no_best() -> None:
    """After Ctrl-C `best` stood on a single lucky step, and no later checkpoint was as good."""
    steps = [("4x4", 5.0)] * 20
    assert watch.ends_best(steps, 20)
    assert not watch.ends_best([*steps, ("4x4", 5.6)], 20)
    assert watch.ends_best([*steps, *[("4x4", 5.6)] * 10], 20)
    assert watch.ends_best([("4x4", 5.6)], 20)


def test_a_checkpoint_with_a_second_adapter_is_refused(tmp_path: Path) -> None:
    """Of an earlier version, with --beta."""
    check_one_adapter(None)
    check_one_adapter(str(tmp_path))
    (tmp_path / "ref").mkdir()
    with pytest.raises(UsageError, match=f"begin anew with --model {tmp_path}"):
        check_one_adapter(str(tmp_path))


def test_latest_is_the_newest_run(undisturbed: Path) -> None:
    assert (undisturbed.parent / "latest").resolve() == undisturbed


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(unfinished: Path, undisturbed: Path) -> None:
    """It is cut short, as by a failing disk.  The run resumes from the one before, or else from the start.

    Curves show no step twice.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    newest = unfinished / f"checkpoint-{steps_done(unfinished)[-1]}"
    with (newest / "optimizer.pt").open("r+b") as file:
        file.truncate(1000)
    done = run(*command(unfinished.parent))
    assert done.returncode == 0, done.stderr
    assert f"{newest} is damaged: skipping it" in done.stdout
    assert numbers_of(unfinished) == numbers_of(undisturbed)
    events = EventAccumulator(str(unfinished))
    events.Reload()
    assert [event.step for event in events.Scalars("train/reward")] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--learning-rate", "0.5"], "--learning-rate was 0.001 when run began: leave it out, or choose another"),
        (["--model", "someone/else"], "--model was tiny when run began"),
        (["--steps", "1"], f"run has {STEPS} steps, and 1 are fewer: name more"),
    ],
)
def test_other_numbers_do_not_go_on_with_a_run(
    unfinished: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--run-name", "run", "--output-dir", str(unfinished.parent), *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_embedded_model(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter of an earlier version would train on weights that it was not made for, without a word."""
    origin = json.loads((unfinished / "origin.json").read_text())
    (unfinished / "origin.json").write_text(json.dumps(origin | {"tiny": tiny.VERSION - 1}))
    assert program.main(command(unfinished.parent)) == 2
    assert "of the embedded model" in capsys.readouterr().err


def test_a_finished_run_is_left_alone(undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = numbers_of(undisturbed)
    assert program.main(command(undisturbed.parent)) == 2
    said = f"error: {undisturbed} is finished: train on with more --steps, or choose another --run-name\n"
    assert capsys.readouterr().err == said
    assert numbers_of(undisturbed) == before


@pytest.mark.slow
def test_a_finished_run_is_trained_further(undisturbed: Path, tmp_path: Path) -> None:
    """With more steps.  Its first result stays beside the new one."""
    folder = Path(shutil.copytree(undisturbed, tmp_path / "run", symlinks=True))
    done = run(*command(tmp_path, steps=STEPS + 1))
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {STEPS}; the learning rate is that of {STEPS + 1} steps" in done.stdout
    steps = [json.loads(line)["step"] for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 2))
    results = [json.loads((folder / name).read_text()) for name in (f"result-{STEPS}.json", "result.json")]
    assert [result["steps"] for result in results] == [STEPS, STEPS + 1]


def test_a_strange_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    assert program.main(command(tmp_path)) == 2
    assert "no run of this program: choose another --run-name" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_there_has_to_be_a_run_to_go_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--resume", "--output-dir", str(tmp_path)]) == 2
    said = f"error: there is no run {tmp_path / 'latest'} to resume: leave --resume out\n"
    assert capsys.readouterr().err == said


@pytest.mark.slow
def test_a_run_with_beta_goes_on_with_what_it_has_learned(base: Path, tmp_path: Path) -> None:
    """TRL's second adapter, the reference, hid the trained one: it went on from the start, and nothing said so."""
    words = command(tmp_path, steps=1, best_of=0, beta=0.1, learning_rate=0.01, warmup_steps=0)
    done = run(*words)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    adapter = numbers_of(folder)[0]
    assert any(any(weights) for name, weights in adapter.items() if "lora_B" in name)
    (folder / "result.json").unlink()
    done = run(*words)  # repeats the evaluation
    assert done.returncode == 0, done.stderr
    assert "resuming after step 1" in done.stdout
    assert numbers_of(folder)[0] == adapter
    assert not (folder / "adapter" / "ref").exists()


@pytest.mark.slow
def test_two_processes_never_train_in_one_folder(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started(*command(unfinished.parent), log=unfinished.parent / "log") as first:
        assert wait_until(lambda: "loading torch" in (unfinished.parent / "log").read_text(), 60)
        assert program.main(command(unfinished.parent)) == 2
        said = f"error: another process trains in {unfinished}: wait for it, or choose another --run-name\n"
        assert capsys.readouterr().err == said
        assert first.poll() is None


@pytest.mark.slow
def test_training_leaves_no_process(resumed: Resumed) -> None:
    assert len(resumed.children) >= 2  # a worker and its zygote
    assert wait_until(lambda: not any(map(alive, resumed.children)), 10)


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept_and_the_best(resumed: Resumed) -> None:
    """`best` is the checkpoint after the last step with the largest tiles, in the last stage.  Here each step has one.

    On some boards the last step is the first one of a higher target, or three steps have the same tiles, which the test
    had not thought of.
    """
    folder = resumed.folder
    levels = []
    for step in numbers_of(folder)[1]:
        games = [game for row in step["completions"] for game in row["results"]]
        levels.append((step["target"], statistics.fmean(math.log2(game["max_tile"]) for game in games), step["step"]))
    *_, best = max(levels)
    assert (folder / "best").resolve() == folder / f"checkpoint-{best}"
    assert steps_done(folder) == sorted({best, STEPS - 1, STEPS})
    assert not (folder / UNFINISHED).exists() or not list((folder / UNFINISHED).iterdir())


def test_tensorboard_shows_more_than_curves(undisturbed: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(undisturbed), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    tags = events.Tags()
    assert {"completions/text_summary", "best program/text_summary"} <= set(tags["tensors"])
    assert len(events.Histograms("largest tile, log2")) == STEPS
    *_, last = events.Images("end of the best game")
    game = json.loads((undisturbed / "best_game.json").read_text())
    assert last.encoded_image_string == png(watch.board_picture(game["end"]))


def png(image: Any) -> bytes:
    """As TensorBoard keeps it."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def test_model_written_text_stays_in_its_block() -> None:
    """Of Markdown, in TensorBoard."""
    text = watch.indented("```\n<script>\r# title\x0b\n\n[link](x)\u2028* item\x85![](y)")
    assert all(line.startswith("    ") for line in text.splitlines())


@pytest.mark.slow
def test_a_stopped_run_has_its_report(stopped: Path) -> None:
    assert "best_game.json" in {path.name for path in stopped.iterdir()}
    assert "This run has no result" in (stopped / "report.html").read_text()


def test_a_run_says_what_made_it(undisturbed: Path) -> None:
    origin = json.loads((undisturbed / "origin.json").read_text())
    assert origin["versions"]["torch"].startswith("2.")
    assert set(origin) == {"started", "versions", "git", "tiny"}


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(unfinished: Path) -> None:
    """Checkpoints stay whole.  The first signal is SIGTERM, which works like Ctrl-C."""
    log = unfinished.parent / "log"
    with started(*command(unfinished.parent), log=log) as process:
        assert wait_until(lambda: in_the_middle_of_a_step(unfinished), 120), log.read_text()
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: "ending this step" in log.read_text(), 20), log.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert "stopped after step" not in log.read_text()
    assert wait_until(lambda: not any(map(alive, children)), 10)
    assert newest_checkpoint(unfinished, print)


@pytest.mark.slow
def test_kill_is_heard_like_an_interruption(unfinished: Path) -> None:
    at = steps_done(unfinished)[-1]
    log = unfinished.parent / "log"
    with started(*command(unfinished.parent), log=log) as process:
        assert wait_until(lambda: in_the_middle_of_a_step(unfinished), 120), log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143
    assert steps_done(unfinished)[-1] > at


@pytest.mark.slow
def test_a_closed_terminal_is_heard_like_an_interruption(unfinished: Path) -> None:
    """SIGHUP, of an ssh connection that dropped, ended the run at once: no checkpoint, no report."""
    at, log = steps_done(unfinished)[-1], unfinished.parent / "log"
    (unfinished / "report.html").unlink()
    with started(*command(unfinished.parent), log=log) as process:
        assert wait_until(lambda: in_the_middle_of_a_step(unfinished), 120), log.read_text()
        process.send_signal(signal.SIGHUP)
        assert wait_until(lambda: "ending this step" in log.read_text(), 20), log.read_text()
        process.send_signal(signal.SIGHUP)
        assert process.wait(300) == 129
    assert steps_done(unfinished)[-1] > at
    assert (unfinished / "report.html").is_file()


@pytest.mark.slow
def test_training_outlives_its_terminal(unfinished: Path) -> None:
    """In a terminal that is gone every line of output is an error (EIO), and the first one ended the run."""
    (ours, theirs), gone = pty.openpty(), threading.Event()

    def read() -> None:
        while not gone.is_set():
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 1 << 16)

    reader = threading.Thread(target=read)
    reader.start()
    with started(*command(unfinished.parent), log=Path(os.ttyname(theirs))) as process:
        assert wait_until(lambda: in_the_middle_of_a_step(unfinished), 120)
        gone.set()
        reader.join()
        os.close(ours)
        os.close(theirs)
        assert process.wait(300) == 0
    assert (unfinished / "result.json").is_file()


@pytest.mark.slow
def test_an_interrupted_last_evaluation_is_said_and_repeated(undisturbed: Path, tmp_path: Path) -> None:
    """It used to end without a word on how to go on, and without a report."""
    folder, log = Path(shutil.copytree(undisturbed, tmp_path / "run", symlinks=True)), tmp_path / "log"
    for name in ("result.json", "report.html"):
        (folder / name).unlink()
    with started(*command(tmp_path), log=log) as process:
        assert wait_until(lambda: "choosing the best program" in log.read_text(), 120), log.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    again = f"python gpt_2048_rl.py --output-dir {tmp_path} --run-name run"
    assert f"training is complete, its evaluation is not; to repeat that: {again}" in log.read_text()
    assert (folder / "report.html").is_file()
    with started(*command(tmp_path), log=log) as process:
        assert process.wait(300) == 0
    assert (folder / "result.json").is_file()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_leaves_the_checkpoint_before(base: Path, tmp_path: Path) -> None:
    """The error is one line that says where the run resumes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        done = run(*command(disk, steps=30))
        assert done.returncode == 2, done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: the disk that "), done.stderr
        kept = newest_checkpoint(disk / "run", print)
        assert kept
        step = kept.name.removeprefix("checkpoint-")
        assert done.stderr.splitlines()[-1].endswith(f"the run resumes after step {step}")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_removed_folder_is_said_in_one_line(unfinished: Path) -> None:
    log = unfinished.parent / "log"
    with started(*command(unfinished.parent), log=log) as process:
        assert wait_until(lambda: "resuming after step" in log.read_text(), 120)
        shutil.rmtree(unfinished, ignore_errors=True)
        assert process.wait(300) == 2
    assert log.read_text().splitlines()[-1].startswith(f"error: {unfinished} was removed")


@pytest.mark.slow
def test_kills_change_nothing(undisturbed: Path, tmp_path: Path) -> None:
    """kill -9 at random moments: at the start, after the first step, after a checkpoint that is new."""
    kills, rng = 3, random.Random(7)
    words = command(tmp_path, keep=3)
    folder, log, last = tmp_path / "run", tmp_path / "log", 0
    for kill in range(kills):
        with started(*words, log=log) as process:
            if kill % 3 == 0:
                time.sleep(rng.uniform(0.0, 2.0))
            elif kill % 3 == 1:
                assert wait_until(lambda: f"/{STEPS}  reward" in log.read_text(), 300), log.read_text()
            else:
                assert wait_until(lambda last=last: steps_done(folder)[-1:] > [last], 300), log.read_text()  # type: ignore[misc]
            time.sleep(rng.uniform(0.0, 0.5))
            assert process.poll() is None, log.read_text()
            children = descendants(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert wait_until(lambda children=children: not any(map(alive, children)), 10)  # type: ignore[misc]
        if folder.is_dir():
            newest = newest_checkpoint(folder, pytest.fail)
            now = int(newest.name.removeprefix("checkpoint-")) if newest else 0
            assert now >= last
            last = now
    assert last >= kills // 3  # one of three kills came after a new checkpoint
    (folder / "report.html").unlink(missing_ok=True)  # of a process that went on in between
    done = run_fresh(*words)  # a fresh process, whose sets have another order
    assert done.returncode == 0, done.stderr
    assert numbers_of(folder) == numbers_of(undisturbed)
    assert done.stdout.count("the report is ") == 2  # at the start that of what the kills left


# ---------------------------------------------------------------------------------------------------------------------
# Memory that runs out


def train_short_of_memory(out: str, where: str, status: str) -> None:
    """A run whose memory runs out: with four rows of an evaluation or of a step, or in its second update."""
    import torch
    from accelerate import Accelerator

    from toolkit.run.sampler import Recorder

    updates = count(1)
    places: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "evaluation": (program, "sample_batch", lambda model, tokenizer, prompts, config: len(prompts) >= 4),
        "generation": (Recorder, "__call__", lambda *_: (Path(out) / "run" / "rollouts.jsonl").exists()),
        "update": (Accelerator, "backward", lambda *_: next(updates) == 2),
    }
    owner, name, limit = places[where]
    whole: Callable[..., Any] = getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if limit(*args):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return whole(*args, **kwargs)

    setattr(owner, name, fails)
    words = command(Path(out), steps=2, save_steps=1, best_of=0)
    with (Path(out) / "log").open("w") as log, contextlib.redirect_stderr(log):
        assert program.main(words) == int(status)


@pytest.mark.slow
def test_an_update_without_memory_names_options_that_need_less(base: Path, tmp_path: Path) -> None:
    """It was a traceback with exit code 1.  With those options the run goes on from its last step."""
    call(train_short_of_memory, tmp_path, "update", 4)
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("error: ")]
    assert "updated with 4 completions at a time: take --batch-size 2 --accumulation 2" in line
    assert (tmp_path / "run" / "report.html").is_file()
    done = run(*command(tmp_path, steps=2, save_steps=1, best_of=0, batch_size=2, accumulation=2))
    assert done.returncode == 0, done.stderr
    assert "resuming after step 1" in done.stdout
    assert steps_done(tmp_path / "run") == [1, 2]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["batch_size"] == 2


@pytest.mark.slow
def test_an_evaluation_without_memory_goes_on_with_fewer_rows(base: Path, tmp_path: Path) -> None:
    call(train_short_of_memory, tmp_path, "evaluation", 0)
    stage = json.loads((tmp_path / "run" / "result.json").read_text())["scores"]["3x3"]
    assert [stage[player]["games"] for player in ("before", "after")] == [4, 4]


@pytest.mark.slow
def test_a_generation_without_memory_is_one_line(base: Path, tmp_path: Path) -> None:
    """A step's completions are generated together."""
    call(train_short_of_memory, tmp_path, "generation", 4)
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("error: ")]
    remedy = "another --run-name with --generations 2 --batch-size 2 --accumulation 1"
    assert f"memory ran out while 4 completions were generated: take {remedy}" in line
    assert (tmp_path / "run" / "report.html").is_file()
