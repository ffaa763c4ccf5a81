"""Where the start comes from, and how it plays: chess data (data), a GPT-2 that learns it (pretrain), games (play).

    python -m mini data --out FOLDER --a-lines 400000 --p-lines 400000 --p-moves 150 --game-lines 800000
    python -m mini pretrain --data FOLDER --log-dir RUN            RUN/model is for --init
    python -m mini play --init RUN

Data is a.txt from self-play, p.txt from stockfish or from the shipped lines, games.txt from stockfish against itself.
Pretraining is likelihood alone, from GPT-2's own start values.  Lines are checked when they are drawn, so millions of
them need no time at the start; a killed run goes on with --resume, to the same numbers.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import chess
import chess.engine
import chess.pgn
import torch
from torch.utils.data import DataLoader

from mini import chess_lines, runs
from mini.chess_lines import KINDS, SHIPPED, ChessTask, Corpus, Example, Kind, policy_line, prompts_of, usual_held_out
from mini.config import DataConfig, PlayConfig, PretrainConfig
from mini.grpo import Learner, likelihood_step, run_steps, score
from mini.model import GPT, GptConfig, Sampling, generate
from mini.runs import LineTokens, Run, Tokens, device_of, digest, load_tokens, naming, save_model, say, write
from toolkit import UsageError

MATE_EVAL = 99.99  # pawns
Choose = Callable[[Sequence[chess.Board]], list[chess.Move | None]]  # a move in each position, or none

# ---------------------------------------------------------------------------------------------------------------------
# The engine


def find_stockfish(path: Path | None) -> str | None:
    """The program, or None if none is installed.  Raises UsageError for a path that does not exist."""
    if path is not None and not path.is_file():
        raise UsageError(f"--stockfish {path} is no file")
    return str(path) if path else shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")


@contextlib.contextmanager
def running(program: str, **options: int) -> Iterator[chess.engine.SimpleEngine]:
    """An engine on one thread.  With a fresh hash for each position it says the same again.

    Raises UsageError for a program that is none.
    """
    try:
        with chess.engine.SimpleEngine.popen_uci(program) as engine:
            engine.configure({"Threads": 1, "Hash": 1, **options})
            yield engine
    except (OSError, chess.engine.EngineError) as error:
        raise UsageError(f"{program} does not work as a chess engine: {error or 'it does not answer'}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Data

BLUNDERS, ILLEGAL_SHARE = 0.1, 0.03  # shares of random moves in games, and of illegal proposals
SHARPNESS = 2.0  # a move that is a pawn worse is chosen e^2 times less often
LONGEST = 80  # moves of a game


def analysed(
    engine: chess.engine.SimpleEngine, fen: str, config: DataConfig, rng: random.Random
) -> tuple[str, list[tuple[str, float]]]:
    """The P line of a position, in shuffled order, and the engine's moves and evals in its own.

    The engine's first move is the best one for the side to move, White or Black.
    """
    limit, parts = chess.engine.Limit(depth=config.depth), chess.engine.INFO_SCORE | chess.engine.INFO_PV
    found = engine.analyse(chess.Board(fen), limit, multipv=config.multipv, game=object(), info=parts)  # a fresh hash
    lines = []
    for info in found:
        pawns = info["score"].relative.score(mate_score=1_000_000) / 100
        lines.append((info["pv"][0].uci(), max(-MATE_EVAL, min(MATE_EVAL, pawns))))
    shuffled = rng.sample(lines, len(lines))
    return policy_line(fen, [move for move, _ in shuffled], [value for _, value in shuffled], lines[0][0]), lines


def analysed_lines(program: str, config: DataConfig) -> Iterator[str]:
    """P lines of positions from self-play, few per game so that they differ."""
    rng = random.Random(f"positions {config.seed}")
    with running(program) as engine:
        for line in chess_lines.self_play(rng):
            fen = line.removeprefix("A: ").partition("+")[0]
            if rng.random() < 0.1 and int(fen.split()[-1]) <= config.p_moves:
                yield analysed(engine, fen, config, rng)[0]


def game_lines(program: str, config: DataConfig) -> Iterator[str]:
    """P and A lines of games in which both sides play one of the engine's moves, the better the oftener."""
    rng = random.Random(f"engine games {config.seed}")
    with running(program) as engine:
        while True:
            board, history = chess.Board(), list[str]()
            while not board.is_game_over() and board.fullmove_number < LONGEST:
                line, lines = analysed(engine, board.fen(), config, rng)
                yield line
                if rng.random() < ILLEGAL_SHARE:
                    yield chess_lines.environment_line(board, chess_lines.illegal_move(board, rng), history)
                weights = [math.exp(SHARPNESS * (value - lines[0][1])) for _, value in lines]
                move = chess.Move.from_uci(rng.choices([move for move, _ in lines], weights)[0])
                if rng.random() < BLUNDERS:
                    move = rng.choice([*board.legal_moves])
                yield chess_lines.environment_line(board, move, history)
                history.append(move.uci())


def data_command(config: DataConfig) -> dict[str, Any]:
    """The data command."""
    program, began = find_stockfish(config.stockfish), time.perf_counter()
    if config.game_lines and not program:
        raise UsageError("--game-lines needs stockfish: install it, or name it with --stockfish")
    kinds: dict[str, tuple[Iterable[str], int, str]] = {
        "a.txt": (chess_lines.self_play(random.Random(f"games {config.seed}")), config.a_lines, "self-play"),
        "p.txt": (SHIPPED.read_text().splitlines(), config.p_lines, "the shipped lines: no stockfish is installed"),
    }
    if program:
        by = f"{program}, depth {config.depth}"
        kinds["p.txt"] = analysed_lines(program, config), config.p_lines, f"positions of self-play, analysed by {by}"
        kinds["games.txt"] = game_lines(program, config), config.game_lines, f"games of {by}"
    for name, (lines, count, source) in kinds.items():
        if count:
            made = list(islice(lines, count))
            write(config.out / name, "".join(f"{line}\n" for line in made))
            print(f"{config.out / name}: {len(made)} lines, {source}; {time.perf_counter() - began:.0f} s")
    return {}


# ---------------------------------------------------------------------------------------------------------------------
# Pretraining

POSITIONS = 256  # the longest A line has 220 tokens
WARM_UP = 200  # steps in which the learning rate rises

Lines = dict[Kind, list[str]]


def read_lines(path: Path) -> Lines:
    """The P and A lines of a corpus, or of all of a folder's."""
    lines: Lines = {"P": [], "A": []}
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    for file in files:
        with naming(file), file.open(encoding="utf-8") as text:
            for line in text:
                lines["P" if "P:" in line[:16] else "A"].append(line)
    if not all(lines.values()):
        raise UsageError(f"{path} needs P and A lines: see python -m mini data --help")
    say(f"{len(lines['P'])} P and {len(lines['A'])} A lines")
    return lines


def take_out(lines: Lines, count: int, tokens: Tokens) -> dict[Kind, list[Example]]:
    """Held-out documents of each task, evenly spread over the first half of its lines."""
    held_out: dict[Kind, list[Example]] = {"P": [], "A": []}
    for kind in KINDS:
        for line in lines[kind][:: max(1, len(lines[kind]) // (2 * count))]:
            with contextlib.suppress(ValueError):
                if len(held_out[kind]) < count:
                    held_out[kind].append(chess_lines.read_example(line, tokens, POSITIONS))
        if not held_out[kind]:
            raise UsageError(f"no {kind} line can be used: see python -m mini data --help")
    return held_out


def documents(lines: Lines, held_out: set[str], tokens: Tokens, config: PretrainConfig, step: int) -> list[Example]:
    """A step's documents: they depend on --seed and the step alone, so a resumed run draws the same."""
    rng, items = random.Random(f"pretrain {config.seed} {step}"), list[Example]()
    p_count, misses = int(config.batch_size * config.p_share + rng.random()), 0
    while len(items) < config.batch_size:
        kind: Kind = "P" if len(items) < p_count else "A"
        misses += 1
        if misses > 1000:
            raise UsageError(f"{config.data}: no {kind} line is left to train on: lower --held-out {config.held_out}")
        try:
            example = chess_lines.read_example(rng.choice(lines[kind]), tokens, POSITIONS)
        except ValueError:  # another one is drawn
            continue
        if kind == "P":
            example = chess_lines.best_first(chess_lines.mirrored(example) if rng.random() < 0.5 else example)
        if example.prompt not in held_out:
            items.append(example)
            misses = 0
    return items


@torch.no_grad()
def held_out_loss(model: GPT, task: ChessTask) -> dict[str, float]:
    """Nats for each character of the right answers, so models with different tokens compare."""
    figures = {}
    for kind in KINDS:
        items, nats = [chess_lines.best_first(e) if kind == "P" else e for e in task.corpus.held_out[kind]], 0.0
        for i in range(0, len(items), 32):
            nats -= score(model, task.rows(items[i : i + 32], model.device), 1.0)[0].sum().item()
        figures[f"nats a character, {kind}"] = nats / sum(len(item.answer) + 1 for item in items)
    return figures


def pretraining(
    learner: Learner, draw: Callable[[int], list[Example]], task: ChessTask, config: PretrainConfig, curve: list[Any]
) -> Iterator[dict[str, float]]:
    """Supervised steps; every --eval-steps and at the end also the held-out loss, which goes to the curve.

    The loader's workers read the coming steps' lines while a GPU computes.
    """
    device, cpu = learner.model.device, torch.device("cpu")
    workers = 0 if device == cpu else max(1, (os.cpu_count() or 1) - 2)
    steps: Any = range(learner.step, config.steps)  # a loader reads it like a Dataset
    loader = DataLoader(
        steps,
        collate_fn=lambda batch: task.rows(draw(*batch), cpu),  # of one step
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        multiprocessing_context="fork" if workers else None,  # Python 3.14 would pickle what they need
    )
    coming = (rows.to(device) for rows in loader)
    for figures in run_steps(
        learner, lambda: likelihood_step(learner, next(coming)), config.steps, warmup=WARM_UP, decay=config.lr_decay
    ):
        if learner.step == config.steps or learner.step % config.eval_steps == 0:
            figures |= held_out_loss(learner.model, task)
            curve.append({"step": learner.step, **figures, "seconds": learner.seconds})
        yield figures


def pretrain_command(config: PretrainConfig) -> dict[str, Any]:
    """Train a new model; write it in 16 bits; report on held-out lines of the corpus and of the chess job."""
    run, tokens, start = Run(config), LineTokens(), config.init and chess_lines.model_folder(config.init)
    if (config.max_new_tokens or 0) > tokens.longest:
        raise UsageError(f"--max-new-tokens {config.max_new_tokens}: an answer has {tokens.longest} at most")
    if start and load_tokens(start).name != tokens.name:
        raise UsageError(f"{start} has other tokens than chess lines: name a model that pretrain made")
    lines = read_lines(config.data)
    corpus = take_out(lines, config.held_out, tokens)
    task, usual = (ChessTask(tokens, config, Corpus({}, held)) for held in (corpus, usual_held_out(config.held_out)))
    draw = partial(documents, lines, prompts_of(corpus) | prompts_of(usual.corpus.held_out), tokens, config)
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    shape = GptConfig(config.n_layer, config.n_head, config.n_embd, POSITIONS, tokens.size)
    model = runs.load_model(start) if start else GPT(shape)
    model.to(device_of(config.device))
    say(f"a model of {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, on {model.device}")
    learner = Learner(model, model, config.lr, config.seed)
    run.begin(model)
    curve = run.extra.setdefault("curve", [])  # goes with the checkpoint

    run.follow(learner, pretraining(learner, draw, task, config, curve), 100)
    save_model(model, tokens, run.folder / "model", torch.float16)
    model = runs.load_model(run.folder / "model").to(model.device)  # what is reported is what was written
    reports = {}
    for name, part in (("the corpus", task), ("the chess job", usual)):
        for how, temperature in (("", config.temperature), (", likeliest", 0.0)):
            sampling = Sampling(temperature, config.top_k, config.top_p, config.max_new_tokens or tokens.longest)
            reports[name + how] = chess_lines.evaluate(model, part, sampling)
    say(chess_lines.tables(reports))
    say(f"{run.folder / 'model'}: the weights, SHA-256 {digest(run.folder / 'model')}")
    return {**reports, "curve": curve, **run.result(learner)}


# ---------------------------------------------------------------------------------------------------------------------
# Games

PLIES = 300  # a longer game is a draw
NO_MOVE = "no legal move named"
SCORES = ("won", "drawn", "lost", "no move")  # shares of the games; the last is a part of those lost
OPENING_PLIES = 4  # random moves before a game, the same for both colours, so that games differ


def answered_move(board: chess.Board, answer: str) -> chess.Move | None:
    """The best move of a P answer, or the first of its list that is legal; None if none is."""
    listed, _, best = answer.partition(" B:")
    legal = {move.uci(): move for move in board.legal_moves}
    return next((legal[move] for move in re.findall(chess_lines.MOVE, best + listed) if move in legal), None)


def opening(rng: random.Random) -> chess.Board:
    """A position after some random moves."""
    board = chess.Board()
    for _ in range(OPENING_PLIES):
        board.push(rng.choice([*board.legal_moves]))
    return board if any(board.legal_moves) else opening(rng)  # the fool's mate


@dataclass
class Match:
    """A game of the model against an opponent."""

    board: chess.Board
    colour: chess.Color  # the model's
    result: str = ""  # while it goes on
    why: str = ""

    def push(self, move: chess.Move | None) -> None:
        """Play a move, and end the game where it has ended; who names no move has lost."""
        if move is None:
            self.result, self.why = "0-1" if self.board.turn == chess.WHITE else "1-0", NO_MOVE
            return
        self.board.push(move)
        if outcome := self.board.outcome(claim_draw=True):
            self.result, self.why = outcome.result(), outcome.termination.name.lower().replace("_", " ")
        elif self.board.ply() >= PLIES:
            self.result, self.why = "1/2-1/2", "too long"

    @property
    def score(self) -> str:
        """Won, drawn or lost, for the model."""
        return {"1/2-1/2": "drawn", "1-0" if self.colour == chess.WHITE else "0-1": "won"}.get(self.result, "lost")


def play_matches(model: Choose, opponent: Choose, count: int, rng: random.Random) -> list[Match]:
    """Finished games, played side by side: each opening with both colours."""
    openings = [opening(rng) for _ in range((count + 1) // 2)]
    matches = [Match(board.copy(), colour) for board in openings for colour in chess.COLORS][:count]
    while going := [match for match in matches if not match.result]:
        ours, theirs = ([m for m in going if (m.board.turn == m.colour) is mine] for mine in (True, False))
        for choose, turn in ((model, ours), (opponent, theirs)):
            moves = choose([match.board for match in turn]) if turn else []
            for match, move in zip(turn, moves, strict=True):
                match.push(move)
    return matches


def pgn(match: Match, opponent: str) -> str:
    """A game in PGN."""
    game, names = chess.pgn.Game.from_board(match.board), ("mini", opponent)
    white, black = names if match.colour == chess.WHITE else names[::-1]
    headers = {"White": white, "Black": black, "Result": match.result, "Termination": match.why}
    game.headers.update(Event="python -m mini play", **headers)
    return f"{game}\n\n"


def scores(matches: Sequence[Match]) -> dict[str, float]:
    """Shares of games that the model won, drew and lost, and of those lost because it named no legal move."""
    counts = Counter(match.score for match in matches)
    counts["no move"] = sum(match.why == NO_MOVE for match in matches)
    return {name: counts[name] / len(matches) for name in SCORES}


def play_command(config: PlayConfig) -> dict[str, Any]:
    """Play, write the games, print a table."""
    began, program = time.perf_counter(), find_stockfish(config.stockfish)
    with naming(config.out):  # before the games
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.open("a").close()
    model, tokens, sampling = chess_lines.prepare(config)
    rng, generator = random.Random(config.seed), torch.Generator(model.device).manual_seed(config.seed)

    def answer(boards: Sequence[chess.Board]) -> list[chess.Move | None]:
        prompts = [[tokens.end, *tokens.encode(f"P: {board.fen()}")] for board in boards]
        rows, _ = generate(model, prompts, 1, sampling, tokens.end, generator)
        texts = [tokens.decode(row) for (row,) in rows.answers(tokens.end)]
        return [answered_move(board, text) for board, text in zip(boards, texts, strict=True)]

    with contextlib.ExitStack() as stack:
        opponents: dict[str, Choose] = {"random moves": lambda boards: [rng.choice([*b.legal_moves]) for b in boards]}
        if program:
            engine, glance = stack.enter_context(running(program, **{"Skill Level": 0})), chess.engine.Limit(depth=1)
            opponents["stockfish, level 0"] = lambda boards: [engine.play(board, glance).move for board in boards]
        played = {name: play_matches(answer, opponent, config.games, rng) for name, opponent in opponents.items()}
    reports = {name: scores(matches) for name, matches in played.items()}
    say(runs.table(f"{config.games} games each", SCORES, reports))
    write(config.out, "".join(pgn(match, name) for name, matches in played.items() for match in matches))
    say(f"{config.out}: the games" + ("" if program else "; no stockfish is installed"))
    return {**reports, "seconds": time.perf_counter() - began}
