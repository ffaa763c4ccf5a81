"""`play --model`: what a server is asked, how each kind of server answers, and a model that is loaded here."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests import preloaded
from tests.conftest import Run
from tests.helpers import HONEST, ROOT, run, serving
from toolkit import UsageError
from toolkit.serve import ask as asking
from toolkit.serve.ask import ChatServer

GAME = ("--size", "3", "--target", "16", "--seeds", "1", "2")  # random moves reach it
FENCED = f"```python\n{HONEST}```"
POOR = '```python\ndef strategy(board):\n    return "no key"\n```'


class Fake:
    """A server that lists models, and answers each request with the next of `answers`: the last one again and again."""

    def __init__(self, *answers: bytes | Iterator[bytes], status: int = 200, models: object = ("first",)):
        self.answers, self.status, self.asked = list(answers), status, list[dict[str, Any]]()
        listed = {"data": [{"id": name} for name in models]} if isinstance(models, tuple) else models
        self.models = json.dumps(listed).encode()

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Its address while it runs."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def reply(self, status: int, body: bytes | Iterator[bytes]) -> None:
                self.send_response(status)
                self.end_headers()
                with contextlib.suppress(OSError):  # whoever asked has gone
                    for part in [body] if isinstance(body, bytes) else body:
                        self.wfile.write(part)

            def do_GET(self) -> None:
                self.reply(200, fake.models)

            def do_POST(self) -> None:
                fake.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                body = fake.answers.pop(0) if len(fake.answers) > 1 else fake.answers[0]
                if body:
                    self.reply(fake.status, body)

            def log_message(self, *_: object) -> None:
                pass

        with serving(Handler) as url:
            yield url


def chat(content: object, end: str = "stop", **message: object) -> bytes:
    """A chat completion."""
    return json.dumps({"choices": [{"message": {"content": content} | message, "finish_reason": end}]}).encode()


Ask = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """`play --model` of a server, which must succeed.  Returns what --json prints, and what is shown."""

    def ask_here(fake: Fake, *options: object) -> tuple[dict[str, Any], str]:
        with fake.running() as url:
            assert program.main(["play", "--model", url, *GAME, "--json", *map(str, options)]) == 0
        out, err = capsys.readouterr()
        return json.loads(out), err

    return ask_here


def test_a_server_is_asked_with_the_prompt_of_an_evaluation(ask: Ask) -> None:
    """The request holds only what every server knows: some refuse a field that they lack."""
    fake = Fake(chat(FENCED))
    told, _ = ask(fake, "--answers", 2, "--keys", "wasd", "--temperature", 0.5)
    prompt = program.build_prompt(3, 16, "wasd", wording=-1)
    messages = [{"role": "user", "content": prompt}]
    assert fake.asked == [{"model": "first", "messages": messages, "temperature": 0.5, "max_tokens": 768, "seed": seed}
                          for seed in (3407, 3408)]  # fmt: skip
    assert {game["outcome"] for game in told["games"].values()} == {"invalid_move"}  # its keys are bépo's


def test_the_best_answer_plays(ask: Ask) -> None:
    told, shown = ask(Fake(chat(POOR), chat(FENCED), chat(POOR)), "--answers", 3)
    assert told["source"] == HONEST.rstrip()
    assert [game["outcome"] for game in told["games"].values()] == ["success", "success"]
    assert [line.partition(",")[0] for line in shown.splitlines() if line.startswith("answer")] == [
        "answer 1: wins 0 of 2 games", "answer 2: wins 2 of 2 games", "answer 3: wins 0 of 2 games"]  # fmt: skip


def test_an_answer_is_watched_like_a_file(ask: Ask) -> None:
    told, shown = ask(Fake(chat(FENCED)), "--answers", 1, "--watch", "--delay", 0)
    steps = told["games"]["1"]["steps"]
    assert f"seed 1  move {steps}/{steps}" in shown


@pytest.mark.parametrize(
    "answer",
    [chat("final answer: " + FENCED, reasoning_content="We need a program."),  # llama.cpp
     chat("final answer: " + FENCED, reasoning="We need a program."),  # vLLM, Ollama
     chat(f"analysisWe need code. ```python\n{POOR}```assistantfinal{FENCED}"),  # special tokens are left out
     chat(f"<|channel|>analysis<|message|>{POOR}<|end|><|start|>assistant<|channel|>final<|message|>{FENCED}"),
     chat(f"<think>We need code.</think>{FENCED}")],
)  # fmt: skip
def test_an_analysis_is_not_the_answer(answer: bytes, ask: Ask) -> None:
    """Whether the server takes it apart or leaves it in the text."""
    fake = Fake(answer)
    told, _ = ask(fake, "--answers", 1, "--reasoning", "low")
    assert told["source"] == HONEST.rstrip()
    assert (fake.asked[0]["reasoning_effort"], fake.asked[0]["max_tokens"]) == ("low", 1024)


@pytest.mark.parametrize(
    ("answer", "said"),
    [(chat("I will\x1b[2J not. \ud800"), r"no program: I will\x1b[2J not. \ud800"),
     (chat(None, reasoning="We need"), "no program: it is empty"),
     (chat("", "length", reasoning="We need"), "no program (cut off: more --max-new-tokens, or --"),
     (chat("x" * 10_000), "no program: " + "x" * program.LIMITS.detail_chars + "\n"),
     (chat("```python\nx = 1 / 0\ndef strategy(board):\n    return 1\n```"), "does not load: ZeroDivisionError"),
     (chat("```python\nimport os\ndef strategy(board):\n    return 1\n```"), "does not play: it imports os")],
)  # fmt: skip
def test_an_answer_without_a_program_is_said_and_is_no_error(answer: bytes, said: str, ask: Ask) -> None:
    told, shown = ask(Fake(answer), "--answers", 1)
    assert (told["source"], told["games"]) == (None, {})
    assert f"answer 1: {said}" in shown
    assert "no answer has a program that plays" in shown
    assert "\x1b" not in shown


def endless() -> Iterator[bytes]:
    while True:
        yield b" " * (1 << 16)


@pytest.mark.parametrize(
    ("fake", "said"),
    [(Fake(b'{"error": {"message": "model is \x1b[2J not loaded"}}', status=404), r"not loaded"),
     (Fake(b"<html>It works!</html>"), "not OpenAI's format: <html>It works!"),
     (Fake(b'{"error": "out of memory"}'), "out of memory"),
     (Fake(b'{"choices": []}'), "not OpenAI's format"),
     (Fake(b'{"choices": [{"message": "text"}]}'), "not OpenAI's format"),
     (Fake(chat([{"type": "text", "text": FENCED}])), "not OpenAI's format"),
     (Fake(b"[" * 100_000), "not OpenAI's format"),
     (Fake(b'{"choices": [{"mess'), "not OpenAI's format"),
     (Fake(b""), "Server disconnected without sending a response"),
     (Fake(endless()), "its answer does not end"),
     (Fake(b"", models=()), "lists no models: name one with --served-name"),
     (Fake(b"", models=("base", "adap\x1b[2Jter")), r"lists 2 models: choose with --served-name: base, adap\x1b[2Jter"),
     (Fake(b"", models=[]), "not OpenAI's format: []")],
)  # fmt: skip
def test_a_server_that_fails_is_one_line_and_exit_code_2(
    fake: Fake, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake.running() as url:
        assert program.main(["play", "--model", url, *GAME]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1
    assert "\x1b" not in error


def forever(first: bytes, again: bytes) -> Iterator[bytes]:
    """Each piece comes in time, the whole never."""
    yield first
    while True:
        yield again
        time.sleep(0.01)


ENDLESS = {
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "one header": (b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
    "an error's body": (b"HTTP/1.1 500 No\r\n\r\n", b" "),
    "nothing": (b"", b""),
}


@pytest.mark.parametrize("part", ENDLESS)
def test_an_exchange_has_one_deadline(part: str) -> None:
    """It held for the body alone: the other parts, a piece at a time, kept a training or `play` waiting for ever."""
    with sending(forever(*ENDLESS[part])) as url:
        began = time.monotonic()
        with pytest.raises(UsageError, match=r"its answer does not end in 0\.2 s"):
            ChatServer(url).ask("/v1/chat/completions", {}, seconds=0.2)
        assert time.monotonic() - began < 5


@contextlib.contextmanager
def sending(pieces: Iterator[bytes]) -> Iterator[str]:
    """The address of a server that takes one connection, and sends bytes as they are."""

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as caller:
            caller.recv(1 << 16)
            for piece in pieces:
                caller.sendall(piece)
                if not piece and select.select([caller], [], [], 0)[0] and not caller.recv(1 << 16):
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.join(5)


def test_an_answer_that_is_packed_stays_packed() -> None:
    """A few bytes could unpack to more than memory holds."""
    packed = gzip.compress(b" " * 10_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n"
    with sending(iter([head + packed])) as url:
        assert ChatServer(url).ask("/v1/models") == packed


class Locked(BaseHTTPRequestHandler):
    """A server that wants a key."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer sesame" else 401)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "behind the door"}]}')

    def log_message(self, *_: object) -> None:
        pass


def test_a_key_opens_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the environment or from a file, which wins.  Every user of a machine sees the arguments of its processes."""
    file = tmp_path / "key"
    file.write_text("sesame\n")
    with serving(Locked) as url:
        with pytest.raises(UsageError, match=r"failed \(401 .*: give its key in OPENAI_API_KEY"):
            ChatServer(url, asking.api_key("")).only_model()
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        assert ChatServer(url, asking.api_key(str(file))).only_model() == "behind the door"
        monkeypatch.setenv("OPENAI_API_KEY", "sesame")
        assert ChatServer(url, asking.api_key("")).only_model() == "behind the door"


def test_a_key_that_cannot_be_sent_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("open\nsesame")
    assert program.main(["play", "--model", "http://127.0.0.1:9", "--api-key-file", str(tmp_path / "key")]) == 2
    said = capsys.readouterr().err
    assert said == "error: the server's key must be one word of ASCII characters\n"


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_with_the_version(ending: str) -> None:
    with Fake().running() as url:
        assert ChatServer(url + ending).only_model() == "first"
        assert ChatServer(url.removeprefix("http://") + ending).only_model() == "first"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["http://127.0.0.1:9/v1"], "error: http://127.0.0.1:9/v1/models failed (All connection attempts failed): start"),
     (["localhost:9"], "error: http://localhost:9/v1/models failed"),
     (["http://127.0.0.1:70000"], "error: http://127.0.0.1:70000/v1/models failed (a port lies between 0 and 65535)"),
     (["http://host:port"], "error: http://host:port/v1/models failed (Invalid port: 'port')"),
     (["http://127.0.0.1:9", "--api-key-file", "/nowhere"], "error: --api-key-file /nowhere cannot be read (No such"),
     (["/"], "error: / holds no model"),
     (["gpt-oss:20b"], "error: model 'gpt-oss:20b' is neither auto, tiny, smollm2, a folder that exists nor a "),
     (["tiny", "--reasoning", "low"], "error: the embedded model cannot reason"),
     (["tiny", "--answers", "0"], "error: --answers must lie between 1 and 1000, not 0"),
     ([], "error: gpt_2048_rl.py play needs Python source")],
)  # fmt: skip
def test_what_cannot_be_asked_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["play", "--model", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.count("\n") == 1


def test_the_documented_client_judges_an_answer_and_shows_the_board(tmp_path: Path) -> None:
    """Random moves do not make 2048: the last board is full, and the program stands above it."""
    client = tmp_path / "client.py"
    _, _, code = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("```python\n")
    client.write_text(code.partition("```")[0], encoding="utf-8")
    fake = Fake(chat(FENCED))
    with fake.running() as url:
        done = run(f"{url}/v1", "second", script=client, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    *source, outcome, _, _, _, last = done.stdout.splitlines()
    assert ("\n".join(source), outcome) == (HONEST.rstrip(), "lost")
    assert 0 not in json.loads(last)
    assert fake.asked[0]["model"] == "second"


@pytest.mark.slow
def test_a_run_is_asked_in_the_game_that_it_was_trained_for(trained: Run) -> None:
    """Its model is loaded here.  What it says is judged as in training."""
    done = preloaded.run("play", "--model", trained.folder, "--answers", 8, "--target", 16, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "options taken from" in done.stderr
    assert (told["size"], told["target"]) == (3, 16)  # the first held-out board of the short run
    assert done.stderr.count("\nanswer ") == 8
    assert "def strategy(board):" in told["source"]
