"""Training in several processes that torchrun or accelerate started: which one this is, and how they agree.

Every rank must take the same decisions, otherwise their collectives deadlock.  So a decision is made from `gathered`
items, or on rank 0 by `by_first_rank`.  With one process, all of this does nothing and imports nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class RankConfig(Protocol):
    """What `join_ranks` reads of a run's configuration."""

    @property
    def model(self) -> str: ...

    @property
    def loader(self) -> str: ...


def sharded() -> bool:
    """Whether accelerate spreads the model over the GPUs of all ranks (FSDP)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def join_ranks(config: RankConfig, prepare: Callable[[bool], None]) -> None:
    """Start the process group.  `prepare(offline)` sets the environment before the first import of a library."""
    if RANKS == 1:
        return
    prepare(config.model == "tiny")
    if config.loader == "unsloth":
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
        raise SystemExit(2)
    return made[0]  # type: ignore[no-any-return]
