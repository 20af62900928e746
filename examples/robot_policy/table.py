"""Prints the table over the runs that train.py left in the cache."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from results import NOTE, NOTE_OVER_SEEDS, read_results, table, table_over_seeds, why_no_energy


def main() -> int:
    """Print the table; 1 where there are no runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("outputs"), help="folder (default: %(default)s)")
    args = parser.parse_args()
    results = read_results(args.cache / "runs")
    if not results:
        print(f"no runs below {args.cache / 'runs'}; run train.py first", file=sys.stderr)
        return 1
    print(table(results))
    print(f"\n{NOTE}{why_no_energy(results)}")
    if over_seeds := table_over_seeds(results):
        print(f"\n{over_seeds}\n\n{NOTE_OVER_SEEDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
