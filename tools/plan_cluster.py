"""What a run needs and whether it fits, without a GPU: ranks, machines, memory, published bytes, every rank's model.

    python -m tools.plan_cluster --config recipes/configs/qwen3_30b_a3b_tau2.yaml --model recipes/models/qwen3_30b_a3b
    python -m tools.plan_cluster --config run.yaml --set layout.expert_model_parallel_size=16 --ranks none

Sizes are estimates by formula (docs/cluster.md), counts of parameters are exact: `--ranks all` builds the model of
every distinct rank on the meta device, in a process group without peers, and checks that their shares tile every
tensor of the Hugging Face checkpoint. Exit code 2, with the arithmetic, for what cannot be formed or does not fit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from megatron_async.config import check, load
from megatron_async.config.describe import describe
from megatron_async.config.schema import RunConfig
from megatron_async.errors import UserError

EXIT_REFUSED = 2


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--model", metavar="DIR", help="a directory with config.json instead of model.path (recipes/models)"
    )
    parser.add_argument(
        "--ranks", choices=("all", "none"), default="all", help="build every distinct rank's model, or none"
    )
    return parser.parse_args(arguments)


def plan(config: RunConfig, *, build_ranks: bool) -> int:
    """Print the plan; the exit code says whether it holds."""
    for warning in check(config, needs_weights=False):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    print(describe(config), flush=True)
    if not build_ranks:
        return 0
    # The models have no memory; a GPU would only make the ranks different from those of another machine's plan.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megatron_async.planning import survey

    started = time.monotonic()
    result = survey(config)
    print(result.text())
    print(f"  {time.monotonic() - started:.0f} s")
    return EXIT_REFUSED if result.problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool."""
    options = parse(arguments)
    overrides = [*options.overrides, *([f"model.path={options.model}"] if options.model else [])]
    try:
        return plan(load(options.config, overrides), build_ranks=options.ranks == "all")
    except UserError as error:
        print(f"plan_cluster: {error}", file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    raise SystemExit(main())
