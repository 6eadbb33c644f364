"""Models of transformers and timm: which are captured and planned, what stays whole, and if plans compute the same.

    python -m benchmarks.zoo [--only NAME] [--part 1/8] [--verify] [--json FILE] [--cpu-seconds S] [--again STATUS]
    python -m benchmarks.zoo --json FILE --table docs/models.md

One model per architecture that transformers has a causal, seq2seq, masked or image-classification head for, in a small
configuration (two layers of width 64), and one per family of timm, the one with the shortest name. Each is planned for
four devices in a process of its own; with --verify the plan, plain data parallelism and shards alone are compared with
the plain model. Rows are written to the file as they come, and models that it has are not run again. Needs
`pip install -e '.[zoo]'`.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo_configurations import HEADS, configurations, first_layers, small

ROOT = Path(__file__).parents[1]
DEVICES = 4


def names() -> list[str]:
    """Targets of all cases, those of transformers first."""
    _declare_torchvision()
    import timm  # type: ignore[import-not-found]
    from transformers.models.auto import modeling_auto

    kinds = dict.fromkeys(kind for head in HEADS for kind in getattr(modeling_auto, head, {}))
    families: dict[str, str] = {}
    for name in timm.list_models():
        family = timm.models.model_entrypoint(name).__module__.rsplit(".", 1)[-1]
        families[family] = min(families.get(family, name), name, key=_size_word)
    return [*(f"transformers:{kind}" for kind in kinds), *(f"timm:{name}" for name in families.values())]


def _size_word(name: str) -> tuple[int, int, str]:
    """An order in which models of one family whose names have words for smaller sizes come first, then short names."""
    words = re.split("[_.]", name)
    return min((SIZES.index(word) for word in words if word in SIZES), default=len(SIZES)), len(name), name


SIZES = [
    "test",
    "zepto",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxxs",
    "xxs",
    "xxt",
    "xs",
    "xt",
    "tiny",
    "t0",
    "s0",
    "b0",
    "mini",
    "small",
    "t",
    "s",
]


def _declare_torchvision() -> None:
    """Operators that torchvision's Python code registers fake versions of; builds for other torches lack them."""
    import torch

    for _ in range(100):
        try:
            import torchvision  # type: ignore[import-not-found]  # noqa: F401
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{missing[1]}(Tensor x) -> Tensor")
            _DECLARED.append(library)
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
        else:
            return


_DECLARED: list[Any] = []  # what is declared lasts as long as these


def run(target: str, verify: bool) -> dict[str, Any]:
    """The row of one model."""
    import torch

    import parplan
    from parplan.errors import ParplanError

    torch.manual_seed(0)
    try:
        found, experts = built(target, meta=not verify)
    except Exception as error:
        return {"status": "not built", "detail": _line(error)}
    args, kwargs = found.args, found.kwargs
    reason = forward_error(found.module, args, kwargs)
    if reason:
        return {"status": "not built", "detail": f"its own forward fails: {reason}"}
    options: dict[str, Any] = {"gpus": DEVICES, "gpu": "a100-80g-sxm", "time_limit_s": 1}
    try:
        decision = parplan.analyze(found.module, args, kwargs=kwargs, **options)
    except ParplanError as error:
        return {"status": "refused", "detail": _line(error)}
    assert decision.priced is not None
    graph = decision.priced.graph
    used = {p for layer in graph.layers.values() for p in layer.parameters}
    weights = {p: graph.values[p].elements for p in used}
    cut = {
        p
        for layer in graph.layers.values()
        for p in layer.parameters
        if any(axis.units % DEVICES == 0 and (p in axis.dims or p in axis.first_only) for axis in layer.axes)
    }
    row: dict[str, Any] = {
        "status": "planned",
        "layers": len(graph.layers),
        "parameters": sum(weights.values()),
        "proof": decision.proof.status,
        "plan": " and ".join(sorted({own.describe() for own in decision.plan.layers.values()})),
        "may_be_cut": sum(weights[p] for p in cut) / max(1, sum(weights.values())),
        "whole": [f"{one.name} ({one.kind})" for one in graph.layers.values() if one.reached and one.batch is None],
        **products(graph, experts),
    }
    if verify:
        smaller, named = small_images(found.module, args, kwargs)
        if smaller is not args:
            decision = parplan.analyze(found.module, smaller, kwargs=named, **options)
        plans = {"solver": decision.plan}
        plans |= {one.name: one.plan for one in decision.baselines if one.plan is not None and one.name != "one device"}
        row["verified"] = {words: verified(found.module, smaller, named, plan) for words, plan in plans.items()}
        if any(one["passed"] is False for one in row["verified"].values()):
            row["status"] = "WRONG"
    return row


def forward_error(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why the plain model fails on these arguments, before parplan has seen it; empty where it runs.

    A copy of the model is called, as a call may change what the model is captured with (a setting, a buffer).
    """
    import torch

    try:
        with torch.no_grad():
            copy.deepcopy(module)(*args, **kwargs)
    except Exception as error:
        return _line(error)
    return ""


def small_images(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments with images cut to as few pixels as the model takes: steps in float64 take long."""
    import torch

    def cut(value: Any, side: int) -> Any:
        image = isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape[2] == value.shape[3] > side
        return value[:, :, :side, :side].clone() if image else value

    for side in (64, 96, 128, 160, 192):
        smaller = [cut(value, side) for value in args], {name: cut(value, side) for name, value in kwargs.items()}
        given = zip((*args, *kwargs.values()), (*smaller[0], *smaller[1].values()), strict=True)
        if any(one is not other for one, other in given) and not forward_error(module, *smaller):
            return tuple(smaller[0]), smaller[1]
    return args, kwargs


def built(target: str, meta: bool) -> tuple[Any, int]:
    """A model with inputs, and how many experts its configuration names (0 without)."""
    import tempfile

    from parplan.target.model_library import library_model

    library, _, name = target.partition(":")
    if library == "timm":
        return library_model(target, batch=8, meta=meta), 0
    config = small(name)
    words = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    experts = [vars(part).get(word) for part in configurations(config) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        file = Path(folder) / "config.json"
        fields = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(first_layers(fields)), encoding="utf-8")
        found = library_model(f"transformers:{folder}", 8, None if _images(name) else 32, "fp32", meta=False)
    return found, max((one for one in experts if isinstance(one, int)), default=0)


def _images(kind: str) -> bool:
    """Whether the head that comes first for a model type takes images."""
    from transformers.models.auto import modeling_auto

    heads = [head for head in HEADS if kind in getattr(modeling_auto, head, {})]
    return heads == list(HEADS[-1:])


def products(graph: Any, experts: int) -> dict[str, Any]:
    """Products and look-ups of a graph: how many there are, those that cannot be cut in `DEVICES`, unknown ops.

    A cut along the sequence, which every device needs all weights for, does not count. A router, whose scores are
    compared with each other, stays whole; so does what no dimension of can be cut in equal parts. Experts are stacks of
    matrices, or the rows of a table that they are looked up in.
    """
    from parplan.graph.axes.table import unknown_ops
    from parplan.graph.kinds import op_name

    count, uncut, whole, stacks, unknown = 0, [], Counter[str](), 0, Counter[str]()
    for layer in graph.layers.values():
        unknown.update(unknown_ops(layer.nodes))
        axes = [one for one in layer.axes if not one.name.startswith("sequence")]
        tables = [p for p in layer.parameters if layer.kind == "embedding" and graph.values[p].shape[0] == experts]
        stacks += any(
            one.units % DEVICES == 0 and (one.name == "experts" or any(one.dims.get(table) == 0 for table in tables))
            for one in axes
        )
        for node in layer.nodes if layer.reached else ():
            if op_name(node) not in PRODUCTS:
                continue
            count += 1
            names = {node.name, *(operand.name for operand in node.all_input_nodes)}
            units = [one.units for one in axes if names & (one.dims.keys() | one.partial)]
            if any(number % DEVICES == 0 for number in units):
                continue
            factors = node.all_input_nodes[1:3] if op_name(node) in ("addmm", "baddbmm") else node.all_input_nodes[:2]
            shapes = [list(operand.meta["val"].shape) for operand in factors]
            # Heads, between samples and matrices, and groups of channels, which are an axis of the layer.
            heads = shapes[0][1:-2] if op_name(node) in ATTENTION and len(shapes[0]) == len(shapes[-1]) else []
            odd = bool(units) or any(all(size % DEVICES for size in sizes) for sizes in (heads, shapes[-1]) if sizes)
            if odd or any(map(_chooses, layer.nodes)) or _routes(node):
                whole["sizes" if odd else "routers"] += 1
            else:
                uncut.append(f"{layer.name} ({layer.kind}): {op_name(node)} {' x '.join(map(str, shapes))}")
    row = {"products": count, "uncut": uncut, "kept_whole": dict(whole), "unknown": dict(unknown)}
    return row | ({"experts": experts, "experts_cut": stacks} if experts > 1 else {})


def _routes(node: Any) -> bool:
    """Whether scores of a product with one matrix reach a choice among them, before any other product."""
    from parplan.graph.kinds import op_name

    waiting, seen = [node] if node.all_input_nodes[1].meta["val"].dim() == 2 else [], set()
    while waiting:
        readers = [user for user in waiting.pop().users if user not in seen and op_name(user) not in PRODUCTS]
        if any(map(_chooses, readers)):
            return True
        seen.update(readers)
        waiting += readers
    return False


def _chooses(node: Any) -> bool:
    """Whether an op tells which ones of some scores are largest."""
    from parplan.graph.kinds import op_name

    asked = op_name(node) == "max" and any(op_name(user) == "getitem" and user.args[1] == 1 for user in node.users)
    return asked or op_name(node) in ("argmax", "topk")


ATTENTION = ("bmm", "baddbmm", "matmul", "scaled_dot_product_attention")
PRODUCTS = frozenset(
    [
        "linear",
        "addmm",
        "baddbmm",
        "bmm",
        "matmul",
        "mm",
        "einsum",
        "scaled_dot_product_attention",
        "flex_attention",
        "embedding",
        "expert_products",
        "grouped_mm",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
    ]
)


def verified(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Any) -> dict[str, Any]:
    """Whether a plan computes what the plain model does; None where that cannot be compared."""
    import parplan
    from parplan.errors import ParplanError

    try:
        outcome = parplan.verify(module, args, kwargs=kwargs, plan=plan)
    except ParplanError as error:
        return {"passed": None, "detail": _line(error)}
    nothing = [one for one in outcome.rows if math.isnan(one.max_relative_difference)]
    if nothing and all(one.passed or one in nothing for one in outcome.rows):
        return {"passed": None, "detail": f"the plain model gives NaN ({nothing[0].group}, {nothing[0].worst})"}
    worst = max(outcome.rows, key=lambda one: (not one.passed, one.max_relative_difference / one.tolerance))
    found_row = {"passed": outcome.passed, "difference": worst.max_relative_difference, "allowed": worst.tolerance}
    return found_row | ({} if outcome.passed else {"detail": f"{worst.group}, {worst.worst}"})


def _line(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:400] or type(error).__name__


def measured(target: str, verify: bool, cpu_s: int) -> dict[str, Any]:
    """The row of one model, run in a process of its own that has all imports."""
    begin, (reader, writer) = time.perf_counter(), os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        try:
            row = run(target, verify)
        except BaseException as error:
            places = [one for one in traceback.extract_tb(error.__traceback__) if "parplan" in one.filename]
            place = f"{Path(places[-1].filename).name}:{places[-1].lineno}: " if places else ""
            row = {"status": "CRASHED", "detail": f"{place}{type(error).__name__}: {_line(error)}"}
        with os.fdopen(writer, "w") as stream:
            json.dump(row, stream)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    detail = f"after {cpu_s} s of CPU time" if code == -signal.SIGXCPU else f"exit code {code}"
    ended = {"status": "ENDED" if code == -signal.SIGXCPU else "CRASHED", "detail": detail}
    found: dict[str, Any] = json.loads(text) if text else ended
    return found | {"cpu_s": used.ru_utime + used.ru_stime, "seconds": time.perf_counter() - begin}


def warm_up() -> None:
    """Import everything and plan a layer once, so that the processes of the models need not."""
    import torch
    import transformers

    import parplan

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    layer, x = torch.nn.Linear(8, 8), torch.randn(8, 8)
    decision = parplan.analyze(layer, x, gpus=DEVICES, gpu="a100-80g-sxm", time_limit_s=1)
    parplan.verify(layer, x, plan=decision.plan)


def cases(only: str, part: str) -> Iterator[str]:
    """The targets that are asked for: of those that contain `only`, every n-th from the k-th on, for k/n.

    Their order is that of a digest, so that those which ran are a sample of all; models of images are last.
    """
    number, _, count = part.partition("/")
    chosen = [target for target in names() if re.search(only, target)]
    digests = {target: hashlib.sha256(target.encode()).hexdigest() for target in chosen}
    chosen.sort(key=lambda target: (_images(target.partition(":")[2]) or target.startswith("timm"), digests[target]))
    yield from chosen[int(number) - 1 :: int(count or 1)]


def main() -> None:
    """Print a row per model, and how many ended how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="targets that match this")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th, from the K-th on")
    parser.add_argument("--verify", action="store_true", help="compare plans with the plain model")
    parser.add_argument("--json", type=Path, help="rows by target; those it has are not run again")
    parser.add_argument("--again", default="-", metavar="REGEX", help="run rows of this status again")
    parser.add_argument("--cpu-seconds", type=int, default=240, metavar="S", help="for one model (default: 240)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the rows of --json into a Markdown file")
    options = parser.parse_args()

    def rows() -> dict[str, Any]:  # read again each time: several parts may write
        text = options.json.read_text() if options.json and options.json.exists() else ""
        return json.loads(text) if text else {}

    if options.table:
        from benchmarks.zoo_table import write_table

        write_table(options.table, rows())
        return
    chosen = list(cases(options.only, options.part))
    warm_up()
    for target in chosen:
        row = rows().get(target)
        lacking = options.verify and row and row["status"] == "planned" and "verified" not in row
        if row is None or lacking or re.fullmatch(options.again, row["status"]):
            row = measured(target, options.verify, options.cpu_seconds)
            if options.json:
                text = json.dumps(rows() | {target: row}, indent=1) + "\n"
                options.json.with_suffix(".tmp").write_text(text, encoding="utf-8")
                options.json.with_suffix(".tmp").replace(options.json)
        share = f"{row['may_be_cut']:>5.0%}" if "may_be_cut" in row else "    -"
        print(f"{target:40} {row['status']:>9} {row['cpu_s']:>4.0f} {share}  {row.get('detail', '')}"[:200], flush=True)
    print(", ".join(f"{count} {status}" for status, count in Counter(row["status"] for row in rows().values()).items()))


if __name__ == "__main__":
    main()
