"""Proof of a layout without its machines: any rank's real model on the meta device, without peers.

from megatron_async.planning import survey

result = survey(config)          # a RunConfig; needs nothing but the checkpoint's config.json
result.problems                  # [] when the ranks' shares add up to the checkpoint
"""

from megatron_async.planning.survey import Survey, survey

__all__ = ["Survey", "survey"]
