#!/usr/bin/env python3
"""What gpt-oss-20b wrote in public notebooks about this task: how long it is, and what the judge and the stages say.

    git clone --bare --depth 1 https://github.com/unslothai/notebooks
    python benchmarks/bench_public.py notebooks.git [MORE.git ...]

Notebooks keep what their cells printed.  Counted is every distinct `def strategy` at the start of a line with its body,
but not the prompt's example.  Nothing is copied: the programs belong to whoever ran the notebooks.  Each program plays
each size to a tile that ends the game, and has won a stage if it made the stage's tile.  OpenEnv's notebooks have
numbers as keys, which are translated for the games.  Needs ./setup.sh --with harmony, for gpt-oss's tokens.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import gpt_2048_rl as program  # noqa: E402

OPENENV = {"0": "w", "1": "d", "2": "s", "3": "a"}  # OpenEnv's numbers for up, right, down and left
LIMITS = (200, 256, 320, 400, 512, 640, 768)  # tokens
LAST_TILE = {3: 1024, 4: 4096, 5: 4096, 6: 4096}  # where a game on a board of this size ends
STAGES = ("6:2048", "6:256", "6:64", "5:512", "5:64", "4:64", "4:128", "4:256", "4:512", "4:1024", "4:2048", "3:32",
          "3:64")  # fmt: skip


@dataclass(frozen=True)
class Args:
    """What to read and how to play."""

    repositories: tyro.conf.Positional[tuple[Path, ...]]  # bare clones
    seeds: tuple[int, ...] = (901, 902, 903, 904)  # boards
    group: int = 16  # programs of a drawn group
    groups: int = 2000  # drawn


@dataclass(frozen=True)
class Found:
    """A program of a notebook."""

    source: str
    numbers: bool  # as keys

    def answer(self) -> str:
        """It as a model would answer, with letters as keys."""
        translated = f"""

_with_numbers = strategy

def strategy(board):
    key = _with_numbers(board)
    return {OPENENV}.get(key, key)
"""
        return f"```python\n{self.source}{translated if self.numbers else ''}\n```"


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def git(repository: Path, *words: str) -> str:
    """What git says of a repository."""
    command = ["git", "-C", str(repository), *words]
    try:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode()
    except subprocess.CalledProcessError:
        raise SystemExit(f"error: {repository} cannot be read: name a bare clone") from None


def programs_in(text: str) -> Iterator[str]:
    """Each function `strategy` of a text."""
    block: list[str] = []
    for line in [*text.split("\n"), "."]:
        if block and (not line.strip() or line[0] in " \t)#]}"):
            block.append(line)
            continue
        if block and "# Example" not in (source := "\n".join(block).rstrip()):
            yield source
        block = [line] if line.startswith("def strategy") else []


def programs_of(repository: Path) -> Iterator[Found]:
    """The programs that the notebooks of a repository's newest commit printed."""
    for path in git(repository, "ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0"):
        if not path.endswith(".ipynb") or "Gemma" in path or not ("2048" in path or "OpenEnv" in path):
            continue
        whole = git(repository, "show", f"HEAD:{path}")
        printed = (output for cell in json.loads(whole)["cells"] for output in cell.get("outputs", []))
        for output in printed:
            text = "".join(output.get("text") or output.get("data", {}).get("text/plain") or "")
            for source in programs_in(text):
                yield Found(source, "openenv" in whole.lower())


def lengths(found: Sequence[Found]) -> list[int]:
    """gpt-oss's tokens of each program with its fence and the end token, in order."""
    import bpe_openai

    encoding = bpe_openai.get_encoding("o200k_base")
    return sorted(len(encoding.encode(f"```python\n{one.source}\n```")) + 1 for one in found)


# ---------------------------------------------------------------------------------------------------------------------
# Games


def at_stage(game: program.GameResult, target: int) -> program.GameResult:
    """What a game would have been if the target had ended it."""
    return replace(game, outcome="success") if game.max_tile >= target else game


def verdicts_on(found: Sequence[Found], size: int, seeds: tuple[int, ...]) -> list[program.Verdict]:
    """The judge's verdicts after each program's games."""
    jobs = [program.Job(one.answer(), seeds, size, LAST_TILE[size], "wasd", completion=True) for one in found]
    return program.shared_pool().judge(jobs)


@dataclass(frozen=True)
class AtStage:
    """What a stage tells programs apart by."""

    stage: str
    won: float  # share of games
    with_winner: float  # share of groups
    spread: float  # standard deviation of the rewards in a group, mean over groups
    flat: float  # share of groups whose rewards are all equal
    outcomes: dict[str, float]  # share of games


def at(stage: str, verdicts: Sequence[program.Verdict], args: Args) -> AtStage:
    """Groups of programs at a stage, drawn at random."""
    target = program.Stage.read(stage).target
    games = [[at_stage(game, target) for game in verdict.results] for verdict in verdicts]
    rewards = [
        0.0 if verdict.cheating else statistics.fmean(program.game_reward(game, target) for game in played)
        for verdict, played in zip(verdicts, games, strict=True)
    ]
    wins = [any(game.outcome == "success" for game in played) for played in games]
    draw = random.Random(1)
    groups = [draw.choices(range(len(games)), k=args.group) for _ in range(args.groups)]
    outcomes = Counter(game.outcome for played in games for game in played)
    return AtStage(
        stage,
        outcomes["success"] / outcomes.total(),
        statistics.fmean(any(wins[i] for i in group) for group in groups),
        statistics.fmean(statistics.pstdev(rewards[i] for i in group) for group in groups),
        statistics.fmean(len({rewards[i] for i in group}) == 1 for group in groups),
        {name: count / outcomes.total() for name, count in outcomes.most_common()},
    )


def main(args: Args) -> int:
    """Read, measure and print."""
    if not importlib.util.find_spec("bpe_openai"):
        raise SystemExit("error: gpt-oss's tokens come with an optional package: ./setup.sh --with harmony")
    found = list(dict.fromkeys(one for repository in args.repositories for one in programs_of(repository)))
    if not found:
        raise SystemExit("error: no notebook about 2048 has printed a program")
    kinds = {"all": found, "letters as keys": [one for one in found if not one.numbers],
             "numbers": [one for one in found if one.numbers]}  # fmt: skip
    kinds = {name: part for name, part in kinds.items() if part}
    long = Table("", "programs", "10%", "median", "90%", "longest", *(f"over {limit}" for limit in LIMITS))
    tokens = {name: lengths(part) for name, part in kinds.items()}
    for name, counted in tokens.items():
        shares = (f"{sum(length > limit for length in counted) / len(counted):.0%}" for limit in LIMITS)
        parts = (str(counted[int(share * (len(counted) - 1))]) for share in (0.1, 0.5, 0.9, 1.0))
        long.add_row(name, str(len(counted)), *parts, *shares)
    verdicts = {size: verdicts_on(found, size, args.seeds) for size in LAST_TILE}
    stages = [at(stage, verdicts[program.Stage.read(stage).size], args) for stage in STAGES]
    ladder = Table("stage", "games won", "groups with a winner", "spread", "flat groups", "how games end")
    for row in stages:
        ends = ", ".join(f"{name} {share:.0%}" for name, share in row.outcomes.items())
        ladder.add_row(
            row.stage, f"{row.won:.1%}", f"{row.with_winner:.0%}", f"{row.spread:.1f}", f"{row.flat:.0%}", ends
        )
    for table in (long, ladder):
        Console(width=150).print(table)
    print(json.dumps({"tokens": tokens, "stages": [asdict(row) for row in stages]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
