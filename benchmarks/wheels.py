#!/usr/bin/env python3
"""Wheels of what bench_gpu.py needs beside PyTorch and transformers, for a GPU machine without network.

    python benchmarks/wheels.py wheels --python 3.12                       # here
    python -m pip install --no-index --no-deps --target site wheels/*.whl  # there
    PYTHONPATH=site python benchmarks/bench_gpu.py

Versions are those of pyproject.toml.  Unsloth's web interface and bitsandbytes' libraries for anything but CUDA 13 are
left out, which leaves 11 of 74 MiB.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("unsloth", "unsloth_zoo", "trl", "peft", "datasets", "bitsandbytes", "tyro", "rich")
THEIR_NEEDS = ("dill", "multiprocess", "docstring-parser", "typeguard")  # their dependencies, in any version
LEFT_OUT = re.compile(r"studio/|bitsandbytes/libbitsandbytes_(?!cuda130)")


@dataclass(frozen=True)
class Args:
    """Where to write the wheels, and for which machine."""

    folder: tyro.conf.Positional[Path]
    python: str = "{}.{}".format(*sys.version_info)  # Python version of the other machine
    machine: str = platform.machine()


def pinned() -> list[str]:
    """The requirements of NAMES, as pinned in pyproject.toml."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return [line for group in ("stack", "no-deps") for line in groups[group] if re.split("[=<>!]", line)[0] in NAMES]


def strip(wheel: Path) -> None:
    """Rewrite a wheel, and its record, without the files that match LEFT_OUT."""
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            if LEFT_OUT.match(info.filename):
                continue
            content = old.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not LEFT_OUT.match(line)).encode()
            new.writestr(info, content)
    smaller.replace(wheel)


def main(args: Args) -> int:
    """Download and strip the wheels, and print their size."""
    platforms = [f"--platform=manylinux_2_{minor}_{args.machine}" for minor in (17, 24, 27, 28)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", args.folder,
         "--python-version", args.python, "--implementation", "cp", *platforms, *pinned(), *THEIR_NEEDS], check=False,
    )  # fmt: skip
    if done.returncode:
        return 2  # pip has printed the reason
    wheels = sorted(args.folder.glob("*.whl"))
    for wheel in wheels:
        strip(wheel)
    print(f"{len(wheels)} wheels, {sum(wheel.stat().st_size for wheel in wheels) / 2**20:.1f} MiB, in {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
