"""Every example under every kind of plan on 2, 3 and 4 devices, against the plain model in float64.

    python -m benchmarks.verification [--json FILE] [EXAMPLE ...]

The small siblings of the examples are run (same layers, fewer channels). Exit 1 on a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from parplan.verification import verify_plan
from tests.plans import PLANS, plan_by

EXAMPLES = ("alexnet", "two_tower", "vgg16", "resnet50", "mlp")


def main() -> None:
    """Print one line per example, plan and number of devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", default=EXAMPLES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for example in arguments.examples:
        module, inputs = import_module(f"examples.{example}").small()
        for name in PLANS:
            for devices in (2, 3, 4):
                found = verify_plan(module, inputs, None, partial(plan_by, name, devices), devices=devices)
                worst = max(row.max_relative_difference for row in found.rows)
                rows.append(
                    {"example": example, "plan": name, "devices": devices, "difference": worst, "passed": found.passed}
                )
                print(f"{example:10} {name:15} {devices} {worst:9.2e} {'' if found.passed else 'DIFFERS'}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(row['passed'] for row in rows)} of {len(rows)} within the tolerance")
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


if __name__ == "__main__":
    main()
