"""What is found of a machine, and what its libraries read of the environment."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import ROOT, run_python
from tests.model.conftest import CPU, GB10, H100
from toolkit.model.machine import bound_memory, find_machine, gpu_is_there, multiplies_bfloat16, prepare_environment


def test_a_gpu_is_described_as_torch_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    properties = SimpleNamespace(name="NVIDIA GB10", major=12, minor=1, total_memory=128_000_000_000, is_integrated=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = find_machine()
    assert dataclasses.replace(found, processor=GB10.processor, triton=GB10.triton) == GB10


@pytest.mark.parametrize(("said", "found"), [
    ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", True), ("flags\t\t: fpu avx2 amx_bf16 amx_tile\n", True),
    ("Features\t: fp asimd i8mm bf16\n", True), ("flags\t\t: fpu avx avx2 avx512f\n", False)])  # fmt: skip
def test_the_processor_says_whether_it_multiplies_bfloat16(
    said: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: said)
    assert multiplies_bfloat16() is found


@pytest.mark.parametrize(("visible", "there"), [(None, True), ("0", True), ("", False), ("-1", False)])
def test_a_gpu_is_known_by_its_device_node(visible: str | None, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(Path, "glob", lambda _, pattern: [Path("/dev/nvidia0")] if "nvidia" in pattern else [])
    assert gpu_is_there() is there
    monkeypatch.setattr(Path, "glob", lambda _, pattern: [])
    assert not gpu_is_there()


def test_memory_that_the_processor_shares_is_not_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 of the GB10's 128 GB are free.  A DGX Spark whose memory runs out has to be switched off."""
    import torch

    taken: list[float] = []
    monkeypatch.setattr("toolkit.model.machine.available_memory", lambda: 40_000_000_000)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", taken.append)
    for machine in (GB10, H100, CPU):
        bound_memory(machine)
    assert taken == [pytest.approx(32 / 128)]


@pytest.mark.parametrize("offline", [False, True])
def test_variables_that_the_user_has_set_stay(offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"XDG_CACHE_HOME": "/cache", "UNSLOTH_GRPO_SEQ_PACKING": "1"}
    monkeypatch.setattr(os, "environ", environment)
    prepare_environment(offline)
    assert environment["UNSLOTH_GRPO_SEQ_PACKING"] == "1"
    assert environment["UNSLOTH_COMPILE_LOCATION"] == "/cache/gpt_2048_rl/unsloth_compiled"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == "/cache/gpt_2048_rl/torchinductor"
    assert environment.get("HF_HUB_OFFLINE") == ("1" if offline else None)


@pytest.mark.parametrize(("users", "spins"), [({}, "10000"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)])
def test_threads_spin_for_a_moment_unless_the_user_says_how_they_wait(
    users: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that slept at once made a step of SmolLM2 a third longer on two idle cores."""
    monkeypatch.setattr(os, "environ", environment := dict(users))
    prepare_environment(offline=True)
    assert environment.get("GOMP_SPINCOUNT") == spins


COMPILES = """
import json, os
from toolkit.model.machine import prepare_environment
prepare_environment(offline=True)
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir())
"""


@pytest.mark.long
def test_compiled_code_is_not_taken_from_where_others_can_write(tmp_path: Path) -> None:
    """torch runs what it finds in /tmp/torchinductor_USER, also if somebody else made that folder."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = run_python(COMPILES, env=environment)
    assert done.stdout.strip() == str(tmp_path / "gpt_2048_rl" / "torchinductor"), done.stderr
