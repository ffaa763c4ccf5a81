"""gpt-oss's own tokenizer and format: the prompt fits and is open, end tokens end, programs survive.

The package bpe-openai brings the vocabulary, openai-harmony the format's reference implementation, which checks the
vocabulary's hash and renders conversations by itself.  The chat template is the one that TRL ships for gpt-oss.
"""

from __future__ import annotations

import gzip
import importlib.resources
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest

import gpt_2048_rl as program
from tests.programs import BLIND, BROKEN, GREEDY, SLOW
from toolkit.referee.extract import extract_function

bpe_openai = pytest.importorskip("bpe_openai", reason="optional: ./setup.sh --with harmony")
openai_harmony = pytest.importorskip("openai_harmony", reason="optional: ./setup.sh --with harmony")
pytestmark = pytest.mark.optional

PROGRAMS = {**BLIND, **GREEDY, **SLOW, **BROKEN}
STAGES = (*(tuple(map(int, stage.split(":"))) for stage in program.TrainConfig().ladder), (6, 2048), (16, 1 << 64))
Effort = Literal["none", "low", "medium", "high"]
EFFORTS: tuple[Effort, ...] = ("none", "low", "medium", "high")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """o200k_base, as a file of base64 tokens and ranks."""
    file = tmp_path_factory.mktemp("o200k") / "o200k_base.tiktoken"
    packed = importlib.resources.files(bpe_openai) / "data" / "o200k_base.tiktoken.gz"
    file.write_bytes(gzip.decompress(packed.read_bytes()))
    return file


@pytest.fixture(scope="module")
def harmony(vocabulary: Path) -> Iterator[Any]:
    """The reference implementation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(vocabulary.parent))
        yield openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.fixture(scope="module")
def o200k(vocabulary: Path) -> Any:
    """A transformers tokenizer with gpt-oss's vocabulary, split pattern and special tokens, and without a template."""
    from tiktoken_ext import openai_public
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    with pytest.MonkeyPatch.context() as patch:  # the vocabulary is there and needs no download
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
        known = openai_public.o200k_harmony()
    special = sorted(known["special_tokens"], key=known["special_tokens"].__getitem__)
    made = TikTokenConverter(str(vocabulary), known["pat_str"], extra_special_tokens=special).converted()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|return|>", pad_token="<|endoftext|>")


@pytest.fixture
def tokenizer(o200k: Any) -> Any:
    """With the template that TRL ships.  It is read from its file, because importing TRL takes long."""
    o200k.chat_template = (importlib.resources.files("trl") / "chat_templates" / "gptoss.jinja").read_text()
    return o200k


def prompt_ids(tokenizer: Any, text: str, effort: Effort) -> list[int]:
    """The prompt, as training and evaluation make it."""
    program.open_channel(tokenizer, effort)
    asked = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False,
                                                   **program.template_arguments(tokenizer, effort))  # fmt: skip
    return ids


def conversation(text: str, effort: str, date: str, *answers: tuple[str, str]) -> Any:
    """The same for the reference: the system message, the user's, and the assistant's (channel, text)."""
    from openai_harmony import Conversation, Message, ReasoningEffort, Role, SystemContent

    system = SystemContent.new().with_conversation_start_date(date).with_reasoning_effort(ReasoningEffort(effort))
    said = [Message.from_role_and_content(Role.ASSISTANT, answer).with_channel(name) for name, answer in answers]
    return Conversation.from_messages([Message.from_role_and_content(Role.SYSTEM, system),
                                       Message.from_role_and_content(Role.USER, text), *said])  # fmt: skip


def today(tokenizer: Any, ids: list[int]) -> str:
    """The date in a prompt: the template writes the current one."""
    return str(tokenizer.decode(ids)).partition("Current date: ")[2][:10]


def test_the_special_tokens_are_those_of_gpt_oss(tokenizer: Any, harmony: Any) -> None:
    names = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>")
    ids = [199998, 199999, 200002, 200005, 200006, 200007, 200008]
    assert tokenizer.convert_tokens_to_ids(list(names)) == ids
    assert [harmony.encode(name, allowed_special="all") for name in names] == [[token] for token in ids]


def test_every_prompt_fits_its_room(tokenizer: Any) -> None:
    """PROMPT_TOKENS is more than twice what gpt-oss needs; other tokenizers take more."""
    lengths = [
        len(prompt_ids(tokenizer, program.build_prompt(size, target, keys, wording), effort))
        for size, target in STAGES
        for keys, wording, effort in product(program.LAYOUTS, range(len(program.WORDINGS)), EFFORTS)
    ]
    assert (min(lengths), max(lengths)) == (237, 251)
    assert 2 * max(lengths) < program.PROMPT_TOKENS


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_prompt_is_the_references_and_ends_in_an_open_final_channel(
    effort: Effort, tokenizer: Any, harmony: Any
) -> None:
    """Without reasoning the answer begins in the final channel; with an effort the model opens its own."""
    text = program.build_prompt(keys="bepo")
    ids = prompt_ids(tokenizer, text, effort)
    named = "low" if effort == "none" else effort
    asked = conversation(text, named.capitalize(), today(tokenizer, ids))
    reference = harmony.render_conversation_for_completion(asked, openai_harmony.Role.ASSISTANT)
    opening = harmony.encode(program.FINAL_CHANNEL, allowed_special="all") if effort == "none" else []
    assert ids == reference + opening
    assert opening in ([], [200005, 17196, 200008])  # <|channel|>final<|message|>


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_survives_its_tokens(name: str, tokenizer: Any, harmony: Any) -> None:
    """Both tokenizers make the same tokens, and these the same text: blanks, é, arrows, quotation marks."""
    answer = f"```python\n{PROGRAMS[name]}\n```"
    ids = tokenizer.encode(answer, add_special_tokens=False)
    assert ids == harmony.encode(answer)
    assert tokenizer.decode(ids, skip_special_tokens=True) == harmony.decode(ids) == answer
    assert extract_function(answer) == extract_function(tokenizer.decode(ids))


def test_an_answer_ends_with_the_end_token_and_is_read(tokenizer: Any, harmony: Any) -> None:
    """What gpt-oss appends to an open final channel, by the reference and by TRL's template."""
    source = next(iter(GREEDY.values()))
    text, answer = program.build_prompt(), f"```python\n{source}\n```"
    ids = prompt_ids(tokenizer, text, "none")
    whole = harmony.render_conversation_for_training(
        conversation(text, "Low", today(tokenizer, ids), ("final", answer))
    )
    assert whole[: len(ids)] == ids
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    assert whole == tokenizer.apply_chat_template(
        chat, return_dict=False, **program.template_arguments(tokenizer, "none")
    )

    completion = whole[len(ids) :]
    assert completion[-1] == tokenizer.eos_token_id
    assert completion[-1] in harmony.stop_tokens_for_assistant_actions()
    assert extract_function(tokenizer.decode(completion, skip_special_tokens=True)) == source.strip("\n")


@pytest.mark.parametrize("stripped", [True, False])
def test_an_analysis_is_told_from_the_answer(stripped: bool, tokenizer: Any, harmony: Any) -> None:
    """With an effort the completion has two channels, whose names alone are left when special tokens are stripped."""
    source = next(iter(GREEDY.values()))
    thought = "We need ```python\ndef strategy(board):\n    return 'x'\n``` or better."
    text = program.build_prompt()
    ids = prompt_ids(tokenizer, text, "low")
    said = ("analysis", thought), ("final", f"```python\n{source}\n```")
    whole = harmony.render_conversation_for_training(
        conversation(text, "Low", today(tokenizer, ids), *said),
        openai_harmony.RenderConversationConfig(auto_drop_analysis=False),
    )
    assert whole[: len(ids)] == ids
    chat = [{"role": "user", "content": text}, {"role": "assistant", "thinking": thought, "content": said[1][1]}]
    assert whole == tokenizer.apply_chat_template(
        chat, return_dict=False, **program.template_arguments(tokenizer, "low")
    )

    read = harmony.parse_messages_from_completion_tokens(whole[len(ids) :], openai_harmony.Role.ASSISTANT)
    assert [(message.channel, message.content[0].text) for message in read] == [*said]
    completion = tokenizer.decode(whole[len(ids) :], skip_special_tokens=stripped)
    assert extract_function(completion, reasons=True) == source.strip("\n")
