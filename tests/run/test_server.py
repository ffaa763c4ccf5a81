"""Sampling from a vLLM server: its command line, what it is sent, its failures, and a run with a real one on a CPU.

vLLM has no LoRA for experts on a CPU.  There a server takes an adapter and cannot sample with it.  So the run's server
gets the merged weights, of attention alone, because it would keep its packed experts; all else is as on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.conftest import flags
from tests.helpers import cmdline, descendants, serving
from tests.preloaded import call
from toolkit import VLLM, UsageError
from toolkit.model import machine, settings, tiny
from toolkit.run import server

H200 = machine.Machine(gpu="NVIDIA H200", capability=(9, 0), memory=150_000_000_000)


@dataclass
class FakeServer:
    """A server that answers every POST with the same object, and notes what it was asked."""

    answer: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Its URL while it runs."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                fake.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                body = json.dumps(fake.answer).encode()
                self.send_response(fake.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        with serving(Handler) as url:
            yield url


def test_completions_come_in_the_order_of_their_prompts() -> None:
    """With the log-probability of each token as a list of one, as TRL expects it."""
    choices = [{"index": 1, "token_ids": [7, 0], "logprobs": {"token_logprobs": [-0.5, -0.25]}},
               {"index": 0, "token_ids": [9], "logprobs": {"token_logprobs": [-2.0]}}]  # fmt: skip
    trainer = SimpleNamespace(temperature=0.7, top_p=1.0, top_k=0, max_completion_length=64, eos_token_ids=[0, 5])
    fake = FakeServer({"choices": choices})
    with fake.running() as url:
        sampler = server.Sampler(trainer, server.Server(url), "base", Path("run"))
        prompts, ids, logprobs, _ = sampler.generate([[1, 2], [3]], None, 2, contextlib.nullcontext())
    assert (prompts, ids, logprobs) == ([[1, 2], [3]], [[9], [7, 0]], [[[-2.0]], [[-0.5], [-0.25]]])
    ((path, asked),) = fake.asked
    assert path == "/v1/completions"
    assert asked["prompt"] == [[1, 2], [3]]
    assert (asked["temperature"], asked["top_k"], asked["max_tokens"]) == (0.7, -1, 64)
    assert asked["stop_token_ids"] == [0, 5]


def test_a_server_that_fails_is_named_with_its_reason() -> None:
    with (
        FakeServer({"error": "no room"}, status=500).running() as url,
        pytest.raises(UsageError, match=rf"the vLLM server {url} failed at /v1/load_lora_adapter .*no room"),
    ):
        server.Server(url, "run/vllm.log").load(Path("adapter"), "run-1")
    with (
        FakeServer({"choices": [{"index": 0, "text": "no ids"}]}).running() as url,
        pytest.raises(UsageError, match="no completions with token ids and log-probabilities"),
    ):
        server.Server(url).complete("run-1", [[1]], {})
    whole = {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0, -2.0]}}
    for choices in (
        [],
        [whole | {"index": 1}],
        [whole | {"index": math.inf}],
        [whole | {"index": 0, "token_ids": "ab"}],
    ):
        with FakeServer({"choices": choices}).running() as url, pytest.raises(UsageError, match="no completions with"):
            server.Server(url).complete("run-1", [[1]], {})
    with pytest.raises(UsageError, match=r"failed.*see run/vllm\.log, then start again"):
        server.Server(url, "run/vllm.log").complete("run-1", [[1]], {})


class Echo(BaseHTTPRequestHandler):
    """A server that answers with the key that it was sent."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(self.headers["Authorization"]).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_named_server_gets_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Echo) as url:
        assert server.named(url).ask("/health") == b"None"
        monkeypatch.setenv("VLLM_API_KEY", "sesame")
        assert server.named(url).ask("/health") == b"Bearer sesame"


SERVES = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer " + os.environ["VLLM_API_KEY"] else 401)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_the_server_of_a_run_has_a_key_that_only_the_run_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads any adapter that it is told to, by any user of the machine."""
    monkeypatch.setattr(server, "command", lambda *rest: [sys.executable, "-c", SERVES, str(rest[-1])])
    started = server.start(str(tmp_path), program.TrainConfig(), H200, tmp_path)
    assert started.ask("/v1/models") == b""
    with pytest.raises(UsageError, match="401"):
        server.Server(started._url).ask("/v1/models")
    arguments = [cmdline(pid) for pid in descendants(os.getpid())]
    key = started._headers["Authorization"].split()[1].encode()
    assert any(SERVES.encode() in line for line in arguments)
    assert not any(key in line for line in arguments)


def test_a_server_that_ends_at_once_is_said_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "command", lambda *_: ["bash", "-c", "echo no CUDA >&2; exit 1"])
    with pytest.raises(UsageError, match=f"vLLM did not start: see {tmp_path / 'vllm.log'}"):
        server.start(str(tmp_path), program.TrainConfig(), H200, tmp_path)
    assert (tmp_path / "vllm.log").read_text() == "no CUDA\n"


def options_of(command: list[str]) -> dict[str, str]:
    return {name: value for name, value in itertools.pairwise(command) if name.startswith("--")}


def test_the_command_line_of_a_server(tmp_path: Path) -> None:
    """Room for a step's completions, counted: a measured one failed on a GPU where other processes came and went."""
    from transformers import GptOssConfig

    GptOssConfig(num_hidden_layers=24, num_local_experts=32).save_pretrained(tmp_path)
    config = program.TrainConfig(sampler="vllm", lora_rank=4, max_new_tokens=2048 - 568)
    options = options_of(server.command(str(tmp_path), config, H200, 8000))
    assert options["--model"] == str(tmp_path)
    assert (options["--max-lora-rank"], options["--max-model-len"]) == ("8", "2048")
    cached, weights = 2 * 32 * 2048 * 49_152, 2 * 20.91e9
    assert (options["--max-num-seqs"], options["--kv-cache-memory-bytes"]) == ("32", str(cached))
    share = (weights + cached + 6e9) / H200.memory
    assert float(options["--gpu-memory-utilization"]) == pytest.approx(share, abs=0.006)
    assert (options["--host"], options["--logprobs-mode"]) == ("127.0.0.1", "processed_logprobs")
    assert "--hf-overrides" not in options
    with pytest.raises(UsageError, match="--lora-rank 600 is more than vLLM's 512"):
        server.command(str(tmp_path), program.TrainConfig(lora_rank=600), H200, 8000)


def test_a_server_measures_what_nobody_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "memory_needed", lambda *_: {})
    options = options_of(server.command("owner/new-kind", program.TrainConfig(sampler="vllm"), H200, 8000))
    assert options["--gpu-memory-utilization"] == f"{24e9 / H200.memory:.2f}"
    assert "--kv-cache-memory-bytes" not in options


def test_the_trainer_holds_the_weights_that_the_server_holds() -> None:
    """As released.  In NF4 the trained model would not be the one that samples."""
    config = program.TrainConfig(sampler="vllm")
    assert settings.choose_weights(H200, "unsloth/gpt-oss-20b", config).weights == "stored"
    config.weights = "4bit"
    assert settings.choose_weights(H200, "unsloth/gpt-oss-20b", config).weights == "4bit"


@pytest.mark.parametrize(
    ("gpu", "arguments", "said"),
    [(True, ["--sampler", "vllm"], "run ./setup.sh --with vllm"),
     (False, ["--sampler", "vllm"], "--sampler vllm needs a GPU, or --vllm-server"),
     (False, ["--vllm-server", "http://localhost:1"], "--vllm-server needs --sampler vllm"),
     (False, ["--sampler", "vllm", "--vllm-server", "http://localhost:1"], "failed at /health"),
     (False, ["--sampler", "vllm", "--vllm-server", "localhost"], "missing an 'http://' or 'https://' protocol")],
)  # fmt: skip
def test_what_vllm_needs_is_said_before_anything_is_loaded(
    gpu: bool, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("toolkit.cli.VLLM", Path("/nowhere"))
    monkeypatch.setattr(machine, "gpu_is_there", lambda: gpu)
    assert program.main(["--model", "tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# A server that fails in the middle of a run


class Stand(BaseHTTPRequestHandler):
    """In vLLM's place: it samples from the embedded model itself, whose adapters hardly change in these runs."""

    model: Any = None
    steps, untold = 99, 0.0  # answers before it dies; share of log-probabilities that are null

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self.answer({})
        elif Stand.steps:
            Stand.steps -= 1
            self.answer({"choices": list(map(self.choice, range(len(asked["prompt"])), *self.sample(asked)))})
        else:
            self.server.shutdown()
            self.server.server_close()  # nor does it take another connection

    def sample(self, asked: dict[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids of a completion of each prompt, and their log-probabilities.  All prompts are equal."""
        import torch

        prompts = torch.tensor(asked["prompt"])
        done = self.model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=asked["max_tokens"],
                                   output_logits=True, return_dict_in_generate=True)  # fmt: skip
        ids = done.sequences[:, prompts.shape[1] :]  # (B, T)
        told = torch.stack(done.logits, 1).log_softmax(-1).gather(2, ids[..., None])[..., 0]  # (B, T)
        ends = [next((i + 1 for i, token in enumerate(row) if token in asked["stop_token_ids"]), len(row))
                for row in ids.tolist()]  # fmt: skip
        return tuple([row[:end] for row, end in zip(rows.tolist(), ends, strict=True)] for rows in (ids, told))  # type: ignore[return-value]

    def choice(self, index: int, ids: list[int], told: list[float]) -> dict[str, Any]:
        shown = [None if place < self.untold * len(told) else value for place, value in enumerate(told)]
        return {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": shown}}

    def answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def train_with_a_stand(out: str, answers: str, untold: str, status: str) -> None:
    """A short run with such a server."""
    import torch
    from transformers import AutoModelForCausalLM

    Stand.model = AutoModelForCausalLM.from_pretrained(tiny.folder_of("bepo"), dtype=torch.float32)
    Stand.steps, Stand.untold = int(answers), float(untold)
    words = flags(output_dir=out, run_name="run", steps=2, sampler="vllm", learning_rate=1e-6)
    with (
        serving(Stand) as url,
        (Path(out) / "log").open("w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        assert program.main([*words, "--vllm-server", url]) == int(status)


@pytest.mark.slow
def test_a_run_whose_server_dies_goes_on_with_the_next(base: Path, tmp_path: Path) -> None:
    """It ended without a page and without the command."""
    run, log = tmp_path / "run", tmp_path / "log"
    call(train_with_a_stand, tmp_path, 1, 0, 2)
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert re.search(r"the vLLM server http://\S+ failed at /v1/completions .*: see its log, then start again", line)
    again = f"to resume: python gpt_2048_rl.py --output-dir {tmp_path} --run-name run --vllm-server http://"
    assert again in log.read_text()
    assert (run / "report.html").is_file()
    call(train_with_a_stand, tmp_path, 9, 0, 0)
    assert "resuming after step 1" in log.read_text()
    assert json.loads((run / "result.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_a_run_trains_where_a_server_leaves_log_probabilities_out(base: Path, tmp_path: Path) -> None:
    """vLLM answers null for some (trl 6166), here for the first fifth of every completion."""
    from toolkit.run.reading import read_curves

    call(train_with_a_stand, tmp_path, 9, 0.2, 0)
    curves = read_curves(tmp_path / "run")
    assert all(0.1 < share < 0.4 for share in curves["sampler/untold"].values())
    assert max(curves["sampler/gap"].values()) < 1e-3
    assert [math.isfinite(norm) for norm in curves["grad_norm"].values()] == [True, True]


# ---------------------------------------------------------------------------------------------------------------------
# A real server

needs_vllm = pytest.mark.skipif(not (VLLM / "gpt-2048-rl.stamp").exists(), reason="needs ./setup.sh --with vllm")
ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}
STEPS = 3


def merged(adapter: Path) -> Path:
    """A folder with the embedded model's weights and an adapter merged into them."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = adapter.parent / "merged"
    base = AutoModelForCausalLM.from_pretrained(tiny.folder_of("bepo"), dtype=torch.float32)
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder, save_original_format=False)
    return folder


class MergingServer(server.Server):
    """A server without LoRA, which reads the merged weights instead of each adapter."""

    def load(self, adapter: Path, name: str) -> None:
        path = str(merged(adapter).resolve())
        self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        self.ask("/reset_prefix_cache", {})

    def unload(self, name: str) -> None:
        pass

    def complete(self, name: str, *rest: Any) -> list[tuple[list[int], list[float]]]:
        return super().complete("base", *rest)


def train_with_a_server(folder: str) -> None:
    """Three steps, with completions of a server that is really started."""
    usual = server.command

    def without_lora(*arguments: Any) -> list[str]:
        words = [word for word in usual(*arguments) if word != "--enable-lora"]
        rank = words.index("--max-lora-rank")
        return [*words[:rank], *words[rank + 2 :], "--enforce-eager"]

    os.environ.update(ON_A_CPU)
    machine.gpu_is_there = lambda: True
    server.command, server.Server = without_lora, MergingServer  # type: ignore[assignment, misc]
    options = {"model": "tiny", "sampler": "vllm", "adapt": "attention", "steps": STEPS, "generations": 8,
               "batch-size": 8, "games": 2, "held-out": "3:64", "ladder": "3:64", "best-of": 0, "race-games": 1,
               "learning-rate": 3e-3, "warmup-steps": 0, "output-dir": folder, "run-name": "run"}  # fmt: skip
    program.main([word for name, value in options.items() for word in (f"--{name}", str(value))])


@pytest.mark.optional
@needs_vllm
def test_a_run_trains_on_completions_of_a_real_server(tmp_path: Path) -> None:
    """The server samples what is trained: the gap at each step is rounding, though the adapter changes every time."""
    from toolkit.run.reading import read_curves

    call(train_with_a_server, tmp_path)
    run = tmp_path / "run"
    log = (run / server.LOG).read_text()
    curves = read_curves(run)
    assert len(curves["sampler/gap"]) == STEPS, log
    assert max(curves["sampler/gap"].values()) < 0.03
    assert len(re.findall(r'"POST /v1/completions HTTP/1.1" 200', log)) == STEPS
    assert json.loads((run / "result.json").read_text())["steps"] == STEPS


def load_an_adapter(folder: str) -> None:
    """Start a server with LoRA as a run does, and give it the adapter of a run, twice."""
    usual = server.command
    os.environ.update(ON_A_CPU)
    server.command = lambda *arguments: [*usual(*arguments), "--enforce-eager"]
    config = program.train_defaults("tiny")
    base, run = str(tiny.folder_of("bepo")), Path(folder)
    model, _ = program.load_model("tiny", config, lambda _: None)
    model = program.add_adapters(model, config)
    trainer: Any = SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model),
                                   state=SimpleNamespace(global_step=0))  # fmt: skip
    asked = server.start(base, config, H200, run)
    sampler = server.Sampler(trainer, asked, base, run)
    for trainer.state.global_step in range(2):
        sampler.sync_weights()
    names = [served["id"] for served in json.loads(asked.ask("/v1/models"))["data"]]
    (run / "names.json").write_text(json.dumps(names))


@pytest.mark.optional
@needs_vllm
def test_a_real_server_takes_the_adapter_of_each_step(tmp_path: Path) -> None:
    """Attention and experts, in the layout of the released model, under a new name; the one before is forgotten."""
    run = tmp_path / "run"
    run.mkdir()
    call(load_an_adapter, run)
    base, adapter = json.loads((run / "names.json").read_text())
    assert base == "base"
    assert re.fullmatch("run-1-[0-9a-f]{8}", adapter)
    shutil.rmtree(run)
