"""The command line: help, bad input, and the play and eval commands on strategy files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpt_2048_rl as program
from mini import __main__ as mini
from mini.config import ChessConfig
from tests.helpers import HELD_OUT, HONEST, ROOT, run, run_python
from tests.record_run import RECORDED
from toolkit import UsageError, cli, spelled
from toolkit.run.checkpoints import keep_config
from toolkit.run.runs import write_program

CONSTANT = 'def strategy(board):\n    return "é"\n'


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    """A strategy file of random moves."""
    path = tmp_path / "honest.py"
    path.write_text(HONEST, encoding="utf-8")
    return path


Call = Callable[..., tuple[str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """The program in this process, which must succeed.  Returns what it writes to stdout and stderr."""

    def run_here(*arguments: object) -> tuple[str, str]:
        assert program.main(list(map(str, arguments))) == 0
        return capsys.readouterr()

    return run_here


@functools.cache
def help_of(*command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as end:
        program.main([*command, "--help"])
    assert end.value.code == 0
    return said.getvalue()


@pytest.mark.parametrize("command", [(), ("train",), ("eval",), ("play",)])
def test_help_lists_the_fields_with_their_defaults(command: tuple[str, ...]) -> None:
    assert "--timeout" in help_of(*command)
    assert "bepo" in help_of(*command)


@pytest.mark.parametrize("kind", [program.TrainConfig, program.GRPOOptions, ChessConfig])
def test_help_reads_the_source_that_inspect_finds(kind: type) -> None:
    """`--help` took 1.5 s, most of it because inspect parsed the whole script for each of its classes."""
    assert cli.source_of(kind).strip() == re.sub("^@.*\n", "", inspect.getsource(kind)).strip()


@pytest.mark.parametrize(("kind", "error"), [(int, TypeError), (cli.grouped(program.PlayConfig, None), OSError)])
def test_what_has_no_source_is_refused_as_by_inspect(kind: type, error: type[Exception]) -> None:
    """tyro takes it for a class without comments."""
    for find in (cli.source_of, inspect.getsource):
        with pytest.raises(error):
            find(kind)


def test_help_of_train_shows_ten_options_first() -> None:
    """All other options follow under headings."""
    _, *headings = re.split(r"^\W*[A-Z]\w+ options\W*$", help_of("train"), flags=re.MULTILINE)
    common, *others = ([line[2:] for line in part.splitlines() if re.match(r"\W*--\w", line)] for part in headings)
    assert [line.split()[0].strip(",") for line in common][::9] == ["--model", "--json"]
    assert len(common) == 10
    assert sum(map(len, others)) > 30


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "abc"], "--steps takes a whole number, like 120, not 'abc'"),
        (["--steps", "1.5"], "--steps takes a whole number, like 120, not '1.5'"),
        (["--minutes", "an hour"], "--minutes takes a number, not 'an hour'"),
        (["--games"], "--games needs a whole number, like 256"),
        (["--json", "yes"], "--json takes no value: leave out yes"),
        (["--steps", "3", "4"], "4 belongs to no option"),
        (["play", "/dev/null", "--seeds", "a"], "--seeds takes whole numbers, like 0 1 2, not 'a'"),
        (["--steps", "0"], "--steps"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--ladder", "4x2048"], "'4x2048'"),
        (["--ladder", "6:2048", "1:2048"], "--ladder: size"),
        (["--ladder", "4:1000"], "--ladder: target"),
        (["--ladder"], "--ladder"),
        (["--held-out", "4:2048", "4:2048"], "--held-out needs at least one value, and none of them twice"),
        (["--keys", "dvorak"], "--keys is one of bepo, wasd, zqsd, arrows, not 'dvorak'"),
        (["--generations", "7"], "--generations"),
        (["--model", "no-such-model"], "nor a hub id like unsloth/gpt-oss-20b"),
        (["--model", "./no-such-folder"], "there is no folder ./no-such-folder: ./no-such-folder is no hub id"),
        (["--no-such-option"], "no option --no-such-option (see"),
        (["-n", "3"], "no option -n (see"),
        (["eval", "--model", "tiny"], "leave out the word --model: gpt_2048_rl.py eval takes its value alone"),
        (["--step", "3"], "similar: --decay-steps, --save-steps, --steps, --warmup-steps; see"),
        (["--model", ""], "--model is empty: give it a value, or leave it out"),
        (["--output-dir="], "--output-dir is empty: give it a value, or leave it out"),
        (["eval", " "], "a name is empty"),
        (["compare", "", "b"], "a name is empty"),
        (["--model", "tiny", "--decay-steps", "90"], "--decay-steps 90 is more than --steps 80: name fewer, or below"),
        (["--model", "tiny", "--warmup-steps", "6", "--steps", "4"], "--warmup-steps 6 is more than --steps 4"),
        (["--lr-schedule", "linear", "--decay-steps", "9"], "--decay-steps needs --lr-schedule constant: linear falls"),
        (["play", "/dev/null", "--answers", "3"], "--answers needs a model after --model"),
        (
            ["play", "/dev/null", "--seed", "3"],
            "--seed needs a model after --model: a program is not asked, and boards",
        ),
        (["play", "/dev/null", "--temperature", "0.5"], "--temperature needs a model after --model"),
        (["eval", "/dev/null.py", "--reasoning", "low"], "--reasoning needs a model: /dev/null.py is a program"),
        (["--model", "mine.py"], "mine.py is a program: eval and play take one"),
        (["play", "--model", "tiny", "--served-name", "a"], "--served-name and --api-key-file need a server's URL"),
        (["export", "/", "--experts", "mxfp4"], "--experts is for --format gguf, and lora has no choice: leave it"),
        (["export", "/", "--no-private"], "--no-private needs --push-to-hub"),
        (["play", "tiny"], "tiny is no file: a model or a server is asked with --model tiny"),
        (["play", "http://127.0.0.1:8000/v1"], "a server is asked with --model http://127.0.0.1:8000/v1"),
        (["export", "/missing"], "there is no folder /missing: name a run's folder"),
        (["compare", "a", "b", "--output", "a/config.json"], "--output is a page"),
        (["export", "/", "--push-to-hub", "nonsense"], "--push-to-hub must be OWNER/NAME, not 'nonsense'"),
        (["--output-dir", "/proc/none"], "error: /proc/none cannot be written"),
        (["--output-dir", "/etc/hostname"], "error: /etc/hostname cannot be written (Not a directory)"),
        (["--run-name", "../elsewhere"], "--run-name"),
        (["--recipe", "secret"], "--recipe"),
        (["--wordings", "9"], "--wordings"),
        (["--minutes", "-1"], "--minutes"),
        (["--model", "tiny", "--reasoning", "low"], "--reasoning"),
        (["eval", "tiny", "--reasoning", "low"], "--reasoning"),
        (["eval", "/"], "config.json"),
        (["eval", "missing.py"], "missing.py"),
        (["play", "missing.py"], "missing.py"),
        (["play"], "play needs Python source that defines strategy(board), or a run's folder"),
        (["play", "/dev/null", "--timeout", "-1"], "--timeout"),
        (["play", "/dev/null", "--size", "99"], "size"),
        (["play", "/dev/null", "--size", "-4"], "--size must be a whole number from 2 to 16, not -4"),
        (["play", "/dev/null", "--size", "3"], "--target on 3x3 must be a tile from 8 to 1024"),
        (["play", "/dev/null", "--target", "2"], "--target on 4x4 must be a tile from 8 to 131072"),
        (["play", "/dev/null", "--size", "1000000"], "--size must be a whole number from 2 to 16, not 1000000"),
        (["play", "/dev/null", "--seeds", "1", "-1"], "--seeds must lie between 0 and 9223372036854775808, not -1"),
        (["play", "/dev/null", "--seeds", "1", "1"], "--seeds needs at least one value, and none of them twice"),
        (["--ladder", "6:2048", "2:64"], "--ladder: target on 2x2 must be a tile from 8 to 32"),
        (["--model", "tiny", "--run-name", " "], "--run-name"),
        (["--model", "tiny", "--run-name", "a\nb"], r"--run-name must be the name of one folder, not 'a\nb'"),
        (["--model", "tiny", "--run-name", ".hidden"], "--run-name"),
        (["--model", "tiny", "--run-name", "x" * 300], "--run-name must be the name of one folder, not 'xxx"),
        (["--model", "tiny", "--run-name", "latest"], "--run-name"),
        (["--model", "tiny", "--max-new-tokens", "5000"], "1024 positions: lower --max-new-tokens"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert named in err
    assert out == ""


def test_a_short_try_keeps_the_defaults() -> None:
    """The README's has 3 steps, and the default warm-up has more."""
    assert program.parse_arguments(["--steps", "3", "--run-name", ""]).warmup_steps > 3


@pytest.mark.parametrize(("theirs", "ours"), [(theirs, ours) for ours, *others in cli.SYNONYMS for theirs in others])
def test_names_that_people_know_from_elsewhere_are_answered_with_ours(
    theirs: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL's --num_generations was an unknown option like any other."""
    assert program.main([f"--{theirs}=4"]) == 2
    assert f"no option --{theirs} (take {spelled(ours)}; see" in capsys.readouterr().err


def test_mini_answers_with_its_own_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert mini.main(["chess", "--num-generations", "4"]) == 2
    assert "no option --num-generations (take --k-samples; see" in capsys.readouterr().err


def test_an_unknown_option_is_answered_without_reading_the_comments_of_all() -> None:
    """tyro's search for similar names took 1.3 of 1.6 seconds of processor time."""
    code = "import sys, gpt_2048_rl as p; assert p.main(['--step', '3']) == 2; sys.exit('tyro' in sys.modules)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_a_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    """YAML may take 6:16 for a number to the base of 60, and 1e-4 for a text."""
    file = tmp_path / "mine.yaml"
    file.write_text("model: tiny\nsteps: 7\nlearning-rate: 1e-4\nladder: [6:16, 4:64]\ncurriculum: false\n")
    config = program.parse_arguments(["--config", str(file), "--steps", "9"])
    assert (config.model, config.steps, config.learning_rate) == ("tiny", 9, 1e-4)
    assert (config.ladder, config.curriculum) == (("6:16", "4:64"), False)
    assert config.generations == program.train_defaults("tiny").generations  # the file's model decides the others


@pytest.mark.parametrize(
    "line", ["curriculum: false", "curriculum: False", "curriculum: no", "curriculum: OFF", "no-curriculum: true"]
)
def test_a_switch_is_spelled_as_in_yaml(line: str, tmp_path: Path) -> None:
    """Only `false` was known, and the error for `False` said to leave it out: the option then stayed on."""
    (tmp_path / "mine.yaml").write_text(f"model: tiny\n{line}")
    assert not program.parse_arguments(["--config", str(tmp_path / "mine.yaml")]).curriculum


def test_a_runs_options_begin_another_run(tmp_path: Path) -> None:
    """All but its place, and but those that have left the program."""
    run = shutil.copytree(RECORDED, tmp_path / "run")
    (run / "origin.json").write_text("{}")
    config = program.parse_arguments(["--config", str(run / "config.json")])
    recorded = json.loads((run / "config.json").read_text())
    assert (config.model, config.steps, config.seed) == ("tiny", recorded["steps"], recorded["seed"])
    assert config.run_name == ""


def test_control_characters_of_a_strangers_files_are_shown_and_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    """A run's stage, or the model that an adapter names, could move the cursor or set the window's title."""
    from rich.console import Console
    from rich.table import Table

    cli.tell("no model \x1b]0;mine\x07")
    assert capsys.readouterr().err == "error: no model \\x1b]0;mine\\x07\n"
    console = cli.escaping(Console(file=(shown := io.StringIO()), markup=False))
    table = Table("stage \x1b[31m")
    table.add_row("4x4 \x1b]0;mine\x07")
    console.print(table, "model \x1b[2J", soft_wrap=True)
    assert "\x1b" not in shown.getvalue()
    assert "model \\x1b[2J" in shown.getvalue()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("report_to: wandb", "sets --report-to, which no file decides: name it as an option"),
        ("unsafe-no-jail: true", "sets --unsafe-no-jail, which no file decides"),
        ("stepps: 3", "mine.yaml: no option --stepps (similar: --save-steps, --steps"),
        ("steps: many", "mine.yaml: --steps takes a whole number, like 120, not 'many'"),
        ("steps: [1, 2]", "mine.yaml: steps is one value, not 2"),
        ("config: other.yaml", "mine.yaml names another file: put its options here"),  # nobody read it
        ("curriculum: maybe", "mine.yaml: curriculum is true or false, not 'maybe'"),
        ("curriculum:", "mine.yaml: curriculum is true or false, not ''"),  # it was on for whoever meant off
        ("steps: true", "mine.yaml: --steps takes a whole number, like 120, not 'true'"),
        ("- steps", "holds no options: write one a line, like steps: 100"),
        ("", "holds no options"),
        ("steps: [", "is neither YAML nor JSON"),
        ("a: " + "[" * 3000, "is neither YAML nor JSON"),
        # Each name stands for ten of the one before: 480 bytes took all memory.
        ("a: &a [x, x]\nb: &b [*a, *a]\nkeys: [*b]", "b is one value, or a list of values"),
        # What was read as another option: one that no file decides, or tyro's own, which writes a file.
        ('ladder: ["6:16", "--unsafe-no-jail"]', "ladder, or a value of it, reads as another option"),
        ("no_unsafe_no_jail: false", "sets --unsafe-no-jail, which no file decides"),
        ('"report-to=wandb": []', "report-to=wandb, or a value of it, reads as another option"),
        ("tyro-write-completion: [bash, written]", "tyro-write-completion, or a value of it, reads as another option"),
        ("help: yes", "help, or a value of it, reads as another option"),
    ],
)
def test_a_wrong_file_of_options_gets_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert program.main(["--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_bad_input_leaves_no_run_folder(tmp_path: Path) -> None:
    assert program.main(["--model", "no-such-model", "--output-dir", str(tmp_path / "runs")]) == 2
    assert not (tmp_path / "runs").exists()


def test_a_strategy_file_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "binary.py"
    path.write_bytes(b"\xff\xfe\x00")
    assert program.main(["play", str(path)]) == 2
    assert capsys.readouterr().err == f"error: {path} cannot be read: it is not UTF-8 text\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [("def strategy(board):\n    return (\n", "SyntaxError: '(' was never closed (<strategy>, line 2)"),
     ("def plan(board):\n    return 'a'\n", "no function strategy(board)"),
     ("import os\n" + CONSTANT, "ImportError: os may not be imported here"),
     ("import os\n" + CONSTANT, "ImportError: os may not be imported here; allowed are math, random, "),
     ("x = 1 / 0\n" + CONSTANT, "ZeroDivisionError: division by zero")],
)  # fmt: skip
@pytest.mark.parametrize("command", ["play", "eval"])
def test_a_file_that_does_not_load_is_refused_with_the_reason(
    command: str, source: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    assert program.main([command, str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {path} does not load: {said}")
    assert "; allowed are" not in err or err.endswith(", decimal\n")  # all of them


def test_play_prints_a_row_per_seed(honest: Path, call: Call) -> None:
    shown, _ = call("play", honest, "--size", 6, "--seeds", 3, 5)
    rows = [line.split("│")[1:3] for line in shown.splitlines() if "success" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [["3", "success"], ["5", "success"]]


@pytest.mark.parametrize("command", ["--help", "play {}", "play {} --json"])
def test_nobody_has_to_read_to_the_end(command: str, honest: Path) -> None:
    """`--help | head` ended in a traceback.  Here the reader has gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, program.__file__, *command.format(honest).split()]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE, done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("command", ["--help", "play {}", "play {} --json"])
@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk_gets_one_line(command: str, both: bool, honest: Path) -> None:
    """What `play FILE > log` could not write ended in a traceback, and with 2>&1 in exit code 120."""
    argv = [sys.executable, program.__file__, *command.format(honest).split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, stdout=full, stderr=full if both else subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    if not both:
        assert done.stderr.splitlines()[-1].startswith("error: no space is left")
        assert "Traceback" not in done.stderr


def test_a_full_disk_elsewhere_loses_nothing_that_was_printed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
import errno
from toolkit import cli
def run(*_):
    print("a line")
    raise OSError(errno.ENOSPC, "No space left on device", "/full/file")
raise SystemExit(cli.main(lambda: None, run))
"""
    with log.open("w") as stdout:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (done.returncode, log.read_text()) == (2, "a line\n")
    assert done.stderr == "error: no space is left on the disk of /full/file: make room there\n"


def test_a_lasting_stream_writes_to_nowhere_once_its_disk_is_full(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        stream = cli.Lasting(full)
        for _ in range(2):
            stream.write("step 1\n")
            stream.flush()
        assert Path(f"/proc/self/fd/{full.fileno()}").readlink() == Path(os.devnull)
    with (tmp_path / "log").open("w") as closed:
        pass
    with pytest.raises(ValueError, match="closed"):
        cli.Lasting(closed).write("step 1\n")


def test_play_json_is_the_only_line_on_stdout(honest: Path) -> None:
    done = run("play", honest, "--size", "6", "--seeds", "3", "5", "--json")
    assert done.stdout.count("\n") == 1
    games = json.loads(done.stdout)["games"]
    assert {seed: game["outcome"] for seed, game in games.items()} == {"3": "success", "5": "success"}
    assert "success" in done.stderr


def test_recorded_moves_replay_to_the_recorded_result(honest: Path, call: Call) -> None:
    game = json.loads(call("play", honest, "--size", 6, "--seeds", 3, "--json")[0])["games"]["3"]
    board = program.GameBoard(6, seed=3)
    for move in game["moves"]:
        board.move(int(move))
    assert (board.score(), board.max_tile(), board.state()) == (game["score"], game["max_tile"], "success")


def test_watch_ends_on_the_final_board(honest: Path, call: Call) -> None:
    shown, _ = call("play", honest, "--seeds", 3, "--target", 32, "--watch", "--delay", 0)
    told = json.loads(call("play", honest, "--seeds", 3, "--target", 32, "--json")[0])
    steps = told["games"]["3"]["steps"]
    assert f"move {steps}/{steps}" in shown


def test_other_keys_reach_the_player(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "wasd.py"
    path.write_text(HONEST.replace("éuai", "wasd"))
    play = ("play", path, "--size", 6, "--seeds", 1, "--json", "--keys")
    by_layout = {keys: json.loads(call(*play, keys)[0])["games"]["1"]["outcome"] for keys in ("wasd", "bepo")}
    assert by_layout == {"wasd": "success", "bepo": "invalid_move"}


def test_a_program_is_played_as_it_was_made(tmp_path: Path, call: Call) -> None:
    """A run's best program for 4x4 in wasd was played in bépo, where its first key is invalid."""
    path = tmp_path / "best_strategy.py"
    made_for = program.TrainConfig(held_out=("6:64", "4:128"), keys="wasd", timeout=2.0)
    write_program(path, HONEST.replace("éuai", "wasd"), made_for)
    shown, said = call("play", path, "--seeds", 1, "--json")
    told = json.loads(shown)
    assert (told["size"], told["target"], told["games"]["1"]["outcome"]) == (6, 64, "success")
    assert "--keys wasd" in said
    told = json.loads(call("play", path, "--seeds", 1, "--json", "--target", 32, "--keys", "bepo")[0])
    assert (told["target"], told["games"]["1"]["outcome"]) == (32, "invalid_move")


def test_a_runs_folder_is_played_by_its_best_program(tmp_path: Path, call: Call) -> None:
    made_for = program.TrainConfig(held_out=("6:64",), keys="wasd")
    write_program(tmp_path / "best_strategy.py", HONEST.replace("éuai", "wasd"), made_for)
    told = json.loads(call("play", tmp_path, "--seeds", 1, "--json")[0])
    assert (told["player"], told["games"]["1"]["outcome"]) == (str(tmp_path / "best_strategy.py"), "success")


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize("timeout", ['[5, "--unsafe-no-jail"]', '"5 --unsafe-no-jail"', '"--unsafe-no-jail"', DEEP],
                         ids=["a list", "a string", "an option", "200,000 brackets"])  # fmt: skip
def test_a_program_cannot_switch_the_jail_off(timeout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The options in its first line are written by whoever wrote the file.  Brackets ended in a traceback."""
    path = tmp_path / "hostile.py"
    path.write_text(f'# made for {{"held_out": ["4:2048"], "timeout": {timeout}}}\n{CONSTANT}')
    assert program.main(["play", str(path), "--json"]) == 2
    assert capsys.readouterr().err == f"error: {path} is damaged: restore it, or use another folder\n"


def test_an_adapter_is_evaluated_as_it_was_trained(tmp_path: Path) -> None:
    """A run on other boards and keys showed 0% on 6x6 in bépo.  SmolLM2 was asked without the example that it knew."""
    run, adapter = tmp_path / "run", tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    made_for = program.TrainConfig(held_out=("4:256", "3:64"), keys="wasd", example="random", max_new_tokens=64)
    (run / "config.json").write_text(json.dumps(dataclasses.asdict(made_for), default=str))
    keep_config(run, adapter)
    copied = Path(shutil.copytree(adapter, tmp_path / "copied"))
    for place in (run, adapter, copied):
        config = program.parse_arguments(["eval", str(place), "--games", "4", "--held-out", "4:512"])
        assert isinstance(config, program.EvalConfig)
        assert (config.held_out, config.keys, config.max_new_tokens) == (("4:512",), "wasd", 64)
        assert config.example == "random"


def test_eval_of_a_strategy_file_stands_beside_the_controls(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "no_key.py"  # boards are random here: any that moves can make 16
    path.write_text('def strategy(board):\n    return "no key"\n')
    result = json.loads(call("eval", path, "--games", 16, *HELD_OUT, "--json")[0])
    assert {name: stage["model"]["games"] for name, stage in result["scores"].items()} == {"3x3": 16, "4x4": 4}
    stage = result["scores"]["4x4"]
    assert (stage["target"], stage["model"]["won"], stage["model"]["won_low"]) == (16, 0.0, 0.0)
    assert 0.4 < stage["model"]["won_high"] < 0.6  # Wilson: 0 of 4
    assert stage["model"]["largest_tile_median"] < 16
    assert {name: control["won"] for name, control in stage["controls"].items()} == dict.fromkeys(
        ("random", "rotation", "greedy", "expert"), 1.0)  # fmt: skip


@pytest.mark.parametrize(
    ("best", "shown"),
    [
        (b'# made for {"held_out": ["4:16"], "keys": "bepo"}\n', True),
        (b'# made for {"held_out": ["4:16"], "keys": "wasd"}\n', False),
        (b'# made for {"keys": 1}\n', False),
        (b"\xff\xfe", False),
        (b'# made for {"held_out": ["4:16"], "keys": "bepo"}\n' + b"#" * 10_000 + b"\xff\n", False),
    ],
)
def test_the_best_of_n_stands_beside_a_program_for_the_same_keys(
    best: bytes, shown: bool, honest: Path, call: Call
) -> None:
    """It won nothing with others; and a file that could not be read lost a whole evaluation."""
    (honest.parent / "best_of_n.py").write_bytes(best + CONSTANT.encode())
    result = json.loads(call("eval", honest, "--games", 2, *HELD_OUT, "--json")[0])
    assert all(("best_of_n" in stage["controls"]) is shown for stage in result["scores"].values())


def test_a_games_option_that_nobody_gave_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f'# made for {{"held_out": ["4:2048"], "timeout": 99999}}\n{CONSTANT}')
    with pytest.raises(UsageError, match=rf"--timeout must lie .* \(with the options of {path}: --size 4"):
        program.parse_arguments(["play", str(path)])
    path.write_text(f"# made for this game I wrote a thing\n{CONSTANT}")  # it was called damaged
    assert program.parse_arguments(["play", str(path)]).player == str(path)


def test_a_servers_address_may_have_no_scheme() -> None:
    assert program.parse_arguments(["play", "--model", "127.0.0.1:9/v1", "--served-name", "x"]).served_name == "x"


def test_the_jail_that_was_left_off_is_recorded(honest: Path, call: Call) -> None:
    short = ("play", honest, "--seeds", 1, "--target", 32, "--json")
    assert json.loads(call(*short, "--unsafe-no-jail")[0])["jailed"] is False
    assert json.loads(call(*short)[0])["jailed"] is True


def test_training_boards_are_never_held_out_boards() -> None:
    trained = {seed for group in range(50) for seed in program.board_seeds(8, 3407, group)}
    held_out = set(program.board_seeds(400, held_out=True))
    assert len(trained) == len(held_out) == 400
    assert {seed % 2 for seed in trained} == {0}
    assert {seed % 2 for seed in held_out} == {1}


def test_a_training_prints_on_when_nobody_reads() -> None:
    """Ctrl-C ends `tee` as well, in the middle of the training that it was to save."""
    code = "import sys; from toolkit.cli import Lasting; out = Lasting(sys.stdout)\nfor _ in range(3):\n" \
           "    out.write('a line\\n' * 10_000); out.flush()\nprint('at the end')"  # fmt: skip
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as nobody:
        done = subprocess.run([sys.executable, "-c", code], stdout=nobody, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                              check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
