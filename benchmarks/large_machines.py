"""Meshes for Llama 3 on up to 16,384 devices: what is chosen, how far from the bound, and what it costs without each.

    python -m benchmarks.large_machines [--only NAME ...]

Every case is planned in this process with the decoder of benchmarks/decoder.py (docs/large-machines.md). Seconds are
those of this process's CPU, capture included.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.decoder import DecoderSize, captured
from parplan.cost_models.devices.presets import cluster_preset
from parplan.errors import InfeasiblePlan
from parplan.planner.mesh.search import Chosen, Model, fastest
from parplan.planner.mesh.step import MIXED, PLAIN, Links, Mesh, ParameterBytes

LLAMA_8B = DecoderSize(32, 4096, 14_336, 32, 8, 128_256, False, 4096)
LLAMA_70B = DecoderSize(80, 8192, 28_672, 64, 8, 128_256, False, 4096)
LLAMA_405B = DecoderSize(126, 16_384, 53_248, 128, 8, 128_256, False, 8192)


@dataclass(frozen=True)
class Case:
    """A model on devices of a preset, with so many samples a step."""

    size: DecoderSize
    devices: int
    preset: str
    samples: int
    held: ParameterBytes = MIXED


CASES = {
    "8B": Case(LLAMA_8B, 8, "rtx4090", 8, PLAIN),
    "70B": Case(LLAMA_70B, 64, "h100-sxm", 256),
    "405B": Case(LLAMA_405B, 512, "h100-sxm", 512),
    "405B-16384": Case(LLAMA_405B, 16_384, "h100-sxm", 2048),
}

WITHOUT: Mapping[str, Callable[[Mesh], bool]] = {
    "without tensor shards": lambda mesh: mesh.tensor == 1,
    "without stages": lambda mesh: mesh.groups == 1,
    "without state in slices": lambda mesh: mesh.state == "replicated",
    "without gathered state": lambda mesh: mesh.state != "gathered",
}


def words(chosen: Chosen, case: Case) -> str:
    """A line of a step."""
    step, size = chosen.step, case.size
    peak = cluster_preset(case.preset, 1).devices[0].flops_per_s["bf16"]
    share = size.sample_flops * case.samples / (step.seconds * case.devices * peak)
    return f"{step.seconds:.3f} s, {share:.1%} of peak, {step.nbytes / 2**30:.1f} GiB: {chosen.describe()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    for name in parser.parse_args().only:
        begin, case = time.process_time(), CASES[name]
        model = Model(captured(case.size), case.size.layers, case.held)
        links = Links(cluster_preset(case.preset, case.devices))
        chosen = fastest(model, case.samples, links)
        seconds = time.process_time() - begin
        print(f"{name} on {case.devices} x {case.preset}, {case.samples} x {case.size.sequence} tokens")
        print(f"  {words(chosen, case)}")
        print(f"  no mesh is faster than {chosen.bound_s:.3f} s (gap {chosen.gap:.1%})")
        print(f"  {chosen.compared} compared, {chosen.solved} spread stage by stage, {seconds:.1f} CPU s", flush=True)
        for what, allowed in WITHOUT.items():
            try:
                other = fastest(model, case.samples, links, allowed)
                print(f"  {what} {other.step.seconds / chosen.step.seconds:.2f} x: {words(other, case)}", flush=True)
            except InfeasiblePlan:
                print(f"  {what} none fits", flush=True)
        free = fastest(model, case.samples, Links(links.cluster.with_memory(1 << 50)))
        print(f"  with all the memory it wants {words(free, case)}")
        print(f"  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of this process", flush=True)


if __name__ == "__main__":
    main()
