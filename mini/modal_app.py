"""The text runs in the cloud, on Modal, by the same options as here.  From the project's folder:

    modal run -m mini.modal_app --algo grpo --iters 2000
    modal volume put mini-outputs input.txt
    modal run --detach -m mini.modal_app --algo ppo --data /outputs/input.txt
    modal volume get mini-outputs mini-text-TIME        what a run wrote

The account is that of Modal's own client.  With --track wandb its key comes from a Modal secret named wandb, that has
WANDB_API_KEY (modal secret create wandb ...); nothing else is secret, and no key passes through these files.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import modal

HOME = Path("/")  # where a run's outputs/ are: on the volume
NEEDED = ("torch", "safetensors", "numpy", "tensorboard", "tyro", "chess", "tiktoken", "wandb")


def pinned() -> list[str]:
    """What mini needs, in the versions of pyproject.toml; nothing in the cloud, where the image is already built."""
    if not modal.is_local():
        return []
    groups = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["dependency-groups"]
    pins = [*groups["torch-cpu"], *groups["stack"], *groups["cloud"]]
    return [pin.partition("+")[0] for pin in pins if pin.partition("==")[0] in NEEDED]


app = modal.App("mini")
volume = modal.Volume.from_name("mini-outputs", create_if_missing=True)
image = (
    modal.Image.debian_slim(python_version="3.11")
    .pip_install(*pinned(), extra_index_url="https://download.pytorch.org/whl/cpu")
    .add_local_python_source("mini")
)
asked = any(word.rpartition("=")[2] == "wandb" for word in sys.argv)
# One secret in any case: in the cloud this file is read again, without the words, and has to need as many things.
key = modal.Secret.from_name("wandb", required_keys=["WANDB_API_KEY"]) if asked else modal.Secret.from_dict({})


@app.function(image=image, cpu=4.0, memory=16384, timeout=24 * 3600, volumes={"/outputs": volume}, secrets=[key])
def train(options: list[str]) -> int:
    """`python -m mini text OPTIONS` in the cloud.  Returns its exit code; what it wrote is kept, however it ended."""
    from mini.__main__ import main

    os.chdir(HOME)
    try:
        return main(["text", *options])
    finally:
        volume.commit()


@app.local_entrypoint()
def run(*options: str) -> None:
    """Hand the options on, and end as the run ended."""
    if code := train.remote(list(options)):
        sys.exit(code)
