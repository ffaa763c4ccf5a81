"""The task as an OpenEnv environment: the answer is the action, and the program's own referee judges it.

    ./setup.sh --with openenv python -m integrations.openenv_2048 --port 8000

`reset` draws boards and gives the prompt; a `seed` draws the same boards again, on the same machine.  `step` takes an
answer and plays its program in the jail.  With several `turns`, all answers but the last play boards for practice,
whose outcome comes back as `feedback` and is worth nothing.  The last answer alone plays the boards that are paid, so
no bad game is tried again, and its reward is the episode's.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import sys
from dataclasses import dataclass
from typing import Any

try:
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from starlette.exceptions import HTTPException
    from starlette.websockets import WebSocketDisconnect
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    print(f"error: the library {missing.name} is not installed: run ./setup.sh --with openenv", file=sys.stderr)
    sys.exit(2)

import gpt_2048_rl as program
from integrations import task
from toolkit import UsageError


@dataclass(kw_only=True, frozen=True)
class Args(task.Game):
    """Serve the task to OpenEnv's clients."""

    host: str = "127.0.0.1"
    port: int = 8000
    sessions: int = 16  # at once
    turns: int = 1  # answers in an episode; it ends sooner when every game of practice is won, or a program cheats

    def __post_init__(self) -> None:
        super().__post_init__()
        task.check_count("turns", self.turns, 64)


class Answer(Action):
    """What a model wrote: a program in a fence, with or without prose around it, or the program alone."""

    answer: str


class Judged(Observation):
    """The prompt; after a step also what became of the program.  `done` and `reward` are OpenEnv's own."""

    prompt: str
    works: str = ""  # "load", "fail" or "none"
    cheating: str = ""
    outcomes: list[str] = []  # noqa: RUF012 - one a board, of practice until the episode is done; pydantic copies it
    largest_tiles: list[int] = []  # noqa: RUF012
    details: list[str] = []  # noqa: RUF012
    feedback: str = ""  # the next message to the model; empty when the episode is done


class Game2048(Environment[Answer, Judged, State]):
    """One episode: a prompt and up to `turns` answers."""

    SUPPORTS_CONCURRENT_SESSIONS = True  # the pool of players is made for it

    def __init__(self, args: Args) -> None:
        super().__init__()
        self._args = args
        self.reset()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Judged:
        """New boards and a wording of the task."""
        drawn = secrets.randbits(62) if seed is None else seed
        self._question = task.Question.read({**vars(self._args), "index": drawn, "split": "train"})
        self._state = State(episode_id=episode_id or secrets.token_hex(8), step_count=0)
        self._end: Judged | None = None  # an answer after it is not played: no bad game is tried again
        return Judged(prompt=self._question.prompt)

    def step(self, action: Answer, timeout_s: float | None = None, **_: Any) -> Judged:
        """Play the answer's program.  The last one's reward is the sum of training's three rewards, others have 0."""
        if self._end:
            return self._end
        self._state.step_count += 1
        rewards: dict[str, float] = {}
        if not (done := self._state.step_count >= self._args.turns):
            verdict = task.practise(self._question, action.answer)
            done = task.is_final(verdict)
        if done:
            verdict, rewards = task.judge(self._question, action.answer)
        judged = Judged(
            prompt=self._question.prompt,
            done=done,
            reward=float(sum(rewards.values())),
            works=verdict.works,
            cheating=verdict.cheating,
            outcomes=[result.outcome for result in verdict.results],
            largest_tiles=[result.max_tile for result in verdict.results],
            details=[result.detail for result in verdict.results],
            feedback="" if done else task.feedback(self._question, verdict),
        )
        self._end = judged if done else None
        return judged

    @property
    def state(self) -> State:
        """Of the episode."""
        return self._state


class Bounded:
    """ASGI middleware: a request larger than any answer that is read gets 413, before it fills memory."""

    BYTES = 8 * program.LIMITS.text_chars  # JSON writes a character in up to six

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        left = self.BYTES

        async def counted() -> Any:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b"")) if scope["type"] == "http" else 0
            if left < 0:
                raise HTTPException(413, f"a request may have {self.BYTES} bytes", {"Connection": "close"})
            return message

        await self._app(scope, counted, send)


def serve(args: Args) -> int:
    """Serve until it is stopped."""
    try:
        listener = socket.create_server((args.host, args.port))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen at {args.host}, port {args.port} ({why}): choose another") from None
    program.shared_pool()
    app = create_fastapi_app(lambda: Game2048(args), Answer, Judged, max_concurrent_envs=args.sessions)
    app.add_middleware(Bounded)
    # OpenEnv closes connections that their clients have closed, and uvicorn would print a traceback of each.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], WebSocketDisconnect))
    )
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again
        uvicorn.Server(uvicorn.Config(app, log_level="warning", ws_max_size=Bounded.BYTES)).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(task.start(Args, serve, "python -m integrations.openenv_2048"))
