"""The model card: what a model is, its run's results, how to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.base.files import naming, read_json
from toolkit.games.evaluation import read_scores
from toolkit.model import tiny
from toolkit.model.adapters import WEIGHTS

MODEL_CARD = """\
---
library_name: {library}
pipeline_tag: text-generation
tags: [grpo, "2048"]{base}
---

# {name} playing 2048

{kind}, trained with GRPO{start}. It answers a prompt with a Python function that plays the game 2048. Run
its code only where it can do no harm, for example in the jail of gpt_2048_rl.py.
{results}{verified}
{use}{config}"""
LOAD = """\
```python
from {library} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained(FOLDER, dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

`python gpt_2048_rl.py eval FOLDER` shows it at work.
"""
LLAMACPP = """\
```
llama-server -m model.gguf --jinja
ollama create player -f Modelfile && ollama run player
```
"""
LLAMACPP_ADAPTER = """\
```
llama-server -m BASE.gguf --lora adapter.gguf --jinja --chat-template-file chat_template.jinja
```
"""


@dataclass(frozen=True)
class Format:
    """What there is to say about a format."""

    kind: str
    library: str
    use: str  # how to load it, in Markdown
    exact: bool = False  # loses nothing, so verification requires it
    instead: str = ""  # what keeps what it loses


PEFT = LOAD.format(library="peft", loader="AutoPeftModelForCausalLM")
TRANSFORMERS = LOAD.format(library="transformers", loader="AutoModelForCausalLM")
FORMATS = {
    "lora": Format("A LoRA adapter", "peft", PEFT, exact=True),
    "merged_16bit": Format("The whole model in bfloat16", "transformers", TRANSFORMERS, exact=True,
                           instead="--format lora"),
    "mxfp4": Format("The whole model with its experts in MXFP4", "transformers", TRANSFORMERS,
                    instead="--format merged_16bit"),
    "gguf": Format("The whole model for llama.cpp and Ollama", "gguf", LLAMACPP, instead="--format gguf_lora"),
    "gguf_lora": Format("A LoRA adapter for llama.cpp", "gguf", LLAMACPP_ADAPTER, instead="--format lora"),
}  # fmt: skip


def results_table(result: Mapping[str, Any]) -> str:
    """The results of a run in Markdown, a table for each stage."""
    text = ""
    for stage, played in read_scores(result).items():
        text += (
            f"\n| held-out boards, {stage} | made {played.target} | 95% interval | median tile | games |\n"
            "|---|---|---|---|---|\n"
        )
        for name, score in played.scores.items():
            text += (
                f"| {name} | {score.won:.0%} | {score.won_low:.0%} to {score.won_high:.0%} "
                f"| {score.largest_tile_median:.0f} | {score.games} |\n"
            )
    return text


def beginning(run: Path) -> str:
    """What a run began from, as the end of a sentence; "" if that was a model as released."""
    with naming(run / "origin.json"):
        start = read_json(run / "origin.json").get("start")
        digest = start["digests"][WEIGHTS] if start else ""
        if not re.fullmatch("|[0-9a-f]{64}", digest):  # or it could write anything into the card
            raise ValueError
        return f" from another run's adapter on (SHA-256 `{digest}`)" if digest else ""


def model_card(base: str, format: str, run: Path, verified: str = "", last: bool = True) -> str:
    """README.md of an export: what it is, how to load it, the run's config with its seed, and the run's results.

    These are of its last adapter, so an earlier one has none.
    """
    config, result = read_json(run / "config.json"), read_json(run / "result.json") if last else {}
    config.pop("output_dir", None)  # a path on this machine
    settings, this = json.dumps(config, indent=2), FORMATS[format]
    with naming(run / "result.json"):
        results = results_table(result)
    return MODEL_CARD.format(
        library=this.library,
        kind=this.kind,
        start=beginning(run),
        use=this.use,
        results=results,
        verified=(
            f"\nCompared with the model as trained, on held-out prompts. {verified}.\n"
            if verified
            else "\nIt was not compared with the model as trained.\n"
        ),
        base="" if Path(base).is_dir() else f"\nbase_model: {base}",
        name="The embedded model" if tiny.layout_of(Path(base)) else Path(base).name,
        config=f"\nThe run's config:\n\n```json\n{settings}\n```\n" if config else "",
    )
