"""Keys of the bank's key-value table by which the trainer asks the rollout for something."""

WRITE_DOWN = "rollout/write_down"
"""The trainer asks, under a new value each time, that all running trajectories be written down as they are."""

WRITTEN_DOWN = "rollout/written_down"
"""The value of `WRITE_DOWN` that the rollout has answered."""
