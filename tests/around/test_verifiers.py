"""The task as a verifiers environment: packed as for the hub, and evaluated by verifiers' own program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from integrations import task
from tests.helpers import ALWAYS_UP, HONEST, ROOT

pytest.importorskip("verifiers", reason="optional: ./setup.sh --with verifiers")
pytestmark = pytest.mark.optional


class Scripted(BaseHTTPRequestHandler):
    """A model behind OpenAI's interface: its first program is bad, and after feedback it writes a better one."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        better = "largest tile" in asked["messages"][-1]["content"]
        message = {"role": "assistant", "content": f"```python\n{HONEST if better else ALWAYS_UP}```"}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"],
                  "choices": [{"index": 0, "finish_reason": "length" if better else "stop", "message": message}],
                  "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}  # fmt: skip
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    """The scripted model's address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def build(kind: str, folder: Path, into: Path) -> Path:
    """The package that hatchling makes of a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (package,) = into.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return package


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's files as the hub installs them: a wheel, built from the source package alone."""
    folder = tmp_path_factory.mktemp("package")
    with tarfile.open(build("sdist", ROOT / "integrations" / "hub", folder)) as archive:
        archive.extractall(folder, filter="data")
    with zipfile.ZipFile(build("wheel", folder / "verifiers_2048-0.1.0", folder)) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


EVALUATIONS = {
    "one turn": (),
    "three turns": ("--env.taskset.turns", "3"),
    "no boards": ("--env.taskset.game.boards", "0"),
}
VF_EVAL = """
import importlib.metadata, json, os, sys
(command,) = importlib.metadata.entry_points(group="console_scripts", name="vf-eval")
main = command.load()
for line in sys.stdin:
    folder, words = json.loads(line)
    if not os.fork():
        os.chdir(folder)
        for stream in (1, 2):
            os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.argv[1:] = words
        sys.exit(main())
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def evaluations(installed: Path, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Path]]:
    """Exit codes and folders of what vf-eval does, where nothing of this repository can be found.

    One process imports verifiers, which takes longer than an evaluation, and is forked for each.
    """
    folders = {name: tmp_path_factory.mktemp("evaluation") for name in EVALUATIONS}
    words = ["verifiers-2048", "--model", "scripted", "--client.base-url", model, "--client.api-key-var", "NONE",
             "--no-push", "--no-rich", "--run.name", "run", "--num-rollouts", "2", "--env.taskset.tasks", "2",
             "--env.taskset.game.size", "5", "--env.taskset.game.target", "32"]  # fmt: skip
    asked = [[str(folder), [*words, "--output-dir", str(folder), *EVALUATIONS[name]]]
             for name, folder in folders.items()]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", VF_EVAL], input="\n".join(map(json.dumps, asked)), cwd=installed,
                          env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True,
                          timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(folders, zip(map(int, done.stdout.split()), folders.values(), strict=True), strict=True))


def traces(folder: Path) -> list[dict[str, Any]]:
    """Of the evaluation's four episodes."""
    lines = [json.loads(line) for line in (folder / "run" / "traces.jsonl").read_text().splitlines()]
    return [trace for line in lines for trace in line.get("traces", [line])]


def rewards(trace: dict[str, Any]) -> dict[str, float]:
    """By name."""
    return {name: reward["score"] for name, reward in trace["rewards"].items()}


def test_an_evaluation_records_the_four_rewards_and_no_seed(evaluations: dict[str, tuple[int, Path]]) -> None:
    code, folder = evaluations["one turn"]
    assert code == 0, (folder / "said").read_text()
    found = traces(folder)
    assert len(found) == 4
    for trace in found:
        lost = rewards(trace)
        assert trace["metrics"]["won"] == 0
        assert lost.pop("strategy_succeeds") < program.NEARLY
        assert lost == {"function_works": program.WORKS["load"], "no_cheating": program.CLEAN, "ends_in_time": 0.0}
    text = (folder / "run" / "traces.jsonl").read_text()
    assert not any(str(seed) in text for i in range(2) for seed in task.Question(index=i).seeds)


def test_the_outcome_comes_back_and_the_better_program_counts(evaluations: dict[str, tuple[int, Path]]) -> None:
    code, folder = evaluations["three turns"]
    assert code == 0, (folder / "said").read_text()
    for trace in traces(folder):
        assert "The last position on board" in json.dumps(trace["nodes"])
        assert trace["metrics"]["won"] == 1
        assert rewards(trace) == {"function_works": program.WORKS["load"], "no_cheating": program.CLEAN,
                                  "strategy_succeeds": program.SUCCESS, "ends_in_time": program.CUT_OFF}  # fmt: skip
        assert sum(node.get("sampled", False) for node in trace["nodes"]) == 2  # a won game needs no third answer


def test_a_game_that_cannot_be_is_refused(evaluations: dict[str, tuple[int, Path]]) -> None:
    code, folder = evaluations["no boards"]
    assert code != 0
    said = (folder / "said").read_text()
    assert "boards must lie between 1 and 64, not 0" in said
    assert "Traceback" not in said
