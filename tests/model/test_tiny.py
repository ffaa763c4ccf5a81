"""The embedded model: the programs that it imitates, its warm start and its cache."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.list_engine import slide
from toolkit import UsageError
from toolkit.games.programs import moves_source
from toolkit.model import compose, tiny

SMALL = tiny.WarmStartConfig(steps=2, batch=4, corpus=50)


@pytest.mark.parametrize("layout", list(program.LAYOUTS))
def test_composed_strategies_load_and_answer_with_keys(layout: str, pool: program.Pool) -> None:
    """Every program that the warm start imitates is legal: it loads and returns nothing but keys."""
    rng, spec = random.Random(1), program.game_spec(layout)
    sources = [compose.strategy(rng, spec.keys) for _ in range(40)]
    results = program.execute_strategies(sources, [1], target=64, keys=layout)
    assert {game.outcome for games in results for game in games} <= {"success", "lost", "stuck"}
    assert not any(program.find_cheating(source) for source in sources)


@pytest.mark.parametrize("layout", list(program.LAYOUTS))
def test_programs_foresee_the_moves_of_the_game(layout: str) -> None:
    """The boards that searches and controls look at are those of an independent engine."""
    rng, keys, code = random.Random(4), program.LAYOUTS[layout], dict[str, Any]()
    exec(moves_source(keys), code)
    for _ in range(200):
        board = [[rng.choice((0, 2, 2, 4, 8)) for _ in range(4)] for _ in range(4)]
        after = {key: slide(board, direction)[0] for key, direction in zip(keys, program.DIRECTIONS, strict=True)}
        foreseen = code["moves"](tuple(map(tuple, board)))
        assert {key: list(map(list, rows)) for key, rows in foreseen.items()} == {
            key: rows for key, rows in after.items() if rows != board
        }


@pytest.mark.slow
def test_composed_strategies_are_of_very_different_quality(pool: program.Pool) -> None:
    rng, spec = random.Random(2), program.game_spec()
    sources = [compose.strategy(rng, spec.keys) for _ in range(60)]
    tiles = [games[0].max_tile for games in program.execute_strategies(sources, [1])]
    assert min(tiles) <= 64
    assert max(tiles) == 2048
    assert sum(tile == 2048 for tile in tiles) < 0.45 * len(tiles)


def test_composed_strategies_are_distinct() -> None:
    """Two corpora of a thousand share few programs, so most of what training finds was never shown."""
    spec = program.game_spec()
    one, two = ({compose.strategy(random.Random(seed * 1000 + i), spec.keys) for i in range(1000)} for seed in (1, 2))
    assert len(one & two) < 0.5 * len(one)


def test_prompts_of_the_warm_start_never_have_the_held_out_wording() -> None:
    rng, spec = random.Random(3), program.game_spec()
    prompts = [tiny.conversation(rng, spec)[0]["content"] for _ in range(200)]
    assert len(set(prompts)) > 100
    assert not any(prompt.startswith(program.WORDINGS[-1].partition("{")[0]) for prompt in prompts)


def test_warm_start_gives_the_same_weights_for_the_same_seed(tmp_path: Path) -> None:
    one, same, other = (
        (tiny.warm_start(program.game_spec(), seed, SMALL, tmp_path / name) / "model.safetensors").read_bytes()
        for name, seed in (("one", 5), ("same", 5), ("other", 6))
    )
    assert one == same != other


def test_what_changes_the_weights_also_changes_the_version(tmp_path: Path) -> None:
    """The cache goes by the version alone.  If this fails, raise tiny.VERSION and record the new values here.

    The hash covers what is fed to the training, the losses cover the training itself.
    """
    formats = [program.game_spec(layout) for layout in ("bepo", "wasd", "zqsd", "arrows")]  # a new one has a new folder
    corpora = [[tiny.conversation(random.Random(i), each) for i in range(100)] for each in formats]
    marked = [compose.marked_strategy(random.Random(i), formats[0].keys) for i in range(100)]
    prompts = [prompt["content"] for prompt, _ in corpora[0]]
    vocabulary = tiny.train_tokenizer(prompts, marked, formats[0].alphabet, 640).get_vocab()
    parts = [dataclasses.asdict(tiny.DEFAULT_CONFIG), tiny.CHAT_TEMPLATE, tiny.SPECIAL_TOKENS, tiny.SEED,
             [each.final_channel for each in formats], corpora, vocabulary]  # fmt: skip
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    losses: list[float] = []
    tiny.warm_start(formats[0], 5, SMALL, tmp_path / "tiny", lambda step, steps, loss: losses.append(loss))
    assert (tiny.VERSION, digest) == (11, "c4e3d7989bdbe47b")
    assert losses == pytest.approx([7.2142, 6.6454], rel=1e-3)


def test_the_default_layouts_model_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All machines begin from it.  If there is none for a new tiny.VERSION, CLAUDE.md says how to make it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiny, "train_model", None)
    folder = tiny.warm_start(program.game_spec())
    weights = (folder / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest()[:16] == "26b785db90559128"
    assert tiny.layout_of(folder) == "bepo"


@pytest.mark.long
def test_the_shipped_model_is_the_warm_starts(base: Path, tmp_path: Path) -> None:
    """Trained again, on any processor, it answers as well, with the same tokenizer."""
    from transformers import AutoTokenizer, GptOssForCausalLM

    spec, rng, losses = program.game_spec(), random.Random(1), list[float]()
    tiny.train_model(tmp_path, spec, tiny.SEED, tiny.DEFAULT_CONFIG, lambda *_: None)
    assert (tmp_path / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(base)
    batch = [tiny.conversation(rng, spec) for _ in range(100)]
    text = tokenizer.apply_chat_template(batch[0][:1], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text + spec.final_channel)["input_ids"]
    answers = tokenizer([answer["content"] + "<|return|>" for _, answer in batch])["input_ids"]
    for folder in (base, tmp_path):
        model = GptOssForCausalLM.from_pretrained(folder)
        losses.append(tiny.answer_loss(model, prompt, answers).item() / sum(map(len, answers)))
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_the_cache_has_a_folder_for_each_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = {layout: tiny.folder_of(layout) for layout in program.LAYOUTS}
    assert len({*folders.values(), tiny.folder_of("bepo", seed=1)}) == len(folders) + 1
    assert {layout: tiny.layout_of(folder) for layout, folder in folders.items()} == {name: name for name in folders}
    elsewhere = tmp_path / tiny.folder_of("bepo").name
    assert [tiny.layout_of(folder) for folder in (None, elsewhere, tiny.folder_of("bepo", seed=1))] == [None] * 3


def test_the_cache_is_only_for_the_default_config() -> None:
    """Cache folders are not named after the config, so a test's small model would be mistaken for the real one."""
    with pytest.raises(ValueError, match="name a folder"):
        tiny.warm_start(program.game_spec(), config=SMALL)


def test_a_damaged_model_is_made_again(tmp_path: Path) -> None:
    """A cached model that was cut short could not be loaded, and nothing said what to remove."""
    folder = tiny.warm_start(program.game_spec(), config=SMALL, folder=tmp_path / "tiny")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:5000])
    tiny.warm_start(program.game_spec(), config=SMALL, folder=folder)
    assert weights.read_bytes() == whole


def test_a_cache_that_cannot_be_written_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(UsageError, match=r"cache cannot be written \(.*\): free some space, or set XDG_CACHE"):
        tiny.warm_start(program.game_spec(), config=SMALL, folder=tmp_path / "cache" / "tiny")


def test_an_interrupted_warm_start_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.warm_start(program.game_spec(), config=SMALL, folder=tmp_path / "tiny", progress=interrupt)
    assert list(tmp_path.iterdir()) == []
