"""The task as a verifiers environment (0.4): `vf.load_environment` and `vf-eval` find what `__all__` names.

    ./setup.sh --with verifiers
    PYTHONPATH=.:integrations vf-eval verifiers-2048 --model NAME --client.base-url http://HOST/v1 --no-push

A model is asked over verifiers' own client.  Its programs play in the jailed pool of this process, so neither a
container nor a sandbox is needed.  `hub/` packs the environment for the environments hub.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from openai import AsyncOpenAI
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire

import gpt_2048_rl as program
from integrations import task

__all__ = ["Chat", "Conversation", "Programs"]


class Data(vf.TaskData):
    """What a trace records of a task: no seed, only the number of its boards."""

    question: dict[str, Any]
    turns: int


class Program(vf.Task[Data]):
    """A prompt.  The last answer counts."""

    async def judge(self, answer: str) -> tuple[program.Verdict, dict[str, float]]:
        """The verdict and the rewards, in a thread, because games take seconds."""
        return await asyncio.to_thread(task.judge, task.Question.read(self.data.question), answer)

    async def practise(self, answer: str) -> program.Verdict:
        """The verdict on an answer that is not the last."""
        return await asyncio.to_thread(task.practise, task.Question.read(self.data.question), answer)

    @vf.metric
    async def games(self, trace: vf.Trace) -> dict[str, float]:
        """Share of won games, and the largest tile of all."""
        results = (await self.judge(trace.last_reply))[0].results
        won = sum(result.outcome == "success" for result in results)
        return {"won": won / len(results), "largest_tile": float(max(result.max_tile for result in results))}

    @vf.reward
    async def rewards(self, trace: vf.Trace) -> dict[str, float]:
        """The four rewards of training."""
        _, rewards = await self.judge(trace.last_reply)
        return {**rewards, "ends_in_time": program.CUT_OFF if trace.is_truncated else 0.0}


class Options(vf.TasksetConfig):
    """What --env.taskset.NAME sets."""

    game: task.Game = task.Game()
    split: Literal["train", "test"] = "train"  # "test" has other boards and a wording of its own
    tasks: int = Field(100, ge=1)
    turns: int = Field(1, ge=1, le=64)  # answers to a prompt; fewer when practice is all won, or a program cheats


class Programs(vf.Taskset[Program, Options]):
    """One task for each row of the dataset."""

    def load(self) -> Iterator[Program]:
        """Prompts in all wordings; each has boards of its own."""
        for index in range(self.config.tasks):
            question = task.Question(**vars(self.config.game), index=index, split=self.config.split)
            yield Program(
                Data(prompt=question.prompt, question=dataclasses.asdict(question), turns=self.config.turns),
                self.config.task,
            )


class Chat(vf.Harness[vf.HarnessConfig]):
    """One chat completion a turn, in this process.  verifiers' own chat harness installs packages with uv."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask for the next answer."""
        system, prompt = self.resolve_prompt(data)
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        messages = [vf.SystemMessage(content=system), *messages] if system else messages
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=list(map(message_to_wire, messages)))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Roles(vf.EnvConfig):
    """Who plays: one model.  The runtime runs nothing, so the cheapest will do."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class Conversation(vf.Env[Roles]):
    """A prompt and up to `turns` answers; after each but the last, its author is told how it fared in practice."""

    async def start(self) -> None:
        """Fail before the first task where the jail does not hold."""
        await asyncio.to_thread(program.shared_pool)

    async def run(self, row: Program, agents: vf.Agents) -> None:
        """One episode."""
        message = None
        async with agents.agent.interaction(row) as interaction:
            for turns_left in reversed(range(row.data.turns)):
                segment = await interaction.turn(message)
                if segment.terminated or not turns_left:
                    return
                verdict = await row.practise(segment.last_reply)
                if task.is_final(verdict):
                    return
                message = task.feedback(task.Question.read(row.data.question), verdict)
