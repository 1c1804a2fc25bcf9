"""Strike every kind of step of every process, fill disks, break checkpoints; print what came of it, a line a cell.

python tools/faults.py                    all cells, two at a time; exit 1 when one of them is not as it must be
python tools/faults.py train SIGKILL      the cells whose line has all these words
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fault_cells import Cell, cells
from fault_run import Bench, run, small_plan

from rollplex.ir.plan import read_plan
from rollplex.runtime.nursery import kept

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
AT_A_TIME = 2


def main(words: list[str]) -> int:
    """All cells that are asked for; the number of those that are not as they must be."""
    wanted = [cell for cell in cells(small_plan()) if all(word in str(cell) for word in words)]
    began, failed = time.monotonic(), 0
    todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in wanted:
        todo.put(cell)
    done: queue.SimpleQueue[tuple[Cell, str, list[str]]] = queue.SimpleQueue()
    with TemporaryDirectory(prefix="faults-") as folder:
        for i in range(min(AT_A_TIME, len(wanted))):
            threading.Thread(target=work, args=(Path(folder) / str(i), todo, done), daemon=True).start()
        for _ in wanted:
            cell, outcome, wrong = done.get()
            failed += bool(wrong)
            print(f"{'FAILED' if wrong else 'ok':<7}{cell} {outcome}", flush=True)
            for what in wrong:
                print(f"       {'':<52} {what}", flush=True)
    print(f"{len(wanted)} cells in {time.monotonic() - began:.0f} s, {failed} failed")
    return failed


def work(folder: Path, todo: queue.SimpleQueue[Cell], done: queue.SimpleQueue[tuple[Cell, str, list[str]]]) -> None:
    """Hand cell after cell to a process that judges them; what it did not survive failed."""
    folder.mkdir()
    bench, cell = judging(folder), None
    while True:
        try:
            cell = todo.get_nowait()
        except queue.Empty:
            break
        assert bench.stdin is not None
        assert bench.stdout is not None
        bench.stdin.write(json.dumps(vars(cell)) + "\n")
        bench.stdin.flush()
        line = bench.stdout.readline()
        if not line:
            done.put((cell, f"the bench ended: see {folder}", ["no verdict"]))
            bench = judging(folder)
            continue
        done.put((cell, *json.loads(line)))
    bench.kill()
    bench.wait()


def judging(folder: Path) -> subprocess.Popen[str]:
    """A process that reads cells and writes verdicts; temporary files of its runs lie in its folder."""
    (folder / "tmp").mkdir(exist_ok=True)
    path = os.pathsep.join([str(HERE / "faultsite"), str(ROOT), str(ROOT / "tests"), str(HERE)])
    fault = folder / "fault.json"
    fault.write_text("{}")
    return subprocess.Popen(
        [sys.executable, str(HERE / "faults.py"), "--bench", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "ROLLPLEX_FAULT": str(fault), "TMPDIR": str(folder / "tmp")},
    )


def judge_all(folder: Path) -> None:
    """Verdicts of the cells on stdin, a line of JSON each; all runs of this process share a nursery."""
    with kept():
        bench = Bench(small_plan(), folder)
        for line in sys.stdin:
            verdict = bench.judge(Cell(**json.loads(line)))
            print(json.dumps([verdict.outcome, verdict.wrong]), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--bench", folder]:
            judge_all(Path(folder))
        case ["--once", out, plan]:
            run(read_plan(plan), Path(out))
        case words:
            sys.exit(1 if main(words) else 0)
