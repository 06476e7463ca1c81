"""Write a tiny, randomly initialised Qwen3-MoE (or dense Qwen3) checkpoint with the tokenizer of a small environment.

    python tools/make_tiny_checkpoint.py --out runs/tiny --seed 0                  # the service desk's
    python tools/make_tiny_checkpoint.py --out runs/tiny-dense --dense
    python tools/make_tiny_checkpoint.py --out runs/telecom --config recipes/configs/tau2_telecom_cpu_warm_start.yaml

The directory loads in transformers, SGLang and megatron_async like a published Qwen3 checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from megatron_async.config import load
from megatron_async.errors import UserError
from megatron_async.rollout.environments.desk_checkpoint import TinyShape, write_tiny_checkpoint


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write; must not hold a checkpoint yet"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    parser.add_argument("--dense", action="store_true", help="a dense Qwen3 with as many active parameters")
    parser.add_argument(
        "--tied-embeddings", action="store_true", help="one matrix for input and output embeddings"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="configuration whose environment the tokenizer is made for: desk (also the default), or tau2 on telecom "
        "tickets",
    )
    for size in dataclasses.fields(TinyShape):
        if size.type == "int" and size.name != "vocabulary":
            flag = "--" + size.name.replace("_", "-")
            parser.add_argument(flag, type=int, default=size.default, help="default %(default)s")
    return parser.parse_args(arguments)


_SIZES = {field.name for field in dataclasses.fields(TinyShape)}


def tokenizer(config_path: str | None) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a configuration's environment, None for the desk's. ValueError where there is none."""
    if config_path is None:
        return None
    config = load(config_path, [])
    if config.environment.name == "desk":
        return None
    if config.environment.name != "tau2":
        raise ValueError(f"environment {config.environment.name!r} has no small tokenizer; known: desk, tau2")
    from megatron_async.rollout.environments.tau2 import telecom_tokenizer

    return telecom_tokenizer.build(config.environment.options, config.seed)


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint; 0, or 2 with one line on stderr when the request cannot be met."""
    options = parse(arguments)
    try:
        sizes = {name: value for name, value in vars(options).items() if name in _SIZES}
        shape = TinyShape(**(sizes | {"experts": 0} if options.dense else sizes))
        parameters = write_tiny_checkpoint(options.out, options.seed, shape, tokenizer(options.config))
    except (ValueError, OSError, UserError) as error:
        print(f"make_tiny_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {parameters / 1e6:.2f} M parameters, seed {options.seed}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
