"""Models that are made once: never half of one, whoever is killed or comes at the same time."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from toolkit.base.cached_models import alone_in, made_once


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


def wait_and_write(folder: Path) -> None:
    time.sleep(0.3)
    write(folder)
    (folder / str(os.getpid())).touch()


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    """The later one waits for the earlier one."""
    folder = tmp_path / "model"
    processes = [multiprocessing.Process(target=made_once, args=(folder, wait_and_write, has_weights)) for _ in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len([*folder.iterdir()]) == 2


def test_a_damaged_model_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    made_once(tmp_path / "model", write, has_weights)
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["weights"]


def test_the_lock_leaves_no_file_and_ends(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        assert not [*tmp_path.iterdir()]
    with pytest.raises(RuntimeError), alone_in(tmp_path):
        raise RuntimeError
    with alone_in(tmp_path):
        shutil.rmtree(tmp_path)
