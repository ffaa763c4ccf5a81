#!/usr/bin/env python3
"""The task as an OpenEnv environment: the strategy is the action, and the program's own referee judges it.

    ./setup.sh --with openenv python integrations/openenv_2048.py --port 8000

`reset` draws boards and gives the prompt.  `step` takes an answer, plays its strategy in the jail on those boards and
ends the episode with the reward of training.  A `seed` draws the same boards again, on the same machine: they come from
its secret, so that no strategy can work them out.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro
import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from starlette.websockets import WebSocketDisconnect

import gpt_2048_rl as program


@dataclass(frozen=True)
class Args:
    """The game and the server."""

    host: str = "127.0.0.1"
    port: int = 8000
    sessions: int = 16  # at once
    boards: int = 4  # that a strategy plays
    size: int = 6
    target: int = 2048
    keys: program.Layout = "bepo"
    timeout: float = 5.0  # CPU seconds for a game's first thousand moves, and for each thousand more


class Answer(Action):  # type: ignore[misc]
    """What a model wrote: a program in a fence, with or without prose around it, or the program alone."""

    answer: str


class Judged(Observation):  # type: ignore[misc]
    """The prompt; after a step also what became of the strategy.  `done` and `reward` are OpenEnv's own."""

    prompt: str
    works: str = ""  # "load", "fail" or "none"
    cheating: str = ""
    outcomes: list[str] = []  # noqa: RUF012 - one a board; pydantic copies it
    largest_tiles: list[int] = []  # noqa: RUF012
    details: list[str] = []  # noqa: RUF012


class Game2048(Environment[Answer, Judged, State]):  # type: ignore[misc]
    """One episode: a prompt, an answer, its reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True  # the pool of players is made for it

    def __init__(self, args: Args) -> None:
        super().__init__()
        self._args, self._state = args, State()
        self.reset()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Judged:
        """New boards and a wording of the task."""
        drawn = secrets.randbits(62) if seed is None else seed
        self._boards = program.board_seeds(self._args.boards, "openenv", drawn)
        self._prompt = program.build_prompt(self._args.size, self._args.target, self._args.keys,
                                            wording=drawn % (len(program.WORDINGS) - 1))  # fmt: skip
        self._state = State(episode_id=episode_id or secrets.token_hex(8), step_count=0)
        return Judged(prompt=self._prompt)

    def step(self, action: Answer, timeout_s: float | None = None, **_: Any) -> Judged:
        """Play the answer's strategy; the reward is the sum of the three rewards of training."""
        self._state.step_count += 1
        args = self._args
        columns = {"seeds": [self._boards], "size": [args.size], "target": [args.target], "keys": [args.keys],
                   "timeout": [args.timeout]}  # fmt: skip
        (verdict,) = program.judge([action.answer], **columns)
        return Judged(
            prompt=self._prompt,
            done=True,
            reward=sum(reward([action.answer], **columns)[0] for reward in program.REWARDS),
            works=verdict.works,
            cheating=verdict.cheating,
            outcomes=[result.outcome for result in verdict.results],
            largest_tiles=[result.max_tile for result in verdict.results],
            details=[program.printable(result.detail) for result in verdict.results],
        )

    @property
    def state(self) -> State:
        """Of the episode."""
        return self._state


def main(args: Args) -> int:
    """Serve until it is stopped."""
    try:
        program.check_game(args.size, args.target)
        listener = socket.create_server((args.host, args.port))
        program.shared_pool()
    except (ValueError, program.JailError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        print(f"error: cannot listen at {args.host}, port {args.port} ({why}): choose another", file=sys.stderr)
        return 2
    make: Callable[[], Game2048] = lambda: Game2048(args)  # noqa: E731 - a session has its own
    app = create_fastapi_app(make, Answer, Judged, max_concurrent_envs=args.sessions)
    # OpenEnv closes connections that their clients have closed, and uvicorn would print a traceback of each.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], WebSocketDisconnect)))  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
