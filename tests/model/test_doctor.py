"""The doctor command: what it finds, measures and keeps, and how it says so."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpt_2048_rl as program
from tests import preloaded
from tests.model.conftest import CPU, DEFAULTS, GB10, H100, RTX_4090, RTX_5080, settings_of
from toolkit import UsageError
from toolkit.model.doctor import DoctorConfig, doctor, forms, time_row
from toolkit.model.machine import Machine

Examined = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Examined:
    """The doctor on a given machine: (what it returns, what it prints)."""
    from huggingface_hub import constants
    from rich.console import Console

    def examine(machine: Machine, config: DoctorConfig, jail: Callable[[], str] = lambda: "holds") -> tuple[Any, str]:
        monkeypatch.setattr("toolkit.model.doctor.find_machine", lambda: machine)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        console = Console(width=250, file=io.StringIO(), record=True, markup=False, emoji=False)
        monkeypatch.setattr(program, "train_defaults", lambda name: program.TrainConfig(model=name))
        monkeypatch.setattr(program, "shared_pool", jail)
        told = doctor(config, console, program)
        return json.loads(json.dumps(told)), console.export_text()

    return examine


def lines(text: str, verdict: str) -> list[str]:
    """The first words of a table's rows that have a verdict in their second column."""
    return [words[0] for words in map(str.split, text.splitlines()) if words[1:2] == [verdict]]


def test_the_doctor_finds_this_machine_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["doctor", "--model", "tiny", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["fit"]
    assert told["versions"]["trl"] == "1.14.2"
    assert told["checks"].keys() == {"settings", "jail", "boards", "model"}  # memory is a question of GPUs
    assert "unsloth" in err


def test_the_doctor_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["doctor", "--model", str(tmp_path)]) == 2
    assert lines(capsys.readouterr().out, "NO") == ["model"]


@pytest.mark.usefixtures("little_memory")
def test_memory_is_a_warning_and_no_refusal(gpt_oss: Path, examined: Examined) -> None:
    told, text = examined(H100, DoctorConfig(str(gpt_oss)))
    assert told["fit"]
    assert (told["warnings"], lines(text, "warning")) == (["memory"], ["fits"])
    assert lines(text, "ok") == ["jail", "boards", "model"]
    told, text = examined(GB10, DoctorConfig(str(gpt_oss)))
    assert told["warnings"] == []
    assert told["checks"]["memory"] == "about 22 GB needed"
    assert "4-bit NF4" in text


@pytest.mark.usefixtures("little_memory")
def test_the_doctor_examines_the_settings_that_were_asked_for(gpt_oss: Path, examined: Examined) -> None:
    told, text = examined(RTX_4090, DoctorConfig(str(gpt_oss), weights="16bit"))
    assert not told["fit"]
    assert lines(text, "NO") == ["settings"]
    assert "--weights 16bit needs a GPU of 80 GB" in told["checks"]["settings"]
    for model, weights in ((str(gpt_oss), "stored"), ("tiny", "auto")):
        told, text = examined(GB10, DoctorConfig(model, weights))  # type: ignore[arg-type]
        assert "as stored; gpt-oss's experts in MXFP4" in [row[1] for row in told["settings"]]


def test_a_small_gpu_evaluates_in_mxfp4_and_measures_what_it_can_train() -> None:
    """Only training takes more memory there; a form that is measured is taken later without a further question."""
    assert not settings_of(RTX_5080, program.EvalConfig(model="")).load["load_in_4bit"]
    assert forms(RTX_5080, "unsloth/gpt-oss-20b") == ["4bit"]
    assert forms(RTX_4090, "unsloth/gpt-oss-20b") == ["4bit", "stored"]
    assert forms(H100, "unsloth/gpt-oss-20b") == ["4bit", "stored", "16bit"]


def measure_a_small_step(out: str, err: str) -> None:
    """As the command line does, with fewer completions."""
    whole, words = program.train_defaults, ["doctor", "--model", "tiny", "--weights", "stored", "--measure", "--json"]
    small = partial(dataclasses.replace, generations=4, batch_size=4, accumulation=1, max_new_tokens=16)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(program, "train_defaults", lambda model: small(whole(model)))
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(Path(out).open("w"))))
        stack.enter_context(contextlib.redirect_stderr(stack.enter_context(Path(err).open("w"))))
        assert program.main(words) == 0


@pytest.mark.slow
def test_the_doctor_measures_a_form(base: Path, tmp_path: Path) -> None:
    preloaded.call(measure_a_small_step, tmp_path / "out", tmp_path / "err")
    told = json.loads((tmp_path / "out").read_text().splitlines()[-1])
    assert told["speeds"]["stored"]["tokens_per_s"] > 0
    assert "h of generating" in (tmp_path / "err").read_text()


@pytest.mark.usefixtures("little_memory")
def test_the_fastest_form_is_kept_for_this_gpu_and_model(
    gpt_oss: Path, examined: Examined, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A form that fails is left out.  Another GPU has its own choice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speeds = {"4bit": {"tokens_per_s": 700.0, "seconds": 15.0}, "16bit": {"tokens_per_s": 800.0, "seconds": 12.0}}

    def run(command: list[str], **_: Any) -> Any:
        weights = command[command.index("--weights") + 1]
        speed = speeds.get(weights)
        told = json.dumps({"speeds": {weights: speed}})
        return SimpleNamespace(returncode=0 if speed else 2, stdout=told, stderr="error: it does not load")

    monkeypatch.setattr("toolkit.model.doctor.subprocess.run", run)
    told, text = examined(H100, DoctorConfig(str(gpt_oss), measure=True))
    assert told["speeds"] == speeds
    assert "stored: failed (error: it does not load)" in text
    assert "the fastest here: 800 tokens/s (doctor --measure)" in text
    assert "0.5 h of generating" in text
    assert "0.5 h of generating" in examined(H100, DoctorConfig(str(gpt_oss)))[1]
    for other, weights in ((H100, "4bit"), (GB10, "auto")):
        assert "not measured" in examined(other, DoctorConfig(str(gpt_oss), weights))[1]  # type: ignore[arg-type]
    kept = settings_of(H100, DEFAULTS, str(gpt_oss))
    assert kept.load["load_in_16bit"]
    assert kept.environment == {"UNSLOTH_MXFP4_KEEP_PACKED": "0"}
    assert settings_of(H100, program.TrainConfig(weights="4bit"), str(gpt_oss)).load["load_in_4bit"]
    assert settings_of(GB10, DEFAULTS, str(gpt_oss)).load["load_in_4bit"]


def test_without_a_gpu_there_is_nothing_to_choose(examined: Examined) -> None:
    told, text = examined(CPU, DoctorConfig("tiny", measure=True))
    assert told["speeds"] == {}
    assert "nothing to choose" in text


def test_the_time_of_a_run_counts_its_evaluations() -> None:
    """320 boards for each of two models, the 32 surest answers and 512 programs are 37 batches of 32."""
    what, time, why = time_row(DEFAULTS, 36.0)
    assert (what, time) == ("time", "1.6 h of generating")
    assert "120 steps and 37 batches of evaluation, 36.0 s each" in why
    assert "80 steps and 46 batches" in time_row(program.train_defaults("tiny"), 1.0)[2]


def test_a_jail_that_does_not_hold_is_told_beside_the_rest(examined: Examined) -> None:
    def jail() -> str:
        raise UsageError("no seccomp [here]")

    told, text = examined(CPU, DoctorConfig("tiny"), jail)
    assert not told["fit"]
    assert lines(text, "NO") == ["jail"]
    assert "no seccomp [here]" in text
    assert told["checks"]["boards"] == "have a key that only this user can read"
    assert told["checks"]["model"].startswith("tiny is available; --model smollm2 is a real language model")
