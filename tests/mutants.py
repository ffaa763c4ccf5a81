"""Forty single-line faults, and which test catches each: a measure of the tests, run by hand.

    python tests/mutants.py                  all faults; those that survive the likely tests meet the whole suite
    python tests/mutants.py --likely-only    only the test files that each fault names, slow tests too
    python tests/mutants.py --only jail 38   one part of the program, and one fault by its number

A fault is a piece of one line and what a careless edit makes of it. Each is tried in a fresh copy of the tracked files,
with a copy of the cache, so that no model of a faulty corpus stays behind. Some open a hole in the jail: the hostile
programs of the tests then meet the layers below it. No fault may let them kill or fork.

Faults name exact pieces of the source, which is what lets them survive a move between files. An edit of such a piece
fails a fast test (test_quality.py), so no fault is lost unseen.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("gpt_2048_rl.py", "toolkit/**/*.py", "toolkit/**/*.html")
PATIENCE = 1800  # seconds for one call of pytest; a suite that hangs has noticed the fault too


@dataclass(frozen=True)
class Fault:
    """A piece of code that stands in one place only, and its replacement; "" drops the whole line."""

    part: str
    likely: str  # names of test files, without "test_" and ".py"
    old: str
    new: str


FAULTS = (
    Fault("jail", "jail", '"clock_gettime": 228,', '"clock_gettime": 228, "futex": 202,'),
    Fault("jail", "jail", '(20, 0xFFFFFFFF, False), (32, _PROT_EXEC, False)', '(20, 0xFFFFFFFF, False)'),
    Fault("jail", "jail", '((16, 0x80000000, False),)', '()'),
    Fault("jail", "jail", '["cpu_seconds"], LIMITS.memory_bytes)', '["cpu_seconds"], LIMITS.referee_bytes)'),
    Fault("jail", "jail", 'if self._capset(', 'if False and self._capset('),
    Fault("jail", "hostile jail", 'not answer.startswith(nonce) or len(answer) ==', 'len(answer) <='),
    Fault("jail", "jail regressions hostile", 'cpu_seconds(self.changes)', 'cpu_seconds(LIMITS.paid_moves)'),
    Fault("jail", "games", 'idle = 0 if changed else idle + 1', 'idle += not changed'),
    Fault("jail", "games rewards", 'env={"PYTHONHASHSEED": "0", ', 'env={'),
    Fault("jail", "pool", 'signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)', ''),
    Fault("rewards", "rewards learning", 'SUCCESS, NEARLY = 20.0, 10.0', 'SUCCESS, NEARLY = 20.0, 21.0'),
    Fault("rewards", "rewards learning", '"lost" if result.outcome == "stuck" else result.outcome', 'result.outcome'),
    Fault("rewards", "rewards hostile", 'CHECK if v.works == "none"', 'CHECK if v.works != "load"'),
    Fault("rewards", "rewards hostile", '[] if verdict.cheating else [', '['),
    Fault("rewards", "rewards train", 'len(ids) >= limit', 'len(ids) > limit'),
    Fault("rewards", "learning train", 'fmean(self.recent) > ', 'fmean(self.recent) >= '),
    Fault("rewards", "learning train", '.append((step + 2, ', '.append((step + 1, '),
    Fault("rewards", "learning train resilience", 'self._rollouts.add(row)',
          'self._rollouts.last, self._rollouts.flat = row, [False]'),
    Fault("rewards", "learning train", 'config.batch_size * config.accumulation // ', 'config.batch_size // '),
    Fault("rewards", "learning train", 'values * kept * every / some', 'values * kept * some / every'),
    Fault("game", "engine", '(gain >= self.target or self.target <= 4)', 'gain >= self.target'),
    Fault("game", "engine", 'self._rows(self._flat) + self._columns(self._flat)', 'self._rows(self._flat)'),
    Fault("extraction", "extract", 'for end in reversed(closes):', 'for end in closes:'),
    Fault("extraction", "extract", '"subclasses", "globals", ', '"subclasses", '),
    Fault("extraction", "extract", '_NEXT_TURN.split(text[final.end() :], maxsplit=1)[0]', 'text[final.end() :]'),
    Fault("evaluation", "cli train regressions", '>> 1 & ~1 | held_out', '>> 1 | held_out'),
    Fault("evaluation", "train cli learning", 'held_out_seeds), (-1,))', 'held_out_seeds), (0,))'),
    Fault("evaluation", "train programs", 'evaluator.boards(2 * FINALISTS[0], "race")', 'evaluator.held_out_seeds'),
    Fault("run folder", "runs", "sorted(found, key=step_of, reverse=True)", "sorted(found, reverse=True)"),
    Fault("run folder", "runs", 'islice(lines, steps)', 'islice(lines, steps + 1)'),
    Fault("run folder", "resilience", 'fcntl.LOCK_EX | fcntl.LOCK_NB', 'fcntl.LOCK_SH | fcntl.LOCK_NB'),
    Fault("watcher", "watcher learning", '(step.flat == 1 and step.won < 1)', 'step.flat == 1'),
    Fault("statistics", "runs report", 'range(min(above, below) + 1)', 'range(min(above, below))'),
    Fault("statistics", "runs cli report", 'z * z / (4 * games * games)', 'z * z / (4 * games)'),
    Fault("embedded model", "tiny train learning", '"tuple(zip(*up))", "tuple(zip(*down))"', '"up", "down"'),
    Fault("embedded model", "tiny train learning", '"first": 8, "search": 33', '"first": 33, "search": 8'),
    Fault("export", "export", '(codes % 2 == 1) &', '(codes % 2 == 0) &'),
    Fault("export", "export", 'torch.stack(parts, -1).flatten(1)', 'torch.cat(parts, 1)'),
    Fault("report", "report", 'autoescape=True', 'autoescape=False'),
    Fault("command line", "cli learning", 'if together % self.generations', 'if self.batch_size % self.generations'),
)  # fmt: skip


def find(fault: Fault, root: Path) -> tuple[Path, str]:
    """The file of a fault, and its text with the fault. Raises SystemExit unless the piece stands in one place."""
    texts = {file: file.read_text(encoding="utf-8") for pattern in SOURCES for file in sorted(root.glob(pattern))}
    found = [file for file, text in texts.items() for _ in range(text.count(fault.old))]
    if len(found) != 1:
        places = ", ".join(str(file.relative_to(root)) for file in found) or "no file"
        raise SystemExit(f"fault {FAULTS.index(fault) + 1} needs one place, but {fault.old!r} stands in {places}")
    (file,) = found
    lines = [line.replace(fault.old, fault.new) for line in texts[file].split("\n")
             if fault.new or fault.old not in line]  # fmt: skip
    if file.suffix == ".py":
        compile("\n".join(lines), str(file), "exec")
    return file, "\n".join(lines)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder with a copy of the tracked files, as they are in the working tree, and of the cache."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt_2048_rl"
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        place.chmod(0o755)  # some tests become another user
        for name in listed.rstrip("\0").split("\0"):
            (place / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / "copy" / name, follow_symlinks=False)
        if cache.is_dir():
            left_out = shutil.ignore_patterns("smollm2*")  # no fault concerns it
            shutil.copytree(cache, place / "cache" / cache.name, ignore=left_out)
        yield place


def end_children() -> None:
    """Kill what a call of pytest has left behind: orphans become this process's children (see main)."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def failures(place: Path, *arguments: str) -> list[str]:
    """The tests that fail in a copy."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    environment.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    environment.pop("PYTHONPATH", None)  # the copy is what is tested
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not long", f"--basetemp={place / 'temp'}", *arguments]
    with (place / "output").open("w+", encoding="utf-8") as output:  # a file: orphans would keep a pipe open
        process = subprocess.Popen(command, cwd=place / "copy", env=environment, stdout=output, stderr=output)
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return [f"no end after {PATIENCE} s"]
        finally:
            process.kill()
            end_children()
        output.seek(0)
        said = output.read()
    if code in (4, 5):
        raise SystemExit(f"pytest found no tests to run:\n{said[-2000:]}")
    named = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", said, re.MULTILINE)
    return named or [f"exit code {code} of pytest"] * bool(code)


def first_failure(fault: Fault, likely_only: bool) -> str:
    """The test that catches a fault; "" if none does."""
    with scratch() as place:
        copy = place / "copy"
        file, text = find(fault, copy)
        file.write_text(text, encoding="utf-8")
        likely = [
            str(file.relative_to(copy))
            for name in fault.likely.split()
            for file in copy.glob(f"tests/*/test_{name}.py")
        ]
        failed = failures(place, "-x", "-n", "0", *likely) if likely else []
        if not failed and not likely_only:
            failed = failures(place, "-x", *(f"--ignore={name}" for name in likely))
        return failed[0] if failed else ""


def failures_without_fault(caught: Iterable[str]) -> list[str]:
    """Of the tests that caught a fault, those that fail without one too."""
    tests = sorted({name.partition("[")[0] for name in caught if name.startswith("tests/")})
    with scratch() as place:
        return failures(place, "-n", "0", *tests) if tests else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts of the program, or numbers of faults")
    parser.add_argument("--likely-only", action="store_true", help="only the test files that each fault names")
    options = parser.parse_args()
    chosen = [fault for i, fault in enumerate(FAULTS, 1) if {fault.part, str(i)} & {*(options.only or (fault.part,))}]
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    for fault in FAULTS:
        find(fault, ROOT)  # all of them, before the first minutes are spent
    caught: dict[Fault, str] = {}
    for fault in chosen:
        began = time.monotonic()
        caught[fault] = first_failure(fault, options.likely_only)
        print(f"{FAULTS.index(fault) + 1:2}  {fault.part:14}  {time.monotonic() - began:5.0f} s  ", end="")
        print(f"{caught[fault] or 'SURVIVED'}\n      {fault.old}  ->  {fault.new or 'dropped'}", flush=True)
    for part in dict.fromkeys(fault.part for fault in caught):
        tests = [test for fault, test in caught.items() if fault.part == part]
        print(f"{part:14}  {sum(map(bool, tests))} of {len(tests)} caught")
    print(f"all             {sum(map(bool, caught.values()))} of {len(caught)} caught")
    for test in (broken := failures_without_fault(caught.values())):
        print(f"fails without a fault too, so it catches nothing: {test}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
