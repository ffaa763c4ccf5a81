"""Training in several processes that torchrun or accelerate started: which one this is, and how they agree.

Every rank must take the same decisions, otherwise their collectives deadlock.  So a decision is made from `gathered`
items, or on rank 0 by `by_first_rank`.  With one process, all of this does nothing and imports nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
SHARDED = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"  # the model is spread over the GPUs of all ranks


def join(loader: str) -> None:
    """Start the process group.  The environment variables of the libraries have to be set."""
    if loader == "unsloth":
        import unsloth  # noqa: F401 - it patches torch, transformers and trl, so it is imported before them
    import torch
    from accelerate import PartialState

    # Rank 0 plays the held-out boards alone, and the others wait for it longer than the default of 10 minutes.
    PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=2))


def gathered(items: Sequence[T]) -> list[T]:
    """The items of all ranks in the order of ranks.  Every rank gets the same list."""
    if RANKS == 1:
        return list(items)
    from accelerate.utils import gather_object

    return list(gather_object(list(items)))


def by_first_rank(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank.  The others wait, and exit with code 2 if it raises there."""
    if RANKS == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    made: list[Any] = [None, False]  # the result, and whether there is one
    try:
        if RANK == 0:
            made = [make(), True]
    finally:
        broadcast_object_list(made)
    if not made[1]:
        os._exit(2)  # at an ordinary exit, gloo may abort the process because its peer is gone
    return made[0]  # type: ignore[no-any-return]


def weights_digest(model: Any) -> str:
    """SHA-256 of all weights that are trained."""
    digest = hashlib.sha256()
    for weights in model.parameters():
        if weights.requires_grad:
            digest.update(weights.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def whole_weights(trainer: Any) -> dict[str, Any] | None:
    """The weights of a model that is spread over the ranks; None where each rank has all of them.

    Raises RuntimeError where the ranks' adapters differ.
    """
    if SHARDED:
        return dict(trainer.accelerator.get_state_dict(trainer.model_wrapped))
    if RANKS > 1 and len(set(gathered([weights_digest(trainer.model)]))) > 1:
        raise RuntimeError("the ranks have trained different adapters")
    return None
