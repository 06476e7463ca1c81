"""Converts checkpoints: a run's sharded ones to Hugging Face format, and back. Bits are moved, never changed.

    python -m tools.convert_checkpoint to-hf runs/quickstart/checkpoints/step_000040 --out exported
    python -m tools.convert_checkpoint from-hf Qwen/Qwen3-4B --out sharded/step_000000

One process reads and writes what any layout wrote. A model that does not fit one: start it under torchrun, and say how
the ranks share it with the options named as in `layout:` (--tensor-model-parallel-size 2 ...).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
import yaml

from megatron_async import training_record
from megatron_async.config.schema import LayoutConfig, ModelConfig, TrainerConfig
from megatron_async.engine import checkpoint, platform
from megatron_async.engine.model import DTYPES
from megatron_async.engine.policy import Policy
from megatron_async.errors import UserError
from megatron_async.training.checkpointing import describe, publish_generation, read_generation

SIZES = [field.name for field in dataclasses.fields(LayoutConfig) if field.name.endswith("_size")]


class ConversionError(UserError):
    """What was asked for cannot be converted."""


def to_hf(source: Path, out: Path, model: Path | None, layout: LayoutConfig) -> None:
    """Write a sharded checkpoint's weights as a Hugging Face checkpoint.

    model: directory with config.json and tokenizer; by default `model.path` of the run that the checkpoint is in.

    Raises:
        ConversionError: no complete checkpoint, or no configuration of its run.
        CheckpointError: `model` is of another architecture.
    """
    generation = read_generation(source)
    if generation is None:
        raise ConversionError(
            f"{source} is no complete checkpoint: give a folder like runs/NAME/checkpoints/step_000040"
        )
    described = ModelConfig(path=str(model or model_of_run(source)), dtype=generation.model["dtype"])
    policy = Policy.build(described, layout, TrainerConfig())
    checkpoint.check_fingerprint(policy, generation.model, source)
    checkpoint.load_weights(policy, generation.weights)
    policy.save_hf(out)
    if dist.get_rank() == 0:
        training_record.carry(source.parent.parent, out)


def from_hf(source: Path, out: Path, dtype: str | None, layout: LayoutConfig) -> None:
    """Write a Hugging Face checkpoint's weights as a sharded checkpoint, without optimiser.

    dtype: precision to store; by default the checkpoint's own.
    """
    model = ModelConfig(path=str(source), dtype=dtype or own_dtype(source))  # type: ignore[arg-type]
    policy = Policy.build(model, layout, TrainerConfig())
    aside = out.with_name(f".{out.name}.converting")
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
    writer = checkpoint.ShardedWriter(asynchronous=False)
    writer.begin(policy, aside / "weights", lambda: None)
    if dist.get_rank() == 0:
        publish_generation(aside, out, {**describe(policy), "steps": 0, "version": 0, "states": {}})


def model_of_run(source: Path) -> Path:
    """`model.path` of the run whose folder a checkpoint is in."""
    config = source.parent.parent / "config.yaml"
    if not config.is_file():
        raise ConversionError(
            f"there is no {config} to say which model {source} is of; give its Hugging Face directory with --model"
        )
    return Path(yaml.safe_load(config.read_text())["model"]["path"])


def own_dtype(source: Path) -> str:
    """The precision that a Hugging Face checkpoint says it is in.

    Raises:
        ConversionError: it says none, or one that is not trained in.
    """
    config = json.loads((source / "config.json").read_text())
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in DTYPES:
        raise ConversionError(
            f"{source / 'config.json'} says dtype {dtype}; choose one of {sorted(DTYPES)} with --dtype"
        )
    return str(dtype)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="convert_checkpoint", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("to-hf", "sharded to Hugging Face"), ("from-hf", "Hugging Face to sharded")):
        command = commands.add_parser(name, help=text)
        command.add_argument("source", type=Path)
        command.add_argument("--out", type=Path, required=True, help="folder that is made; replaced if it is there")
        for size in SIZES:
            command.add_argument("--" + size.replace("_", "-"), type=int)
    model = "Hugging Face directory with configuration and tokenizer; default: model.path of the checkpoint's run"
    commands.choices["to-hf"].add_argument("--model", type=Path, help=model)
    commands.choices["from-hf"].add_argument("--dtype", choices=sorted(DTYPES), help="default: the checkpoint's own")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; returns the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = {name: value for name in SIZES if (value := getattr(options, name)) is not None}
    layout = LayoutConfig(**{"world_size": world, **sizes})
    try:
        if options.command == "to-hf":
            to_hf(options.source, options.out, options.model, layout)
        else:
            from_hf(options.source, options.out, options.dtype, layout)
    except UserError as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2
    finally:
        platform.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
