"""Keys of the bank's key-value table by which the parts of a run tell one another something."""

PHASE = "phase"
"""What the run does: `RESUMING`, `TRAINING`, or `FINISHED`."""

RESUMING = "resuming"
"""A resumed trainer has not given the engines its weights yet: nothing may be sampled."""

TRAINING = "training"

FINISHED = "finished"
"""Every step was trained: nothing more is wanted of anybody."""

STOP = "trainer/stop"
"""The launcher asks the trainer whose part has this mark (`supervise.Part.mark`) to end after its step."""

WRITE_DOWN = "rollout/write_down"
"""The trainer asks that all running trajectories be written down; the value is when it had stopped the engines, in
nanoseconds since 1970, and so a new one each time."""

WRITTEN_DOWN = "rollout/written_down"
"""The value of `WRITE_DOWN` that the rollout has answered."""

OLDEST = "rollout/oldest/{}"
"""Where admission counts from, in updates, for the groups that the rollout process of a number plays; empty while there
is none."""

OWNER = "rollout/owner/{}"
"""Number of the rollout process that plays the group of a name, once it is not the one in the name."""

DRAIN = "engines/drain"
"""Names (`roster.Engine.name`) of the engines that the trainer wants to fall idle, separated by blanks."""

PUBLISHED = "published_version"
"""The version that the engines were last published: one that was started anew serves once it holds it. Empty: 0."""
