"""Completions from a vLLM server: it holds the model as released, and before each step it gets the new adapter.

The server is a process with an environment of its own (`./setup.sh --with vllm`), or runs elsewhere (`--vllm-server`).
Trainer and server speak OpenAI's protocol, so the trainer needs no vLLM.  Every adapter has the step in its name: what
the server has cached of an older one cannot be taken for the new one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from toolkit import VLLM, ServerFailed, UsageError, visible
from toolkit.base.files import no_link
from toolkit.base.ranks import by_first_rank, whole_weights
from toolkit.model import tiny
from toolkit.model.adapters import full_precision, write_adapter
from toolkit.model.machine import Machine, find_machine
from toolkit.model.memory import KEYS_AND_VALUES, SERVER, memory_needed
from toolkit.model.settings import ModelConfig

RANKS_OF_LORA = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be started for
START_SECONDS, ANSWER_SECONDS = 1200, 1200  # for loading, after a download; for all completions of a step
LOG = "vllm.log"  # in the run's folder
KEY = "VLLM_API_KEY"  # the environment's variable with the key, for the server as for who asks it


class ServerConfig(ModelConfig, Protocol):
    """What is read of a run's options."""

    @property
    def lora_rank(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def accumulation(self) -> int: ...

    @property
    def vllm_server(self) -> str: ...


@cache
def certificates() -> ssl.SSLContext:
    """What a server's certificate is checked with.  Reading them takes 40 ms."""
    return ssl.create_default_context()


class Server:
    """A vLLM server's endpoints.  Every error becomes a ServerFailed."""

    largest = 1 << 28  # bytes of an answer

    def __init__(self, url: str, log: str = "its log", key: str = "") -> None:
        self._url, self._log = url.rstrip("/"), log
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            if not re.fullmatch("[!-~]+", key):  # an error about the header would show it
                raise UsageError("the server's key must be one word of ASCII characters")
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, path: str, body: dict[str, Any] | None = None, seconds: float = ANSWER_SECONDS) -> bytes:
        """The answer to a GET, or with a body to a POST."""
        import httpx

        try:
            if not 0 <= (httpx.URL(self._url).port or 0) < 1 << 16:  # connect() would raise an OverflowError in a group
                raise ValueError("a port lies between 0 and 65535")
            status, answer = asyncio.run(self._exchange(path, body, seconds))
            if status == 200:
                return answer
            reason = f"{status} {answer[:300].decode(errors='replace')}"
        except TimeoutError:
            reason = f"its answer does not end in {seconds:g} s"
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
        raise self._failed(path, visible(reason)[:300])

    async def _exchange(self, path: str, body: dict[str, Any] | None, seconds: float) -> tuple[int, bytes]:
        """The status and the whole answer.

        The deadline holds for all of it, from the connection to the last trailer.  httpx's own timeouts begin anew with
        every byte.  No proxy is asked, because none knows a server of this machine.
        """
        import httpx

        data, read = None if body is None else json.dumps(body).encode(), bytearray()
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(trust_env=False, timeout=None, verify=certificates()) as client,
            client.stream("POST" if data else "GET", self._url + path, content=data, headers=self._headers) as answer,
        ):
            async for part in answer.aiter_raw():
                read += part
                if len(read) > self.largest:
                    raise ValueError(f"its answer does not end: {len(read)} bytes so far")
        return answer.status_code, bytes(read)

    def _failed(self, path: str, reason: str) -> UsageError:
        said = f"the vLLM server {self._url} failed at {path} ({reason}): see {self._log}, then start again"
        return ServerFailed(said)

    def load(self, adapter: Path, name: str) -> None:
        """Load an adapter from a folder that the server can read."""
        self.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter.resolve())})

    def unload(self, name: str) -> None:
        """Forget an adapter."""
        self.ask("/v1/unload_lora_adapter", {"lora_name": name})

    def complete(
        self, name: str, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]
    ) -> list[tuple[list[int], list[float]]]:
        """A completion of each prompt, by an adapter's name: token ids, and the log-probability of each."""
        asked = {"model": name, "prompt": [list(ids) for ids in prompts], "logprobs": 0, "return_token_ids": True}
        answer = self.ask("/v1/completions", asked | sampling)
        try:
            choices = sorted(json.loads(answer)["choices"], key=lambda choice: int(choice["index"]))
            if [choice["index"] for choice in choices] != list(range(len(prompts))):
                raise ValueError
            return [([int(i) for i in done["token_ids"]], list(done["logprobs"]["token_logprobs"])) for done in choices]
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            raise self._failed("/v1/completions", "no completions with token ids and log-probabilities") from None


def named(url: str) -> Server:
    """The server of --vllm-server, with its key from the environment."""
    return Server(url, key=os.environ.get(KEY, ""))


# ---------------------------------------------------------------------------------------------------------------------
# A server of the program's own


def command(model: str, config: ServerConfig, machine: Machine, port: int) -> list[str]:
    """The command line of a server.

    It is told how much memory its keys and values get, twice what a step's completions need or more.  Otherwise vLLM
    would measure what is left, and fail where another process takes or frees memory meanwhile.
    """
    rank = next((rank for rank in RANKS_OF_LORA if rank >= config.lora_rank), 0)
    if not rank:
        raise UsageError(f"--lora-rank {config.lora_rank} is more than vLLM's {RANKS_OF_LORA[-1]}")
    needed = memory_needed(model, config)
    options = {
        "model": model,
        "served-model-name": "base",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16",
        "max-model-len": config.max_seq_length,
        "max-lora-rank": rank,
        "max-loras": 1,
        "max-num-seqs": config.batch_size * config.accumulation,
        "gpu-memory-utilization": f"{needed.get(SERVER, 24e9) / machine.memory:.2f}",
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
    }
    if KEYS_AND_VALUES in needed:
        options["kv-cache-memory-bytes"] = int(2 * needed[KEYS_AND_VALUES])
    if tiny.layout_of(Path(model)):  # vLLM knows gpt-oss only with YaRN; with factor 1 it changes no angle
        rope = {
            "rope_type": "yarn",
            "rope_theta": tiny.ROPE_THETA,
            "factor": 1.0,
            "truncate": False,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": tiny.POSITIONS,
        }
        options["hf-overrides"] = json.dumps({"rope_parameters": rope})
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [str(VLLM / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--enable-lora", *words]


def start(model: str, config: ServerConfig, machine: Machine, run: Path) -> Server:
    """Start a server that ends with this process.  Returns it once it answers.  Raises UsageError.

    It loads any adapter that it is told to, so it has a key, which other users of this machine cannot read.  vLLM asks
    for it under /v1 alone: docs/cluster.md.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", str(run / LOG), key := secrets.token_hex(16))
    environment = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", KEY: key}
    parent = os.getpid()

    def end_with_the_trainer() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    with open(run / LOG, "a", opener=no_link) as log:
        process = subprocess.Popen(
            command(model, config, machine, port),
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_the_trainer,
        )
    atexit.register(process.terminate)
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS and process.poll() is None:
        with contextlib.suppress(UsageError):
            server.ask("/health", seconds=5)
            return server
        time.sleep(1)
    process.terminate()
    raise UsageError(f"vLLM did not start: see {run / LOG}")


# ---------------------------------------------------------------------------------------------------------------------
# In training


class Sampler:
    """What TRL's and Unsloth's trainers ask of their `vllm_generation`."""

    def __init__(self, trainer: Any, server: Server, base: str, run: Path) -> None:
        self._trainer, self._server, self._base, self._run = trainer, server, base, run
        self._name = ""  # of the newest adapter

    def sync_weights(self) -> None:
        """Give the server the adapter as it is now."""
        weights = whole_weights(self._trainer)
        name = f"{self._run.name}-{self._trainer.state.global_step}-{secrets.token_hex(4)}"  # a resumed run has others
        by_first_rank(partial(self._send, weights, name))
        self._name = name

    def _send(self, weights: dict[str, Any] | None, name: str) -> None:
        folder = self._run / ".sampler"
        shutil.rmtree(folder, ignore_errors=True)
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        model.save_pretrained(folder / "trained", state_dict=weights, save_embedding_layers=False)
        (folder / "released").mkdir()
        write_adapter(folder / "trained", self._base, folder / "released")
        self._server.load(folder / "released", name)
        if self._name:
            self._server.unload(self._name)

    def generate(
        self, prompts: Sequence[Sequence[int]], images: Any, num_generations: int, profiler: Any
    ) -> tuple[Any, list[list[int]], list[list[list[float]]], None]:
        """A completion of each prompt (token ids) with the log-probability of each token."""
        trainer = self._trainer
        sampling = {
            "temperature": trainer.temperature,
            "top_p": trainer.top_p,
            "top_k": trainer.top_k or -1,
            "max_tokens": trainer.max_completion_length,
            "stop_token_ids": list(trainer.eos_token_ids),
        }
        with profiler:
            done = self._server.complete(self._name, prompts, sampling)
        return prompts, [ids for ids, _ in done], [[[value] for value in logprobs] for _, logprobs in done], None


def sample_with_vllm(trainer: Any, config: ServerConfig, run: Path) -> None:
    """Let a trainer sample its completions from a vLLM server: the one named, or one that is started here."""
    base = full_precision(trainer.model.peft_config["default"].base_model_name_or_path)
    server = named(config.vllm_server) if config.vllm_server else start(base, config, find_machine(), run)
    trainer.vllm_generation = Sampler(trainer, server, base, run)
    # What the trainers set themselves when they start with a server of TRL's own kind.
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
