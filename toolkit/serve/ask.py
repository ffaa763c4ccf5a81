"""`play --model`: a served or a local model is asked for programs, each answer is judged, and the best program plays.

A server is anything that speaks OpenAI's chat completions: vLLM, llama.cpp, Ollama, transformers.  What it sends is as
hostile as a program: bounded in size and time, parsed by the jail's workers, and shown without control characters.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit import UsageError, visible
from toolkit.model import models
from toolkit.run.server import Server

if TYPE_CHECKING:
    from rich.console import Console

URL = re.compile(r"https?://|[\w.-]+:\d+(/|$)")  # how a server's address begins; the scheme may be left out


class Answer(NamedTuple):
    """What a model said to the prompt."""

    text: str
    reasons: bool  # the text may begin with an analysis
    cut_off: bool = False  # at the limit of tokens


def read_answer(told: Any, reasons: bool) -> Answer:
    """The first choice of a chat completion.  Many servers put the analysis into a field of its own."""
    choice = told["choices"][0]
    message = choice["message"]
    text = message.get("content") or ""
    if not isinstance(text, str):
        raise TypeError
    apart = message.get("reasoning_content") or message.get("reasoning")
    return Answer(text, reasons and not apart, choice.get("finish_reason") == "length")


class ChatServer(Server):
    """A server's chat completions.  Every error becomes a UsageError."""

    largest = 4 << 20  # bytes; the longest answer whose program is read has half a million

    def __init__(self, url: str, key: str = "") -> None:
        super().__init__(re.sub(r"/*(v1/*)?$", "", url if "://" in url else f"http://{url}"), key=key)

    def _failed(self, path: str, reason: str) -> UsageError:
        key = "give its key in OPENAI_API_KEY or --api-key-file"
        remedy = key if reason[:3] in ("401", "403") else "start the server, or correct the URL or --served-name"
        return UsageError(f"{self._url}{path} failed ({reason}): {remedy}")

    def _told(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], Any]) -> Any:
        """What `read` finds in a JSON answer."""
        answer = self.ask(path, body)
        try:
            return read(json.loads(answer))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            said = visible(answer[:200].decode(errors="replace"))
            raise self._failed(path, f"not OpenAI's format: {said}") from None

    def only_model(self) -> str:
        """The model that the server lists.  With several, the first can be the base of the one that is meant."""
        listed = self._told("/v1/models", None, lambda told: [visible(model["id"])[:200] for model in told["data"]])
        if len(listed) != 1:
            which = f"choose with --served-name: {', '.join(listed[:50])}" if listed else "name one with --served-name"
            raise UsageError(f"{self._url} lists {len(listed) or 'no'} models: {which}")
        return str(listed[0])

    def chat(self, name: str, prompt: str, config: Any, seed: int) -> Answer:
        """An answer to a prompt.  `config` has `reasoning`, `temperature` and `max_new_tokens`."""
        reasons = config.reasoning != "none"
        asked = {
            "model": name,
            "messages": [{"role": "user", "content": prompt}],
            "seed": seed,
            "temperature": config.temperature,
            "max_tokens": config.max_new_tokens,
        }
        if reasons:  # some servers refuse fields that they do not use
            asked["reasoning_effort"] = config.reasoning
        answer: Answer = self._told("/v1/chat/completions", asked, partial(read_answer, reasons=reasons))
        return answer


def api_key(file: str) -> str:
    """A server's key, from a file or the environment: everyone on a machine can read the arguments of its processes."""
    if not file:
        return os.environ.get("OPENAI_API_KEY", "")
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {file} cannot be read ({getattr(error, 'strerror', error)})") from None


def served_answers(config: Any, prompt: str, say: Callable[[str], None]) -> Iterator[Answer]:
    """A server's answers, one after the other."""
    server = ChatServer(config.player, api_key(config.api_key_file))
    name = config.served_name or server.only_model()
    say(f"asking {visible(name)[:200]} for {config.answers} programs")
    for number in range(config.answers):
        yield server.chat(name, prompt, config, config.seed + number)


def local_answers(config: Any, prompt: str, program: Any, say: Callable[[str], None]) -> Iterator[Answer]:
    """The answers of a model that is loaded here, sampled together, as in an evaluation."""
    name = models.resolve_model(config.player)
    models.check_model(name, config.reasoning, config.max_seq_length)
    model, tokenizer = program.load_model(name, config, say)
    for text in program.sample_completions(model, tokenizer, [prompt] * config.answers, config):
        yield Answer(text, config.reasoning != "none")


def in_words(answer: Answer, verdict: Any, printable: Callable[[str], str]) -> str:
    """The verdict on an answer, in one line."""
    if verdict.works == "none":
        limit = " (cut off: more --max-new-tokens, or --reasoning low)" if answer.cut_off else ""
        return f"no program{limit}: {printable(answer.text) or 'it is empty'}"
    if verdict.cheating:
        return str(verdict.results[0].detail)
    if verdict.works == "fail":
        return f"does not load: {verdict.results[0].detail}"
    won = sum(game.outcome == "success" for game in verdict.results)
    largest = max(game.max_tile for game in verdict.results)
    return f"wins {won} of {len(verdict.results)} games, largest tile {largest}"


def best_program(config: Any, program: Any, console: Console) -> tuple[str | None, list[Any]]:
    """Ask for programs, and play all on the same boards.  Returns the one with the highest reward, and its games.

    `config` is the script's PlayConfig, `program` the script.  Where no answer has a program that plays: (None, []).
    """
    say = partial(console.print, soft_wrap=True)
    prompt = program.build_prompt(config.size, config.target, config.keys, -1, config.example)  # as in an evaluation
    if URL.match(config.player):
        answers = served_answers(config, prompt, say)
    else:
        answers = local_answers(config, prompt, program, say)
    best, highest = None, float("-inf")
    for number, answer in enumerate(answers, 1):
        job = program.Job(
            answer.text,
            config.seeds,
            config.size,
            config.target,
            config.keys,
            config.timeout,
            completion=True,
            reasons=answer.reasons,
            record=True,
        )
        (verdict,) = program.shared_pool().judge([job])
        say(f"answer {number}: {in_words(answer, verdict, program.printable)}")
        if verdict.works == "load" and not verdict.cheating:
            reward = statistics.fmean(program.game_reward(game, config.target) for game in verdict.results)
            best, highest = (verdict, reward) if reward > highest else (best, highest)
    if best is None:
        return None, []
    say(f"the best on these boards:\n\n{best.source}\n")
    return best.source, list(best.results)
