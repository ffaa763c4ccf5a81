"""Models that are made once: never half of one, whoever is killed or comes at the same time."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from toolkit import UsageError
from toolkit.base.cached_models import made_once


def has_weights(folder: Path) -> bool:
    return (folder / "weights").is_file()


def write(folder: Path) -> None:
    (folder / "weights").write_text("all of them")


def be_killed(folder: Path) -> None:
    (folder / "half").write_text("half of them")
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Each kill while SmolLM2 was converted left a hidden folder of up to 270 MB in the cache for ever."""
    killed = multiprocessing.Process(target=made_once, args=(tmp_path / "model", be_killed, has_weights))
    killed.start()
    killed.join()
    assert [*tmp_path.glob(".model*")]
    made_once(tmp_path / "model", write, has_weights)
    assert [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*")] == ["model", "model/weights"]


def test_two_processes_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The later one begins while the first is at work, and ends after it."""
    folder, first_is_there, second_is_there = tmp_path / "model", multiprocessing.Event(), multiprocessing.Event()

    def first(made: Path) -> None:
        first_is_there.set()
        assert second_is_there.wait(60)
        write(made)

    def second(made: Path) -> None:
        second_is_there.set()
        processes[0].join()
        write(made)

    processes = [multiprocessing.Process(target=made_once, args=(folder, first, has_weights))]
    processes[0].start()
    assert first_is_there.wait(60)
    made_once(folder, second, has_weights)
    assert processes[0].exitcode == 0
    assert [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*")] == ["model", "model/weights"]


def test_a_damaged_model_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    made_once(tmp_path / "model", write, has_weights)
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["weights"]


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems: another machine may be at work there."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".model-of-another").mkdir()
    made_once(tmp_path / "model", write, has_weights)
    assert {file.name for file in tmp_path.iterdir()} == {"model", ".model-of-another"}


def test_a_failure_leaves_nothing_and_no_lock(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UsageError, match="No space left on device"):
        made_once(tmp_path / "model", fails, has_weights)
    assert not [*tmp_path.iterdir()]
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
