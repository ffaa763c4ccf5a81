"""The corpus, the task, the report, the controls, and the commands as their user runs them."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import mini.__main__
import mini.chess_lines
from mini.chess_lines import (
    SHOWN,
    ChessTask,
    Example,
    Verdict,
    build_corpus,
    controls,
    evaluate,
    judge,
    mirrored,
    report,
    shipped_examples,
)
from mini.config import (
    ChessConfig,
    DataConfig,
    EvalConfig,
    PlayConfig,
    PretrainConfig,
    SampleConfig,
    TextConfig,
)
from mini.model import GPT, GptConfig, Sampling
from mini.runs import BpeTokens, LineTokens
from tests.helpers import run_python
from tests.mini.helpers import run_mini, untrained
from toolkit import UsageError

DATA = ("--a-lines", 200, "--held-out", 4, "--max-new-tokens", 24)
# All answers of an untrained model are invalid: only with a value head have they something to teach.
STEPS = 2
RL = ("--kl-coef", 0.02, "--batch-size", 2, "--k-samples", 4, "--save-steps", 1, "--use-gae",
      "--p-share", 0.5)  # fmt: skip
Trained = tuple[Path, str, dict[str, Any]]  # folder, what was said, the JSON object

A_TRUTH = "8/8/8/8/8/8/8/K1k5 w - - 0 1+0.001+0+0"
P_TRUTH = "M: e2e4 c2c4 E: 0.42 0.21 B: e2e4"


@pytest.fixture(scope="module", autouse=True)
def few_lines() -> Iterator[None]:
    """A part of the shipped lines: each command reads them, and works out their legal moves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini.chess_lines, "shipped_examples", lambda: shipped_examples()[:150])
        yield


@pytest.fixture(scope="module")
def task() -> ChessTask:
    """By the published grammar."""
    config = ChessConfig(a_lines=400, held_out=64, grammar="published")
    return ChessTask(LineTokens(), config, build_corpus(config, LineTokens()))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Options of a short run from a model that knows nothing."""
    return (*DATA, "--init", untrained(tmp_path_factory.mktemp("start")))


# ---------------------------------------------------------------------------------------------------------------------
# Corpus and task


def test_held_out_prompts_are_the_same_for_every_seed_and_never_trained_on(task: ChessTask) -> None:
    other = build_corpus(ChessConfig(a_lines=200, held_out=64, seed=9), LineTokens())
    assert other.held_out == task.corpus.held_out
    assert other.train["A"][:100] != task.corpus.train["A"][:100]
    for corpus in (other, task.corpus):
        assert [len(corpus.held_out[name]) for name in ("P", "A")] == [64, 64]
        prompts = {example.prompt for examples in corpus.held_out.values() for example in examples}
        trained = {example.prompt for examples in corpus.train.values() for example in examples}
        assert not prompts & trained
        assert not {mirrored(example).prompt for example in corpus.held_out["P"]} & trained


def test_steps_mix_both_tasks(task: ChessTask) -> None:
    drawn = [Counter(item.kind for item in task.draw(random.Random(seed), 10)) for seed in range(3)]
    assert drawn == [Counter(P=6, A=4)] * 3
    odd = {item.kind for seed in range(20) for item in task.draw(random.Random(seed), 1)}
    assert odd == {"P", "A"}


def test_rewards_are_told_apart_by_task(task: ChessTask) -> None:
    items = [Example("P", "", P_TRUTH), Example("A", "", A_TRUTH)]
    encode = task.tokens.encode
    completions = [[encode(P_TRUTH), []], [encode(A_TRUTH), encode(A_TRUTH.replace("1+0.001", "2+0.001"))]]
    rewards, figures = task.rewards(items, completions)
    torch.testing.assert_close(rewards, torch.tensor([[1.0, -0.3], [1.0, 0.8]]))
    assert figures == pytest.approx({"reward/P": 0.35, "reward/A": 0.9, "valid/P": 0.5, "valid/A": 1.0})


def test_report_by_hand(task: ChessTask) -> None:
    wrong_clock = judge("A", A_TRUTH.replace("0 1+", "0 2+"), A_TRUTH)
    verdicts = [judge("A", A_TRUTH, A_TRUTH), wrong_clock, judge("A", "", A_TRUTH), judge("P", P_TRUTH, P_TRUTH),
                judge("P", P_TRUTH.replace("B: e2e4", "B: c2c4"), P_TRUTH)]  # fmt: skip
    length = len(A_TRUTH.split("+")[0])
    assert report(verdicts[:3], task.shaping) == pytest.approx({
        "reward": (1 + 0.8 - 0.3) / 3, "validity": 2 / 3, "exact_fen": 1 / 3,
        "fen_similarity": (1 + 1 - 1 / length) / 3,
    })  # fmt: skip
    assert report(verdicts[3:], task.shaping) == pytest.approx({
        "reward": (1 + 0.4) / 2, "validity": 1, "best_move": 0.5, "legal": None, "king": None, "moves": None,
    })  # fmt: skip


def test_evaluation_judges_each_prompt_once(task: ChessTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that always answers right is told so."""
    judged = list[Example]()

    def judge_right(self: ChessTask, item: Example, answer: str) -> Verdict:
        judged.append(item)
        return judge(item.kind, item.answer, item.answer, item.fen)

    monkeypatch.setattr(ChessTask, "judge", judge_right)
    torch.manual_seed(0)
    told = evaluate(GPT(GptConfig(1, 2, 16, 256, task.tokens.size)), task, Sampling(0.8, 50, 0.95, 5))
    assert judged == task.corpus.held_out["P"] + task.corpus.held_out["A"]
    assert told["A"] == {"reward": 1, "validity": 1, "exact_fen": 1, "fen_similarity": 1}
    king, moves = told["P"].pop("king"), told["P"].pop("moves")
    assert told["P"] == {"reward": 1, "validity": 1, "best_move": 1, "legal": 1}
    assert 0 < king < 0.5
    assert 1 < moves <= 5


def test_controls_need_no_learning(task: ChessTask) -> None:
    """By the published grammar, to copy the position pays almost as well as to be nearly right; by the strict one not.

    What is left is to copy it with the other side to move.
    """
    configs = [ChessConfig(grammar=grammar, held_out=32, a_lines=200) for grammar in ("published", "strict")]
    told = [controls(ChessTask(task.tokens, config, build_corpus(config, task.tokens))) for config in configs]
    published, strict = ({name: one for name, by_task in each.items() for one in by_task.values()} for each in told)
    assert list(strict) == list(published) == ["blind", "copied", "copied, other side", "five fixed moves",
                                               "random legal moves"]  # fmt: skip
    assert published["copied"]["reward"] == pytest.approx(0.79375)
    assert published["random legal moves"]["legal"] is None
    assert strict["copied"]["validity"] == strict["copied"]["exact_fen"] == 1 / 32  # after the one illegal move
    assert strict["copied, other side"]["validity"] == 31 / 32
    assert strict["copied"]["reward"] < 0 < strict["copied, other side"]["reward"] < 0.8
    assert strict["random legal moves"]["legal"] == strict["random legal moves"]["validity"] == 1
    assert strict["five fixed moves"]["legal"] < 0.5
    assert strict["five fixed moves"]["moves"] == 5


def test_corpus_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that are not well-formed are left out, and counted."""
    corpus = build_corpus(ChessConfig(a_lines=100, held_out=8), LineTokens())
    lines = [example.prompt + example.answer for name in ("A", "P") for example in corpus.train[name]]
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join([*lines, "A: 8/8 w+e2e4+e2e4+x+0+0+0"]))
    own = build_corpus(EvalConfig(data=path, held_out=10), LineTokens())
    assert f"{path}: 1 left out, " in capsys.readouterr().out
    assert [len(own.held_out[name]) for name in ("P", "A")] == [10, 10]
    assert len(own.train["A"]) <= 90
    every = EvalConfig(data=path, held_out=100_000)  # eval trains nothing, and needs nothing to train on
    assert not build_corpus(every, LineTokens()).train["P"]
    assert "five fixed moves" not in controls(ChessTask(LineTokens(), every, build_corpus(every, LineTokens())))
    with pytest.raises(UsageError, match="none are left to train on"):
        build_corpus(ChessConfig(data=path, held_out=100_000), LineTokens())
    path.write_text("\n".join(line for line in lines if line.startswith("P:")))
    with pytest.raises(UsageError, match=f"{path} has no usable A lines"):  # it divided by zero
        build_corpus(EvalConfig(data=path, held_out=2), LineTokens())


# ---------------------------------------------------------------------------------------------------------------------
# Commands


@pytest.fixture(scope="module")
def chess_run(quick: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = run_mini("chess", *quick, *RL, "--steps", STEPS, "--log-dir", folder, "--json")
    assert done.returncode == 0, done.stderr
    return folder, done.stderr, json.loads(done.stdout.splitlines()[-1])


def test_chess_reports_before_and_after(chess_run: Trained) -> None:
    folder, said, told = chess_run
    both = {"reward", "validity"}
    names = {"A": both | {"exact_fen", "fen_similarity"}, "P": both | {"best_move", "legal", "king", "moves"}}
    for moment in ("before", "before, likeliest", "after", "supervised", "rejection"):
        assert {kind: set(told[moment][kind]) for kind in told[moment]} == names
    for kept in ("model", "supervised", "rejection"):
        assert (folder / kept / "model.safetensors").is_file()
    assert 0 < told["train_seconds"] < told["seconds"]
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    assert len(steps) == told["steps"] == STEPS
    for name in SHOWN:
        assert f"  {name} " in steps[0]


def test_init_of_a_small_model_has_the_small_models_rate(chess_run: Trained) -> None:
    """Any model of --init had the rate for large ones, also one that pretrain made: a twentieth."""
    group, *_ = torch.load(chess_run[0] / "checkpoint.pt")["optimizer"]["param_groups"]
    assert group["initial_lr"] == 2e-4
    assert mini.config.LR.keys() == {LineTokens.name, BpeTokens.name}


def test_tensorboard_has_every_figure(chess_run: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(chess_run[0]))
    events.Reload()
    wanted = {"reward/P", "reward/A", "valid/P", "valid/A", "kl", "kl_coef", "kl_exact", "clip_share", "entropy",
              "zero_spread", "seconds"}  # fmt: skip
    assert wanted <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("reward/P")] == list(range(1, STEPS + 1))


def test_an_interrupted_run_goes_on_to_the_same_numbers(
    quick: tuple[Any, ...], chess_run: Trained, tmp_path: Path
) -> None:
    """One step, then --resume to two: reports and weights are those of two steps at once."""
    folder = tmp_path / "run"
    done = run_mini("chess", *quick, *RL, "--steps", 1, "--no-control", "--log-dir", folder)
    assert done.returncode == 0, done.stderr
    assert "already" in run_mini("chess", *quick, *RL, "--steps", STEPS, "--log-dir", folder).stderr
    done = run_mini("chess", *quick, *RL, "--steps", STEPS, "--log-dir", folder, "--no-control", "--resume",
                    "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "config.json").read_text())["steps"] == STEPS  # it kept the first number
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["before"], told["after"]) == (chess_run[2]["before"], chess_run[2]["after"])
    ours, theirs = ((part / "model" / "model.safetensors").read_bytes() for part in (folder, chess_run[0]))
    assert ours == theirs != (quick[-1] / "model.safetensors").read_bytes()


def test_a_resumed_run_must_be_the_same_run(quick: tuple[object, ...], chess_run: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(chess_run[0], folder)
    wrong = ((("--kl-coef", 0.5), "had --kl-coef 0.02, not 0.5"), (("--seed", 8), "had --seed 1, not 8"))
    for more, complaint in wrong:
        done = run_mini("chess", *quick, *RL, "--steps", STEPS, "--log-dir", folder, "--resume", *more)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert complaint in done.stderr
    done = run_mini("text", "--log-dir", folder, "--resume")
    assert f"error: {folder} has a run of chess in it, not of text\n" == done.stderr
    start = folder / "start.pt"
    start.write_bytes(start.read_bytes()[:1000])
    done = run_mini("chess", *quick, *RL, "--steps", STEPS, "--log-dir", folder, "--resume")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"error: {start} is damaged or does not fit: " in done.stderr
    (folder / "checkpoint.pt").write_bytes((folder / "checkpoint.pt").read_bytes()[:1000])
    done = run_mini("chess", *quick, *RL, "--steps", STEPS, "--log-dir", folder, "--resume")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "checkpoint.pt is damaged or does not fit: begin again with another --log-dir" in done.stderr


def test_eval_and_sample_read_the_trained_model(chess_run: Trained) -> None:
    model = chess_run[0] / "model"
    done = run_mini("eval", "--init", model, *DATA[2:], "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.pop("controls") == chess_run[2]["controls"]
    assert {name: told[name] for name in told if name != "seconds"} == chess_run[2]["after"]
    done = run_mini("sample", "--init", model, "--k-samples", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("log-probability") == 2
    assert "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1+0.001+0+0\n    is right" in done.stdout


def test_steps_without_unequal_rewards_end_the_run(quick: tuple[object, ...], tmp_path: Path) -> None:
    """All answers are invalid and have no value head: there is nothing to learn, and the exit code says so."""
    done = run_mini("chess", *quick, "--steps", 9, "--batch-size", 2,
                    "--k-samples", 4, "--patience", 2, "--track", "none", "--no-control", "--log-dir", tmp_path,
                    "--json")  # fmt: skip
    assert done.returncode == 3
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["steps"] == 2
    assert told["collapsed"] == "nothing to learn: in 2 steps all rewards of every group were equal"
    assert told["collapsed"] in done.stderr
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_one_completion_has_no_best_of_its_group(quick: tuple[object, ...], tmp_path: Path) -> None:
    """Rejection sampling trained on nothing, and its row was the start's."""
    done = run_mini("chess", *quick, "--k-samples", 1, "--use-gae", "--steps", 1, "--batch-size", 2, "--patience", 9,
                    "--track", "none", "--log-dir", tmp_path, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert "supervised" in told
    assert "rejection" not in told


def test_a_sampled_position_is_judged_strictly(chess_run: Trained) -> None:
    """A run's folder stands for its model."""
    ask = ("sample", "--init", chess_run[0], "--k-samples", 1, "--prompt")
    done = run_mini(*ask, "P: 4k3/8/8/8/8/8/8/4K3 w - - 0 1")
    assert run_mini(*ask, "P:4k3/8/8/8/8/8/8/4K3 w").stdout == done.stdout  # a FEN in short was asked as it stood
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("log-probability") == 1
    assert "is right" not in done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("words", [
    ["--data", "/nowhere"], ["--init", "/nowhere"], ["--held-out", "100000"], ["--track", "wandb"],
    ["--max-new-tokens", "1000"],
], ids=str)  # fmt: skip
def test_a_failed_start_leaves_no_folder(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    done = run_mini("chess", "--a-lines", 50, *words, "--log-dir", tmp_path / "run")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("arguments", "complaint"), [
    (["fly"], "no command 'fly'"),
    (["chess", "--steps", "-1"], "--steps must lie between"),
    (["chess", "--steps", "many"], "see python -m mini chess --help"),
    (["chess", "--kl-type", "sideways"], "see python -m mini chess --help"),
    (["chess", "--temperature", "0"], "--temperature must be above 0"),
    (["chess", "--temperature", "nan"], "--temperature must lie between"),
    (["chess", "--k-samples", "1"], "nothing to compare"),
    (["chess", "--kl-coef", "0.1", "--adaptive-kl", "--kl-horizon", "9"], "--kl-horizon must be above"),  # fell below 0
    (["chess", "--resume"], "--resume needs the --log-dir"),
    (["chess", "--log-dir", "/proc/none", "--a-lines", "50", "--held-out", "4"], "cannot be written"),
    (["chess", "--resume", "--log-dir", "/nowhere"], "has no checkpoint to resume from"),
    (["eval", "--init", "/nowhere"], "/nowhere/config.json: No such file"),
    (["eval", "--data", "/nowhere"], "/nowhere: No such file"),
    (["eval", "--held-out", "100000"], "must be below"),
    (["eval", "--max-new-tokens", "1000"], "lower --max-new-tokens"),
    (["eval", "--a-lines", "9"], "no option --a-lines"),  # it did nothing there
    (["eval", "--seed", "2"], "no option --seed"),  # nor did this
    (["sample", "--prompt", "What?"], "--prompt must be"),
    (["sample", "--prompt", "A: 8/8 w+e2e4+e2e4+"], "--prompt must be"),
    (["data", "--stockfish", "/nowhere"], "--stockfish /nowhere is no file"),
    (["chess", "--log-dir", ""], "--log-dir is empty"),  # an unset variable: it was the working directory
    (["data", "--multipv", "6"], "--multipv must lie between 1 and 5"),
    (["pretrain", "--data", "/nowhere"], "/nowhere: No such file"),
    (["pretrain", "--max-new-tokens", "99"], "an answer has 98 at most"),  # it failed after hours, in its report
    (["play", "--held-out", "4"], "no option --held-out"),  # it and --data did nothing there
    (["pretrain", "--n-head", "6"], "--n-embd 160 cannot be shared by --n-head 6"),
    (["play", "--stockfish", "/nowhere"], "--stockfish /nowhere is no file"),
    (["data", "--out", "/proc/none", "--a-lines", "9", "--p-lines", "9"], "cannot be written"),
])  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mini.__main__.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert complaint in said


def test_memory_that_runs_out_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def allocate(config: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr(mini.chess_lines, "eval_command", allocate)
    assert mini.__main__.main(["eval"]) == 4
    assert capsys.readouterr().err == "error: memory ran out while computing: take a smaller model or batch\n"


def test_nobody_has_to_read_to_the_end(tmp_path: Path) -> None:
    """`| head -1` left a traceback."""
    read, write = os.pipe()
    os.close(read)
    words = ["-m", "mini", "data", "--a-lines", "9", "--p-lines", "9", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
import mini.__main__
try:
    mini.__main__.main(["chess", "--help"])
except SystemExit as stop:
    print("code", stop.code)
print(*(name for name in ("torch", "chess", "transformers", "tokenizers", "numpy") if name in sys.modules), "loaded")
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "--kl-type {exact,squared,forward,reverse,symmetric}" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["code 0", " loaded"] or done.stdout.endswith("code 0\nloaded\n")


def test_the_two_programs_import_nothing_from_each_other() -> None:
    root = Path(mini.__main__.__file__).resolve().parents[1]
    assert "import mini" not in (root / "gpt_2048_rl.py").read_text()
    assert "from mini" not in (root / "gpt_2048_rl.py").read_text()
    assert not [path for path in (root / "mini").glob("*.py") if "gpt_2048_rl" in path.read_text()]


@pytest.mark.parametrize("kind", [ChessConfig, DataConfig, EvalConfig, PlayConfig, PretrainConfig, SampleConfig,
                                  TextConfig])  # fmt: skip
def test_every_number_has_its_limits(kind: type) -> None:
    """And keeps to them by default."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        plain = getattr(hint, "__origin__", hint)
        if {int, float} & {plain, *getattr(plain, "__args__", ())}:
            ((low, high),) = hint.__metadata__
            value = getattr(kind(), name)
            assert value is None or low <= value <= high


@pytest.mark.long
def test_the_default_job_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the steps has to do: answers get better, and positions do not suffer."""
    monkeypatch.setattr(mini.chess_lines, "shipped_examples", shipped_examples)
    done = run_mini("chess", "--json", "--no-control", "--steps", 60, "--log-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["after"]["P"]["reward"] >= told["before"]["P"]["reward"] + 0.05
    assert told["after"]["P"]["legal"] > told["before"]["P"]["legal"]
    assert told["after"]["A"]["reward"] >= told["before"]["A"]["reward"] - 0.05
    before, after = (sum(told[moment][kind]["validity"] for kind in ("A", "P")) for moment in ("before", "after"))
    assert after >= before
