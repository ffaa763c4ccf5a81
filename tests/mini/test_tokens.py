"""Text to tokens and back, for every line that self-play and stockfish make."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest

from mini.chess_lines import SHIPPED, parse_line, self_play
from mini.model import GPT, GptConfig
from mini.runs import END, BpeTokens, LineTokens, load_tokens, save_model
from toolkit import UsageError


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Of both tasks."""
    return [*islice(self_play(random.Random(0)), 1000), *SHIPPED.read_text().splitlines()]


def test_characters_round_trip_and_each_square_has_its_place(lines: list[str]) -> None:
    tokens = LineTokens()
    assert len(set(tokens.VOCABULARY)) == tokens.size
    for line in lines:
        example = parse_line(line)
        assert example is not None
        for text in (example.prompt, " ".join(example.answer.split())):
            assert tokens.decode(tokens.encode(text)) == text
        spelled = [tokens.VOCABULARY[i] for i in tokens.encode(example.prompt)]
        assert [i for i, token in enumerate(spelled) if token == "/"] == [*range(9, 72, 9)]
        promotions = sum(token in "qrbn" for token in spelled[90:])
        assert len(spelled) == (89 if example.kind == "P" else 114 + promotions)
        assert len(tokens.encode(example.answer)) < tokens.longest


@pytest.mark.parametrize(("text", "spelled"), [
    ("M: e2e4 a7a8q E: -0.42 B: e2e4", ["M:", " e2", "e4", " a7", "a8", "q", " E:", " ", "-", "0", ".42", " B:",
                                        " e2", "e4"]),
    ("8/8/8/8/8/8/8/k1K5 b Kq e3 10 9+0.001+0+0", [
        *"________/" * 7, *"k_K_____", " b", *" Kq~~", " e3", *"~~ ~10 ~~9+0", ".00", *"1+0+0"]),
], ids=["P", "A"])  # fmt: skip
def test_how_answers_are_spelled(text: str, spelled: list[str]) -> None:
    tokens = LineTokens()
    assert [tokens.VOCABULARY[i] for i in tokens.encode(text)] == spelled


def test_a_character_that_chess_lines_do_not_have() -> None:
    with pytest.raises(ValueError, match="no chess token for 'x'"):
        LineTokens().encode("M: e2xe4")


def test_any_tokens_have_a_text() -> None:
    """What an untrained model says must reach the judge, not a traceback."""
    rng, tokens = random.Random(0), LineTokens()
    texts = [tokens.decode(rng.choices(range(tokens.size), k=rng.randrange(80))) for _ in range(500)]
    assert len(set(texts)) > 450


# ---------------------------------------------------------------------------------------------------------------------
# Byte pairs


@pytest.fixture(scope="module")
def vocabulary(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte pairs of chess lines in the form of GPT-2's files, made by another library."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("vocabulary")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(lines, vocab_size=400, show_progress=False)
    trained.save_model(str(folder))
    # In GPT-2's files ids are in the order of its merges, behind its own order of the 256 bytes, and END is the last.
    merges = (folder / "merges.txt").read_text()
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    letters = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    pairs = [line.replace(" ", "") for line in merges.splitlines()[1:]]
    ids = {text: i for i, text in enumerate([*letters, *pairs, END])}
    (folder / "vocab.json").write_text(json.dumps(ids))
    return folder


def test_byte_pairs_equal_those_of_another_library(vocabulary: Path, lines: list[str]) -> None:
    from tokenizers import ByteLevelBPETokenizer

    theirs = ByteLevelBPETokenizer(str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt"))
    ours = BpeTokens(vocabulary)
    for text in [*lines[::50], "Les cinq échecs, d'un coup ! 它们 \n\n  x", "it's   we'll"]:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode(END) == [ours.end] == [ours.size - 1]


def test_prompt_and_answer_apart_are_the_line_together(vocabulary: Path, lines: list[str]) -> None:
    """What was trained on whole lines must meet the same tokens when it only gets the prompt."""
    tokens = BpeTokens(vocabulary)
    for line in lines[::50]:
        example = parse_line(line)
        assert example is not None
        blank = " " if example.kind == "P" else ""
        whole = tokens.encode(example.prompt + blank + example.answer)
        assert tokens.encode(example.prompt) + tokens.encode(blank + example.answer) == whole


def test_either_pair_of_names_will_do(vocabulary: Path, lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "vocab.bpe").write_bytes((vocabulary / "merges.txt").read_bytes())
    (tmp_path / "encoder.json").write_bytes((vocabulary / "vocab.json").read_bytes())
    assert BpeTokens(tmp_path).encode(lines[0]) == BpeTokens(vocabulary).encode(lines[0])


def test_a_model_keeps_its_byte_pairs(vocabulary: Path, tmp_path: Path, lines: list[str]) -> None:
    """A run that began from another run's folder had none, because these files lie in its model's folder."""
    tokens = BpeTokens(vocabulary)
    save_model(GPT(GptConfig(1, 1, 8, 8, tokens.size)), tokens, tmp_path)
    assert load_tokens(tmp_path).encode(lines[0]) == tokens.encode(lines[0])


def test_ids_and_bytes_that_are_no_text(vocabulary: Path) -> None:
    tokens = BpeTokens(vocabulary)
    assert tokens.decode([tokens.size + 3]) == "\N{REPLACEMENT CHARACTER}"
    assert tokens.decode(tokens.encode("é")[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_damaged_vocabulary(vocabulary: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no GPT-2 vocabulary"):
        BpeTokens(tmp_path)
    (tmp_path / "merges.txt").write_bytes((vocabulary / "merges.txt").read_bytes())
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(UsageError, match="are no GPT-2 vocabulary"):
        BpeTokens(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(UsageError, match="are no GPT-2 vocabulary"):
        BpeTokens(tmp_path)
