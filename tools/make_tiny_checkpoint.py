"""Write a tiny, randomly initialised Qwen3-MoE (or dense Qwen3) checkpoint with the service desk's tokenizer.

    python tools/make_tiny_checkpoint.py --out runs/tiny --seed 0
    python tools/make_tiny_checkpoint.py --out runs/tiny-dense --dense

The directory loads in transformers, SGLang and megatron_async like a published Qwen3 checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

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
    for size in dataclasses.fields(TinyShape):
        if size.type == "int":
            flag = "--" + size.name.replace("_", "-")
            parser.add_argument(flag, type=int, default=size.default, help="default %(default)s")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint; 0, or 2 with one line on stderr when the request cannot be met."""
    options = parse(arguments)
    try:
        sizes = {field.name: getattr(options, field.name) for field in dataclasses.fields(TinyShape)}
        shape = TinyShape(**(sizes | {"experts": 0} if options.dense else sizes))
        parameters = write_tiny_checkpoint(options.out, options.seed, shape)
    except (ValueError, OSError) as error:
        print(f"make_tiny_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {parameters / 1e6:.2f} M parameters, seed {options.seed}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
