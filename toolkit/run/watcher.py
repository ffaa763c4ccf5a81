"""What the completions of one step say, and the watcher: every known way in which training goes wrong has a name."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from toolkit import stage_name
from toolkit.run import steps
from toolkit.run.advantages import played


class WatchedConfig(Protocol):
    """What is read of a run's options."""

    steps: int
    minutes: float
    games: int
    boards: int
    eval_batch_size: int
    best_of: int
    race_games: int
    save_steps: int
    patience: int
    curriculum: bool

    @property
    def reasoning(self) -> str: ...


# ---------------------------------------------------------------------------------------------------------------------
# A step


ENDED_BY_THE_JAIL = ("the player's process", "MemoryError", "PermissionError")  # how the details of such games begin


def ended_by_the_jail(game: Mapping[str, Any]) -> bool:
    """Whether the jail ended a game, and not the rules or the program."""
    return bool(game["outcome"] == "error" and game["detail"].startswith(ENDED_BY_THE_JAIL))


def exponents(games: Iterable[Mapping[str, Any]]) -> list[float]:
    """log2 of each game's largest tile."""
    return [math.log2(max(1, game["max_tile"])) for game in games]


@dataclass(frozen=True)
class StepSummary:
    """What the completions of one step say: its line in the terminal, the watcher's evidence, and curves."""

    size: int  # of the boards
    target: int
    random_won: float  # share of games in which random legal moves make this target
    won: float  # share of games
    works: float  # share of completions whose strategy loads
    cheating: float  # share of completions
    distinct: float  # share of completions whose program differs from all earlier ones of their group
    commonest: float  # share of a group that plays its most frequent games; 0 if all differ; mean over groups
    identical: bool  # all programs of a group play the same games, in every group
    flat: float  # share of groups whose rewards are all equal, so that there is no gradient
    reward: float  # mean over the completions
    spread: float  # its standard deviation
    largest_tile: float  # median over the games
    level: float  # mean of log2 of the largest tiles
    tiles: Mapping[int, float]  # share of games by largest tile
    outcomes: Mapping[str, float]  # share of games by outcome
    jailed: float  # share of games that the jail ended
    usual: frozenset[str]  # lines that more than half of the programs have

    @classmethod
    def of(cls, row: Mapping[str, Any], flat: Sequence[bool], random_won: float) -> StepSummary:
        """Sum up a line of rollouts.jsonl; `flat` says of each group whether it has no gradient."""
        completions = row["completions"]
        size = len(completions) // len(flat)
        games = [game for completion in completions for game in completion["results"]]
        programs = [completion["source"] or completion["text"] for completion in completions]
        starts = range(0, len(programs), size)
        plays = [Counter(map(played, completions[i : i + size])) for i in starts]
        sources = [completion["source"] or "" for completion in completions]
        lines = Counter(line for source in sources for line in set(source.splitlines()))
        tiles, outcomes = Counter(game["max_tile"] for game in games), Counter(game["outcome"] for game in games)
        rewards = [completion["reward"] for completion in completions]
        return cls(
            size=row["size"],
            target=row["target"],
            random_won=random_won,
            won=outcomes["success"] / len(games),
            works=statistics.fmean(completion["works"] == "load" for completion in completions),
            cheating=statistics.fmean(bool(completion["cheating"]) for completion in completions),
            distinct=sum(len(set(programs[i : i + size])) for i in starts) / len(programs),
            commonest=statistics.fmean(max(counts.values()) / size * (len(counts) < size) for counts in plays),
            identical=all(len(counts) == 1 for counts in plays),
            flat=statistics.fmean(flat),
            reward=statistics.fmean(rewards),
            spread=statistics.pstdev(rewards),
            largest_tile=statistics.median_low(game["max_tile"] for game in games),
            level=statistics.fmean(exponents(games)),
            tiles={tile: count / len(games) for tile, count in sorted(tiles.items())},
            outcomes={outcome: outcomes[outcome] / len(games) for outcome in steps.OUTCOMES},
            jailed=statistics.fmean(ended_by_the_jail(game) for game in games),
            usual=frozenset(line for line, count in lines.items() if 2 * count > len(sources)),
        )

    @property
    def stage(self) -> str:
        """Board and target for people."""
        return stage_name(self.size, self.target)

    def line(self) -> str:
        """The step for people."""
        return (
            f"reward {self.reward:5.2f} ±{self.spread:5.2f}  won {self.won:4.0%} at {self.stage}  "
            f"loads {self.works:4.0%}  distinct {self.distinct:4.0%}"
            + (f"  no gradient in {self.flat:.0%} of groups" if self.flat else "")
        )

    def curves(self) -> dict[str, float]:
        """Every number by the name of its curve."""
        numbers = {f"games/{name}": float(n) for name, n in vars(self).items() if isinstance(n, int | float)}
        outcomes = {f"outcomes/{name}": share for name, share in self.outcomes.items()}
        reached = {
            f"reached/{1 << n}": sum(share for tile, share in self.tiles.items() if tile >= 1 << n)
            for n in range(5, 18)
        }
        return numbers | outcomes | reached


# ---------------------------------------------------------------------------------------------------------------------
# The watcher

GAPS = 5  # first steps, whose differences between sampler and model are usual
LAST = 3  # steps in a row with such a difference, or without a finite gradient, end training
LARGE = 5  # times the difference that rounding explains: one step is enough
REPEAT = 10  # steps until a warning that still holds is repeated
FAR = 2.0  # KL divergence from the start in nats a token; runs that learn stay below 0.2


class Watcher:
    """Says in plain words when training goes wrong, and what to do; and when it makes no sense to go on.

    A step is lost when nothing can be learned from it: no valid code, or no group whose rewards differ.  A solved task
    looks the same to the optimizer, but it is no collapse.
    """

    def __init__(self, config: WatchedConfig) -> None:
        self._config = config
        self.trouble, self._lasted = "", 0  # the present one, and for how many steps it has lasted
        self._entropy = 0.0  # the last one measured
        self._first_entropies: list[float] = []
        self._stage, self._at_stage = "", 0  # the last stage, and how many steps had it
        self._unwon = 0  # steps in a row at this stage in which no game was won
        self._gaps: list[float] = []  # `sampler/gap` of the first steps with the same limit
        self._limit = 0.0
        self._fatal = ""  # what ends training at once
        self._foreign_steps = self._broken_steps = 0  # in a row
        self.lost_steps = 0  # in a row

    @property
    def ended(self) -> str:
        """Why training has to end; "" if it can go on."""
        if self.lost_steps >= self._config.patience:
            return f"nothing to learn for {self._config.patience} steps in a row (--patience)"
        return self._fatal

    def look(self, step: StepSummary, logs: Mapping[str, float]) -> str:
        """What to say after a step, or "".  `logs` are the trainer's metrics of the step."""
        self._fatal = ""
        nothing_to_learn = step.works == 0 or (step.flat == 1 and step.won < 1)
        self.lost_steps = self.lost_steps + 1 if nothing_to_learn else 0
        same = step.stage == self._stage
        self._stage, self._at_stage = step.stage, self._at_stage + 1 if same else 1
        self._unwon = 0 if step.won else self._unwon + 1 if same else 1
        foreign, broken = self._another_model(logs), self._no_gradient(logs)
        trouble = foreign or broken or self._name(step, logs)
        self._lasted = self._lasted + 1 if trouble == self.trouble else 0
        self.trouble = trouble
        return trouble if self._lasted % REPEAT == 0 else ""

    def _no_gradient(self, logs: Mapping[str, float]) -> str:
        """What to say of a gradient that is not finite; "" if it is.  The trainer has left such a step out."""
        self._broken_steps = 0 if math.isfinite(logs.get("grad_norm", 0.0)) else self._broken_steps + 1
        if not self._broken_steps:
            return ""
        trouble = (
            "the gradient is not finite, so the step was left out and the weights are those of before: start "
            "again with a lower --learning-rate"
        )
        if self._broken_steps >= LAST:
            self._fatal = f"{LAST} steps in a row had no finite gradient"
        return trouble

    def _another_model(self, logs: Mapping[str, float]) -> str:
        """What shows that a step's completions are not the trained model's; "" if nothing does.

        Rounding has a limit, and what it does in the first steps, it does later.  A limit is no proof, because few
        GPUs have confirmed it: one large difference, or several in a row, end training.
        """
        if logs.get("sampler/unended", 0.0) > 0:
            self._fatal = (
                "the sampler ended completions without the model's end token: compare eos_token_id in "
                "generation_config.json with the tokenizer's"
            )
            return self._fatal
        if (gap := logs.get("sampler/gap")) is None:
            return ""
        if logs["sampler/limit"] != self._limit:  # a run that goes on in another precision, of another processor
            self._limit, self._gaps = logs["sampler/limit"], []
        usual = statistics.fmean(self._gaps) if len(self._gaps) == GAPS else math.inf
        if gap <= min(logs["sampler/limit"], 10 * usual + 1e-4):
            self._foreign_steps = 0
            if len(self._gaps) < GAPS:
                self._gaps.append(gap)
            return ""
        trouble = (
            f"completions were sampled from another model than the trained one, their log-probabilities differ "
            f"by {gap:.2g} nats a token: look for a lost or old adapter, another chat template or temperature, "
            "top-k, damaged weights"
        )
        self._foreign_steps += 1
        if self._foreign_steps >= LAST or not gap <= LARGE * logs["sampler/limit"]:  # NaN neither
            self._fatal = trouble
        return trouble

    def _name(self, step: StepSummary, logs: Mapping[str, float]) -> str:
        entropy = logs.get("entropy", logs.get("sampled/entropy", self._entropy))
        self._entropy = entropy
        if len(self._first_entropies) < 5:
            self._first_entropies.append(entropy)
        or_less = "" if self._config.reasoning == "none" else ", or take --reasoning none"
        usual, no_spread, all_won = statistics.fmean(self._first_entropies), step.flat == 1, step.won == 1
        troubles = {  # the first that holds is named
            f"nearly all completions are cut off at the length limit: raise --max-new-tokens{or_less}":
                logs.get("completions/clipped_ratio", 0.0) >= 0.8,
            "the sampler tells no log-probabilities, so nothing shows whether it has the trained model: see vllm.log":
                logs.get("sampler/untold", 0.0) > 0.5,
            "next to no completion is valid code: lower --learning-rate, or go back to an earlier checkpoint":
                step.works <= 0.1,
            "every game is won, there is nothing left to learn from: take a harder --ladder, or drop --no-curriculum":
                no_spread and all_won and not self._config.curriculum,
            "collapsed, all programs play alike: lower --learning-rate, or hold the model with --beta":
                no_spread and step.identical and not all_won,
            "collapsing, most answers play as one program does: lower --learning-rate, or raise --generations":
                step.commonest >= 0.5 and not all_won,
            "all rewards of a group are equal, so there is no gradient: raise --generations or --boards":
                no_spread and not all_won,
            "most completions cheat, and do not play (`cheating` in rollouts.jsonl says how): lower --learning-rate":
                step.cheating > 0.5,
            "the clock ends most games: the programs are too slow for --timeout": step.outcomes["timeout"] > 0.5,
            "the jail ends most games (`detail` in rollouts.jsonl says why): lower --temperature or --learning-rate":
                step.jailed > 0.5,
            "entropy runs away, answers turn random: lower --entropy-coef and --learning-rate":
                entropy > 3 * usual + 0.5,
            "KL runs away, the model is far from where it started: lower --learning-rate, or raise --beta":
                logs.get("sampled/kl", 0.0) > FAR,
            "no game was won in the last ten steps, so no reward shows what to find: raise --generations, or begin "
            "--ladder with an easier stage (a smaller tile, a larger board)": self._unwon > REPEAT,
            "random moves would do as well: only a harder stage shows skill (--ladder has the stages)":
                self._at_stage > REPEAT and step.won <= step.random_won,
        }  # fmt: skip
        return next((trouble for trouble, holds in troubles.items() if holds), "")
