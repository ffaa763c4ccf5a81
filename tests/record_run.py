"""Copy what pages read of a run to tests/recorded_run, so that their tests need no training.

    python gpt_2048_rl.py --model tiny --steps 6 --generations 8 --batch-size 8 --accumulation 1 --boards 2 \
        --learning-rate 1e-3 --games 4 --ladder 4:128 --held-out 4:128 3:32 --max-new-tokens 96 --run-name recorded
    python -m tests.record_run outputs/recorded
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from toolkit.run.reading import read_curves

RECORDED = Path(__file__).with_name("recorded_run")


def write_curves(file: Path, curves: Mapping[str, Mapping[int, float]]) -> None:
    """Write curves as TensorBoard's events, as the trainer does, but without importing torch."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    with file.open("wb") as out:
        events = RecordWriter(out)
        events.write(Event(file_version="brain.Event:2").SerializeToString())
        for name, curve in curves.items():
            for step, value in curve.items():
                summary = Summary(value=[Summary.Value(tag=f"train/{name}", simple_value=value)])
                events.write(Event(step=step, summary=summary).SerializeToString())


def record(run: Path) -> None:
    """Replace tests/recorded_run.  Of TensorBoard's events the curves are kept."""
    shutil.rmtree(RECORDED, ignore_errors=True)
    RECORDED.mkdir()
    for name in ("config.json", "result.json", "best_strategy.py", "best_game.json", "best_of_n.py", "rollouts.jsonl"):
        shutil.copyfile(run / name, RECORDED / name)
    write_curves(RECORDED / "events.out.tfevents.0.recorded", read_curves(run))


if __name__ == "__main__":
    record(Path(sys.argv[1]))
