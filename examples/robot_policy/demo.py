"""The demo: a policy for a new task, its frozen encoder in INT8 outside of torch, in a few minutes on two cores."""

from __future__ import annotations

import sys
import time

from results import NOTE, table, why_no_energy
from train import parse, run


def main() -> None:
    """Record demonstrations, train, roll out, print; further arguments are those of train.py."""
    began = time.perf_counter()
    result = run(parse(["--offload", "L4", "--episodes", "50", *sys.argv[1:]], description=__doc__))
    print("\nFidelity of the INT8 encoder's outputs (L4: K1, V1, .., K4, V4), on images that did not calibrate it:")
    for name, figures in result["fidelity"].items():
        print(f"  {name:12} SQNR {figures['sqnr_db']:5.1f} dB   cosine {figures['cosine']:.5f}")
    print(f"\n{table([result])}\n\n{NOTE}{why_no_energy([result])}")
    print(f"\nThe demo took {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
