"""Models of transformers and timm: which are captured and planned, what stays whole, and if plans compute the same.

    python -m benchmarks.zoo [--only NAME] [--part 1/8] [--verify] [--json FILE] [--kill-after S]

One model per architecture that transformers has a causal, seq2seq, masked or image-classification head for, in a small
configuration (two layers of width 64), and one per family of timm, the one with the shortest name. Each is planned for
four devices in a process of its own; with --verify the plan, plain data parallelism and shards alone are compared with
the plain model. Rows are written to the file as they come, and models that it has are not run again. Needs
`pip install -e '.[zoo]'`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEVICES = 4

HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)  # fmt: skip

SMALL = {
    2: """num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers depth num_experts_per_tok moe_topk num_experts_per_token""",
    4: """num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads num_experts
        n_routed_experts num_local_experts moe_num_experts""",
    16: "head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim",
    64: """hidden_size n_embd d_model dim embed_dim moe_intermediate_size q_lora_rank kv_lora_rank d_embed
        embedding_size""",
    128: "intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim max_position_embeddings n_positions",
    256: "vocab_size",
}
"""Sizes of a small configuration by the names that configurations have for them."""


def names() -> list[str]:
    """Targets of all cases, those of transformers first."""
    _declare_torchvision()
    import timm  # type: ignore[import-not-found]
    from transformers.models.auto import modeling_auto  # type: ignore[import-not-found]

    kinds = dict.fromkeys(kind for head in HEADS for kind in getattr(modeling_auto, head, {}))
    families: dict[str, str] = {}
    for name in timm.list_models():
        family = timm.models.model_entrypoint(name).__module__.rsplit(".", 1)[-1]
        families[family] = min(families.get(family, name), name, key=lambda one: (len(one), one))
    return [*(f"transformers:{kind}" for kind in kinds), *(f"timm:{name}" for name in families.values())]


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


def small(kind: str) -> Any:
    """The configuration of a model type with small sizes; those that it does not have, or has smaller, are left."""
    from transformers import CONFIG_MAPPING  # type: ignore[import-not-found]

    config = CONFIG_MAPPING[kind]()
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        heads = getattr(part, "num_attention_heads", 0)
        shared = isinstance(getattr(part, "num_key_value_heads", None), int) and part.num_key_value_heads != heads
        for size, words in SMALL.items():
            for name in words.split():
                known = getattr(part, name, None)
                if isinstance(known, int) and not isinstance(known, bool) and known > size:
                    setattr(part, name, size)
        if getattr(part, "num_key_value_heads", None) is not None:
            part.num_key_value_heads = 2 if shared else 4
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            if isinstance(getattr(part, name, None), int) and getattr(part, name) >= 256:
                setattr(part, name, 1)
        if isinstance(getattr(part, "layer_types", None), list):
            part.layer_types = part.layer_types[: getattr(part, "num_hidden_layers", 2)]
    return config


def run(target: str, verified: bool) -> dict[str, Any]:
    """The row of one model."""
    import tempfile

    import torch

    import parplan
    from parplan.errors import ParplanError
    from parplan.target.model_library import library_model

    torch.manual_seed(0)
    _declare_torchvision()
    library, _, name = target.partition(":")
    try:
        if library == "transformers":
            with tempfile.TemporaryDirectory() as folder:
                small(name).save_pretrained(folder)
                found = library_model(f"transformers:{folder}", batch=8, sequence=32, meta=False, dtype="fp32")
        else:
            found = library_model(target, batch=8, meta=not verified)
    except Exception as error:
        return {"status": "not built", "detail": _line(error)}
    args, kwargs = found.inputs.args, found.inputs.kwargs
    begin = time.perf_counter()
    try:
        decision = parplan.analyze(found.module, args, kwargs=kwargs, gpus=DEVICES, gpu="a100-80g-sxm", time_limit_s=10)
    except ParplanError as error:
        return {"status": "refused", "detail": _line(error)}
    assert decision.priced is not None
    graph = decision.priced.graph
    weights = {p: graph.values[p].elements for p in graph.parameters}
    cut = {
        p
        for layer in graph.layers.values()
        for p in layer.parameters
        if any(axis.units % DEVICES == 0 and (p in axis.dims or p in axis.first_only) for axis in layer.axes)
    }
    row: dict[str, Any] = {
        "status": "planned",
        "seconds": time.perf_counter() - begin,
        "layers": len(graph.layers),
        "parameters": sum(weights.values()),
        "proof": decision.proof.status,
        "plan": " and ".join(sorted({own.describe() for own in decision.plan.layers.values()})),
        "may_be_cut": sum(weights[p] for p in cut) / max(1, sum(weights.values())),
        "may_have_replicas": sum(one.batch is not None or not one.reached for one in graph.layers.values()),
        "whole": sorted({one.kind for one in graph.layers.values() if one.reached and one.batch is None}),
    }
    if verified:
        plans = {"solver": decision.plan}
        plans |= {one.name: one.plan for one in decision.baselines if one.plan is not None and one.name != "one device"}
        row["verified"] = {}
        for words, plan in plans.items():
            try:
                outcome = parplan.verify(found.module, args, kwargs=kwargs, plan=plan)
                row["verified"][words] = (
                    max((one.max_relative_difference for one in outcome.rows), default=0.0),
                    outcome.passed,
                )
            except ParplanError as error:
                row["verified"][words] = None, _line(error)
        if any(passed is False for _, passed in row["verified"].values()):
            row["status"] = "WRONG"
    return row


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def measured(target: str, verified: bool, kill_after_s: float) -> dict[str, Any]:
    """The row of one model, run in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.zoo", "--child", target, *["--verify"] * verified]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=kill_after_s, check=False)
    except subprocess.TimeoutExpired:
        return {"status": "ENDED", "detail": f"after {kill_after_s:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"status"')]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return {"status": "CRASHED", "detail": f"exit code {done.returncode}: {last[0][:300]}"}


def cases(only: str, part: str) -> Iterator[str]:
    """The targets that are asked for: of those that contain `only`, every n-th from the k-th on, for k/n."""
    number, _, count = part.partition("/")
    chosen = [target for target in names() if only in target]
    yield from chosen[int(number) - 1 :: int(count or 1)]


def main() -> None:
    """Print a row per model, and how many ended how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="targets that contain this")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th, from the K-th on")
    parser.add_argument("--verify", action="store_true", help="compare plans with the plain model (minutes each)")
    parser.add_argument("--json", type=Path, help="rows by target; those it has are not run again")
    parser.add_argument("--kill-after", type=float, default=240.0, metavar="S", help="for one model (default: 240)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.child, options.verify)))
        return
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for target in cases(options.only, options.part):
        if target not in rows:
            rows[target] = measured(target, options.verify, options.kill_after)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        row = rows[target]
        share = f"{row['may_be_cut']:>5.0%}" if "may_be_cut" in row else "    -"
        print(
            f"{target:48} {row['status']:>9} {share}  {row.get('detail') or ', '.join(row['whole'])}"[:160], flush=True
        )
    print(", ".join(f"{count} {status}" for status, count in Counter(row["status"] for row in rows.values()).items()))


if __name__ == "__main__":
    main()
