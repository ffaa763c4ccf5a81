"""The README's formulas point at the lines that they say they do."""

from __future__ import annotations

import re

from tests.mini.helpers import ROOT

README = (ROOT / "mini" / "README.md").read_text()


def test_every_formula_points_at_its_line() -> None:
    """Readers click the links.  Where code has moved, the difference shows what to write."""

    def link(found: re.Match[str]) -> str:
        number, name = found[1], found[2]
        lines = (ROOT / "mini" / name).read_text().splitlines()
        (at,) = (at for at, line in enumerate(lines, 1) if line.endswith(f"# ({number})"))
        return f"[({number})]({name}#L{at})"

    links = re.compile(r"\[\((\d+)\)\]\((\w+\.py)#L\d+\)")
    numbers = sorted(int(found[1]) for found in links.finditer(README))
    assert numbers == list(range(1, 21)) == sorted(map(int, re.findall(r"\\tag\{(\d+)\}", README)))
    assert README.splitlines() == links.sub(link, README).splitlines()


def test_every_file_of_the_reading_order_is_there() -> None:
    named = set(re.findall(r"\]\((\w+\.py)\)", README))
    files = {path.name for path in (ROOT / "mini").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert named == files
