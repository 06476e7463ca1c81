"""Every layout on 1, 2 and 4 processes against one rank, as a table: docs/layouts.md, and [layout_error_fp32].

    python -m tools.benchmark_layouts --write            # about four minutes on two cores
    python -m tools.benchmark_layouts --only moe:tp2     # without writing anything

For each layout: five training steps (Adam, clipping, warm-up) on the same batches of packed sequences; loss, gradient
norm and log-probs of every step, and the weights after the last, compared with those of one rank. fp32 shows that
nothing is computed differently; bf16, on up to two processes, what rounding makes of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async.config.schema import LayoutConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint
from sglang_bridge.server import claim_port
from tools.benchmark_rows import ROOT, Row, commit, machine, write_rows

PAGE = ROOT / "docs" / "layouts.md"
STEPS = 5
KINDS = ("loss", "grad_norm", "logprobs", "weights")
SHAPES = {
    "moe": TinyShape(hidden=64, layers=4, heads=4, key_value_heads=4, head_dim=16, experts=8, expert_hidden=32),
    "dense": TinyShape(hidden=64, layers=4, heads=4, key_value_heads=4, head_dim=16, experts=0, expert_hidden=32),
}
# A large epsilon keeps Adam smooth where a gradient is near 0: without it rounding decides the sign of the step.
OPTIMIZER = OptimizerConfig(lr=1e-2, adam_eps=1e-3, clip_grad=0.5, lr_warmup_steps=2, weight_decay=0.1)
FIELDS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
LAYOUTS: dict[int, tuple[str, ...]] = {
    1: ("moe:tokens128", "moe:tokens1024", "moe:reversed", "moe:recompute", "dense:tokens128"),
    2: (
        "moe", "moe:tp2", "moe:tp2:etp2", "moe:ep2", "moe:tp2:ep2", "moe:pp2", "moe:pp2:vpp2", "moe:cp2", "moe:overlap",
        "dense", "dense:tp2", "dense:pp2", "dense:cp2",
    ),
    4: (
        "moe", "moe:tp4", "moe:tp2", "moe:tp2:ep2", "moe:tp2:etp2", "moe:tp2:ep2:etp2", "moe:ep4", "moe:ep2", "moe:pp4",
        "moe:pp2:ep2", "moe:pp2:vpp2:ep2", "moe:pp2:tp2", "moe:cp4", "moe:cp2:ep2", "moe:cp2:tp2:ep2", "moe:cp2:pp2",
        "dense:tp2:pp2", "dense:pp2:vpp2:tp2", "dense:cp2:tp2",
    ),
}  # fmt: skip
"""Processes: layouts. What they leave over is data parallel. tokens: of a micro-batch; reversed: order of the batch."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Largest relative difference to one rank over five steps: |Δ| over the reference, of log-probs and weights over
    the largest of their tensor."""

    layout: str
    processes: int
    dtype: str
    loss: float
    grad_norm: float
    logprobs: float
    weights: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.grad_norm, self.logprobs, self.weights)


# ---- on every rank ---------------------------------------------------------------------------------------------------


def _options(text: str, processes: int) -> tuple[str, LayoutConfig, dict[str, Any]]:
    """The kind of model, the layout, and what else the text asks for."""
    kind, *parts = text.split(":")
    sizes: dict[str, Any] = {}
    further: dict[str, Any] = {"tokens": 256, "reversed": False, "recompute": False, "overlap": False}
    for part in parts:
        name, number = re.fullmatch(r"([a-z]+)(\d*)", part).groups()  # type: ignore[union-attr]
        if name in FIELDS:
            sizes[FIELDS[name]] = int(number)
        else:
            further[name] = int(number) if number else True
    return kind, LayoutConfig(world_size=processes, **sizes), further


def _batches(vocabulary: int) -> list[list[Any]]:
    """Packed sequences of uneven length and temperature, with an advantage per token, for each step."""
    from megatron_async.engine.sequences import Sequence

    random = np.random.default_rng(5)
    return [
        [
            Sequence(
                random.integers(0, vocabulary, n).astype(np.int32),
                temperature=float(random.choice([0.8, 1.0])),
                arrays={"advantages": random.normal(size=n).astype(np.float32)},
            )
            for n in random.integers(5, 100, 12)
        ]
        for _ in range(STEPS)
    ]


def run_layout(folder: Path, text: str, processes: int, dtype: str) -> dict[str, np.ndarray] | None:
    """Five steps; on rank 0 loss [steps], grad_norm [steps], logprobs [tokens of all steps] and weight.* by name."""
    import torch

    from megatron_async.config.megatron import MegatronConfig
    from megatron_async.engine.policy import Policy

    kind, layout, further = _options(text, processes)
    ddp: dict[str, Any] = {"overlap_grad_reduce": True, "bucket_size": 20_000} if further["overlap"] else {}
    trainer = TrainerConfig(
        micro_batch_tokens=further["tokens"], recompute=further["recompute"], megatron=MegatronConfig(ddp=ddp)
    )
    model = ModelConfig(path=str(folder / kind), dtype=dtype)  # type: ignore[arg-type]
    policy = Policy.build(model, layout, trainer, OPTIMIZER)
    found: dict[str, list[Any]] = {"loss": [], "grad_norm": [], "logprobs": []}
    for batch in _batches(policy.hf_config.vocab_size):
        count = sum(map(len, batch))

        def loss_fn(packed: Any, logprobs: Any, entropy: Any, count: int = count) -> tuple[Any, dict[str, Any]]:
            return -(packed.arrays["advantages"] * logprobs + 0.1 * entropy).sum() / count, {}

        result = policy.train_step(batch[::-1] if further["reversed"] else batch, loss_fn)
        logprobs = result.logprobs[::-1] if further["reversed"] else result.logprobs
        found["loss"].append(result.loss)
        found["grad_norm"].append(result.grad_norm)
        found["logprobs"].append(np.concatenate(logprobs))
    weights = {f"weight.{n}": t.float().cpu().numpy().copy() for n, t in policy.export() if t is not None}
    if torch.distributed.get_rank() != 0:
        return None
    arrays = {name: np.concatenate([np.atleast_1d(v) for v in values]) for name, values in found.items()}
    return {**arrays, **weights}


def rank_main(folder: Path, jobs: SequenceOf[str]) -> None:
    """Run the jobs DTYPE/LAYOUT in this process, one of WORLD_SIZE; rank 0 leaves NAME.npz for each."""
    from megatron_async.engine import platform

    processes = int(os.environ["WORLD_SIZE"])
    for job in jobs:
        dtype, text = job.split("/")
        arrays = run_layout(folder, text, processes, dtype)
        if arrays is not None:
            np.savez(_file(folder, text, processes, dtype), **arrays)  # type: ignore[arg-type]
    platform.shutdown()


# ---- the table -------------------------------------------------------------------------------------------------------


def _file(folder: Path, text: str, processes: int, dtype: str) -> Path:
    return folder / f"{processes}-{dtype}-{text.replace(':', '_')}.npz"


def launch(folder: Path, processes: int, jobs: SequenceOf[str]) -> None:
    """Run jobs on so many local processes. Raises RuntimeError with the output of one that failed."""
    port = claim_port("127.0.0.1", 0)
    ranks = []
    for rank in range(processes):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        command = [sys.executable, "-m", "tools.benchmark_layouts", "--folder", str(folder), "--jobs", *jobs]
        ranks.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [rank.communicate()[0] for rank in ranks]
    failed = [output for rank, output in zip(ranks, outputs, strict=True) if rank.returncode]
    if failed:
        raise RuntimeError(f"{processes} processes, {' '.join(jobs)}:\n{failed[0][-3000:]}")


def compare(folder: Path, text: str, processes: int, dtype: str) -> Errors:
    """One layout against one rank."""
    own = np.load(_file(folder, text, processes, dtype))
    one = np.load(_file(folder, text.partition(":")[0], 1, dtype))

    def relative(name: str) -> float:
        return float(np.abs(own[name] - one[name]).max() / np.abs(one[name]).max())

    steps = {name: float((np.abs(own[name] - one[name]) / np.abs(one[name])).max()) for name in ("loss", "grad_norm")}
    weights = max(relative(name) for name in one.files if name.startswith("weight."))
    return Errors(text, processes, dtype, **steps, logprobs=relative("logprobs"), weights=weights)


def precisions(processes: int) -> tuple[str, ...]:
    """bf16 on more than two processes would say again what it says on two."""
    return ("float32", "bfloat16") if processes <= 2 else ("float32",)


def collect(folder: Path, chosen: Mapping[int, SequenceOf[str]]) -> list[Errors]:
    """What the ranks left in a folder, against one rank."""
    return [
        compare(folder, text, processes, dtype)
        for processes, texts in chosen.items()
        for text in texts
        for dtype in precisions(processes)
    ]


def measure(only: SequenceOf[str]) -> list[Errors]:
    """All layouts, or some."""
    chosen = {n: [t for t in texts if not only or t in only] for n, texts in LAYOUTS.items()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for kind, shape in SHAPES.items():
            write_tiny_checkpoint(folder / kind, 0, shape)
        for processes, texts in chosen.items():
            wanted = [*SHAPES, *texts] if processes == 1 else texts
            if wanted:
                jobs = [f"{dtype}/{text}" for dtype in precisions(processes) for text in wanted]
                launch(folder, processes, jobs)
                print(f"{processes} process(es): {', '.join(wanted)}", flush=True)
        return collect(folder, chosen)


def page(found: SequenceOf[Errors]) -> str:
    """docs/layouts.md."""
    worst = max(errors.worst for errors in found if errors.dtype == "float32")
    lines = [
        "# Layouts",
        "",
        "Made by `python -m tools.benchmark_layouts --write`; do not edit. Measured at "
        f"`{commit()}` on {machine()}.",
        "",
        f"Five training steps of tiny Qwen3 models ({SHAPES['moe'].layers} layers, hidden {SHAPES['moe'].hidden}; 8 "
        "experts, top-2, or dense), with clipping, warm-up, weight decay and the distributed optimiser, on packed "
        "sequences of uneven length and temperature. Differences to one rank, relative: the largest over the steps of "
        "loss and gradient norm; of log-probs and weights the largest over the largest of their tensor. What the sizes "
        "leave over of the processes is data parallel; tensor parallel has sequence parallel. Rows of one process "
        "change the micro-batches (`tokens`), the order of the batch, or recompute activations; `overlap` reduces "
        "gradients during the backward pass.",
        "",
        f"fp32: the worst of all is {worst:.1e} (goal: at most 1e-5). bf16 rounds after every product, in another "
        "order under every layout, and a token now and then goes to another expert: those columns say how far apart "
        "two correct runs are. `tests/distributed/test_engine_layouts.py` compares a sample with transformers.",
        "",
        "| processes | layout | loss | gradient norm | log-probs | weights "
        "| bf16: loss | gradient norm | log-probs | weights |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_place = {(errors.processes, errors.layout, errors.dtype): asdict(errors) for errors in found}
    for processes, layout in dict.fromkeys((errors.processes, errors.layout) for errors in found):
        both = [by_place.get((processes, layout, dtype)) for dtype in ("float32", "bfloat16")]
        cells = ["–" if errors is None else f"{errors[kind]:.1e}" for errors in both for kind in KINDS]
        lines.append(f"| {processes} | `{layout}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def rows(found: SequenceOf[Errors]) -> list[Row]:
    """The worst of each kind."""
    result = []
    for dtype, short, goal in (("float32", "fp32", "<= 1e-5"), ("bfloat16", "bf16", "")):
        chosen = [errors for errors in found if errors.dtype == dtype]
        sizes = sorted({errors.processes for errors in chosen})
        setting = (
            f"worst of {len(chosen)} layouts on {', '.join(map(str, sizes))} processes against one rank, five steps; "
            "docs/layouts.md"
        )
        for kind in KINDS:
            worst = max(getattr(errors, kind) for errors in chosen)
            result.append(Row(f"layout_{kind}_error_{short}", worst, "", goal, setting))
    return result


def main() -> int:
    """Measure, print, and with --write keep table and figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/layouts.md and docs/benchmarks/megatron.json")
    parser.add_argument("--only", nargs="+", default=[], metavar="LAYOUT")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs:
        rank_main(options.folder, options.jobs)
        return 0
    found = measure(options.only)
    for errors in found:
        print(json.dumps(asdict(errors)))
    figures = rows(found)
    if options.write:
        PAGE.write_text(page(found), encoding="utf-8")
        write_rows("megatron", figures)
    return 0 if all(row.passed is not False for row in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
