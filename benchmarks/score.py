"""How long `shardwise dev score` takes: seconds for a table of many rows, none of which shares another's workload.

The rows are those of a small table, again and again, each time with longer sequences. Of several repeats the least;
seconds of a core are the process's own.

Run: OMP_NUM_THREADS=1 python -m benchmarks.score [--rows 3000] [--times 3] [RUNS.csv]
"""

import argparse
import csv
import tempfile
import time
from pathlib import Path

from shardwise.cost.predicting import predict
from shardwise.cost.published import rows
from shardwise.cost.scored_model import memory_model, time_model
from shardwise.cost.scoring import score

SAMPLE = Path(__file__).resolve().parents[1] / "tests" / "unit" / "measured_runs.csv"
LIMIT_SECONDS = 30.0


def repeated(table: Path, count: int, out: Path) -> None:
    """Write `count` rows to `out`: those of the table, each round with sequences eight tokens longer."""
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        for number in range(count):
            again, line = divmod(number, len(lines))
            writer.writerow({**lines[line], "seq_len": int(lines[line]["seq_len"]) + 8 * again})


def seconds(table: Path) -> float:
    """Of a core, from the file to its score."""
    started = time.process_time()
    found = rows(table)
    score(found, predict(found, time_model, memory_model))
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=SAMPLE)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "many.csv"
        repeated(arguments.runs, arguments.rows, table)
        took = min(seconds(table) for _ in range(arguments.times))
    limit = LIMIT_SECONDS * arguments.rows / 3000
    print(f"{arguments.rows:,} rows: {took:.1f} s of a core, {took / limit:.2f} of the limit of {limit:g} s")


if __name__ == "__main__":
    main()
