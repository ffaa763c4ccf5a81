"""The three trackers; a module stands in for wandb where it is not installed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mini.track import open_tracker
from tests.mini.helpers import ROOT
from toolkit import UsageError

FIGURES = [(1, {"loss": 2.5, "kl": 0.25}), (2, {"loss": 1.5, "kl": 0.5})]


def write(kind: str, folder: Path, first_step: int = 0) -> None:
    tracker = open_tracker(kind, folder, {"lr": 0.1}, first_step)
    for step, figures in FIGURES:
        tracker.write(step, figures)
    tracker.close()


def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
    assert [event.value for event in events.Scalars("kl")] == [0.25, 0.5]


def test_none_writes_nothing(tmp_path: Path) -> None:
    write("none", tmp_path)
    assert list(tmp_path.iterdir()) == []


def stand_in(calls: list[Any]) -> ModuleType:
    module = ModuleType("wandb")

    def init(**options: Any) -> SimpleNamespace:
        calls.append(options)
        run = {"log": lambda figures, step: calls.append((step, figures)), "finish": lambda: calls.append("end")}
        return SimpleNamespace(**run)

    module.init = init  # type: ignore[attr-defined]
    module.Error = type("Error", (Exception,), {})  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(("first_step", "resume"), [(0, None), (5, "allow")])
def test_wandb_is_told_the_run_each_step_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_step: int, resume: str | None
) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", stand_in(calls))
    write("wandb", tmp_path / "a-run", first_step)
    assert calls[0]["config"] == {"lr": 0.1}
    assert (calls[0]["id"], calls[0]["resume"]) == ("a-run", resume)
    assert calls[1:] == [*FIGURES, "end"]


def test_wandb_that_is_missing_or_unwilling_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="wandb is not installed"):
        write("wandb", tmp_path)
    module = stand_in([])
    monkeypatch.setattr(module, "init", lambda **_: (_ for _ in ()).throw(module.Error("no API key")), raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(UsageError, match="--track wandb: no API key"):
        write("wandb", tmp_path)


@pytest.mark.optional
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    write("wandb", tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_wandb_is_not_imported_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by another tracker nor, indented by nothing, by any module."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # its import fails
    write("none", tmp_path)
    write("tensorboard", tmp_path)
    sources = "\n".join(path.read_text() for path in (ROOT / "mini").glob("*.py"))
    assert not re.search("^(import|from) wandb", sources, re.MULTILINE)
