"""The task as a dataset, and what judges its rows: for TRL's script, for verl, and for whoever reads chat messages.

    python -m integrations.dataset --output-dir outputs/dataset
    trl grpo --dataset_name outputs/dataset --reward_funcs integrations.dataset.function_works \
        integrations.dataset.no_cheating integrations.dataset.strategy_succeeds ...

A row is a group: all answers to it play the same boards.  It holds the number of its boards and not their seeds, which
are drawn where answers are judged (see task.py).  The seeds would be worth more than the prompts: a file is copied and
published, and with a seed anyone can search for the moves that win its board.  The price is that two machines play
different boards, unless they have the same secret.  `test` has boards and a wording that `train` never has.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import gpt_2048_rl as program
from integrations import task
from toolkit import UsageError


@dataclass(kw_only=True, frozen=True)
class Args(task.Game):
    """Write the task as a dataset, a file each for training and for evaluation."""

    output_dir: Path = Path("outputs/dataset")  # must not exist yet
    train: int = 1000  # rows; as many as the training has groups, because a repeated row repeats its boards
    test: int = 100
    format: Literal["parquet", "jsonl"] = "parquet"

    def __post_init__(self) -> None:
        super().__post_init__()
        task.check_count("train", self.train, 1 << 20)
        task.check_count("test", self.test, 1 << 20)

    def rows(self, split: Literal["train", "test"]) -> Iterator[dict[str, Any]]:
        """verl's columns.  TRL reads `prompt`, and gives the others to the rewards."""
        for index in range(getattr(self, split)):
            question = task.Question.read({**vars(self), "index": index, "split": split})
            yield {
                "prompt": [{"role": "user", "content": question.prompt}],
                "data_source": "gpt_2048",
                "ability": "code",
                "reward_model": {"style": "rule", "ground_truth": str(question.target)},
                "extra_info": dataclasses.asdict(question),
            }


def export(args: Args) -> int:
    """Write the files."""
    from datasets import Dataset

    try:
        args.output_dir.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--output-dir {args.output_dir} cannot be made: {error.strerror}") from None
    for split in ("train", "test"):
        rows = Dataset.from_list(list(args.rows(split)))
        write = rows.to_parquet if args.format == "parquet" else rows.to_json
        write(args.output_dir / f"{split}.{args.format}")
        print(f"{len(rows)} rows in {args.output_dir / f'{split}.{args.format}'}")
    return 0


def _of_rows(reward: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """One of training's rewards, with the boards of this dataset's rows."""

    @wraps(reward)  # TRL logs it under its name
    def of_rows(completions: Sequence[Any], extra_info: Sequence[Mapping[str, Any]], **_: Any) -> list[float]:
        return reward(completions, **task.columns(list(map(task.Question.read, extra_info))))

    return of_rows


function_works, no_cheating, strategy_succeeds = map(_of_rows, program.REWARDS)  # for TRL; a batch is judged once


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any], **_: Any
) -> dict[str, float]:
    """For verl: the score is the sum of the rewards, which are logged beside it."""
    rewards = task.judge(task.Question.read(extra_info), solution_str)[1]
    return {"score": sum(rewards.values()), **rewards}


if __name__ == "__main__":
    sys.exit(task.start(Args, export, "python -m integrations.dataset"))
