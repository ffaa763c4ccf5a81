"""What people see of a run: the terminal, tables, a replayed game, TensorBoard, and the run that shows itself there."""

from __future__ import annotations

import math
import statistics
import textwrap
import time
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit import visible
from toolkit.base import files
from toolkit.base.ranks import RANK, by_first_rank, gathered
from toolkit.games import duration, evaluation
from toolkit.games.programs import BackgroundGames, Game, finished_game, random_moves_win
from toolkit.run import checkpoints, runs, steps, trackers
from toolkit.run.sampler import Recorder, sampled_curves
from toolkit.run.watcher import StepSummary, WatchedConfig, Watcher, exponents

if TYPE_CHECKING:
    from rich.console import Console


# ---------------------------------------------------------------------------------------------------------------------
# The terminal


def small_curve(values: Sequence[float], width: int = 48) -> str:
    """The last values as a line of bars."""
    bars, values = "▁▂▃▄▅▆▇█", values[-width:]
    low, high = min(values), max(values)
    return "".join(bars[round((value - low) / (high - low or 1.0) * (len(bars) - 1))] for value in values)


def excerpt(source: str, usual: Container[str], most: int) -> str:
    """At most so many lines of a program: those that most other programs do not have, and "..." for the rest."""
    lines, shown = visible(source).splitlines(), list[str]()
    for line in lines:
        if line not in usual or shown[-1:] != ["..."]:
            shown.append("..." if line in usual else line)
    shown = lines if {*shown} <= {"..."} else shown
    return "\n".join(shown[:most] + ["..."] * (len(shown) > most))


LEGEND = (
    "reward: mean of a step's answers, ± standard deviation; won: share of their games that made the stage's target "
    "(a program that fails wins none); loads: answers with a program that loads; distinct: answers whose program "
    "differs within their group, which is all answers to one prompt; no gradient: groups with equal rewards, which "
    "teach nothing"
)


class TrainingView:
    """Training in a terminal: one view that is kept up to date; elsewhere a line for each step."""

    def __init__(self, console: Console, steps: int) -> None:
        from rich.live import Live

        self._console, self._steps = console, steps
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._rewards: list[float] = []
        self._seconds: deque[float] = deque(maxlen=10)

    def __enter__(self) -> TrainingView:
        self._console.print(LEGEND, style="dim")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """A line that stays."""
        self._console.print(text, style=style, soft_wrap=True)

    def step(
        self,
        number: int,
        step: StepSummary,
        tokens: float,
        seconds: float,
        evaluations: float,
        warning: str,
        trouble: str,
        best: tuple[str, float, int] | None,
    ) -> None:
        """Show a step.  `evaluations` are the seconds that they will take; `warning` is what the watcher says now,
        `trouble` what it sees; `best` is the best program so far with its mean tile and its step."""
        count = f"step {number:{len(str(self._steps))}d}/{self._steps}"
        self._seconds.append(seconds)
        left = statistics.median(self._seconds) * (self._steps - number) + evaluations  # the first steps compile
        about = f"about {timedelta(seconds=round(left))} left"
        if not self._live:
            self.say(f"{count}  {step.line()}  {tokens:3.0f} tokens  {seconds:4.1f} s")
            if len(self._seconds) == duration.COMPILING:
                self.say(f"  {about}, {timedelta(seconds=round(evaluations))} of them evaluations")
            if warning:
                self.say(f"  warning: {warning}", style="bold yellow")
            return
        self._live.start()  # not before the first step, because it would hide what is said before
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        self._rewards.append(step.reward)
        ends = "  ".join(f"{outcome} {share:.0%}" for outcome, share in step.outcomes.items() if share)
        head = Table.grid(padding=(0, 2))
        head.add_row(count, ProgressBar(self._steps, number, width=30), about)
        # What matters most stands first: a small terminal shows the first lines.
        parts: list[Any] = [
            head,
            *([Text(f"warning: {trouble}", style="bold yellow")] if trouble else ()),
            Text(step.line()),
            Text(f"reward {small_curve(self._rewards)}"),
            Text(f"games: {ends}"),
            Text(f"{tokens:.0f} tokens an answer, {seconds:.1f} s a step"),
        ]
        if best:
            source, tile, found = best
            used = len(self._console.render_lines(Group(*parts)))
            most = self._console.height - used - 4  # its two borders, "...", and the cursor's line
            shown = Text(excerpt(source, step.usual, max(1, most)), overflow="ellipsis", no_wrap=True)
            title = f"best program so far, without the usual lines: mean tile {tile:.0f} in step {found}"
            parts.append(Panel(shown, title=title, expand=False))
        self._live.update(Group(*parts), refresh=True)


def show_scores(console: Console, result: Mapping[str, Any]) -> None:
    """The tables at the end of a run or an evaluation, one for each stage."""
    from rich.table import Table

    for i, (stage, played) in enumerate(evaluation.read_scores(result).items()):
        table = Table(f"{stage}, held out", f"made {played.target}", "95% interval", "median tile", "games")
        for name, score in played.scores.items():
            interval = f"{score.won_low:.0%} to {score.won_high:.0%}"
            shown = str(result["model"]).removesuffix("/adapter") if name == evaluation.MODEL else name
            table.add_row(shown, f"{score.won:.0%}", interval, f"{score.largest_tile_median:.0f}", str(score.games))
        console.print(table)
        if i:
            console.print(evaluation.without_skill(stage, played))
    if not result["jailed"]:
        console.print("These strategies ran WITHOUT the jail (--unsafe-no-jail): nothing kept them from cheating.")


COLOURS = (236, 240, 242, 94, 130, 166, 160, 178, 142, 106, 70, 35, 33)  # xterm-256 backgrounds, by log2 of the tile


def render(board: Sequence[Sequence[int]]) -> str:
    """A board as text with ANSI colours, for a terminal."""
    width = len(str(max(map(max, board)))) + 2

    def cell(tile: int) -> str:
        return f"\x1b[48;5;{COLOURS[min(max(tile, 1).bit_length() - 1, 12)]}m{tile or '·':^{width}}\x1b[0m"

    return "\n".join("".join(map(cell, row)) for row in board)


def replay(console: Console, game: Game, moves: Sequence[int], title: str, delay: float) -> None:
    """Replay a finished game in the terminal, move by move."""
    from rich.live import Live
    from rich.text import Text

    def frame(step: int) -> Text:
        return Text.from_ansi(f"{title}  move {step}/{len(moves)}  score {game.score()}\n{render(game.board())}")

    with Live(frame(0), console=console, auto_refresh=False) as live:
        for step, direction in enumerate(moves, 1):
            game.move(direction)
            live.update(frame(step), refresh=True)
            time.sleep(delay)
    if not console.is_terminal:
        console.print()  # Live ends a terminal's last line, and no other


# ---------------------------------------------------------------------------------------------------------------------
# Pictures and TensorBoard


def board_picture(tiles: Sequence[int], cell: int = 64) -> Any:
    """A square board, row by row, as a PIL image: the larger a tile, the darker its red."""
    from PIL import Image, ImageDraw, ImageFont

    size = math.isqrt(len(tiles))
    image = Image.new("RGB", (size * cell, size * cell), "#bbada0")
    draw = ImageDraw.Draw(image)
    for i, tile in enumerate(tiles):
        top, left = (cell * at for at in divmod(i, size))
        shade = min(1.0, math.log2(tile) / 17) if tile else 0.0
        colour = (238 - round(80 * shade**2), 228 - round(210 * shade), 218 - round(200 * shade)) if tile else "#cdc1b4"
        draw.rounded_rectangle((left + 3, top + 3, left + cell - 4, top + cell - 4), cell // 10, fill=colour)
        if tile:
            font = ImageFont.load_default(cell * min(0.4, 1.3 / len(str(tile))))
            draw.text((left + cell / 2, top + cell / 2), str(tile), "white" if shade > 0.4 else "#3c3a32", font, "mm")
    return image


def indented(text: str) -> str:
    """Model-written text as a block of code in Markdown, which no character can end."""
    return textwrap.indent(visible(text), "    ", lambda _: True)


def write_best(writer: Any, step: int, source: str, game: Mapping[str, Any]) -> None:
    """The best program and the end of its best game, in TensorBoard."""
    import numpy as np

    writer.add_text("best program", indented(source), step)
    writer.add_image("end of the best game", np.asarray(board_picture(game["end"])), step, dataformats="HWC")


def show_best(run: Path, step: int, source: str, game: Mapping[str, Any]) -> None:
    """The best program of a finished run, among its curves."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(run) as writer:
        write_best(writer, step, source, game)


def write_glance(writer: Any, step: StepSummary, number: int, tokens: float) -> None:
    """What matters most, in TensorBoard.  Its first tab sorts groups by name, and all other curves are in "train"."""
    curves = {
        "reward": step.reward,
        "games won": step.won,
        "distinct programs": step.distinct,
        "tokens of an answer": tokens,
    }
    for name, value in curves.items():
        writer.add_scalar(f"at a glance/{name}", value, number)


def write_step(writer: Any, step: int, completions: Sequence[Mapping[str, Any]], texts: bool) -> None:
    """In TensorBoard: a histogram of a step's largest tiles; with `texts`, eight completions with their verdicts."""
    import numpy as np

    games = [game for done in completions for game in done["results"]]
    writer.add_histogram("largest tile, log2", np.array(exponents(games)), step)
    if texts:
        rows = [
            f"**reward {done['reward']:.2f}, {done['works']}** {done['cheating']} "
            + " ".join(f"{game['outcome']} {game['max_tile']}" for game in done["results"])
            + f"\n\n{indented(done['text'])}"
            for done in completions[:8]
        ]
        writer.add_text("completions", "\n\n---\n\n".join(rows), step)


# ---------------------------------------------------------------------------------------------------------------------
# Watching a run

SAMPLED = 10  # steps between measurements of KL divergence and entropy


class WatchedRollouts(Protocol):
    """The script's Rollouts: the last step, and which of its groups are flat."""

    last: dict[str, Any]
    flat: list[bool]

    def add(self, row: dict[str, Any]) -> None: ...


def ends_best(levels: Sequence[tuple[str, float]], every: int) -> bool:
    """Whether tiles at the last stage were larger before the last checkpoint than before any other.

    `levels` are each step's stage and mean log2 of the largest tiles; there is a checkpoint `every` so many steps.  One
    between, as Ctrl-C leaves it, has to have half as many behind it: a step or two say little.
    """
    parts = [levels[i : i + every] for i in range(0, len(levels), every)]
    if len(parts) > 1 and 2 * len(parts[-1]) < every:
        return False
    means = [
        statistics.fmean(found)
        for part in parts
        if (found := [level for stage, level in part if stage == levels[-1][0]])
    ]
    return means[-1] >= max(means)


def best_completion(row: Mapping[str, Any]) -> tuple[str, float, int] | None:
    """The program with the largest tiles in a line of rollouts.jsonl: source, mean tile, step.  None if none plays."""
    found = [
        (done["source"], statistics.fmean(game["max_tile"] for game in done["results"]), int(row["step"]))
        for done in row["completions"]
        if done["works"] == "load" and not done["cheating"]
    ]
    return max(reversed(found), key=lambda program: program[1], default=None)


def callback(progress: Any) -> Any:
    """A TrainerCallback that calls a Progress."""
    from transformers import TrainerCallback

    class Watching(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            progress.begin_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save |= state.global_step == 1  # so that a run can be resumed from early on
            if progress.end_step():
                control.should_save = control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs and progress.is_over(logs):
                control.should_save = control.should_training_stop = True

    return Watching()


class Observer:
    """What a trainer asks while it trains.  This one takes no note."""

    def measure(self, batch: dict[str, Any]) -> None:
        """Measure the policy on a batch before it is used."""

    def curves(self) -> dict[str, float]:
        """Curves of the last step, beside the trainer's own."""
        return {}

    def is_best(self) -> bool:
        """Whether the checkpoint about to be written is the best so far."""
        return False


class Progress(Observer):
    """Shows every step, and stops a run that collapsed, was interrupted or has no time.

    Nothing of this is kept in checkpoints: rollouts.jsonl and the trainer's own log have all of it.
    """

    def __init__(
        self, rollouts: WatchedRollouts, games: BackgroundGames, run: Path, console: Console, started: float = 0.0
    ) -> None:
        """`games` are played beside training.  The user waits since `started`, by time.monotonic()."""
        self._rollouts = rollouts
        self.games, self.evaluator, self.run = games, games.first, run
        self._config: WatchedConfig = self.evaluator.config
        self._random_won = cache(lambda size, target: random_moves_win(self.evaluator.at(size, target)))
        self._view, self._watcher = TrainingView(console, self._config.steps), Watcher(self._config)
        self._interruption = runs.Interruption()
        self._writer: Any = None  # of the curves, on rank 0
        self._summary: StepSummary | None = None  # of the last step
        self._summaries: list[tuple[float, float]] = []  # distinct and flat of every step
        self._levels: list[tuple[str, float]] = []  # stage and level of every step
        self._best: tuple[str, float, int] | None = None  # the program with the largest tiles at the last stage
        self._sampled: dict[str, float] = {}
        self._limit, self._late = duration.TimeLimit(games), False
        self._spent, self._began, self._step_began = 0.0, 0.0, 0.0
        self._started = started or time.monotonic()

    @property
    def steps(self) -> int:
        """Steps done."""
        return int(self._trainer.state.global_step)

    @property
    def ended(self) -> str:
        """Why the run was ended before its last step; "" if it was not."""
        late = self._late and self.steps < self._config.steps
        return self._watcher.ended or ("its time was up (--minutes)" if late else "")

    @property
    def interrupted(self) -> int:
        """The signal that ended the run on any rank; 0: none."""
        return max(gathered([self._interruption.signal]))

    def begin(self, trainer: Any) -> str | None:
        """Prepare a trainer that was made with this observer.  Returns the newest checkpoint, from which it goes on."""
        from torch.utils.tensorboard import SummaryWriter
        from transformers import PrinterCallback
        from transformers.integrations import TensorBoardCallback

        self._trainer, self._recorder = trainer, Recorder(trainer.model)
        checkpoint = by_first_rank(partial(checkpoints.newest_checkpoint, self.run, self._view.say))
        step = checkpoints.step_of(checkpoint) if checkpoint else 0
        if checkpoint:
            self._resume(checkpoint, step)
            self._view.say(f"resuming after step {step}; the learning rate is that of {self._config.steps} steps")
        elif by_first_rank(partial(checkpoints.forget_steps, self.run)):
            self._view.say("no checkpoint is left to resume from: training starts again at step 1")
        options: Any = self._config
        trainer.remove_callback(PrinterCallback)  # it prints raw dictionaries
        trackers.report(trainer, options.report_to, self.run)
        trainer.add_callback(callback(self))
        if RANK == 0 and "tensorboard" in options.report_to:
            self._writer = SummaryWriter(self.run, purge_step=step + 1)
            trainer.add_callback(TensorBoardCallback(self._writer))
        if options.sampler == "vllm":
            from toolkit.run.server import sample_with_vllm

            self._view.say(f"sampling at {options.vllm_server}" if options.vllm_server else "starting vLLM")
            sample_with_vllm(trainer, options, self.run)
        return str(checkpoint) if checkpoint else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it trains: until the last step, a collapse, an interruption or the end of time."""
        self._began = time.monotonic() - self._spent
        self._loading = time.monotonic() - self._started
        with self._view, self._interruption, trackers.blaming_the_tracker():
            yield

    def result(self) -> dict[str, Any]:
        """What result.json says of the training."""
        assert self._summary
        distinct, flat = (statistics.fmean(values) for values in zip(*self._summaries, strict=True))
        judged = self.steps * len(self._rollouts.last["completions"])
        return {
            "steps": self.steps,
            "judged": judged,
            "minutes": round(self._spent / 60, 2),
            "stage": self._summary.stage,
            "distinct": round(distinct, 4),
            "zero_spread": round(flat, 4),
            "collapsed": bool(self._watcher.ended),
            "ended": self.ended,
        }

    def begin_step(self) -> None:
        """From here on the first interruption lets the step end."""
        self._step_began, self._interruption.waits = time.perf_counter(), True
        self._recorder.start()

    def end_step(self) -> bool:
        """Whether training was interrupted."""
        self._spent = time.monotonic() - self._began
        return self.interrupted > 0

    def _resume(self, checkpoint: Path, step: int) -> None:
        """Take note of all steps before a checkpoint.  Later ones are forgotten."""
        rows = by_first_rank(partial(steps.rewind, self.run / "rollouts.jsonl", step))
        history = files.read_json(checkpoint / "trainer_state.json")["log_history"]
        with files.naming(self.run / "rollouts.jsonl"):
            for row, logs in zip(rows, (logs for logs in history if "loss" in logs), strict=True):
                self._rollouts.add(row)
                step_summary = StepSummary.of(row, self._rollouts.flat, logs["games/random_won"])
                self._note(step_summary)
                self._watcher.look(step_summary, logs)
                self._spent = logs["seconds/spent"]

    def _note(self, step: StepSummary) -> None:
        if self._summary and step.stage != self._summary.stage:
            self._best = None
        self._summary = step
        self._summaries.append((step.distinct, step.flat))
        self._levels.append((step.stage, step.level))
        programs = filter(None, (best_completion(self._rollouts.last), self._best))
        self._best = max(programs, key=lambda program: program[1], default=None)

    def measure(self, batch: dict[str, Any]) -> None:
        """Measure the policy on a batch before it is used.  Of several ranks the worst counts."""
        exact = self.steps % SAMPLED == 0
        with self._trainer.compute_loss_context_manager():
            found = gathered([sampled_curves(self._trainer, batch, self._recorder, exact)])
        names = {name for curves in found for name in curves}
        self._sampled = {name: max(curves[name] for curves in found if name in curves) for name in sorted(names)}

    def is_best(self) -> bool:
        """Whether tiles at the last stage were never larger before a checkpoint."""
        return ends_best(self._levels, self._config.save_steps)

    def curves(self) -> dict[str, float]:
        """Curves of the last step, beside the trainer's own."""
        row = self._rollouts.last
        step = StepSummary.of(row, self._rollouts.flat, self._random_won(row["size"], row["target"]))
        if self._summary is None or step.stage != self._summary.stage:
            self._view.say(f"the stage is {step.stage}: random legal moves win {step.random_won:.0%} of its games")
        self._note(step)
        seconds = {f"seconds/{name}": value for name, value in self._trainer.seconds.items()}
        took = time.perf_counter() - self._step_began
        return {
            **step.curves(),
            **self._sampled,
            **seconds,
            "seconds/update": took - sum(seconds.values()),
            "seconds/spent": self._spent,
        }

    def is_over(self, logs: Mapping[str, float]) -> bool:
        """Show a step; whether it has to be the last one."""
        assert self._summary
        step, config = self._summary, self._config
        warning = self._watcher.look(step, logs)
        tokens, took = logs.get("completions/mean_length", 0), time.perf_counter() - self._step_began
        trouble, done = self._watcher.trouble, self._rollouts.last["completions"]
        known = self.steps * len(done), done, self._trainer.seconds
        waited = self._loading + time.monotonic() - self._began
        self._late = by_first_rank(partial(self._limit.is_up, waited, took, *known))
        evaluations = self._limit.evaluations(*known)
        self._view.step(self.steps, step, tokens, took, evaluations, warning, trouble, self._best)
        if self._writer:
            write_glance(self._writer, step, self.steps, tokens)
            saves = self.steps % config.save_steps == 0
            write_step(self._writer, self.steps, done, texts=saves)
            if saves and self._best:
                source = self._best[0]
                write_best(self._writer, self.steps, source, finished_game(self.evaluator, source))
        if self._late:
            about = timedelta(seconds=round(evaluations))
            self._view.say(f"evaluating now, for about {about} (--minutes): fewer --games leave more time for training")
        return bool(self._watcher.ended) or self._late
