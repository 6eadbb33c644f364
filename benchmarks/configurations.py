"""Prices configurations that somebody else ran: tokens per second and device, memory, and the plan's own choice.

    python -m benchmarks.configurations FILE.csv [--cluster MACHINE.toml] [--plain] [--only-rows] [--csv OUT.csv]

One row of the file is a decoder (layers, hidden, ffn, heads, kv_heads, vocabulary, tied, sequence), a machine (nodes,
gpus_per_node, preset), and a way to train on it: dp, tp, pp, zero (0, 1, 3), micro_batch (sequences), grad_acc,
sequence_parallel (0, 1), recompute (none, full). Every row is priced as it is written: layers as Megatron cuts them,
equal numbers of blocks in stages of one forward, one backward (1F1B), sums and gathers beside compute. The plan's own
choice is the fastest mesh for the same machine and samples a step that fits (docs/large-machines.md).

Weights are computed with in bf16; gradients and the optimizer's state are float32 with master weights (18 bytes per
parameter), or with `--plain` all bf16 (8 bytes). Other columns are kept, so that measured ones stand beside.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from benchmarks.decoder import DecoderSize, captured
from parplan.cluster import Cluster
from parplan.cost_models.devices.cluster_file import load_cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.errors import ParplanError
from parplan.fields import read_file
from parplan.planner.mesh.parts import Parts
from parplan.planner.mesh.search import Chosen, Model, fastest
from parplan.planner.mesh.step import MIXED, PLAIN, Links, Mesh, ParameterBytes, Step, stage_of, step_of

STATE_OF = {0: "replicated", 1: "sharded", 3: "gathered"}
RECOMPUTE = ("none", "full")
PADDED = 128
"""What vocabularies are padded to a multiple of, as training programs do, so that tensor parallelism can cut them."""


@dataclass(frozen=True)
class Row:
    """A configuration; fields are the file's columns."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: int
    sequence: int
    nodes: int
    gpus_per_node: int
    preset: str
    dp: int
    tp: int
    pp: int
    zero: int
    micro_batch: int
    grad_acc: int
    sequence_parallel: int
    recompute: str

    @staticmethod
    def of(columns: Mapping[str, str], where: str) -> Row:
        """The row of a file.

        Raises:
            ParplanError: a column is missing or is no number, or the numbers do not fit each other.
        """
        given: dict[str, int | str] = {}
        for own in fields(Row):
            value = (columns.get(own.name) or "").strip()
            if not value:
                raise ParplanError(
                    f"{where}: no {own.name}; every row has {', '.join(one.name for one in fields(Row))}"
                )
            if own.type == "str":
                given[own.name] = value
                continue
            words = {"true": "1", "false": "0", "yes": "1", "no": "0"}
            number = words.get(value.lower(), value)
            if not number.isdecimal():
                raise ParplanError(f"{where}: {own.name} is {value!r}; it is a whole number")
            given[own.name] = int(number)
        row = Row(**given)  # type: ignore[arg-type]
        if row.zero not in STATE_OF or row.recompute not in RECOMPUTE:
            raise ParplanError(
                f"{where}: zero is 0, 1 or 3 and recompute none or full, not {row.zero}, {row.recompute}"
            )
        if row.dp * row.tp * row.pp != row.devices or row.devices == 0:
            raise ParplanError(
                f"{where}: dp x tp x pp = {row.dp} x {row.tp} x {row.pp} are not the {row.devices} devices of "
                f"{row.nodes} nodes"
            )
        if not row.micro_batch * row.grad_acc or row.hidden % row.heads or row.heads % row.kv_heads:
            raise ParplanError(f"{where}: micro_batch and grad_acc are positive, heads divide hidden, kv_heads heads")
        if row.pp > row.layers:
            raise ParplanError(f"{where}: {row.layers} layers are no {row.pp} stages")
        return row

    @property
    def devices(self) -> int:
        """Of the machine."""
        return self.nodes * self.gpus_per_node

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.micro_batch * self.grad_acc

    @property
    def size(self) -> DecoderSize:
        """The model, with its vocabulary padded."""
        words = -(-self.vocabulary // PADDED) * PADDED
        own = self.layers, self.hidden, self.ffn, self.heads, self.kv_heads, words, bool(self.tied), self.sequence
        return DecoderSize(*own)

    @property
    def mesh(self) -> Mesh:
        """How its devices are used."""
        return Mesh(self.tp, self.dp, self.pp, 1, self.grad_acc, self.micro_batch, state=STATE_OF[self.zero])


@dataclass(frozen=True)
class Priced:
    """A row with its prediction.

    Args:
        limit: bytes that a device has.
        chosen: the plan's own choice for the same machine and samples; None where none fits, or it was not asked for.
        why_not: the reason for which there is none.
    """

    row: Row
    step: Step
    limit: float
    peak_flops: float
    chosen: Chosen | None = None
    why_not: str = ""

    def tokens_per_s(self, step: Step) -> float:
        """Tokens per second and device."""
        return self.row.batch * self.row.sequence / step.seconds / self.row.devices

    def utilisation(self, step: Step) -> float:
        """Model FLOPs utilisation: what the model needs, of what the devices could do."""
        needed = self.row.size.sample_flops * self.row.batch
        return needed / (step.seconds * self.row.devices * self.peak_flops)

    @property
    def words(self) -> str:
        """Lines for a terminal."""

        def line(step: Step) -> str:
            share, gib = self.utilisation(step), step.nbytes / 2**30
            return f"{self.tokens_per_s(step):,.0f} tokens/s per device, {share:.1%} of peak, {gib:.1f} GiB"

        fits = self.step.nbytes <= self.limit
        lines = [f"{line(self.step)}{'' if fits else f' of {self.limit / 2**30:.1f}: does not fit'}"]
        if self.chosen is not None:
            lines += [f"own choice {line(self.chosen.step)}, gap {self.chosen.gap:.1%}:", self.chosen.describe()]
        return "\n".join(f"   {one}" for one in lines + [self.why_not] * bool(self.why_not))

    @property
    def columns(self) -> dict[str, str]:
        """What is written."""
        found = {
            "tokens_per_s_device": f"{self.tokens_per_s(self.step):.1f}",
            "step_s": f"{self.step.seconds:.4f}",
            "utilisation": f"{self.utilisation(self.step):.3f}",
            "memory_gib": f"{self.step.nbytes / 2**30:.2f}",
            "fits": str(int(self.step.nbytes <= self.limit)),
        }
        if self.chosen is not None:
            own = self.chosen.step
            found |= {
                "own_tokens_per_s_device": f"{self.tokens_per_s(own):.1f}",
                "own_utilisation": f"{self.utilisation(own):.3f}",
                "own_memory_gib": f"{own.nbytes / 2**30:.2f}",
                "own_gap": f"{self.chosen.gap:.3f}",
                "own_plan": self.chosen.describe(),
            }
        elif self.why_not:
            found["own_plan"] = self.why_not
        return found


class Pricer:
    """Prices rows: a model is captured once, and its parts priced once per tensor group of a kind of machine.

    Args:
        cluster: the machine, of which rows use the first devices; default: each row's preset.
        held: bytes per parameter.
        own: whether the plan's own choice is found, too.
    """

    def __init__(self, cluster: Cluster | None = None, held: ParameterBytes = MIXED, own: bool = True) -> None:
        self._cluster, self._held, self._own = cluster, held, own
        self._links: dict[tuple[str, int, int], Links] = {}
        self._models: dict[DecoderSize, Model] = {}
        self._chosen: dict[object, Chosen | str] = {}

    def links(self, row: Row) -> Links:
        """The machine of a row.

        Raises:
            ParplanError: there is no such preset, or the machine is too small.
        """
        key = row.preset, row.nodes, row.gpus_per_node
        if key not in self._links:
            cluster = self._cluster or cluster_preset(row.preset, row.devices, hosts=row.nodes)
            if cluster.count < row.devices or (cluster.links and cluster.links[0].size < row.gpus_per_node):
                raise ParplanError(
                    f"{cluster.describe()} has no {row.nodes} nodes of {row.gpus_per_node}; describe a larger machine"
                )
            self._links[key] = Links(cluster.first(row.devices))
        return self._links[key]

    def priced(self, row: Row) -> Priced:
        """The prediction of a row.

        Raises:
            ParplanError: it cannot be priced.
        """
        links, blockless = self.links(row), replace(row.size, layers=0)
        known = self._models.get(blockless)
        if known is None:
            known = self._models[blockless] = Model(captured(row.size), row.layers, self._held)
        model, device = replace(known, blocks=row.layers), links.cluster.devices[0]
        parts = model.parts(links.cluster.first(row.tp), row.micro_batch, whole=not row.sequence_parallel)
        found = Priced(
            row,
            as_written(row, parts, links, self._held),
            min(one.memory_bytes for one in links.cluster.devices),
            device.flops_per_s.get("bf16", device.flops_per_s["fp32"]),
        )
        if not self._own:
            return found
        key = row.size, row.preset, row.nodes, row.gpus_per_node, row.batch
        if key not in self._chosen:
            try:
                self._chosen[key] = fastest(model, row.batch, links)
            except ParplanError as reason:
                self._chosen[key] = str(reason)
        chosen = self._chosen[key]
        return replace(found, why_not=chosen) if isinstance(chosen, str) else replace(found, chosen=chosen)


def as_written(row: Row, parts: Parts, links: Links, held: ParameterBytes) -> Step:
    """The step of a row: equal numbers of blocks in all stages, the first with one more where they do not divide."""
    parts = parts.replayed if row.recompute == "full" else parts
    stages = []
    for group in range(row.pp):
        blocks = row.layers // row.pp + (group < row.layers % row.pp)
        none = (0,) * len(parts.block.units)
        stage = stage_of(parts, row.mesh, links, group, blocks, float("inf"), held, none)
        assert stage is not None  # whether it fits or not
        stages.append(stage)
    return step_of(parts, row.mesh, links, stages)


def read(path: Path) -> list[tuple[Row, dict[str, str]]]:
    """The rows of a file, each with all its columns.

    Raises:
        ParplanError: the file cannot be read, or a row has mistakes.
    """
    lines = read_file(path, "configurations", ParplanError, "a CSV file").splitlines()
    known = list(csv.DictReader(lines))
    if not known:
        raise ParplanError(f"{path}: no row; the first line names the columns")
    return [(Row.of(columns, f"{path}, row {number}"), columns) for number, columns in enumerate(known, 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cluster", type=Path, help="a machine file in place of the rows' presets (docs/clusters.md)")
    parser.add_argument("--plain", action="store_true", help="gradients and optimizer state in bf16, no master weights")
    parser.add_argument("--only-rows", action="store_true", help="do not search for the plan's own choice")
    parser.add_argument("--csv", type=Path, help="write all columns and predictions to this file")
    options = parser.parse_args(arguments)
    try:
        rows, written = read(options.file), []
        cluster = load_cluster(options.cluster) if options.cluster else None
        pricer = Pricer(cluster, PLAIN if options.plain else MIXED, not options.only_rows)
        for number, (row, columns) in enumerate(rows, 1):
            try:
                found = pricer.priced(row)
            except ParplanError as error:
                raise ParplanError(f"{options.file}, row {number}: {error}") from error
            print(f"{number}: {row.mesh.describe()}{', all replayed' * (row.recompute == 'full')}")
            print(found.words, flush=True)
            written.append(columns | found.columns)
        if options.csv:
            names = list(dict.fromkeys(name for one in written for name in one))
            with options.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(written)
    except ParplanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
