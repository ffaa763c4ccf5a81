"""Trackers: which names are accepted, where their files go, and that each holds a run's curves."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests import helpers
from tests.conftest import Run, flags
from tests.helpers import run_python
from tests.preloaded import run
from toolkit import UsageError
from toolkit.run import report, trackers
from toolkit.run.reading import read_curves

INSTALLED = [name for name in trackers.TRACKERS if find_spec(name)]


def test_several_have_commas_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: sys.__spec__)
    assert trackers.named("tensorboard,wandb, trackio,mlflow") == list(trackers.TRACKERS)
    assert trackers.named("none") == []


def test_an_unknown_tracker_is_one_line_before_anything_is_loaded() -> None:
    done = run("--model", "tiny", "--report-to", "tensorboard,comet")
    assert done.returncode == 2
    assert done.stderr == "error: --report-to comet: name none, or some of tensorboard,wandb,trackio,mlflow\n"


def test_a_missing_tracker_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder of its name is no library: wandb makes one where it runs."""
    (tmp_path / "folder_of_a_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("folder_of_a_tracker", "no_such_tracker"):
        monkeypatch.setattr(trackers, "TRACKERS", (name,))
        with pytest.raises(UsageError, match=f"needs the library {name}: run ./setup.sh --with trackers"):
            program.parse_arguments(["--model", "tiny", "--report-to", name])


def test_what_the_environment_says_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: sys.__spec__)
    monkeypatch.setattr(os, "environ", {"WANDB_MODE": "online"})
    trackers.keep_in(tmp_path, "tensorboard,wandb")
    assert os.environ["WANDB_MODE"] == "online"
    assert os.environ["WANDB_DIR"] == str(tmp_path)
    assert not [name for name in os.environ if name.startswith(("TRACKIO", "MLFLOW"))]


def test_pages_need_no_tracker(trained: Run, tmp_path: Path) -> None:
    """Without TensorBoard's files all curves are still there, and so are the report and the comparison."""
    copy = shutil.copytree(trained.folder, tmp_path / "copy", symlinks=True)
    full = (copy / "report.html").read_text()
    for file in copy.glob("events.out.*"):
        file.unlink()
    shown, logged = read_curves(trained.folder), read_curves(copy)
    closing = {name for name in shown if name.startswith("train_")} | {"total_flos"}
    steps = shown.keys() - closing - {name for name in shown if name.startswith("at a glance/")}  # which repeat others
    assert len(steps) > 20
    for name in steps:
        assert logged[name] == pytest.approx(shown[name], rel=1e-5), name
    assert report.write_report(copy).read_text().count("data-chart") == full.count("data-chart") > 3
    done = run("compare", trained.folder, copy, "--output", tmp_path / "compare.html")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_can_do_without_trackers(base: Path, tmp_path: Path) -> None:
    done = run(*flags(output_dir=tmp_path, run_name="bare", steps=2, report_to="none"))
    assert done.returncode == 0, done.stderr
    assert list(read_curves(tmp_path / "bare")["reward"]) == [1, 2]
    assert not list((tmp_path / "bare").glob("events.out.*"))


# ---------------------------------------------------------------------------------------------------------------------
# With those that are installed: --with cloud has wandb, --with trackers all


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in INSTALLED, reason="optional: ./setup.sh --with trackers")


@pytest.fixture(scope="module")
def tracked(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that reported to all.  A process of its own: TRL imports trackers as it is imported."""
    place = tmp_path_factory.mktemp("tracked")
    words = flags(output_dir=place / "out", run_name="all", steps=2, report_to=",".join(INSTALLED))
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_", "MLFLOW_"))}
    done = helpers.run(*words, cwd=place, env=mine)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in place.iterdir()] == ["out"]  # nothing in the working directory
    return place / "out" / "all"


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of wandb's offline file: protocol buffers in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""  # after a header of seven bytes
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # a block's end is padded
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


@needs("wandb")
@pytest.mark.optional
def test_wandb_has_the_rewards(tracked: Path) -> None:
    """Offline: in the run's folder, to be sent by `wandb sync`."""
    (file,) = tracked.glob("wandb/offline-run-*/run-*.wandb")
    rows = [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in wandb_records(file) if record.HasField("history")]  # fmt: skip
    found = {row["train/global_step"]: row["train/reward"] for row in rows if "train/reward" in row}
    assert found == pytest.approx(read_curves(tracked)["reward"], rel=1e-5)


TRACKIO = """
import json, trackio
from toolkit.run.trackers import PROJECT
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs(PROJECT)
print(json.dumps([run.name, SQLiteStorage.get_logs(PROJECT, run.name)]))
"""


@needs("trackio")
@pytest.mark.optional
def test_trackio_has_the_rewards(tracked: Path) -> None:
    place = {"PYTHONPATH": str(helpers.ROOT), "TRACKIO_DIR": str(tracked / "trackio")}
    done = run_python(TRACKIO, env=os.environ | place)
    name, rows = json.loads(done.stdout.splitlines()[-1])
    found = {row["train/global_step"]: row["train/reward"] for row in rows if "train/reward" in row}
    assert name == "all"
    assert found == pytest.approx(read_curves(tracked)["reward"], rel=1e-5)


@needs("mlflow")
@pytest.mark.optional
def test_mlflow_has_the_rewards(tracked: Path) -> None:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tracked / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(trackers.PROJECT)
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "all"
    rewards = {point.step: point.value for point in client.get_metric_history(found.info.run_id, "reward")}
    assert rewards == pytest.approx(read_curves(tracked)["reward"], rel=1e-5)


@needs("wandb")
@pytest.mark.optional
def test_tensorboard_is_complete_beside_others(tracked: Path) -> None:
    """Its curves, and what we write there ourselves: completions and the best program."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked))
    events.Reload()
    tags = events.Tags()
    assert {"train/reward", "train/games/won"} <= {*tags["scalars"]}
    assert {"completions/text_summary", "best program/text_summary"} <= {*tags["tensors"]}
    assert "end of the best game" in tags["images"]


@pytest.mark.optional
def test_a_tracker_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="optional: ./setup.sh --with trackers")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    client = mlflow.MlflowClient("http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r"--report-to mlflow: .*--resume"), trackers.blaming_the_tracker():
        client.get_run("none")
