"""Text runs in the cloud, on Modal, with the same options as here.  From the project's folder:

    modal run -m mini.modal_app --algo grpo --steps 2000
    modal volume put mini-outputs input.txt
    modal run --detach -m mini.modal_app --algo ppo --data /outputs/input.txt
    modal volume get mini-outputs RUN                   download a run's folder

Modal's own client holds the account.  With --track wandb, wandb's key comes from a Modal secret named wandb that holds
WANDB_API_KEY (modal secret create wandb ...).  Nothing else is secret, and no key passes through these files.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import modal

HOME = Path("/")  # the parent of outputs/, which is the volume
NEEDED = ("torch", "tokenizers", "safetensors", "numpy", "tensorboard", "tyro", "rich", "chess", "wandb")


def pinned() -> list[str]:
    """The packages that mini needs, pinned as in pyproject.toml; none in the cloud, where the image already exists."""
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
    .add_local_python_source("mini", "toolkit")
)
asked = any(word.rpartition("=")[2] == "wandb" for word in sys.argv)
# Always one secret: Modal reads this file again in the cloud, without argv, and compares the number of dependencies.
key = modal.Secret.from_name("wandb", required_keys=["WANDB_API_KEY"]) if asked else modal.Secret.from_dict({})


@app.function(image=image, cpu=4.0, memory=16384, timeout=24 * 3600, volumes={"/outputs": volume}, secrets=[key])
def train(options: list[str]) -> int:
    """`python -m mini text OPTIONS` in the cloud.  Returns its exit code; its files are kept however it ends."""
    from mini.__main__ import main

    os.chdir(HOME)
    try:
        return main(["text", *options])
    finally:
        volume.commit()


@app.local_entrypoint()
def run(*options: str) -> None:
    """Pass the options on, and exit with the run's exit code."""
    if code := train.remote(list(options)):
        sys.exit(code)
