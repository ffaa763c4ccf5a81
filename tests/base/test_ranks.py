"""torchrun: two processes train one adapter, on whole groups each, and leave one log, one checkpoint and one result."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import HELD_OUT, ROOT, alive, cmdline, descendants, run_python, wait_until
from tests.preloaded import call
from toolkit.base import ranks
from toolkit.run.reading import read_curves

RANKS, STEPS, GENERATIONS, BATCH = 2, 2, 4, 8


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The program in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS),
               str(ROOT / "gpt_2048_rl.py"), *map(str, arguments)]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, result, streams and steps."""

    folder: Path
    result: dict[str, Any]
    stdout: str
    stderr: str
    steps: list[dict[str, Any]]


@pytest.fixture(scope="module")
def together(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps; a rank has two groups of each."""
    out = tmp_path_factory.mktemp("ranks")
    numbers = {"steps": STEPS, "generations": GENERATIONS, "batch-size": BATCH, "accumulation": 1, "boards": 2,
               "save-steps": 1, "games": 4, "ladder": "4:128", "max-new-tokens": 48}  # fmt: skip
    flags = [*HELD_OUT, *(text for name, value in numbers.items() for text in (f"--{name}", str(value)))]
    done = torchrun("--model", "tiny", "--output-dir", out, "--run-name", "two", "--json", *flags)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (out / "two" / "rollouts.jsonl").read_text().splitlines()]
    return Run(out / "two", json.loads(done.stdout.splitlines()[-1]), done.stdout, done.stderr, steps)


@pytest.mark.long
def test_one_of_them_speaks(together: Run) -> None:
    assert together.result["ranks"] == RANKS
    assert len(together.stdout.splitlines()) == 1
    assert [line.split()[1] for line in together.stderr.splitlines() if line.startswith("step ")] == ["1/2", "2/2"]


@pytest.mark.long
def test_a_step_has_the_groups_of_both(together: Run) -> None:
    """Whole groups, each with its own boards.  A rank that ignores its number would play the other's boards."""
    assert [len(step["completions"]) for step in together.steps] == [RANKS * BATCH] * STEPS
    boards = []
    for step in together.steps:
        played = [tuple(game["seed"] for game in row["results"]) for row in step["completions"]]
        groups = [set(played[i : i + GENERATIONS]) for i in range(0, len(played), GENERATIONS)]
        assert all(len(group) == 1 for group in groups)
        boards += [group.pop() for group in groups]
    assert len(set(boards)) == len(boards) == STEPS * RANKS * BATCH // GENERATIONS


@pytest.mark.long
def test_they_sample_different_programs(together: Run) -> None:
    texts = [row["text"] for row in together.steps[0]["completions"]]
    assert texts[:BATCH] != texts[BATCH:]


@pytest.mark.long
def test_both_sample_from_the_model_that_they_train(together: Run) -> None:
    """Of both ranks the larger gap counts."""
    gaps = read_curves(together.folder)["sampler/gap"]
    assert len(gaps) == STEPS
    assert max(gaps.values()) < 1e-4


@pytest.mark.long
def test_there_is_one_checkpoint_a_step_and_one_adapter(together: Run) -> None:
    """The program itself has checked that both ranks end with the same adapter."""
    names = {path.name for path in together.folder.iterdir()}
    assert {"checkpoint-1", "checkpoint-2", "adapter", "result.json"} <= names
    assert sum(name.startswith("events.out") for name in names) == 2  # of the steps, and of the best program


def check_the_digest(base: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
    before = ranks.weights_digest(model)
    assert ranks.weights_digest(model) == before
    next(weights for name, weights in model.named_parameters() if "lora_B" in name).data[0, 0] += 1e-6
    assert ranks.weights_digest(model) != before


def test_the_digest_tells_adapters_apart(base: Path) -> None:
    call(check_the_digest, base)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks share two cores")
def test_ranks_share_out_the_cores() -> None:
    """The pool of the second of two ranks has the odd cores, a worker on each."""
    code = """
import os
import gpt_2048_rl as program
cores = sorted(os.sched_getaffinity(0))
with program.Pool() as pool:
    assert [os.sched_getaffinity(worker._process.pid) for worker in pool._workers] == [{core} for core in cores[1::2]]
"""
    done = run_python(code, env={**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert done.returncode == 0, done.stderr


def test_one_process_needs_no_library_to_agree_with_itself() -> None:
    done = run_python(
        "import sys\n"
        "from toolkit.base import ranks\n"
        "assert (ranks.RANK, ranks.RANKS) == (0, 1)\n"
        "assert ranks.gathered((1, 2)) == [1, 2]\n"
        "assert ranks.by_first_rank(lambda: 3) == 3\n"
        "assert not {'torch', 'accelerate', 'unsloth'} & sys.modules.keys()"
    )
    assert done.returncode == 0, done.stderr


AGREE = """
import json, sys
from toolkit.base import ranks

made = []
ranks.join("transformers")
ours = ranks.by_first_rank(lambda: made.append(ranks.RANK) or {"of": ranks.RANK})
all_of_them = ranks.gathered([ranks.RANK, "a"])
print(json.dumps([ranks.RANK, made, ours, all_of_them]), flush=True)
assert "unsloth" not in sys.modules
ranks.by_first_rank(lambda: 1 // 0)
"""


@pytest.mark.slow
def test_all_ranks_get_what_the_first_made_and_end_if_it_failed(tmp_path: Path) -> None:
    """`by_first_rank` and `gathered` in two processes that met by `join`."""
    script = tmp_path / "agree.py"
    script.write_text(AGREE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = [
        subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank),
                              "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                              "MASTER_PORT": str(port)})
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=120) for process in started]
    assert [json.loads(out) for out, _ in said] == [
        [0, [0], {"of": 0}, [0, "a", 1, "a"]],
        [1, [], {"of": 0}, [0, "a", 1, "a"]],
    ]
    assert "ZeroDivisionError" in said[0][1]
    assert "Traceback" not in said[1][1]
    first, second = (process.returncode for process in started)
    assert first in (1, -signal.SIGABRT)  # with its peer gone, gloo may abort an ordinary exit, after the traceback
    assert second == 2


@pytest.mark.slow
def test_nohup_reaches_the_processes_of_torchrun(tmp_path: Path) -> None:
    """torchrun takes SIGHUP for itself, and ends its processes over it, unless it is told which signals are its own."""
    script = tmp_path / "told.py"
    script.write_text("import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)")
    docs = (ROOT / "docs" / "cluster.md").read_text()
    documented = re.search(r"^nohup torchrun (--signals-to-handle) (\S+) ", docs, re.MULTILINE)
    assert documented
    done = subprocess.run(["nohup", sys.executable, "-m", "torch.distributed.run", "--standalone", *documented.groups(),
                           script], capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.slow
def test_commands_other_than_train_refuse_it(tmp_path: Path) -> None:
    done = torchrun("eval", "tiny")
    assert done.returncode != 0
    assert "eval runs in one process: start it with python, without torchrun" in done.stderr


@pytest.mark.long
def test_nothing_is_left_of_them(together: Run) -> None:
    ours = [pid for pid in descendants(os.getpid()) if str(together.folder.parent).encode() in cmdline(pid)]
    assert wait_until(lambda: not any(map(alive, ours)), 5)
