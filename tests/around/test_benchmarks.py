"""The benchmarks of learning, of the generator and of GPUs: their figures are consistent, and they run here."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

import gpt_2048_rl as program
from tests.helpers import HONEST, ROOT
from tests.preloaded import run
from tests.record_run import RECORDED, write_curves
from toolkit.games import evaluation
from toolkit.model import compose

# ---------------------------------------------------------------------------------------------------------------------
# Learning

LEVELS = {"before": 0.0, "after": 0.6, "best": 0.9}  # share of won games of the runs made up here
CONTROLS = {"random": 0.0, "rotation": 0.0, "greedy": 0.01, "expert": 0.6, "best_of_n": 0.3}


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("bench_learning")


def made_up_run(folder: Path, **shares: float) -> None:
    """A finished run of 100 boards whose players make 4096 in the first of their won games."""

    def score(share: float) -> dict[str, Any]:
        won = round(100 * share)
        return asdict(evaluation.score([4096] * (won // 2) + [2048] * (won - won // 2) + [256] * (100 - won), 2048))

    shutil.copytree(RECORDED, folder)
    result = json.loads((folder / "result.json").read_text())
    entry: dict[str, Any] = {"target": 2048, "boards": [f"board {i}" for i in range(100)]}
    entry |= {name: score(share) for name, share in (LEVELS | shares).items()}
    entry["controls"] = {name: score(share) for name, share in CONTROLS.items()}
    easy = entry | {"after": score(1.0)}
    result |= {"scores": {"4x4": entry, "6x6": easy}, "minutes": 8.0, "seconds": 700.0}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "top_hundred.json").write_text(json.dumps(score(0.1)))
    seconds, levels = ({n: start + slope * n for n in range(1, 7)} for start, slope in ((0.0, 20.0), (5.0, 1.0)))
    write_curves(folder / "events.out.tfevents.0.recorded", {"seconds/spent": seconds, "games/level": levels})


def measured(learning: ModuleType, folder: Path, *recipes: str, **shares: float) -> list[Any]:
    """Two seeds of each recipe."""
    found = []
    for recipe in recipes:
        for seed in (1, 2):
            made_up_run(folder / f"{recipe}-{seed}", **shares)
            found.append(learning.measure(recipe, seed, learning.read(folder / f"{recipe}-{seed}", set())))
    return found


def test_learning_meets_its_targets_only_in_every_seed(
    learning: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = learning.Args(figure=tmp_path / "figure.svg")
    good = measured(learning, tmp_path / "good", "stable", "published")
    assert learning.conclude(args, good) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["met"]
    assert len(told["runs"]) == 4
    (weak, _) = measured(learning, tmp_path / "weak", "stable", best=0.3)
    assert learning.conclude(args, [*good, weak]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    missed = {target["text"] for target in told["targets"] if not target["met"]}
    assert missed == {"best >= 85.0%", "best, 4096 >= 45.0%", "p, best below expert >= 0.05",
                      "p, best against best of N < 0.01"}  # fmt: skip


def test_learning_has_a_row_for_each_seed_and_the_median(learning: ModuleType, tmp_path: Path) -> None:
    table, *_ = learning.tables(measured(learning, tmp_path, "stable"))
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["seed"] == ["1", "2", "median"]
    assert columns["after"] == ["60.0%", "60.0%", "60.0% (60.0% to 60.0%)"]
    assert columns["best, 4096"][0] == "45.0%"
    assert columns["top hundred"][0] == "10.0%"


def test_the_picture_has_a_curve_for_each_run_on_4x4_and_a_dot_for_each_score(
    learning: ModuleType, tmp_path: Path
) -> None:
    found = measured(learning, tmp_path, "stable", "published")
    assert [level for _, level in found[0].curve] == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    assert [round(share, 3) for share, _ in found[0].curve] == [0.017, 0.183, 0.35, 0.517, 0.683, 0.85]
    picture = ElementTree.fromstring(learning.picture(found))
    words = [element.text for element in picture if element.tag.endswith("text")]
    assert words.count("60%") == 3  # after training by two recipes, and the expert
    assert {"published, after", "best program", "90%", "32", "2048"} <= set(words)
    assert sum(element.tag.endswith("polyline") for element in picture) == 4
    assert sum(element.tag.endswith("circle") for element in picture) == 2 * 9


def test_a_run_that_was_measured_is_not_repeated(
    learning: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures and its curve come from the file, equal to those of its folder."""
    (made,) = measured(learning, tmp_path / "runs", "stable")[:1]
    (tmp_path / "stable-1.json").write_text(json.dumps(asdict(made)))
    for module, name in ((learning.tiny, "warm_start"), (learning, "train"), (learning, "warm_start_programs")):
        monkeypatch.setattr(module, name, lambda *_: None)
    args = learning.Args(seeds=(1,), recipes=(), measured=tmp_path, figure=tmp_path / "figure.svg")
    (read,) = learning.train_all(args, tmp_path / "runs")
    assert asdict(read) == json.loads(json.dumps(asdict(made)))
    assert [run.figures for run in (read, made)] == [made.figures] * 2
    assert learning.picture([read]) == learning.picture([made])


def test_variants_are_the_stable_recipe_with_further_options(learning: ModuleType) -> None:
    args = learning.Args(recipes=("published",), variants=("easy=--ladder 4:256 --no-curriculum",))
    assert learning.options(args) == {"stable": ["--recipe", "stable"], "published": ["--recipe", "published"],
                                      "easy": ["--ladder", "4:256", "--no-curriculum"]}  # fmt: skip


def test_the_top_hundred_play_the_held_out_boards_in_turn(
    learning: ModuleType, pool: program.Pool, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    idle = "def strategy(board):\n    return 'x'"
    (folder / "best_of_n.json").write_text(json.dumps([HONEST, idle]))
    score = learning.play_hundred(folder)
    assert [tile > 4 for tile in score.tiles] == [True, False, True, False]
    (folder / "best_of_n.json").unlink()
    assert learning.play_hundred(folder) == score  # from its file


# ---------------------------------------------------------------------------------------------------------------------
# The generator


@pytest.mark.parametrize(("kinds", "rules"), [(("constant", "draw2"), 2), (("turns", "search"), 1), (("first",), 1)])
def test_as_many_programs_are_counted_as_can_be_composed(
    kinds: tuple[str, ...], rules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small tables, where nearly all choices are soon drawn."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    generator = importlib.import_module("bench_generator")
    small = {"KINDS": dict.fromkeys(kinds, 1), "RULES": {rules: 1}, "STATES": ("max(flat)",), "LIMITS": (1, 2),
             "TERMS": {"max(ranks)": 1, "sum(ranks)": -1}, "TERM_COUNTS": {2: 1}, "WEIGHTS": (3,), "DEAD": (0,),
             "PLACES": {"": 1}, "CELLS": (1, 2), "SIGNS": {1: 1, -1: 1},
             "SEARCHES": {"value": 1, "expected": 2, "further": 2},
             "LINE_VALUES": ("sum(map(worth, board))",), "POOLED": {"max(map(look, boards))": 1}}  # fmt: skip
    for name, table in small.items():
        monkeypatch.setattr(compose, name, table)
    rng = random.Random(1)
    composed = {compose.strategy(rng, "éuai") for _ in range(20_000)}
    assert len(composed) == sum(count for _, count in generator.texts())


@pytest.mark.long
def test_the_generator_is_measured() -> None:
    done = run("--count", 20, "--games", 4, "--race-games", 16, script=ROOT / "benchmarks" / "bench_generator.py")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["composed"]["games"], told["best"]["games"], told["race"]["candidates"]) == (20, 4, 20)


# ---------------------------------------------------------------------------------------------------------------------
# GPUs


@pytest.mark.long
def test_whole_steps_are_measured_on_a_cpu_too(base: Path) -> None:
    done = run("--batches", 1, 4, "--steps", 1, "--tokens", 150, script=ROOT / "benchmarks" / "bench_gpu.py")
    assert done.returncode == 0, done.stderr
    one, four = (json.loads(line)["measured"] for line in done.stdout.splitlines() if line.startswith("{"))
    assert (one["completions"], four["completions"]) == (1, 4)
    assert one["update"] == 0 < four["update"]
    assert four["forwards"] > 0  # on a GPU the second trainer went on in the first one's folder, and did no step
    assert 4 * 90 <= four["tokens"] <= 4 * 150
    for row in (one, four):
        assert 0 < row["tokens"] / row["generate"] < row["bound"]


@pytest.mark.parametrize("form", ["mxfp4", "bf16"])
def test_a_made_up_gpt_oss_loads(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small shape here.  What is made in NF4 loads in test_gpu.py."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench_gpu = importlib.import_module("bench_gpu")
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 32, "vocab_size": 1024}  # fmt: skip
    monkeypatch.setattr(transformers, "GptOssConfig", lambda **more: GptOssConfig(**(more | small)))
    bench_gpu.made_up_gpt_oss(tmp_path, 2, form)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True,
        quantization_config=Mxfp4Config(dequantize=True) if form == "mxfp4" else None,
    )  # fmt: skip
    assert not any(report.values()), report
    assert len(model.model.layers) == 2
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
    assert model.model.layers[0].mlp.experts.down_proj.abs().max() > 0


@pytest.mark.long
def test_the_campaign_for_a_borrowed_gpu_runs_dry(base: Path, tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "gpu_campaign.py"
    parts = "smollm2-4bit", "smoke", "nf4"
    command = [sys.executable, script, *parts, "--dry-run", "--out", tmp_path, "--seconds", "300"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {part: json.loads((tmp_path / f"{part}.json").read_text())["runs"] for part in parts}
    assert told["smollm2-4bit"][0]["told"][-1]["steps"] == 1
    assert "resuming after step 1" in "\n".join(told["smoke"][1]["said"])
    measured = [line["measured"] for line in told["nf4"][0]["told"]]
    assert [(row["completions"], row["forwards"]) for row in measured] == [(2, 1), (4, 1)]


def test_a_command_of_the_campaign_that_takes_too_long_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    campaign = importlib.import_module("gpu_campaign")
    slow = campaign.run(("-c", """import time; print('{"measured": 1}', flush=True); time.sleep(60)"""), 2.0, False)
    assert (slow["status"], slow["told"]) == (124, [{"measured": 1}])


def test_a_stripped_wheel_installs_without_what_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    wheels = importlib.import_module("wheels")
    about = "bitsandbytes-1.0.dist-info"
    files = {"bitsandbytes/__init__.py": "", "bitsandbytes/libbitsandbytes_cuda130.so": "x",
             "bitsandbytes/libbitsandbytes_cuda128.so": "x" * 1000, "studio/index.html": "x" * 1000,
             f"{about}/METADATA": "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 1.0\n",
             f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}  # fmt: skip
    wheel = tmp_path / "bitsandbytes-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**files, f"{about}/RECORD": "".join(f"{name},,\n" for name in files)}.items():
            archive.writestr(name, content)
    wheels.strip(wheel)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(wheel)], check=True, timeout=300)
    there = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.*") if path.is_file()}
    assert {"bitsandbytes/__init__.py", "bitsandbytes/libbitsandbytes_cuda130.so"} <= there
    assert not there & {"bitsandbytes/libbitsandbytes_cuda128.so", "studio/index.html"}


def test_every_wheel_is_of_the_pinned_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    wheels = importlib.import_module("wheels")
    assert sorted(line.partition("==")[0] for line in wheels.pinned()) == sorted(wheels.NAMES)


def bench_smollm2(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark of SmolLM2."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("bench_smollm2")


def done_with(reward: float, score: int | None) -> dict[str, Any]:
    """A completion as in rollouts.jsonl: one without a program, or one whose game had this score."""
    games = [] if score is None else [{"outcome": "stuck", "steps": 70, "score": score}]
    works = "none" if score is None else "load"
    return {"text": f"{reward} {score}", "works": works, "cheating": "", "reward": reward, "results": games}


def test_the_control_trains_on_the_best_quarter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rule replaces GRPO's advantages: once it was not asked at all, and the control was GRPO again."""
    import torch

    smollm2 = bench_smollm2(monkeypatch)
    for owner, name in ((program.Rollouts, "add"), (program, "without_flat_groups")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    smollm2.take_advantages(smollm2.best_quarter)
    config = program.TrainConfig(generations=4)
    rollouts = program.Rollouts(tmp_path / "rollouts.jsonl", config, program.Ladder([program.Stage(4, 64)]))
    group = [done_with(1.0, 8), done_with(5.0, 90), done_with(-3.0, None), done_with(2.0, 9)]
    rollouts.add({"step": 1, "size": 4, "target": 64, "completions": group})
    batch = {"advantages": torch.zeros(4), "completion_mask": torch.ones(4, 1)}
    assert program.without_flat_groups(batch, [False], False)["advantages"].tolist() == [0.0, 1.0, 0.0, 0.0]


def test_sampled_programs_that_make_2048_on_6x6_count_as_won(monkeypatch: pytest.MonkeyPatch) -> None:
    """Games that went on to their end never ended as won: every model won 0%, and so did keys at random."""
    smollm2 = bench_smollm2(monkeypatch)
    monkeypatch.setattr(smollm2, "BOARDS", 4)
    found = smollm2.of_programs([smollm2.blind_programs()["at random"]])  # it wins 99%
    assert (found.loads, found.distinct) == (1.0, 0.25)
    assert found.won >= 0.5


def test_a_number_of_steps_is_that_of_every_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The published recipe has a number of its own: --steps beside it was a TypeError."""
    smollm2, asked = bench_smollm2(monkeypatch), dict[str, object]()

    def run(way: str, folder: Path, **options: object) -> None:
        asked.update(options)
        folder.mkdir()
        (folder / "best_strategy.py").touch()

    nothing = smollm2.Sampled(0, 0, 0, 0, 0)
    monkeypatch.setattr(smollm2, "run", run)
    monkeypatch.setattr(smollm2, "kept", lambda file, make: nothing)
    monkeypatch.setattr(smollm2, "of_programs", lambda sources: nothing)
    smollm2.learn(smollm2.Args("learn", seeds=(1,), steps=2, methods=("published",), best_of=0), tmp_path)
    assert asked["steps"] == 2


# ---------------------------------------------------------------------------------------------------------------------
# Public programs


def test_programs_of_public_notebooks_are_found_and_played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each once, without the prompt's example and other models' notebooks; numbers as keys become letters."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    public: Any = importlib.import_module("bench_public")
    turns = "def strategy(board):\n    return str(sum(map(sum, board)) // 2 % 4)"
    texts = {"2048.ipynb": f"step 1\n{turns}\n# Example\nfound\n{turns}\n\nReward: 1", "OpenEnv_2048.ipynb": turns,
             "Gemma_2048.ipynb": "def strategy(board):\n    return 'w'", "other.ipynb": turns}  # fmt: skip
    for name, text in texts.items():
        cells = [{"source": [name]}, {"outputs": [{"text": [text[:20], text[20:]]}, {"data": {"text/plain": "3"}}]}]
        (tmp_path / name).write_text(json.dumps({"cells": cells}))
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "notebooks")):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    found = list(dict.fromkeys(public.programs_of(tmp_path)))
    assert found == [public.Found(turns, False), public.Found(turns, True)]
    args = public.Args((tmp_path,), seeds=(1, 2), group=4, groups=20)
    verdicts = public.verdicts_on(found, 4, args.seeds)
    assert [verdict.results[0].outcome for verdict in verdicts] == ["invalid_move", "stuck"]
    row = public.at("4:8", verdicts, args)
    assert row.won == 0.5
    assert row.outcomes == {"invalid_move": 0.5, "success": 0.5}
    assert 0.5 < row.with_winner < 1.0
    assert 0.0 < row.flat < 0.5
