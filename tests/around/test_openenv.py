"""The task as an OpenEnv environment, served and called over a real connection."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import gpt_2048_rl as program
from integrations import task
from tests.helpers import ALWAYS_UP, FOR_EVER, HONEST, ROOT, wait_until

pytest.importorskip("openenv", reason="optional: ./setup.sh --with openenv")
pytestmark = pytest.mark.optional

SERVER = ("-m", "integrations.openenv_2048")


@dataclass(frozen=True)
class Server:
    """A server with a short limit of time, a low target and two turns; what it says goes to a file."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, *SERVER, "--port", str(port), "--size", "6", "--target", "256", "--boards", "2",
               "--timeout", "0.5", "--turns", "2"]  # fmt: skip
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, stderr=file) as process:
        try:
            assert wait_until(lambda: serves(port), 300), log.read_text()
            yield Server(process, f"http://127.0.0.1:{port}", log)
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def address(server: Server) -> str:
    return server.address


def serves(port: int) -> bool:
    """Whether the server has started: it listens before."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def episode(address: str, answer: str, seed: int = 1) -> tuple[Any, Any]:
    """What reset and step give."""
    from openenv.core import GenericEnvClient

    with GenericEnvClient(base_url=address).sync() as client:
        return client.reset(seed=seed), client.step({"answer": answer})


def test_an_episode_is_a_prompt_an_answer_and_its_reward(address: str) -> None:
    first, last = episode(address, f"Here it is:\n```python\n{HONEST}```")
    assert "strategy(board)" in first.observation["prompt"]
    assert not first.done
    assert last.done
    assert last.observation["works"] == "load"
    assert last.observation["outcomes"] == ["success", "success"]
    assert last.reward == program.WORKS["load"] + program.CLEAN + program.SUCCESS


def test_a_seed_draws_the_same_boards_again(address: str) -> None:
    first, second, other = (episode(address, ALWAYS_UP, seed)[1] for seed in (1, 1, 2))
    assert first.observation == second.observation
    assert first.reward == second.reward
    assert first.observation != other.observation or first.reward != other.reward


@pytest.mark.parametrize(
    ("answer", "outcome", "cheats"),
    [
        (FOR_EVER, "timeout", False),
        ("I cannot do that.", "no_function", False),
        ("import os\n" + HONEST, "error", True),
    ],
)
def test_hostile_answers_end_as_in_training(address: str, answer: str, outcome: str, cheats: bool) -> None:
    _, last = episode(address, answer)
    assert set(last.observation["outcomes"]) == {outcome}
    assert bool(last.observation["cheating"]) == cheats
    assert last.reward < episode(address, HONEST)[1].reward


def test_the_outcome_comes_back_and_the_last_answer_counts(address: str) -> None:
    from openenv.core import GenericEnvClient

    with GenericEnvClient(base_url=address).sync() as client:
        client.reset(seed=1)
        first = client.step({"answer": ALWAYS_UP})
        second = client.step({"answer": HONEST})
    assert not first.done
    assert "Board 2: stuck" in first.observation["feedback"]
    assert "The last position on board" in first.observation["feedback"]
    assert second.done
    assert second.observation["feedback"] == ""
    assert (first.reward, second.reward) == (0.0, program.WORKS["load"] + program.CLEAN + program.SUCCESS)


def test_nothing_is_said_of_the_boards_that_are_paid_before_the_last_answer() -> None:
    """An early end would say it too: a program that wins all of practice, and it alone, ends the episode."""
    from integrations.openenv_2048 import Answer, Args, Game2048

    game = Game2048(Args(size=6, target=256, boards=2, turns=3))
    game.reset(seed=1)
    answer = Answer(answer=ALWAYS_UP)
    practised, again, last = (game.step(answer) for _ in range(3))
    assert practised.largest_tiles == again.largest_tiles
    assert [step.done for step in (practised, again, last)] == [False, False, True]
    question = game._question
    on_boards = [[program.execute_strategies([ALWAYS_UP], seeds, 6, 256)[0][i].steps for i in range(2)]
                 for seeds in (question.practice, question.seeds)]  # fmt: skip
    assert [int(steps) for steps in re.findall(r", (\d+) moves", practised.feedback)] == on_boards[0]
    assert on_boards[0] != on_boards[1]


def test_an_episode_is_done_after_its_turns_or_when_a_program_cheats() -> None:
    from integrations.openenv_2048 import Answer, Args, Game2048

    one, two = Game2048(Args(target=256)), Game2048(Args(target=256, turns=2))
    assert one.step(Answer(answer=ALWAYS_UP)).done
    assert two.step(Answer(answer="import os\n" + HONEST)).done
    two.reset()
    assert [two.step(Answer(answer=ALWAYS_UP)).done for _ in range(2)] == [False, True]


def test_after_the_end_no_answer_is_played() -> None:
    """Each further one played the paid boards again, so the best of many tries could be kept."""
    from integrations.openenv_2048 import Answer, Args, Game2048

    game = Game2048(Args(target=256))
    end = game.step(Answer(answer=ALWAYS_UP))
    assert game.step(Answer(answer=HONEST)) == end
    game.reset()
    assert game.step(Answer(answer=HONEST)) != end


def test_an_answer_that_is_too_long_has_no_program(address: str) -> None:
    """It is an answer like others, with the reward of one without a program."""
    _, last = episode(address, HONEST + "#" * program.LIMITS.text_chars)
    assert set(last.observation["outcomes"]) == {"no_function"}
    assert last.observation["details"][0].startswith("the text is longer than")


def test_a_request_that_no_answer_needs_is_refused_and_other_sessions_go_on(address: str) -> None:
    """A text of 800 MB ended the workers, closed the pool and failed the sessions beside it."""
    from openenv.core import GenericEnvClient

    pieces = iter([b'{"action": {"answer": "', *[b"x" * (1 << 20)] * 800])

    with GenericEnvClient(base_url=address).sync() as client:
        client.reset(seed=1)
        with contextlib.suppress(httpx.NetworkError):  # the server does not wait for the rest
            assert httpx.post(f"{address}/step", content=pieces, timeout=60).status_code == 413
        assert len(list(pieces)) > 700
        assert client.step({"answer": HONEST}).observation["outcomes"] == ["success", "success"]


def test_sessions_do_not_mix(address: str) -> None:
    from openenv.core import GenericEnvClient

    with GenericEnvClient(base_url=address).sync() as one, GenericEnvClient(base_url=address).sync() as two:
        one.reset(seed=1)
        two.reset(seed=2)
        alone = episode(address, HONEST, seed=1)[1].observation["largest_tiles"]
        assert one.step({"answer": HONEST}).observation["largest_tiles"] == alone


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target", "100"], "target must be a power of two"),
        (["--turns", "0"], "turns must lie between 1 and 64, not 0"),
        (["--port", "99999"], "cannot listen at 127.0.0.1, port 99999"),
    ],
)
def test_what_cannot_be_served_gets_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from integrations.openenv_2048 import Args, serve

    assert task.start(Args, serve, SERVER[1], flags) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {said}")
    assert errors.count("\n") == 1


def test_a_port_that_another_server_has_gets_one_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    from integrations.openenv_2048 import Args, serve

    port = address.rpartition(":")[2]
    assert task.start(Args, serve, SERVER[1], ["--port", port]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: cannot listen at 127.0.0.1, port {port} (Address already in use")
    assert errors.count("\n") == 1


def test_ctrl_c_ends_the_server_without_a_traceback(server: Server) -> None:
    """The last test: nothing is served any more."""
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log.read_text()
