"""The battery of hostile strategies: each has its outcome, none leaves a trace, wherever the program runs.

They are judged in one batch, on one board each, by the same pool as everything else; the tests read the results.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import gpt_2048_rl as program
from tests.battery import BATTERY, GROUPS, PROTOCOL, job
from tests.conftest import AS_ROOT, ON_X86
from tests.helpers import HONEST, ORDINARY, alive, descendants, run_python, wait_until, without_seconds


@dataclass(frozen=True)
class Aftermath:
    """The battery's results, and the state of the machine afterwards."""

    results: dict[str, program.GameResult]
    written: list[str]  # files where the strategies wanted to write
    processes: set[int]  # below the workers
    workers: int
    answers: tuple[list[program.GameResult], list[program.GameResult]]  # of an honest strategy, before and after


@pytest.fixture(scope="module")
def aftermath(pool: program.Pool) -> Iterator[Aftermath]:
    """Judge the whole battery at once.  The folder to write into is open to everybody: only the jail protects it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    play = functools.partial(program.execute_strategies, timeout=1.0, pool=pool)
    try:
        before = play([HONEST], (1, 2))[0]
        verdicts = pool.judge([job(name, str(folder / "pwned")) for name in BATTERY])
        results = {name: verdict.results[0] for name, verdict in zip(BATTERY, verdicts, strict=True)}
        after = play([HONEST], (1, 2))[0]
        workers = {worker._process.pid for worker in pool._workers}
        wait_until(lambda: len(set[int]().union(*map(descendants, workers))) == len(workers))
        processes = set[int]().union(*map(descendants, workers))
        written = [path.name for path in folder.iterdir()]
        yield Aftermath(results, written, processes, sum(map(alive, workers)), (before, after))
    finally:
        shutil.rmtree(folder)


def test_battery_is_large() -> None:
    """No name stands in two groups, because it would hide a case."""
    assert len(BATTERY) == sum(map(len, GROUPS)) >= 280


@pytest.mark.parametrize("name", BATTERY)
def test_hostile_strategy_has_its_outcome(aftermath: Aftermath, name: str) -> None:
    """The one right outcome, and a detail that is safe to print."""
    result = aftermath.results[name]
    assert result.outcome == BATTERY[name][1], result
    assert len(result.detail) <= program.LIMITS.detail_chars
    assert result.detail.isprintable()


@pytest.mark.parametrize("name", ["eats its own messages", "reads the next board first"])
def test_a_player_that_waits_for_ever_is_blocked(aftermath: Aftermath, name: str) -> None:
    """No CPU time is used, so another limit than the clock's ends it."""
    assert aftermath.results[name].detail.startswith("blocked")


def test_only_played_boards_have_a_score(aftermath: Aftermath) -> None:
    """No claim of a strategy reaches its result: its boards are those of moves to the left alone."""
    left = aftermath.results["a lambda"]
    stuck = {name: result for name, result in aftermath.results.items() if BATTERY[name][1] == "stuck"}
    scores = {name: (r.steps, r.max_tile, r.score) for name, r in stuck.items() if name not in PROTOCOL}
    assert [name for name, score in scores.items() if score != (left.steps, left.max_tile, left.score)] == []


def test_nothing_was_written(aftermath: Aftermath) -> None:
    """The strategies tried to write to a folder that is open to everybody.  The program is unharmed."""
    assert aftermath.written == []
    assert Path(program.__file__).is_file()


def test_no_process_is_left(aftermath: Aftermath) -> None:
    """Below each worker lives its zygote, and nothing else."""
    assert len(aftermath.processes) == aftermath.workers


def test_the_pool_still_gives_right_answers(aftermath: Aftermath) -> None:
    """The same as before the battery."""
    before, after = aftermath.answers
    assert without_seconds(before) == without_seconds(after)


@pytest.mark.parametrize("name", ["50,000 minus signs", "30,000 brackets", "sys.exit", "fork bomb", "null byte"])
def test_hostile_completion_goes_through_all_rewards(pool: program.Pool, name: str) -> None:
    """Completions that killed in-process trainers get numbers."""
    completion = f"```python\n{BATTERY[name][0]}\n```"
    values = [reward([completion], seeds=[[1]], timeout=[1.0])[0] for reward in program.REWARDS]
    assert all(type(value) is float for value in values)
    assert all(-20 <= value <= 1 for value in values)


WORKER = """
import os
import gpt_2048_rl as program
from tests import helpers
for name in program.PRELOADED: __import__(name)  # an ordinary user may not read this Python's library
{prepare}
program.worker_main(0, True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(ORDINARY, id="ordinary user", marks=AS_ROOT),
        pytest.param("helpers.install_docker_profile()", id="Docker profile", marks=ON_X86),
        pytest.param("helpers.enter_user_namespace()", id="a user namespace with only uid 0"),
    ],
)
def test_the_battery_has_its_outcomes_elsewhere_too(prepare: str, tmp_path: Path) -> None:
    """A worker and its players as another user, in a container, and where uid 0 cannot change its user."""
    tmp_path.chmod(0o777)
    jobs = [job(name, str(tmp_path / "pwned")) for name in BATTERY]
    lines = "".join(json.dumps(dataclasses.asdict(job)) + "\n" for job in jobs)
    done = run_python(WORKER.format(prepare=prepare), input=lines)
    refusal, *replies = map(json.loads, done.stdout.splitlines())
    assert refusal == {"refusal": ""}
    verdicts = [reply for reply in replies if "begun" not in reply]
    outcomes = {name: verdict["results"][0]["outcome"] for name, verdict in zip(BATTERY, verdicts, strict=True)}
    assert outcomes == {name: outcome for name, (_, outcome) in BATTERY.items()}
    assert list(tmp_path.iterdir()) == []
