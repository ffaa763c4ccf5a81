"""mini/modal_app.py without an account: a module stands in for Modal's, and the function runs here."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.mini.helpers import ROOT


class Stub:
    """Takes any call and any method, and remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            decorates = name in ("function", "local_entrypoint")
            return (lambda function: function) if decorates else self

        return call


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., tuple[Any, Stub]]]:
    """Import the file as `modal run` would, with these words on the command line; without any, as in the cloud."""

    def load(*words: str) -> tuple[Any, Stub]:
        stub, module = Stub(), ModuleType("modal")
        for name in ("Image", "Volume", "Secret"):
            setattr(module, name, stub)
        module.App, module.is_local = lambda _: stub, lambda: bool(words)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "modal", module)
        monkeypatch.setattr(sys, "argv", ["modal", *words])
        monkeypatch.delitem(sys.modules, "mini.modal_app", raising=False)
        file = importlib.import_module("mini.modal_app")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(file, "HOME", tmp_path)
        return file, stub

    yield load
    sys.modules.pop("mini.modal_app", None)


def called(stub: Stub, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return next(call[1:] for call in stub.calls if call[0] == name)


def test_the_image_has_what_pyproject_pins_and_both_folders(imported: Callable[..., tuple[Any, Stub]]) -> None:
    _, stub = imported("--algo", "ppo")
    pins, _ = called(stub, "pip_install")
    text = (ROOT / "pyproject.toml").read_text()
    assert [re.split("==", pin)[0] for pin in pins] == ["torch", "tokenizers", "safetensors", "numpy", "tensorboard",
                                                       "tyro", "rich", "chess", "wandb"]  # fmt: skip
    assert all(f'"{pin}' in text for pin in pins)
    assert called(stub, "add_local_python_source")[0] == ("mini", "toolkit")


KEY = ("from_name", ("wandb",), {"required_keys": ["WANDB_API_KEY"]})


@pytest.mark.parametrize(("words", "asked"), [
    (["--algo", "grpo"], False), (["--track", "wandb"], True), (["--track=wandb"], True), ([], False),
], ids=str)  # fmt: skip
def test_a_key_is_asked_for_with_wandb_only(
    words: list[str], asked: bool, imported: Callable[..., tuple[Any, Stub]]
) -> None:
    """Modal refuses a function that needs fewer things in the cloud, where there are no words, than it did here."""
    _, stub = imported(*words)
    assert len(called(stub, "function")[1]["secrets"]) == 1
    assert (KEY in stub.calls) == asked
    assert called(stub, "from_name") == (("mini-outputs",), {"create_if_missing": True})


@pytest.mark.parametrize("code", [0, 2])
def test_the_local_end_exits_as_the_run_did(
    code: int, imported: Callable[..., tuple[Any, Stub]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = imported()
    monkeypatch.setattr(file, "train", SimpleNamespace(remote=lambda options: code if options == ["--lr", "1"] else 9))
    with pytest.raises(SystemExit, match="2") if code else contextlib.nullcontext():  # 0 would count as a failure
        file.run("--lr", "1")


def test_the_functions_body_trains_and_keeps_what_it_wrote(
    imported: Callable[..., tuple[Any, Stub]], tmp_path: Path
) -> None:
    file, stub = imported()
    (tmp_path / "text.txt").write_text("the cat sat on the mat; " * 40)
    tiny = "--n-layer 1 --n-head 2 --n-embd 16 --horizon 8 --steps 2 --held-out 4 --data text.txt --track none"
    assert file.train(tiny.split()) == 0
    assert len(list(tmp_path.glob("outputs/mini-text-*/checkpoint.pt"))) == 1
    assert stub.calls[-1][0] == "commit"
    assert file.train(["--data", "missing.txt"]) == 2
    assert [call[0] for call in stub.calls].count("commit") == 2


@pytest.mark.optional
def test_real_modal_has_the_function_too(tmp_path: Path) -> None:
    """Without an account: all but the volume's commit."""
    pytest.importorskip("modal")
    (tmp_path / "text.txt").write_text("the cat sat on the mat; " * 40)
    tiny = "--n-layer 1 --n-head 2 --n-embd 16 --horizon 8 --steps 2 --held-out 4 --data text.txt --track none"
    code = f"""
from pathlib import Path; from types import SimpleNamespace; from mini import modal_app
modal_app.HOME, modal_app.volume = Path({str(tmp_path)!r}), SimpleNamespace(commit=lambda: print("kept"))
print("exit code", modal_app.train.local({tiny.split()}), sorted(modal_app.app.registered_functions))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "HOME": str(tmp_path)},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.splitlines()[-2:] == ["kept", "exit code 0 ['train']"]
    assert len(list(tmp_path.glob("outputs/mini-text-*/checkpoint.pt"))) == 1
