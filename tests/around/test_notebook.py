"""The notebook: in step with its source, executed, and run from top to bottom on the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import HELD_OUT, ROOT

jupytext = pytest.importorskip("jupytext", reason="optional: ./setup.sh --with notebook")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytestmark = pytest.mark.optional

SOURCE, NOTEBOOK = ROOT / "docs" / "notebook.py", ROOT / "gpt_oss_20B_RL_2048_Game.ipynb"


def pictures(notebook: Any) -> int:
    """How many outputs are images."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_it_is_its_source_with_what_that_printed() -> None:
    """If this fails: CLAUDE.md says how the notebook is made."""
    made, source = nbformat.read(NOTEBOOK, as_version=4), jupytext.read(SOURCE)
    assert [(cell.cell_type, cell.source) for cell in made.cells] == [(c.cell_type, c.source) for c in source.cells]
    assert all(cell.execution_count for cell in made.cells if cell.cell_type == "code")
    assert pictures(made) == 3


@pytest.mark.long
def test_it_runs_from_top_to_bottom(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_FLAGS", f"--output-dir {tmp_path} --model tiny --steps 2 --games 4 --ladder 4:2048 "
                                         f"{' '.join(HELD_OUT)} "
                                         "--generations 16 --batch-size 16 --accumulation 1")  # fmt: skip
    notebook = jupytext.read(SOURCE)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": ROOT}}).execute()
    assert pictures(notebook) == 3
    assert (tmp_path / "notebook" / "report.html").exists()
