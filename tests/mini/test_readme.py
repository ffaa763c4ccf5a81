"""The README's formulas point at the lines that they say they do."""

from __future__ import annotations

import re

from tests.mini.helpers import ROOT

README = (ROOT / "mini" / "README.md").read_text()


def test_every_formula_points_at_its_line() -> None:
    found = re.findall(r"\[\((\d+)\)\]\((\w+\.py)#L(\d+)\)", README)
    numbers = [int(number) for number, _, _ in found]
    assert sorted(numbers) == list(range(1, 21)) == sorted(map(int, re.findall(r"\\tag\{(\d+)\}", README)))
    for number, name, line in found:
        assert f"# ({number})" in (ROOT / "mini" / name).read_text().splitlines()[int(line) - 1]


def test_every_file_of_the_reading_order_is_there() -> None:
    named = set(re.findall(r"\]\((\w+\.py)\)", README))
    files = {path.name for path in (ROOT / "mini").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert named == files
