"""cpp/train.cpp, built here: the same weights and tokens give the losses that Python has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from mini.__main__ import main
from mini.model import GPT, GptConfig
from mini.text import draw_windows
from tests.mini.helpers import ROOT

STEPS = 5
MISSING = [tool for tool in ("cmake", "ninja", "g++") if not shutil.which(tool)]
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(MISSING), reason=f"not found: {', '.join(MISSING)}")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.cpp, compiled against the libtorch that comes with torch."""
    folder = tmp_path_factory.mktemp("build")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", ROOT / "mini" / "cpp", "-B", folder, "-G", "Ninja", prefix], check=True)
    subprocess.run(["cmake", "--build", folder], check=True)
    return folder / "train"


def run(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=600, check=False)


def first_loss(folder: Path) -> float:
    """Of the weights, tokens and options in the folder, by Python."""
    config = json.loads((folder / "config.json").read_text())
    ids = torch.frombuffer(bytearray((folder / "tokens.bin").read_bytes()), dtype=torch.uint16).long()
    weights = torch.load(folder / "start.pt", weights_only=True)
    model = GPT(
        GptConfig(config["n_layer"], config["n_head"], config["n_embd"], config["n_positions"], int(ids.max()) + 1)
    )
    model.load_state_dict(weights)
    train = ids[: len(ids) - len(ids) // 10]
    text = draw_windows(train, config["horizon"], config["batch_size"], config["seed"], 0)
    logits = model.logits(model(text[:, :-1], torch.ones_like(text[:, :-1])))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).item()


def test_losses_and_weights_are_pythons(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the cat sät on the mat; " * 60, encoding="utf-8")
    options = ["--n-layer", 2, "--n-head", 2, "--n-embd", 32, "--horizon", 16, "--steps", STEPS, "--batch-size", 8,
               "--lr", "1e-3", "--lr-decay", 0, "--log-steps", 1, "--data", tmp_path / "text.txt",
               "--log-dir", tmp_path / "run", "--track", "none"]  # fmt: skip
    assert main(["text", *map(str, options)]) == 0
    expected = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)", capsys.readouterr().out, re.MULTILINE)]
    done = run(program, tmp_path / "run", STEPS)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert losses[0] == pytest.approx(first_loss(tmp_path / "run"), abs=1e-4)
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert losses == pytest.approx(expected, abs=5e-4)  # printed to four digits
    ours, theirs = state["model"], torch.load(tmp_path / "run" / "cpp.pt", weights_only=False)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, atol=1e-4, rtol=0)


def test_bad_input_is_one_line_and_exit_code_2(program: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"algo": "grpo",\n "steps": 3}')
    for words, said in (((), "usage"), ((tmp_path / "none",), "cannot be read"), ((tmp_path, "ten"), "STEPS must be"),
                        ((tmp_path,), "only --algo supervised")):  # fmt: skip
        done = run(program, *words)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
