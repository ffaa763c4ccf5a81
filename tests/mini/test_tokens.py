"""Text to tokens and back, for every line that self-play and stockfish make."""

from __future__ import annotations

import json
import random
from itertools import islice, pairwise
from pathlib import Path

import pytest

from mini.chess_lines import SHIPPED, parse_line, self_play
from mini.model import GPT, GptConfig
from mini.runs import load_tokens, save_model
from mini.tokens import END, VOCABULARY, BpeTokens, ChessTokens, LineTokens
from toolkit import UsageError

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Of both tasks."""
    return [*islice(self_play(random.Random(0)), 1000), *SHIPPED.read_text().splitlines()]


def test_no_token_stands_in_the_vocabulary_twice() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY)


def test_chess_tokens_round_trip(lines: list[str]) -> None:
    tokens = ChessTokens()
    for line in lines:
        example = parse_line(line)
        assert example is not None
        for text in (example.prompt, " ".join(example.answer.split())):
            assert tokens.decode(tokens.encode(text)) == text


def test_a_square_always_has_the_same_place(lines: list[str]) -> None:
    """Prompts of a kind have the same length, and so have positions; a P answer is as long as its list of moves."""
    tokens, lengths = ChessTokens(), set[tuple[str, int, int]]()
    for line in lines:
        example = parse_line(line)
        assert example is not None
        lengths.add((example.task, len(tokens.encode(example.prompt)), len(tokens.encode(example.answer))))
    assert sorted(task for task, _, _ in lengths) == ["A", "P"]
    assert tokens.longest == 1 + max(length for _, _, length in lengths)
    assert [VOCABULARY[i][1] for i in tokens.encode(f"P: {START}")[1:9]] == list("RNBQKBNR".lower())
    assert [len(tokens.encode(f"M: {'e2e4 ' * n}E: {'0.10 ' * n}B: e2e4")) for n in (1, 5)] == [8, 24]


@pytest.mark.parametrize("text", [
    "", "x", f"P: {START}+", f"P: {START.replace('0 1', '0 210')}", "P: 8/8/8/8/8/8/8/9 w - - 0 1",
    f"A: {START}+e2e4+e2e4", f"A: {START}+e2e4+{'e2e4 ' * 10}e2e4+", "M: e2e4 E: 0.1 B: e2e4",
    "M: e2e4 E: 100.00 B: e2e4", f"{START}+0.002+0+0", f"A: {START}+e2e4 e2e4+e2e4+", "M: e2e8k E: 0.10 B: e2e4",
    "M: e2e4 E: 0.10 B: d2d4", f"A: {START}++e2e4+", "M: a2a3 b2b3 c2c3 d2d3 e2e3 f2f3 E: B: f2f3",
])  # fmt: skip
def test_what_the_chess_tokens_cannot_say(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        ChessTokens().encode(text)


def test_one_more_on_a_clock_is_one_more_in_each_of_its_tokens() -> None:
    """In decimal digits nine became ten too rarely to be learnt: after 29 came 29 again."""
    tokens, clocks = ChessTokens(), list[tuple[int, ...]]()
    for clock in range(210):
        prompt = f"P: {START[:-3]}{clock} {clock}"
        ids = tokens.encode(prompt)
        assert tokens.decode(ids) == prompt
        clocks.append(tuple(int(VOCABULARY[i][1].split()[0]) for i in ids[-2:]))
    assert all(((a + 1) % 14, (b + 1) % 15) == after for (a, b), after in pairwise(clocks))
    assert "mod" in tokens.decode(ids[:-1])  # half a clock is none


def test_a_move_is_the_square_it_leaves_and_the_one_it_goes_to() -> None:
    """A promotion belongs to the second; without one of the two there is no move."""
    tokens = ChessTokens()
    ids = tokens.encode("M: e2e4 a7a8q E: 0.10 0.20 B: e2e4")
    assert [VOCABULARY[i] for i in ids[1:5]] == [("from", " e2"), ("to", "e4"), ("from", " a7"), ("to", "a8q")]
    assert VOCABULARY[ids[5]] == ("mark", " E:")
    del ids[1]
    assert tokens.decode(ids) == "M:e4 a7a8q E: 0.10 0.20 B: a7a8q"


def test_the_best_move_is_its_number_in_the_list() -> None:
    """And no move at all where the list is shorter."""
    tokens = ChessTokens()
    ids = tokens.encode("M: e2e4 d2d4 E: 0.10 0.20 B: d2d4")
    assert VOCABULARY[ids[-1]] == ("number", "2")
    ids[-1] += 1
    assert tokens.decode(ids) == "M: e2e4 d2d4 E: 0.10 0.20 B:"


def test_any_tokens_have_a_text() -> None:
    """What an untrained model says must reach the judge, not a traceback."""
    rng, tokens = random.Random(0), ChessTokens()
    texts = [tokens.decode(rng.choices(range(tokens.size), k=rng.randrange(80))) for _ in range(500)]
    assert len(set(texts)) > 450


# ---------------------------------------------------------------------------------------------------------------------
# Characters of lines


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
        assert len(spelled) == (89 if example.task == "P" else 114 + promotions)
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
        blank = " " if example.task == "P" else ""
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
