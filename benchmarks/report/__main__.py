"""JSON of benchmarks to one report.

    python -m benchmarks.report                  # of benchmarks/results/*.json, which make bench writes
    python -m benchmarks.report --reference      # of the results that are kept beside each benchmark

Writes report.md and its drawings into benchmarks/results/, or wherever --out says.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.records import TOP, Results, read
from benchmarks.report.bars import bars
from benchmarks.report.page import page

_FOLDER = TOP / "benchmarks"


def main() -> None:
    """Read, draw, write, and say how many bars are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", action="store_true", help="read benchmarks/*/results.json")
    parser.add_argument("--results", type=Path, default=_FOLDER / "results", help="folder of JSON files")
    parser.add_argument("--out", type=Path, default=_FOLDER / "results", help="folder for the report")
    args = parser.parse_args()
    paths = _FOLDER.glob("*/results.json") if args.reference else args.results.glob("*.json")
    parts = [read(path) for path in sorted(paths)]
    if not parts:
        where = f"{_FOLDER}/*/results.json" if args.reference else args.results
        sys.exit(f"no results in {where}: run make bench first")
    written = write({part.benchmark: part for part in parts}, args.out)
    print(f"report: {written}")


def write(results: dict[str, Results], folder: Path) -> Path:
    """The report of these results; its path."""
    try:
        from benchmarks.report.charts import draw
    except ImportError:
        sys.exit("the drawings need matplotlib: pip install 'hpc_train[report]'")
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {name: f"{name}.png" for name, part in results.items() if draw(part, folder / f"{name}.png")}
    path = folder / "report.md"
    path.write_text(page(results, drawings))
    met = [bar.met for bar in bars(results)]
    missed, unknown = met.count(False), met.count(None)
    print(f"{met.count(True)} of {len(met)} bars met, {missed} missed, {unknown} not measured")
    return path


if __name__ == "__main__":
    main()
