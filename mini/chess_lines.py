"""Chess as text: lines, the judge, the controls, and the commands chess, eval and sample.

    P: FEN M: up to five moves E: their evals B: the best      policy: what to play (evals in pawns, for the mover)
    A: FEN+move+history+new FEN+reward+terminated+truncated    environment: what a move does

The answer of an A line starts after the history's `+`, that of a P line at `M:`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import chess
import torch
from torch import Tensor

from mini import config as options
from mini.config import ChessConfig, ChessOptions, JudgeOptions, SampleConfig, SamplingOptions, Shaping
from mini.grpo import Baseline, KlController, Learner, supervised, train
from mini.model import GPT, Rows, Sampling, generate
from mini.runs import Run, Tokens, device_of, load_model, load_tokens, naming, save_model, say, table
from toolkit import UsageError

Kind = Literal["P", "A"]
KINDS: tuple[Kind, ...] = ("P", "A")
SHIPPED = Path(__file__).with_name("positions.txt")  # P lines from stockfish 15.1, depth 8
PRETRAINED = Path(__file__).with_name("weights")  # the model that `pretrain` made, the default start
ONGOING, MATE, DRAW, ILLEGAL = "0.001", "1.0", "0.5", "-1.0"  # rewards of an A line
HISTORY = 10  # at most this many moves in an A line, with its own
OPENING = f"A: {chess.STARTING_FEN}+e2e4+e2e4+"


@dataclass(frozen=True)
class Example:
    """A document: a prompt and the right answer."""

    kind: Kind
    prompt: str
    answer: str

    @property
    def fen(self) -> str:
        """The position that the prompt asks about."""
        return self.prompt[3:].partition("+")[0]


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def parse_line(line: str) -> Example | None:
    """Parse a corpus line; without a prefix it is an A line.  None if it is neither kind."""
    line = line.replace("<|endoftext|>", "").strip()
    if line.startswith("P:"):
        prompt, moves, answer = line.partition("M:")
        return Example("P", f"P: {prompt[2:].strip()}", moves + answer) if moves else None
    fields = line.removeprefix("A:").strip().split("+")
    if len(fields) != 7:
        return None
    return Example("A", f"A: {'+'.join(fields[:3])}+", "+".join(fields[3:]))


def environment_line(board: chess.Board, move: chess.Move, history: list[str]) -> str:
    """The A line of a move.  A legal move is also played on the board; `history` holds the moves before it."""
    before = board.fen()
    reward, terminated, truncated = ONGOING, 0, 0
    if move not in board.legal_moves:
        reward, truncated = ILLEGAL, 1
    else:
        board.push(move)
        if outcome := board.outcome():  # mate, and draws that no player has to claim
            reward, terminated = (DRAW if outcome.winner is None else MATE), 1
    moves = " ".join([*history, move.uci()][-HISTORY:])
    return f"A: {before}+{move.uci()}+{moves}+{board.fen()}+{reward}+{terminated}+{truncated}"


def policy_line(fen: str, moves: list[str], evals: list[float], best: str) -> str:
    """A P line, padded as in the published corpus."""
    numbers = " ".join(f"{value:.2f}" for value in evals)
    return f"P: {fen:90}M: {' '.join(moves):30}E: {numbers:40}B: {best}"


# ---------------------------------------------------------------------------------------------------------------------
# Self-play


def choose_move(board: chess.Board, rng: random.Random) -> chess.Move:
    """A random move that favours checks, captures, castling and en passant, because these hardly occur otherwise."""
    moves = list(board.legal_moves)
    rare = [move for move in moves if board.is_castling(move) or board.is_en_passant(move)]
    if rare and rng.random() < 0.5:
        return rng.choice(rare)
    if rng.random() < 0.5 and (checks := [move for move in moves if board.gives_check(move)]):
        return rng.choice(checks)
    if rng.random() < 0.25 and (captures := [move for move in moves if board.is_capture(move)]):
        return rng.choice(captures)
    return rng.choice(moves)


def illegal_move(board: chess.Board, rng: random.Random) -> chess.Move:
    """A forbidden move of one of the mover's pieces."""
    own = list(chess.SquareSet(board.occupied_co[board.turn]))
    while True:
        move = chess.Move(rng.choice(own), rng.randrange(64))
        if move.from_square != move.to_square and move not in board.legal_moves:
            return move


def self_play(rng: random.Random) -> Iterator[str]:
    """An endless stream of A lines, game after game."""
    while True:
        board, history = chess.Board(), list[str]()
        while not board.is_game_over() and board.fullmove_number < 150:
            if rng.random() < 0.03:
                yield environment_line(board, illegal_move(board, rng), history)
                continue
            move = choose_move(board, rng)
            yield environment_line(board, move, history)
            history.append(move.uci())


# ---------------------------------------------------------------------------------------------------------------------
# The judge.  An answer is judged once, first by a grammar, then field by field; rewards and reports read the verdict.
#
# Both grammars are stricter than the original's: fields must be in order with nothing around them, repeated moves break
# the grammar, and only a fully exact answer gets 1.0.  The strict one, the default, also knows chess: a FEN has to
# parse, with one king each and the right side to move; listed moves have to be legal.

FORMAT = {"P": 2.0, "A": 4.0}  # weight of the grammar
WEIGHTS = {"best": 4.0, "candidates": 1.5, "evals": 1.0, "legal": 6.0, "fen": 3.0, "flags": 2.0, "reward": 1.0}
INVALID = -0.3  # reward of an answer that breaks the grammar
LADDER = ((0.4, 0.2), (0.6, 0.4), (0.8, 0.6), (0.95, 0.8))  # raw score below -> reward
NEARLY = LADDER[-1][1]  # the most that an answer can get that is not exact
EVALS_EXACT = 0.95  # evals with this score or more count as exact
REWARD_TOLERANCE = 0.01

MOVE = r"[a-h][1-8][a-h][1-8][qrbn]?"
NUMBER = r"-?\d{1,9}(?:\.\d{1,9})?"
P_GRAMMAR = re.compile(rf"M:((?: +{MOVE}){{1,5}}) +E:((?: +{NUMBER}){{1,5}}) +B: +({MOVE})")
A_GRAMMAR = re.compile(rf"([^+\n]+)\+({NUMBER})\+([01])\+([01])")


@dataclass(frozen=True)
class Verdict:
    """The judgement of an answer against the right one."""

    kind: Kind
    scores: dict[str, float]  # per field, 0 to 1; empty if not valid
    listed: int = 0  # moves of a P answer, valid or not, where the position is known
    legal: int = 0  # of these
    kings: int = 0  # of the legal ones

    @property
    def valid(self) -> bool:
        """Whether the answer matches the grammar."""
        return bool(self.scores)

    @property
    def raw(self) -> float:
        """Weighted mean of grammar and fields."""
        if not self.valid:
            return 0.0
        content = sum(WEIGHTS[name] * score for name, score in self.scores.items())
        return (FORMAT[self.kind] + content) / (FORMAT[self.kind] + sum(WEIGHTS[name] for name in self.scores))

    @property
    def exact(self) -> bool:
        """Whether every field is right; evals may be slightly off."""
        needed = {"evals": EVALS_EXACT}
        return self.valid and all(score >= needed.get(name, 1.0) for name, score in self.scores.items())


def judge(kind: Kind, answer: str, truth: str, fen: str | None = None) -> Verdict:
    """Judge an answer; by the strict grammar if the prompt's position is given.

    Raises ValueError if the truth itself breaks the grammar.
    """
    answer, truth = answer.strip(), truth.strip()
    if kind == "A":
        return Verdict(kind, judge_environment(answer, truth, strict=fen is not None))
    scores = judge_policy(answer, truth)
    if fen is None:
        return Verdict(kind, scores)
    board, listed = chess.Board(fen), re.findall(MOVE, answer.partition("E:")[0])
    legal = [move for move in board.legal_moves if move.uci() in listed]  # repeated: not legal
    if scores:
        scores["legal"] = len(legal) / len(listed)
    kings = sum(move.from_square == board.king(board.turn) for move in legal)
    return Verdict(kind, scores, len(listed), len(legal), kings)


def shaped(verdict: Verdict, shaping: Shaping = "graduated") -> float:
    """A verdict's reward."""
    linear = INVALID + (1 - INVALID) * verdict.raw
    if shaping == "linear":
        return linear
    if shaping == "binary" or verdict.exact:
        return float(verdict.exact)
    if not verdict.valid or shaping == "capped":
        return min(linear, NEARLY)
    return next((reward for below, reward in LADDER if verdict.raw < below), NEARLY)


def parse_policy(answer: str) -> tuple[dict[str, float], str] | None:
    """Each candidate's eval, and the best move; None if the answer breaks the grammar."""
    parts = P_GRAMMAR.fullmatch(answer)
    if not parts:
        return None
    moves, evals, best = parts[1].split(), [float(number) for number in parts[2].split()], parts[3]
    distinct = len(set(moves)) == len(moves) == len(evals) and all(move[:2] != move[2:4] for move in moves)
    return (dict(zip(moves, evals, strict=True)), best) if distinct and best in moves else None


def judge_policy(answer: str, truth: str) -> dict[str, float]:
    """Scores of best move, candidates and evals; none if the answer breaks the grammar."""
    right, given = parse_policy(truth), parse_policy(answer)
    if right is None:
        raise ValueError(f"no answer of a P line: {truth!r}")
    if given is None:
        return {}
    (evals, best), (right_evals, right_best) = given, right
    shared = [move for move in evals if move in right_evals]  # in order: a sum of floats depends on it
    close = sum(max(0.0, 1 - abs(evals[move] - right_evals[move]) / (1 + abs(right_evals[move]))) for move in shared)
    candidates = len(shared) / max(len(evals), len(right_evals))
    return {"best": float(best == right_best), "candidates": candidates, "evals": close / len(right_evals)}


def levenshtein(a: str, b: str) -> int:
    """The smallest number of single characters to insert, delete or replace."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j - 1] + (x != y), previous[j] + 1, row[-1] + 1))
        previous = row
    return previous[-1]


def similarity(a: str, b: str) -> float:
    """From 0 for texts with nothing in common to 1 for equal texts."""
    return 1 - levenshtein(a, b) / max(len(a), len(b)) if a != b else 1.0


def read_board(fen: str) -> chess.Board:
    """The position of a FEN.  Raises ValueError if it does not parse, or without one king each."""
    board = chess.Board(fen)
    if any(len(board.pieces(chess.KING, colour)) != 1 for colour in chess.COLORS):
        raise ValueError("not one king each")
    return board


def judge_environment(answer: str, truth: str, strict: bool) -> dict[str, float]:
    """Scores of the new position, the flags and the reward; none if the answer breaks the grammar."""
    right, given = A_GRAMMAR.fullmatch(truth), A_GRAMMAR.fullmatch(answer)
    if right is None:
        raise ValueError(f"no answer of an A line: {truth!r}")
    if given is None:
        return {}
    if strict:
        try:  # python-chess would fill in fields that are left out
            if len(given[1].split(" ")) != 6 or read_board(given[1]).turn != chess.Board(right[1]).turn:
                return {}
        except ValueError:
            return {}
    flags = given.group(3, 4) == right.group(3, 4)
    reward = abs(float(given[2]) - float(right[2])) < REWARD_TOLERANCE
    return {"fen": similarity(given[1], right[1]), "flags": float(flags), "reward": float(reward)}


# ---------------------------------------------------------------------------------------------------------------------
# Corpus and task


@dataclass(frozen=True)
class Corpus:
    """Documents by kind: training and held-out."""

    train: dict[Kind, list[Example]]
    held_out: dict[Kind, list[Example]]
    p_share: float = 0.0  # of P among the prompts that are drawn


def shipped_examples() -> list[Example]:
    """The P lines shipped with the package."""
    return [example for line in SHIPPED.read_text().splitlines() if (example := parse_line(line))]


def mirrored(example: Example) -> Example:
    """The same P line with colours exchanged.  Evals are from the mover's side, so they stay."""
    answer = re.sub(r"([a-h])([1-8])", lambda square: square[1] + str(9 - int(square[2])), example.answer)
    return Example("P", f"P: {chess.Board(example.fen).mirror().fen()}", answer)


def best_first(example: Example) -> Example:
    """The same P line with its best moves first, and evals in whole pawns.

    The judge takes any order, and small errors of an eval cost little.  Shuffled, five moves have 120 spellings, and
    hundredths of a pawn are noise: a model spends its training on both.
    """
    parsed = parse_policy(example.answer.strip())
    assert parsed is not None  # it was judged when it was read
    evals, best = parsed
    pairs = sorted(evals.items(), key=lambda pair: (pair[0] != best, -pair[1]))
    pawns = " ".join(f"{max(-99, min(99, round(value)))}.00" for _, value in pairs)
    return Example("P", example.prompt, f"M: {' '.join(move for move, _ in pairs)} E: {pawns} B: {best}")


def read_example(line: str, tokens: Tokens, room: float = math.inf) -> Example:
    """A corpus line, for a model with so many positions.  Raises ValueError with the reason why it cannot be used."""
    example = parse_line(line)
    if not example:
        raise ValueError("neither a P nor an A line")
    judge(example.kind, example.answer, example.answer)
    board = read_board(example.fen)
    flagged = example.answer.strip().endswith("+1")  # an A line may show that a move is illegal
    moves = [example.prompt.split("+")[1]] if example.kind == "A" else re.findall(MOVE, example.answer)
    if example.kind == "A":
        read_board(example.answer.partition("+")[0])
    for move in () if flagged else moves:
        if chess.Move.from_uci(move) not in board.legal_moves:
            raise ValueError("an illegal move")
    prompt, answer = len(tokens.encode(example.prompt)), len(tokens.encode(example.answer))
    if 1 + prompt + max(answer + 1, tokens.longest) > room:  # with an end token before and after
        raise ValueError("too long for the model")
    return example


def read_corpus(path: Path, tokens: Tokens, room: float = math.inf) -> list[Example]:
    """The usable lines of a file; says which ones are not, and why."""
    examples, dropped = list[Example](), defaultdict[str, list[int]](list)
    with naming(path), path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                examples += [read_example(line, tokens, room)] if line.strip() else []
            except ValueError as error:
                dropped[re.sub(r"'.*'|\S*\d\S*", "...", str(error))].append(number)
    for reason, numbers in dropped.items():
        say(f"{path}: {len(numbers)} left out, {reason}: line {', '.join(map(str, numbers))}")
    return examples


def usual_held_out(count: int) -> dict[Kind, list[Example]]:
    """The chess job's held-out documents without --data: shipped P lines, and A lines from far apart in self-play."""
    far_apart = islice(self_play(random.Random("held out")), 0, 10 * count, 10)
    return {"P": shipped_examples()[:count], "A": [e for line in far_apart if (e := parse_line(line))]}


def prompts_of(held_out: dict[Kind, list[Example]]) -> set[str]:
    """Prompts that must not be trained on: with colours exchanged, too."""
    return {e.prompt for examples in held_out.values() for e in examples} | {mirrored(e).prompt for e in held_out["P"]}


def build_corpus(config: ChessOptions, tokens: Tokens, room: float = math.inf) -> Corpus:
    """Held-out documents depend on the data alone, not on --seed.  Their prompts are excluded from training.

    To evaluate, no A lines are played: only a control reads what is left, which needs P lines.
    """
    a_lines, p_share, seed = 0, 0.0, 0
    if isinstance(config, ChessConfig):
        a_lines, p_share, seed = config.a_lines, config.p_share, config.seed
    if config.data:
        examples = read_corpus(config.data, tokens, room)
        random.Random("held out").shuffle(examples)
        train = {kind: [e for e in examples if e.kind == kind] for kind in KINDS}
        held_out = {kind: train[kind][: config.held_out] for kind in KINDS}
    else:
        policy = shipped_examples()
        if config.held_out >= len(policy):
            raise UsageError(f"--held-out {config.held_out} must be below {len(policy)}, the number of P lines")
        held_out = usual_held_out(config.held_out)
        played = islice(self_play(random.Random(f"games {seed}")), a_lines)
        both_colours = [best_first(e) for line in policy for e in (line, mirrored(line))]
        train = {"P": both_colours, "A": [e for line in played if (e := parse_line(line))]}
    forbidden = prompts_of(held_out)
    train = {kind: [example for example in train[kind] if example.prompt not in forbidden] for kind in KINDS}
    for kind in KINDS:
        if not held_out[kind]:
            raise UsageError(f"{config.data} has no usable {kind} lines")
        if a_lines and not train[kind]:
            usable = f"{len(held_out[kind])} usable {kind} lines"
            raise UsageError(f"--held-out {config.held_out}: of {usable} none are left to train on")
    if a_lines:
        say(" and ".join(f"{len(train[kind])} {kind}" for kind in KINDS) + " lines to train on")
    return Corpus(train, held_out, p_share)


class ChessTask:
    """Prompts of both tasks, and their rewards."""

    def __init__(self, tokens: Tokens, config: JudgeOptions, corpus: Corpus) -> None:
        self.tokens, self.end, self.corpus = tokens, tokens.end, corpus
        self.strict = config.grammar == "strict"
        self.shaping: Shaping = config.reward_shaping or ("capped" if self.strict else "graduated")

    def draw(self, rng: random.Random, count: int) -> list[Example]:
        """Draw training documents; the number of P documents is rounded up or down at random."""
        p_count = int(count * self.corpus.p_share + rng.random())
        return [rng.choice(self.corpus.train["P" if i < p_count else "A"]) for i in range(count)]

    def prompt_ids(self, item: Example) -> list[int]:
        """The prompt after an end token, as documents begin in GPT-2's own training."""
        return [self.end, *self.tokens.encode(item.prompt)]

    def answer_ids(self, item: Example) -> list[int]:
        """The right answer and the end token."""
        blank = " " if item.kind == "P" else ""
        return [*self.tokens.encode(blank + item.answer), self.end]

    def rows(self, items: Sequence[Example], device: torch.device) -> Rows:
        """Documents as rows."""
        prompts, answers = [self.prompt_ids(item) for item in items], [self.answer_ids(item) for item in items]
        return Rows.of_documents(prompts, answers, self.end, device)

    def judge(self, item: Example, answer: str) -> Verdict:
        """Judge an answer against the right one."""
        return judge(item.kind, answer, item.answer, item.fen if self.strict else None)

    def rewards(self, items: Sequence[Example], completions: list[list[list[int]]]) -> tuple[Tensor, dict[str, float]]:
        """Rewards (B, K); mean reward and validity of each kind."""
        asked = zip(items, completions, strict=True)
        verdicts = [[self.judge(item, self.tokens.decode(row)) for row in rows] for item, rows in asked]
        rewards = torch.tensor([[shaped(verdict, self.shaping) for verdict in group] for group in verdicts])
        figures = {}
        for kind in KINDS:
            group = torch.tensor([item.kind == kind for item in items])
            if group.any():
                figures[f"reward/{kind}"] = rewards[group].mean().item()
                valid = [verdict.valid for row in verdicts for verdict in row if verdict.kind == kind]
                figures[f"valid/{kind}"] = sum(valid) / len(valid)
        return rewards, figures


# ---------------------------------------------------------------------------------------------------------------------
# Held-out report, and the controls beside it

Report = dict[str, Any]  # of one task, from its held-out prompts


def report(verdicts: Sequence[Verdict], shaping: Shaping) -> Report:
    """Means over the verdicts on one task; None where none applies.  An invalid answer has similarity 0."""
    n, fens = len(verdicts), [verdict.scores.get("fen", 0.0) for verdict in verdicts]
    rewards, valid = sum(shaped(verdict, shaping) for verdict in verdicts), sum(verdict.valid for verdict in verdicts)
    means = {"reward": rewards / n, "validity": valid / n}
    if verdicts[0].kind == "A":
        return {**means, "exact_fen": fens.count(1) / n, "fen_similarity": sum(fens) / n}
    listed, legal, kings = (
        sum(getattr(verdict, name) for verdict in verdicts) for name in ("listed", "legal", "kings")
    )
    best = sum(verdict.scores.get("best", 0.0) for verdict in verdicts) / n
    shares = {"legal": legal / listed if listed else None, "king": kings / legal if legal else None}
    return {**means, **shares, "moves": listed / n if listed else None, "best_move": best}


def report_on(kind: Kind, answers: Sequence[str], task: ChessTask) -> Report:
    """The report on one answer for each of a task's held-out prompts."""
    asked = zip(task.corpus.held_out[kind], answers, strict=True)
    return report([task.judge(item, answer) for item, answer in asked], task.shaping)


def evaluate(model: GPT, task: ChessTask, sampling: Sampling) -> dict[str, Report]:
    """By task: one sampled answer per held-out prompt, with the same random numbers every time."""
    generator, reports = torch.Generator(model.device).manual_seed(0), dict[str, Report]()
    for kind in KINDS:
        prompts, answers = [task.prompt_ids(item) for item in task.corpus.held_out[kind]], list[str]()
        for i in range(0, len(prompts), 32):
            rows, _ = generate(model, prompts[i : i + 32], 1, sampling, task.end, generator)
            answers += [task.tokens.decode(row) for (row,) in rows.answers(task.end)]
        reports[kind] = report_on(kind, answers, task)
    return reports


def listed(moves: Sequence[str]) -> str:
    """A P answer that holds the first move for the best, and all for equal."""
    return f"M: {' '.join(moves)} E: {' '.join(['0.00'] * len(moves))} B: {moves[0]}"


def controls(task: ChessTask) -> dict[str, dict[str, Report]]:
    """What needs no learning, on the held-out prompts: answers that ignore the prompt or copy it, and legal moves."""
    corpus, rng, goes_on = task.corpus, random.Random(0), f"+{ONGOING}+0+0"
    boards = ["8/8/8/8/8/8/8/8", "4k3/8/8/8/8/8/8/4K3", chess.STARTING_BOARD_FEN]  # the second is the average board
    blind = ["x" + goes_on, *(f"{board} {side} - - 0 1{goes_on}" for board in boards for side in "wb")]
    documents = corpus.train["P"][:2000]
    likely = Counter(move for e in documents for move in re.findall(MOVE, e.answer.partition("E:")[0]))
    legal = Counter(move.uci() for e in documents for move in chess.Board(e.fen).legal_moves)
    fixed = [listed([move for move, _ in counts.most_common(5)]) for counts in (likely, legal) if counts]

    def random_moves(item: Example) -> str:
        moves = [move.uci() for move in chess.Board(item.fen).legal_moves]
        return listed(rng.sample(moves, min(5, len(moves))))

    def other_side(fen: str) -> str:
        return re.sub(" [wb] ", " b " if " w " in fen else " w ", fen, count=1)

    def best(kind: Kind, *tried: list[str]) -> dict[str, Report]:
        return {kind: max((report_on(kind, answers, task) for answers in tried), key=lambda told: told["reward"])}

    moved, asked = corpus.held_out["A"], corpus.held_out["P"]
    return {
        "blind": best("A", *([text] * len(moved) for text in blind)),
        "copied": best("A", [item.fen + goes_on for item in moved]),
        "copied, other side": best("A", [other_side(item.fen) + goes_on for item in moved]),
        **({"five fixed moves": best("P", *([text] * len(asked) for text in fixed))} if fixed else {}),
        "random legal moves": best("P", [random_moves(item) for item in asked]),
    }


def tables(columns: dict[str, dict[str, Report]]) -> str:
    """A table for each task."""
    parts = {kind: {label: told[kind] for label, told in columns.items() if kind in told} for kind in ("A", "P")}
    return "\n".join(table(kind, list(next(iter(rows.values()))), rows) for kind, rows in parts.items())


# ---------------------------------------------------------------------------------------------------------------------
# Commands

# In the printed line of a step.
SHOWN = [f"{name}/{kind}" for name in ("reward", "valid") for kind in KINDS]
SHOWN += ["kl_exact", "kl_coef", "clip_share", "entropy", "zero_spread", "seconds"]


def model_folder(folder: Path) -> Path:
    """A folder with a model, or the model's in a run's folder."""
    if (folder / "model").is_dir():
        return folder / "model"
    if (folder / "start.pt").is_file():
        raise UsageError(f"{folder} is a run without a model: end it with --resume (a denoiser leaves none)")
    return folder


def prepare(config: SamplingOptions) -> tuple[GPT, Tokens, Sampling]:
    """The start, its vocabulary, and how to sample from it."""
    folder = model_folder(config.init or PRETRAINED)
    tokens = load_tokens(folder)
    if tokens.name == "chars" and not isinstance(config, SampleConfig):
        raise UsageError(f"{folder} has the model of a text: only sample can read it")
    model = load_model(folder).to(device_of(config.device))
    say(f"a model of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, on {model.device}")
    longest = config.max_new_tokens or min(tokens.longest, model.config.n_positions // 2)
    sampling = Sampling(config.temperature, config.top_k, config.top_p, longest)
    if sampling.max_new_tokens >= model.config.n_positions:
        raise UsageError(f"the model has {model.config.n_positions} positions: lower --max-new-tokens")
    return model, tokens, sampling


def chess_command(config: ChessConfig) -> dict[str, Any]:
    """GRPO from a start; from the same start likelihood for as long, and rejection sampling for as many steps.

    Reports on all, and on controls.  One is the start's likeliest answers: rewards also raise what is likely already.
    """
    run = Run(config)
    model, tokens, sampling = prepare(config)
    task = ChessTask(tokens, config, build_corpus(config, tokens, model.config.n_positions))
    blind = controls(task)
    run.begin(model)
    if not run.checkpoint:
        run.extra["before"] = evaluate(model, task, sampling)
        run.extra["before, likeliest"] = evaluate(model, task, dataclasses.replace(sampling, temperature=0))
        say(tables({**blind, **run.extra}))
    lr = options.LR[tokens.name] if config.lr is None else config.lr

    def beginner(baseline: options.BaselineType) -> Learner:
        return Learner(
            copy.deepcopy(model).requires_grad_(True),
            model.requires_grad_(False),
            lr,
            config.seed,
            value_lr=lr if config.use_gae and baseline != "best" else None,
            baseline=Baseline(baseline, config.scale_by_std),
            kl=KlController(config.kl_coef, config.adaptive_kl, config.kl_target, config.kl_horizon),
        )

    learner = beginner(config.baseline_type)
    lines = dict[str, float]()  # level ones, for TensorBoard
    for name, told in blind.items():
        words = "_".join(re.findall("[a-z]+", name))
        lines |= {f"reward/{kind}_of_{words}": one["reward"] for kind, one in told.items()}
    steps = ({**figures, **lines} for figures in train(learner, task, config, sampling))
    flat = run.follow(learner, steps, shown=SHOWN)
    save_model(learner.model, tokens, run.folder / "model")
    reports = {**run.extra, "after": evaluate(learner.model, task, sampling)}
    if config.control:
        say(tables(reports))
        say(f"likelihood from the same start, for as long: {learner.seconds:.0f} s (--no-control: without controls)")
        control, rng = copy.deepcopy(model).requires_grad_(True), random.Random(f"control {config.seed}")
        supervised(
            control,
            lambda step: task.rows(task.draw(rng, config.batch_size), model.device),  # as many as GRPO has prompts
            config.control_lr,
            seconds=learner.seconds,
        )
        save_model(control, tokens, run.folder / "supervised")
        reports["supervised"] = evaluate(control, task, sampling)
    if config.control and config.k_samples > 1:
        say(f"rejection sampling from the same start: the likelihood of each group's best, {learner.step} steps")
        rejecting = beginner("best")
        for _ in train(rejecting, task, dataclasses.replace(config, steps=learner.step), sampling):
            pass
        save_model(rejecting.model, tokens, run.folder / "rejection")
        reports["rejection"] = evaluate(rejecting.model, task, sampling)
    say(tables({**blind, **reports}))
    say(flat or f"{run.folder}: models, checkpoint and curves")
    return {**reports, "controls": blind, "collapsed": flat, **run.result(learner)}


def eval_command(config: options.EvalConfig) -> dict[str, Any]:
    """Evaluate a model."""
    began = time.perf_counter()
    model, tokens, sampling = prepare(config)
    task = ChessTask(tokens, config, build_corpus(config, tokens, model.config.n_positions))
    blind = controls(task)
    result = evaluate(model, task, sampling)
    say(tables({**blind, str(config.init or "the start"): result}))
    return {**result, "controls": blind, "seconds": time.perf_counter() - began}


def asked_for(prompt: str) -> Example:
    """A prompt with a whole FEN; for A: with python-chess's answer.  Raises UsageError for anything else."""
    try:
        if prompt.startswith("P:"):
            return Example("P", f"P: {read_board(prompt[2:].strip()).fen()}", "")
        fen, move, history, nothing = prompt.removeprefix("A:").strip().split("+")
        before = history.split()[:-1]
        example = parse_line(environment_line(read_board(fen), chess.Move.from_uci(move), before))
        if nothing or not prompt.startswith("A:") or not example:
            raise ValueError
    except ValueError:
        raise UsageError(f"--prompt must be 'P: FEN' or 'A: FEN+move+history+', not {prompt!r}") from None
    return example


def sample_command(config: SampleConfig) -> dict[str, Any]:
    """Print completions of one prompt, with their verdicts if it is one of chess."""
    model, tokens, sampling = prepare(config)
    task = ChessTask(tokens, config, Corpus({}, {}))
    prompt = (tokens.decode([0]) if tokens.name == "chars" else OPENING) if config.prompt is None else config.prompt
    of_chess = tokens.name == "lines" or (tokens.name == "bpe" and prompt.startswith(("P:", "A:")))
    item = asked_for(prompt.strip()) if of_chess else None
    try:
        ids = task.prompt_ids(item) if item else tokens.encode(prompt)
    except ValueError as error:
        raise UsageError(f"--prompt: {error}") from None
    generator = torch.Generator(model.device).manual_seed(config.seed)
    rows, log_probs = generate(model, [ids], config.k_samples, sampling, task.end, generator)
    for row, log_prob in zip(rows.answers(task.end)[0], log_probs.sum(1).tolist(), strict=True):
        text = tokens.decode(row)
        if not item:
            print(f"{prompt}{text}\n---")
            continue
        if not item.answer:
            said = "valid" if parse_policy(text.strip()) else "invalid"
        else:
            verdict = task.judge(item, text)
            said = f"reward {shaped(verdict, task.shaping):.1f}, raw score {verdict.raw:.3f}"
        print(f"{text}\n    log-probability {log_prob:.2f}, {said}")
    if item and item.answer:
        print(f"{item.answer}\n    is right")
    return {}
