#!/usr/bin/env python3
"""SmolLM2, a real language model, on two cores: how fast a step is, and what training teaches it.

    python benchmarks/bench_smollm2.py speed
    python benchmarks/bench_smollm2.py learn --output-dir outputs/smollm2 --seeds 1 2 3

`speed`: steps of this program, and of TRL's own trainer with the same model, arguments, rewards and rows, which has
neither toolkit/model/cpu_speed.py nor watching, recording and checkpoints.
`learn`: the recipe, and beside it what could embarrass or better it, with the same number of sampled programs:

- mean: GRPO's own advantages, which push a program as often as it was sampled;
- rejection: the likelihood of the best quarter of each group, in place of GRPO's advantages;
- published: the recipe of the public notebook, on this model;
- best of N: the hundred best of as many programs of the untrained model, chosen by the program's own race;
- blind programs: each key alone, all keys in turn, keys and legal moves at random, and the program that the prompt
  shows.

A run is told by its seed and its steps, and never by seconds.  Needs ./setup.sh --with smollm2.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import gpt_2048_rl as program  # noqa: E402
from toolkit.base import files  # noqa: E402
from toolkit.games import programs  # noqa: E402
from toolkit.model import cpu_speed, machine  # noqa: E402

KEYS: program.Layout = "wasd"
METHODS: dict[str, dict[str, object]] = {  # the options of each
    "recipe": {},
    "mean": {"objective": "mean"},
    "rejection": {},
    "published": {"recipe": "published", "steps": 320},  # of 4 completions: as many as 40 steps of 32
}


@dataclass(frozen=True)
class Args:
    """What to run."""

    part: tyro.conf.Positional[Literal["speed", "learn", "steps"]]  # steps: one process of the others
    seeds: tuple[int, ...] = (1, 2, 3)
    steps: int = 0  # of each run; 0: the recipe's
    methods: tuple[str, ...] = ("recipe", "mean", "rejection", "published")  # of METHODS
    best_of: int = 1  # of how many seeds the best of N is measured
    weights: Literal["auto", "4bit", "16bit"] = "auto"  # of the model, on a GPU
    output_dir: Path | None = None  # keeps the runs; a later start with the same folder continues
    way: str = ""  # for `steps`: what is changed
    words: str = "[]"  # for `steps`: the program's options, as JSON


# ---------------------------------------------------------------------------------------------------------------------
# One process: the program with one thing changed


def best_quarter(completions: Sequence[dict[str, Any]], group: int) -> list[float]:
    """Advantages (B,) of rejection sampling: 1 for the best quarter of each group, as far as it has a program."""
    chosen: list[float] = []
    for i in range(0, len(completions), group):
        rewards = [done["reward"] if done["works"] == "load" else -1e9 for done in completions[i : i + group]]
        bar = sorted(rewards, reverse=True)[max(1, group // 4) - 1]
        chosen += [float(reward >= bar and reward > -1e9) for reward in rewards]
    return chosen


def take_advantages(rule: Callable[[Sequence[dict[str, Any]], int], list[float]]) -> None:
    """Let the trainer, in one process, take its advantages from a rule instead of GRPO's mean."""
    add, leave_out, last = program.Rollouts.add, program.without_flat_groups, dict[str, list[float]]()

    def noted(self: program.Rollouts, row: dict[str, Any]) -> None:
        add(self, row)
        last["advantages"] = rule(row["completions"], len(row["completions"]) // len(self.flat))

    def changed(batch: dict[str, Any], flat: Sequence[bool], by_token: bool) -> dict[str, Any]:
        batch["advantages"] = batch["advantages"].new_tensor(last["advantages"])
        return leave_out(batch, flat, by_token)

    program.Rollouts.add = noted  # type: ignore[method-assign]
    program.without_flat_groups = changed


def train_by_trl(config: program.TrainConfig) -> list[float]:
    """Train with TRL's own trainer.  Returns the seconds of each step."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    ends: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    cpu_speed.speed_up = lambda model: None
    model, tokenizer = program.load_model(config.model, config, lambda _: None)
    folder, ladder = config.output_dir / config.run_name, program.Ladder([program.Stage.read(config.ladder[0])])
    folder.mkdir(parents=True)
    rows = program.training_set(config, ladder)
    rollouts = program.Rollouts(folder / "rollouts.jsonl", config, ladder)
    ours = program.make_trainer(program.add_adapters(model, config), tokenizer, config, folder, rollouts, rows)
    ours.args.save_strategy = "no"
    GRPOTrainer(
        model=ours.model,
        processing_class=tokenizer,
        args=ours.args,
        reward_funcs=[*program.REWARDS, program.ends_in_time],
        train_dataset=rows,
        callbacks=[Ends()],
    ).train()
    return [after - before for before, after in pairwise(ends)]


def steps(way: str, words: Sequence[str]) -> int:
    """A training with one thing changed.  Its last line tells the peak of memory in bytes."""
    if way == "rejection":
        take_advantages(best_quarter)
    seconds = train_by_trl(program.parse_arguments(list(words))) if way == "trl" else []
    status = 0 if seconds else program.main(list(words))
    print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "steps": seconds}))
    return status


def run(way: str, folder: Path, **options: object) -> dict[str, Any]:
    """Train in a process of its own.  Returns what it told.  A finished run is not repeated."""
    kept = folder / "told.json"
    if kept.is_file():
        return files.read_json(kept)
    flags = {"model": "smollm2", "keys": KEYS, "output-dir": folder.parent, "run-name": folder.name, **options}
    words = [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]
    command = [sys.executable, __file__, "steps", "--way", way, "--words", json.dumps(words)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 3):  # 3: collapsed
        raise SystemExit(f"{folder.name} ended with exit code {done.returncode}")
    told = json.loads(done.stdout.splitlines()[-1])
    files.write_whole(kept, json.dumps(told) + "\n")
    return dict(told)


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def speed(args: Args, out: Path) -> dict[str, Any]:
    """Seconds of a step of 16 completions of at most 96 tokens, and peak memory, of this program and of TRL's."""
    numbers = {
        "steps": args.steps or 4,
        "generations": 16,
        "batch-size": 8,  # as in the recipe
        "accumulation": 2,
        "max-new-tokens": 96,
        "games": 1,
        "best-of": 0,
        "held-out": "2:8",
        "race-games": 1,
        "report-to": "none",
    }
    names = ("generate", "score", "update")
    table, found = Table("16 completions", *names, "step, s", "peak, GB"), dict[str, Any]()
    for way in ("ours", "trl"):
        told = run(way, out / f"speed-{way}", seed=args.seeds[0], **numbers)
        parts: dict[str, list[float]] = {}
        if way == "ours":
            history = files.read_json(out / f"speed-{way}" / f"checkpoint-{numbers['steps']}" / "trainer_state.json")
            logs = [row for row in history["log_history"] if "loss" in row]
            parts = {name: [row[f"seconds/{name}"] for row in logs][1:] for name in names}
        whole = [sum(row) for row in zip(*parts.values(), strict=True)] or told["steps"][1:]  # the first warms up
        found[way] = {**parts, "step": whole, "peak": told["peak"]}
        shown = [f"{statistics.median(parts[name]):.1f}" if parts else "" for name in names]
        spread = f"{statistics.median(whole):.1f} ({min(whole):.1f} to {max(whole):.1f})"
        table.add_row(way, *shown, spread, f"{told['peak'] / 1e9:.1f}")
    Console(width=100).print(table)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Learning


def blind_programs() -> dict[str, str]:
    """Programs without skill: but for legal moves they never look at the board.  One is what the prompt shows."""
    keys = program.LAYOUTS[KEYS]
    names = dict(zip(program.DIRECTIONS, keys, strict=True))
    alone = {f"always {key}": f'def strategy(board): return "{key}"' for key in keys}
    random = f'import random\ndef strategy(board): return random.choice("{keys}")'
    return alone | {
        "in turn": programs.controls(keys)["rotation"],
        "legal moves at random": programs.controls(keys)["random"],
        "at random": random,
        "the prompt's": program.EXAMPLES["random"].format(**names),
    }


@dataclass(frozen=True)
class Sampled:
    """What a model's sampled programs do: shares of the answers, and means over their games."""

    loads: float
    distinct: float
    reward: float  # function_works + no_cheating + strategy_succeeds, 6x6 to 2048
    won: float  # 6x6, 2048
    level: float  # mean of log2 of the largest tile, 4x4

    @classmethod
    def of(cls, evaluator: program.Evaluator, answers: Sequence[str]) -> Sampled:
        """Judge answers, each on a held-out board of 6x6 and of 4x4."""
        boards = [[seed] for seed in evaluator.held_out_seeds[: len(answers)]]
        large = evaluator.at(6, 2048, 2048).judge(answers, boards)  # until they make it
        small = evaluator.at(4, 2048).judge(answers, boards)  # to their end
        rewards = []
        for verdict in large:
            (game,) = verdict.results
            plays = 0.0 if verdict.cheating else program.game_reward(game, 2048)
            clean = program.NOTHING_TO_CHECK if verdict.works == "none" else program.CLEAN
            rewards.append(program.WORKS[verdict.works] + (program.CHEATING if verdict.cheating else clean) + plays)
        return cls(
            statistics.fmean(verdict.works == "load" for verdict in large),
            len({verdict.source or answer for verdict, answer in zip(large, answers, strict=True)}) / len(answers),
            statistics.fmean(rewards),
            statistics.fmean(verdict.results[0].outcome == "success" for verdict in large),
            statistics.fmean(max(0, verdict.results[0].max_tile).bit_length() - 1 for verdict in small),
        )

    def row(self) -> list[str]:
        """For people."""
        return [
            f"{self.loads:.0%}",
            f"{self.distinct:.0%}",
            f"{self.reward:.1f}",
            f"{self.won:.0%}",
            f"{self.level:.2f}",
        ]


BOARDS = 128  # held-out boards, and answers of a model


def recipe(seed: int, **other: Any) -> program.TrainConfig:
    """The recipe of SmolLM2, which says how a model is asked too."""
    return replace(program.train_defaults("smollm2"), seed=seed, games=BOARDS, keys=KEYS, **other)


def sampled(model: str | Path, seed: int, weights: str) -> Sampled:
    """The programs of a model's answers to the prompt in the held-out wording."""
    evaluator = program.Evaluator(recipe(seed, weights=weights), 6, 2048)
    loaded = program.load_model(str(model), evaluator.config, lambda _: None)
    return Sampled.of(evaluator, evaluator.answers(*loaded, BOARDS, (-1,)))


def of_programs(sources: Sequence[str]) -> Sampled:
    """Some programs on the held-out boards, in turn."""
    evaluator = program.Evaluator(recipe(0), 6, 2048)
    return Sampled.of(evaluator, [f"```python\n{sources[i % len(sources)]}\n```" for i in range(BOARDS)])


def best_of_n(count: int, seed: int, weights: str) -> Sampled:
    """The hundred best of so many programs of the untrained model, on the held-out boards."""
    evaluator = program.Evaluator(config := recipe(seed, weights=weights), 4, 2048)
    found = programs.sampled_programs(evaluator, *program.load_model("smollm2", config, lambda _: None), count)
    return of_programs(programs.race(evaluator, found, config.race_games).ranking[:100])


def kept(file: Path, make: Callable[[], Sampled]) -> Sampled:
    """What was measured before, or is measured now and kept."""
    if not file.is_file():
        files.write_whole(file, json.dumps(vars(make())) + "\n")
    return Sampled(**files.read_json(file))


def learn(args: Args, out: Path) -> dict[str, Any]:
    """Every method and seed, and the controls."""
    machine.prepare_environment(offline=True)
    numbers = recipe(0)
    count = (args.steps or numbers.steps) * numbers.batch_size * numbers.accumulation
    rows: dict[str, list[Sampled]] = {"before": []}
    for seed in args.seeds:
        rows["before"].append(kept(out / f"before-{seed}.json", partial(sampled, "smollm2", seed, args.weights)))
        for method in args.methods:
            steps = {"steps": args.steps} if args.steps else {}
            folder, same = out / f"{method}-{seed}", {"seed": seed, "weights": args.weights}
            run(method, folder, **same, **{"best-of": 0, "games": 32, **METHODS[method], **steps})
            after, best = folder / "after.json", folder / "best.json"
            rows.setdefault(method, []).append(kept(after, partial(sampled, folder / "adapter", seed, args.weights)))
            source = (folder / "best_strategy.py").read_text()
            rows.setdefault(f"{method}, best program", []).append(kept(best, partial(of_programs, [source])))
    for seed in args.seeds[: args.best_of]:
        of_n = kept(out / f"best-of-n-{seed}.json", partial(best_of_n, count, seed, args.weights))
        rows.setdefault(f"best hundred of {count} untrained", []).append(of_n)
    rows |= {name: [of_programs([source])] for name, source in blind_programs().items()}
    table = Table("", "seed", "loads", "distinct", "reward, 6x6", "won, 6x6", "log2 of the tile, 4x4")
    for name, found in rows.items():
        for number, done in enumerate(found):
            table.add_row(name if not number else "", str(args.seeds[number]) if len(found) > 1 else "", *done.row())
    Console(width=120).print(table)
    return {name: [vars(done) for done in found] for name, found in rows.items()}


def main(args: Args) -> int:
    """Measure and print."""
    if args.part == "steps":
        return steps(args.way, json.loads(args.words))
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.output_dir or Path(scratch)).absolute()
        out.mkdir(parents=True, exist_ok=True)
        found = (speed if args.part == "speed" else learn)(args, out)
    print(json.dumps({"part": args.part, "seeds": args.seeds, "cores": os.cpu_count(), "found": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
