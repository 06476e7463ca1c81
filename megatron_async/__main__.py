"""`python -m megatron_async`: the same commands as `megatron-async`."""

from megatron_async.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
