"""report.html and compare in a real browser: what they say, that no text in them does anything, and the replay.

The pages are about the run in tests/recorded_run, so these tests train nothing.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpt_2048_rl as program
from tests.browser import Browser, Page
from tests.conftest import Run
from tests.helpers import HONEST, ROOT
from tests.record_run import RECORDED
from toolkit import UsageError
from toolkit.games import evaluation
from toolkit.games.programs import controls, recorded_game
from toolkit.run import reading, report, runs

HOSTILE = (
    "</code></pre></script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    '" onfocus="window.hit = 1" autofocus x="<!-- ]]> {{games}} &lt;b&gt; \\u003c \u2028 \u202e \x00 \x1b[31m \ud800\n'
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser where there is one; CI has to have it."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None and os.environ.get("CI"):
        pytest.fail("there is no chromium")
    if executable is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with Browser(executable) as started:
        yield started


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its report."""
    folder = Path(shutil.copytree(RECORDED, tmp_path_factory.mktemp("recorded") / "run"))
    report.write_report(folder)
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the recorded run that a test may change."""
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


def change(file: Path, changed: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a JSON file with what `changed` does to its object."""
    content = json.loads(file.read_text())
    changed(content)
    file.write_text(json.dumps(content))


def shown_board(page: Page) -> list[int]:
    """The tiles of the replay, row by row."""
    return list(page.run("[...document.querySelectorAll('#board [role=cell]')].map(c => Number(c.textContent))"))


def shown(page: Page, selector: str) -> str:
    """The text of an element."""
    return str(page.run(f"document.querySelector({json.dumps(selector)}).textContent"))


# ---------------------------------------------------------------------------------------------------------------------
# What a report says


def test_a_training_run_writes_its_report(trained: Run) -> None:
    assert f"the report is {trained.folder / 'report.html'}" in trained.stderr
    assert (trained.folder / "report.html").stat().st_size < 500_000


def test_the_table_has_the_figures_of_the_result(recorded: Path, browser: Browser) -> None:
    with Page(browser) as page:
        page.open(recorded / "report.html")
        cells = """[...document.querySelectorAll('tbody tr')].map(row =>
            [row.closest('table').querySelector('th').innerText, ...[...row.children].map(cell => cell.innerText)])"""
        rows = {(head, name): figures for head, name, *figures in page.run(cells)}
    result = json.loads((recorded / "result.json").read_text())
    first = result["scores"]["4x4"]
    for name, score in (("before training", first["before"]), ("best program", first["best"]),
                        ("expert (expectimax)", first["controls"]["expert"])):  # fmt: skip
        interval = f"{100 * score['won_low']:.0f}–{score['won_high']:.0%}"
        won, tile, level, games = rows["4x4, held out", name]
        assert won.split("\n")[:2] == [f"{score['won']:.0%}", interval]
        assert tile.split("\n")[0] == f"{score['largest_tile_median']:.0f}"
        assert (level, games) == (f"{score['mean_log2_tile']:.2f}", "4")
    assert ("3x3, held out", "before training") in rows


def test_the_page_says_what_blind_programs_reach(recorded: Path) -> None:
    controls = json.loads((recorded / "result.json").read_text())["scores"]["3x3"]["controls"]
    random, rotation = (f"{controls[name]['won']:.0%}" for name in ("random", "rotation"))
    said = (f"On 3x3, games end at 32. Random legal moves make it in {random} of them, four keys in turn, without a "
            f"look at the board, in {rotation}.")  # fmt: skip
    assert said in (recorded / "report.html").read_text()


def test_a_stopped_run_has_a_page_without_a_result(folder: Path, browser: Browser) -> None:
    """A killed run has no result, no best program, and a last line that was cut off."""
    for name in ("result.json", "best_strategy.py", "best_game.json", "report.html"):
        (folder / name).unlink()
    log = folder / "rollouts.jsonl"
    log.write_text(log.read_text()[:-100])
    report.write_report(folder)
    with Page(browser) as page:
        page.open(folder / "report.html")
        assert "5 of 6 steps" in shown(page, "main > p")
        assert page.run("document.getElementById('replay').checkVisibility()") is False
        assert page.run("document.querySelectorAll('figure').length") == 5
        assert page.problems() == []


def test_a_run_that_was_killed_at_once_has_a_page_too(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.json").write_text(config)
    command = [sys.executable, "-m", "toolkit.run.report", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.returncode) == (f"{folder / 'report.html'}\n", 0), done.stderr
    assert "0 of 6 steps" in (folder / "report.html").read_text()


def test_a_step_that_was_done_again_counts_once(folder: Path) -> None:
    """A resumed run writes the steps after its checkpoint again."""
    log = folder / "rollouts.jsonl"
    first, second = log.read_text().splitlines(keepends=True)[:2]
    other = json.loads(second)
    other["completions"] = other["completions"][:3]
    log.write_text(first + second + json.dumps(other) + "\n")
    (folder / "result.json").unlink()
    steps = reading.read_run(folder).steps
    assert [(number, len(step.attempts)) for number, step in steps.items()] == [(1, 8), (2, 3)]


def test_a_finished_run_with_too_few_steps_is_damaged(folder: Path) -> None:
    """With its only line cut off, the page was written without any step, and without a word."""
    log = folder / "rollouts.jsonl"
    log.write_text(log.read_text()[:-100])
    with pytest.raises(UsageError, match=r"rollouts\.jsonl is damaged"):
        report.write_report(folder)


def test_programs_are_shown_without_the_comment_that_names_their_game(folder: Path) -> None:
    source = reading.read_run(folder).best
    runs.write_program(folder / "best_strategy.py", source, program.TrainConfig())
    assert reading.read_run(folder).best.strip() == source.strip()


def test_four_boards_are_too_few_for_a_test(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven tests of two boards each stood below a short run's result."""
    assert "Exact McNemar test" not in report.write_report(folder).read_text()
    monkeypatch.setattr(report, "FEWEST_BOARDS", 4)
    assert "Exact McNemar test" in report.write_report(folder).read_text()


def test_what_hinders_the_report_costs_the_run_nothing(folder: Path) -> None:
    (folder / "rollouts.jsonl").write_text("{}\n")
    assert report.try_report(folder).startswith("no report could be written: ")


def test_curves_are_read_out_with_the_keyboard(recorded: Path, browser: Browser) -> None:
    curves = reading.read_curves(recorded)
    with Page(browser) as page:
        page.open(recorded / "report.html")
        page.run("document.querySelector('figure input').focus()")
        for step, key in ((5, "ArrowLeft"), (6, "ArrowRight")):
            page.press(key)
            said = f"Step {step}: mean {curves['reward'][step]:.2f}"
            assert shown(page, ".readout") == said
            assert page.run("document.activeElement.getAttribute('aria-valuetext')") == said


def test_curves_are_read_out_under_the_pointer(recorded: Path, browser: Browser) -> None:
    with Page(browser) as page:
        page.open(recorded / "report.html")
        page.run("document.querySelector('figure').scrollIntoView()")
        box = page.run("(b => [b.left + 5, b.top + 5])(document.querySelector('figure svg').getBoundingClientRect())")
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        assert shown(page, ".readout").startswith("Step 1: ")


# ---------------------------------------------------------------------------------------------------------------------
# Nothing in it runs, and nothing reaches out


STRANGE: tuple[Any, ...] = ("<b class=strange>&\"'\x1b", 10**400)  # instead of any value in a file


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a JSON object; of a list, to its first item alone."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, inner in items:
        yield from places(inner, (*path, name))


def replaced(value: Any, path: tuple[Any, ...], new: object) -> Any:
    """A copy of a JSON object with another value at a place."""
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


@pytest.mark.parametrize("record", [b"\xff" * 5, None], ids=["no event", "a length of 4 EiB"])
def test_damaged_curves_are_one_line(record: bytes | None, folder: Path) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter, masked_crc32c

    with (folder / "events.out.tfevents.1.strange").open("wb") as file:
        if record:
            RecordWriter(file).write(record)
        else:
            length = (1 << 62).to_bytes(8, "little")
            file.write(length + masked_crc32c(length).to_bytes(4, "little") + b"and no more")
    with pytest.raises(UsageError, match=rf"TensorBoard cannot read its files in {folder}: remove them"):
        reading.read_curves(folder)


@pytest.mark.parametrize(
    ("name", "parts"),
    [("config.json", ()), ("best_game.json", ()), ("rollouts.jsonl", ()), ("result.json", ("scores", "4x4")),
     ("result.json", ("races",)), ("result.json", ("ended",))],
)  # fmt: skip
@pytest.mark.slow
def test_no_value_of_a_file_becomes_html_or_a_traceback(name: str, parts: tuple[str, ...], folder: Path) -> None:
    """Of 791 fields two reached the page as they were, and 91 were tracebacks: the file is named instead."""
    (folder / "events.out.tfevents.0.recorded").unlink()
    log = folder / "rollouts.jsonl"
    if name == "config.json":  # a page without a result is made faster
        (folder / "result.json").unlink()
        log.write_text(log.read_text().splitlines()[0] + "\n")
    text = (folder / name).read_text()
    first, *others = text.splitlines() if folder / name == log else [text]
    whole = json.loads(first)
    for path in places(whole):
        for strange in STRANGE if path[: len(parts)] == parts else ():
            (folder / name).write_text("\n".join([json.dumps(replaced(whole, path, strange)), *others, ""]))
            assert "<b class=strange" not in said_of(folder), path


def said_of(folder: Path) -> str:
    """A run's page, or the one line that says why there is none."""
    try:
        return report.write_report(folder).read_text()
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("name", ["size", "target"])
def test_a_stage_in_a_file_is_two_numbers(name: str, folder: Path) -> None:
    """They were put into the page as they are."""
    log = folder / "rollouts.jsonl"
    step = json.loads(log.read_text().splitlines()[0])
    log.write_text(json.dumps(step | {name: HOSTILE}) + "\n")
    with pytest.raises(UsageError, match=r"rollouts\.jsonl is damaged"):
        report.write_report(folder)


@pytest.fixture
def hostile(folder: Path) -> Path:
    """A report about a run whose every text tries to break out of its element."""
    steps = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for i, done in enumerate(done for step in steps for done in step["completions"]):
        cheating = HOSTILE if i % 2 else ""
        done |= {"text": HOSTILE, "source": f"{HOSTILE}{i}", "works": "load", "cheating": cheating, "reward": i}
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    for name in ("best_strategy.py", "best_of_n.py"):
        (folder / name).write_text(HOSTILE.encode("utf-8", "replace").decode())
    change(folder / "config.json", lambda config: config.update({"model": HOSTILE, HOSTILE: HOSTILE}))
    folder = folder.rename(folder.with_name("<img src=x onerror='window.hit = 1'>"))
    return report.write_report(folder)


def assert_harmless(page: Page) -> None:
    assert page.run("window.hit === undefined")
    assert page.run("document.querySelectorAll('script').length") == 2
    assert not page.run("document.querySelector('img, iframe, object, embed, [onfocus], [onerror], [autofocus]')")
    assert page.run("document.getElementById('replay').checkVisibility()")


def test_hostile_text_stays_text(hostile: Path, browser: Browser) -> None:
    """The policy has nothing to stop: the console holds no complaint."""
    with Page(browser) as page:
        page.open(hostile)
        assert_harmless(page)
        assert page.problems() == []
        programs = page.run("[...document.querySelectorAll('pre code')].map(code => code.textContent)")
    told = HOSTILE.partition(" \u2028")[0]
    assert len(programs) > 8
    assert all(source.startswith(told) for source in programs)
    assert r" \u2028 \u202e \x00 \x1b[31m \ud800" in programs[-1]


def test_hostile_text_stays_text_without_the_policy(hostile: Path, browser: Browser) -> None:
    """Without the policy, escaping is enough."""
    page_text = hostile.read_text()
    hostile.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", page_text))
    assert hostile.read_text() != page_text
    with Page(browser) as page:
        page.open(hostile)
        assert_harmless(page)


def test_the_policy_holds_without_escaping(recorded: Path, browser: Browser, tmp_path: Path) -> None:
    """A script, a handler, a style, a picture and a frame in the middle of the page: none of them does anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        planted = (f"<main><script>window.hit = 1</script><img src='{address}' onerror='window.hit = 1'>"
                   f"<iframe src='{address}'></iframe><link rel='stylesheet' href='{address}'>"
                   f"<script src='{address}'></script><style>body {{ display: none }}</style>")  # fmt: skip
        copy = tmp_path / "planted.html"
        copy.write_text((recorded / "report.html").read_text().replace("<main>", planted))
        with Page(browser) as page:
            page.open(copy)
            assert page.run("window.hit === undefined")
            assert page.run("getComputedStyle(document.body).display") == "block"
            assert page.run(f"fetch('{address}').then(() => 'sent', () => 'refused')") == "refused"
            assert shown(page, "#board [role=cell]") in ("", "2", "4")  # the page's own script still runs
        server.settimeout(0.5)
        with contextlib.suppress(TimeoutError):  # Chromium opens a connection for a frame, but requests nothing
            caller, _ = server.accept()
            caller.settimeout(0.5)
            assert caller.recv(1) == b""


def test_the_page_asks_for_nothing_but_itself(recorded: Path, browser: Browser) -> None:
    with Page(browser) as page:
        page.open(recorded / "report.html")
        page.run("document.getElementById('end').click()")
        asked = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
        assert page.problems() == []
    assert {url for url in asked if not url.startswith("data:")} == {(recorded / "report.html").as_uri()}


# ---------------------------------------------------------------------------------------------------------------------
# The replay


def test_the_replay_starts_and_ends_where_the_game_did(recorded: Path, browser: Browser) -> None:
    game = json.loads((recorded / "best_game.json").read_text())
    with Page(browser) as page:
        page.open(recorded / "report.html")
        assert shown_board(page) == game["start"]
        page.run("document.getElementById('end').click()")
        assert shown_board(page) == game["end"]
        assert f"Score {game['score']:,}, largest tile {game['max_tile']}." in shown(page, "#status")


def page_game(game: program.GameResult, size: int) -> dict[str, Any]:
    """A recorded game as a page shows it."""
    return recorded_game(program.GameBoard(size, game.seed, program.TO_THE_END), map(int, game.moves))


@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_every_position_of_the_replay_is_the_engines(size: int, folder: Path, browser: Browser) -> None:
    """Forwards, backwards and in leaps; boards of other sizes; games longer than the positions that are kept."""
    game = program.execute_strategies([HONEST], [size], size, 1024, record=True)[0][0]
    (folder / "best_game.json").write_text(json.dumps(page_game(game, size)))
    report.write_report(folder)
    board = program.GameBoard(size, size, program.TO_THE_END)
    positions = [(list(itertools.chain(*board.board())), board.score())]
    positions += [(list(itertools.chain(*board.board())), board.score()) for move in map(int, game.moves)
                  if board.move(move)]  # fmt: skip
    count = len(positions)
    order = [*range(count), *reversed(range(count)), *(i * 37 % count for i in range(count))]
    script = """(order => { const slider = document.getElementById('position'); return order.map(i => {
        slider.value = i;
        slider.dispatchEvent(new Event('input'));
        return [[...document.querySelectorAll('#board [role=cell]')].map(c => Number(c.textContent)),
                Number(document.getElementById('status').textContent.match(/Score ([\\d,]+)/)[1].replaceAll(',', ''))];
    }); })"""
    with Page(browser) as page:
        page.open(folder / "report.html")
        seen = page.run(f"{script}({order})")
    assert [tuple(position) for position in seen] == [positions[i] for i in order]


def test_a_move_that_changed_nothing_is_not_replayed() -> None:
    result = program.execute_strategies(["def strategy(board): return 'a'"], [0], record=True)[0][0]
    game = page_game(result, 6)
    assert len(result.moves) - len(game["moves"]) == program.LIMITS.idle_moves
    assert game["max_tile"] == result.max_tile


def test_the_replay_is_played_with_the_keyboard_alone(recorded: Path, browser: Browser) -> None:
    """Tab reaches forward, back, slider, play and pause.  Screen readers get each position."""

    def tab_to(name: str) -> None:
        for _ in range(200):
            page.press("Tab")
            if page.run("document.activeElement.id") == name:
                return
        raise AssertionError(f"Tab does not lead to {name}")

    with Page(browser) as page:
        page.open(recorded / "report.html")
        tab_to("play")
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab_to("forward")
        page.press("Enter")
        page.press(" ")
        said = r"Move 2 of [\d,]+: (up|down|left|right)\. .* New [24] in row \d, column \d\."
        assert re.match(said, shown(page, "#said"))
        tab_to("position")
        page.press("ArrowLeft")
        assert shown(page, "#status").startswith("Move 1 of")
        page.press("End")
        total = page.run("Number(document.activeElement.max)")
        assert shown(page, "#status").startswith(f"Move {total:,} of {total:,}")
        page.press("Home")
        assert shown(page, "#status").startswith("Move 0 of")
        page.run("document.getElementById('speed').value = 50")
        page.run("document.getElementById('play').focus()")
        page.press(" ")
        assert shown(page, "#play") == "Pause"
        page.run("new Promise(done => setTimeout(done, 400))")
        page.press(" ")
        moves = int(shown(page, "#status").split()[1])
        assert shown(page, "#play") == "Play"
        assert 0 < moves < total
        assert shown(page, "#said").startswith(f"Move {moves} of")
        page.run("new Promise(done => setTimeout(done, 200))")
        assert shown(page, "#status").startswith(f"Move {moves} of")


def test_the_replay_plays_to_the_end_and_stops(recorded: Path, browser: Browser) -> None:
    with Page(browser) as page:
        page.open(recorded / "report.html")
        total = page.run("Number(document.getElementById('position').max)")
        page.run("document.getElementById('speed').value = 1000")
        page.run("document.getElementById('play').click()")
        page.run(f"new Promise(done => setTimeout(done, {total + 1000}))")
        assert shown(page, "#play") == "Play"
        assert shown(page, "#status").startswith(f"Move {total:,} of")


def test_the_replay_jumps_to_each_new_largest_tile(recorded: Path, browser: Browser) -> None:
    """A game of 32,639 moves at ten a second took 54 minutes."""
    game = json.loads((recorded / "best_game.json").read_text())
    with Page(browser) as page:
        page.open(recorded / "report.html")
        seen = [max(shown_board(page))]
        while seen[-1] < game["max_tile"]:
            page.run("document.getElementById('tile').click()")
            seen.append(max(shown_board(page)))
        before = page.run("document.getElementById('back').click(), Number(document.getElementById('position').value)")
        assert max(shown_board(page)) == seen[-2]
    assert seen == sorted(set(seen))
    assert before < len(game["moves"])


def test_any_game_plays_in_half_a_minute(recorded: Path, browser: Browser) -> None:
    with Page(browser) as page:
        page.open(recorded / "report.html")
        total = page.run("Number(document.getElementById('position').max)")
        page.run("window.requestAnimationFrame = frame => setTimeout(() => frame(clock += 100)), window.clock = 0")
        page.run("performance.now = () => clock")
        page.run("document.getElementById('play').click()")
        over = "document.getElementById('play').textContent == 'Play'"
        page.run(f"new Promise(done => (function wait() {{ {over} ? done() : setTimeout(wait) }})())")
        assert page.run("clock") == pytest.approx(30_000, abs=30_000 / total + 200)
        assert shown(page, "#status").startswith(f"Move {total:,} of")


def test_every_control_has_a_name(recorded: Path, browser: Browser) -> None:
    with Page(browser) as page:
        page.open(recorded / "report.html")
        page.call("Accessibility.enable")
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    controls = [(role, name) for role, name in named if role in ("button", "slider", "combobox", "image")]
    assert {"Start", "Back", "Play", "Forward", "End"} <= {name for role, name in controls if role == "button"}
    assert ("table", "Board") in named
    assert all(name for _, name in controls)


def test_less_motion_where_the_user_wants_less(recorded: Path, browser: Browser) -> None:
    for wish, animation in (("no-preference", "appear"), ("reduce", "none")):
        with Page(browser, prefers_reduced_motion=wish) as page:
            page.open(recorded / "report.html")
            page.run("document.getElementById('forward').click()")
            assert page.run("getComputedStyle(document.querySelector('#board .new')).animationName") == animation


# ---------------------------------------------------------------------------------------------------------------------
# On any screen


@pytest.mark.parametrize("width", [320, 360, 390, 1400])
def test_nothing_is_wider_than_the_screen(width: int, hostile: Path, browser: Browser) -> None:
    """With every program unfolded, among them one long line."""
    with Page(browser, width=width) as page:
        page.open(hostile)
        page.run("document.querySelectorAll('details').forEach(part => part.open = true)")
        assert page.run("document.documentElement.scrollWidth") == width


def test_a_phone_breaks_no_word_of_the_table(recorded: Path, browser: Browser) -> None:
    """Its rows were headed "best of N, untraine d" and "expert (expecti max)"."""
    script = """[...document.querySelectorAll('tbody th')].filter(head => {
        const width = head.clientWidth;
        head.style.overflowWrap = 'normal';
        const needed = head.clientWidth;
        head.style.overflowWrap = '';
        return needed > width;
    }).map(head => head.textContent)"""
    with Page(browser, width=390) as page:
        page.open(recorded / "report.html")
        assert page.run(script) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(scheme: str, recorded: Path, browser: Browser) -> None:
    """The contrast that WCAG 2.2 asks for: 4.5 for text, 3 for large bold text such as that on tiles."""

    def brightness(colour: str) -> float:
        values = (int(value) / 255 for value in re.findall(r"\d+", colour)[:3])
        red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    script = """(() => {
        const colours = (text, ground) => [getComputedStyle(text).color, getComputedStyle(ground).backgroundColor];
        const find = selector => document.querySelector(selector);
        const tiles = Array.from({length: 17}, (_, i) => {
            const cell = find('#board [role=cell]');
            cell.className = i > 8 ? 'tile deep' : 'tile';
            cell.style.setProperty('--e', i + 1);
            return colours(cell, cell);
        });
        return {tiles, text: [colours(document.body, document.body), colours(find('.quiet'), document.body),
                colours(find('.readout'), find('figure')), colours(find('#play'), find('#play')),
                colours(find('pre'), find('details'))]};
    })()"""
    with Page(browser, prefers_color_scheme=scheme) as page:
        page.open(recorded / "report.html")
        found = page.run(script)
    for pairs, least in ((found["text"], 4.5), (found["tiles"], 3.0)):
        for pair in pairs:
            dark, light = sorted(map(brightness, pair))
            assert (light + 0.05) / (dark + 0.05) >= least, pair
    assert (brightness(found["text"][0][1]) < 0.1) == (scheme == "dark")


# ---------------------------------------------------------------------------------------------------------------------
# Runs compared


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Path:
    """A run like the first, except for its tiles after training: higher on one board, lower on two."""
    twin = Path(shutil.copytree(folder, tmp_path / "twin", symlinks=True))
    change(folder / "result.json", lambda result: result["scores"]["4x4"]["after"].update(tiles=[128, 128, 128, 16]))
    change(twin / "result.json", lambda result: result["scores"]["4x4"]["after"].update(tiles=[256, 64, 16, 16]))
    return twin


def test_runs_are_compared_board_by_board(
    folder: Path, other: Path, browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page_file = tmp_path / "both.html"
    assert program.main(["compare", str(folder), str(other), "--output", str(page_file), "--json"]) == 0
    after = json.loads(capsys.readouterr().out)["pairs"][0]
    assert after == {"stage": "4x4", "target": 128, "first": "copy, after training", "second": "twin, after training",
                     "boards": 4, "won_first": 2, "won_second": 0, "won_p": 0.5,
                     "higher_first": 2, "higher_second": 1, "higher_p": 1.0}  # fmt: skip
    with Page(browser) as page:
        page.open(page_file)
        rows = page.run("[...document.querySelectorAll('tbody tr')].map(r => r.innerText.split(/\\s*[\\t\\n]\\s*/))")
        names = "copy, after training against twin, after training"
        assert [names, "2 : 0", "p = 0.500", "2 : 1", "p = 1.000", "4"] in rows
        page.run("(which => { which.value = 1; which.dispatchEvent(new Event('change')); })(which)")
        assert page.run("which.selectedOptions[0].text") == "twin"
        assert page.problems() == []


def test_runs_are_compared_on_the_boards_in_common(folder: Path, other: Path) -> None:
    """A run with fewer games plays the first of the same boards."""

    def shorten(result: dict[str, Any]) -> None:
        stage = result["scores"]["4x4"]
        stage["boards"] = stage["boards"][:3]
        for score in (stage["before"], stage["after"], stage["best"], *stage["controls"].values()):
            score["tiles"] = score["tiles"][:3]

    change(other / "result.json", shorten)
    pairs = evaluation.pairs_between({name: run.held_out for name, run in reading.read_runs([folder, other]).items()})
    assert {(pair.stage, pair.boards) for pair in pairs} == {("4x4", 3), ("3x3", 1)}


def test_controls_that_differ_between_runs_have_a_row_each(folder: Path, other: Path, tmp_path: Path) -> None:
    """The page showed the first run's for all, also where another had played other games."""
    change(other / "result.json", lambda result: result["scores"]["4x4"]["controls"]["random"].update(won=0.123))
    page = report.write_comparison(reading.read_runs([folder, other]), [], tmp_path / "both.html").read_text()
    for run in ("copy", "twin"):
        assert f">{run}, random legal moves<" in page
        assert f">{run}, greedy on empty cells<" not in page
    assert page.count(">greedy on empty cells<") == 2  # a stage each


def test_games_that_went_on_after_the_target_are_compared_with_others_up_to_it(folder: Path, other: Path) -> None:
    """A run's first stage is played to the end, so a program had larger tiles than itself in a run that began with
    another."""
    change(folder / "result.json", lambda result: result["scores"]["4x4"]["after"].update(tiles=[256, 256, 128, 16]))
    change(other / "result.json", lambda result: result["scores"]["4x4"]["after"].update(tiles=[128, 128, 128, 16]))
    change(other / "result.json", lambda result: result.update(scores=dict(reversed(result["scores"].items()))))
    pair, *_ = evaluation.pairs_between(
        {name: run.held_out for name, run in reading.read_runs([folder, other]).items()}
    )
    assert (pair.stage, pair.higher_first, pair.higher_second) == ("4x4", 0, 0)


def test_runs_of_one_name_are_told_apart(folder: Path, other: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = other.rename(tmp_path / "elsewhere" / "copy")
    assert list(reading.read_runs([folder, moved])) == [str(folder), str(moved)]


def truncate(name: str) -> Callable[[Path], object]:
    """Cut a file of a run off in the middle of its first line."""
    return lambda folder: (folder / name).write_text((folder / name).read_text()[:40] + "\n")


def rewrite(name: str, **changed: Any) -> Callable[[Path], None]:
    """Change fields of a JSON file of a run."""
    return lambda folder: change(folder / name, lambda content: content.update(changed))


def restage(**changed: Any) -> Callable[[Path], None]:
    """Change fields of the first stage in result.json."""
    return lambda folder: change(folder / "result.json", lambda result: result["scores"]["4x4"].update(changed))


def rename_boards(folder: Path) -> None:
    """As if another machine had played."""

    def rename(result: dict[str, Any]) -> None:
        for stage in result["scores"].values():
            stage["boards"] = [f"{name}, elsewhere" for name in stage["boards"]]

    change(folder / "result.json", rename)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "twin is no run"),
        (lambda folder: (folder / "config.json").unlink(), "twin is no run"),
        (truncate("config.json"), "config.json is damaged"),
        (truncate("result.json"), "result.json is damaged"),
        (truncate("rollouts.jsonl"), "rollouts.jsonl is damaged"),
        (truncate("best_game.json"), "best_game.json is damaged"),
        (rewrite("best_game.json", moves=[[4, 0, 2]]), "best_game.json is damaged"),
        (lambda folder: (folder / "best_strategy.py").write_bytes(b"\xff"), "best_strategy.py is damaged"),
        (restage(after={"won": "often"}), "result.json is damaged"),
        (restage(boards=["x"]), "result.json is damaged"),
        (restage(target="none"), "result.json is damaged"),
        (rewrite("result.json", scores={}), "twin has no result"),
        (lambda folder: (folder / "result.json").unlink(), "twin has no result"),
        (rename_boards, "no board in common"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_compared_get_one_line(
    damage: Callable[[Path], object], said: str, folder: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(other)
    assert program.main(["compare", str(folder), str(other), "--output", str(folder / "page.html")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("error: ")) == ("", 1, True)
    assert said in err
    assert not (folder / "page.html").exists()


def test_a_comparison_needs_two_runs_and_a_place(folder: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (([str(folder)], "two different runs"), ([str(folder)] * 2, "two different runs"),
                            ([str(folder), str(other), "--output", "/proc/none.html"], "/proc/none.html")):  # fmt: skip
        assert program.main(["compare", *arguments]) == 2
        assert said in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves for its pages


def test_the_result_is_there_for_each_board(trained: Run) -> None:
    """In the order of the boards, under names that say nothing of their seeds.  Games of the first stage go on to their
    end; the second has a quarter of the boards, and its games end at its target."""
    result = json.loads((trained.folder / "result.json").read_text())["scores"]
    seeds = program.board_seeds(4, held_out=True)
    source = controls(program.LAYOUTS["bepo"])["greedy"]
    for stage, size, target, goal, games in (("3x3", 3, 64, program.TO_THE_END, 4), ("4x4", 4, 16, 16, 1)):
        played = program.execute_strategies([source], seeds[:games], size, goal)[0]
        assert result[stage]["controls"]["greedy"]["tiles"] == [game.max_tile for game in played]
        assert len(set(result[stage]["boards"])) == games
        scores = [result[stage][name] for name in ("before", "after", "best")]
        for score in (*scores, *result[stage]["controls"].values()):
            assert sum(tile >= target for tile in score["tiles"]) / games == score["won"]
    assert not any(str(seed) in (trained.folder / "best_game.json").read_text() for seed in seeds)


def test_the_recorded_game_is_the_best_one_on_the_held_out_boards(trained: Run) -> None:
    """Played once more, move for move."""
    source = (trained.folder / "best_strategy.py").read_text()
    seeds = program.board_seeds(4, held_out=True)
    played = program.execute_strategies([source], seeds, 3, program.TO_THE_END, record=True)[0]
    best = max(played, key=lambda game: (game.max_tile, game.score))
    board = program.GameBoard(3, best.seed, program.TO_THE_END)
    start = list(itertools.chain(*board.board()))
    for move in best.moves:
        board.move(int(move))
    game = json.loads((trained.folder / "best_game.json").read_text())
    assert (game["start"], game["end"]) == (start, list(itertools.chain(*board.board())))
    assert (game["score"], game["max_tile"]) == (best.score, best.max_tile)
