"""Where the anchor log-probs of a batch come from: one source per file, chosen by `old_logits.source`.

Invariant: a source says what its values are (`kind`: exact, approximate or absent); nothing substitutes silently.
"""

from megatron_async.old_logits.builders import BUILDERS, build_source
from megatron_async.old_logits.source import AnchorLogprobs, OldLogitSource

__all__ = ["BUILDERS", "AnchorLogprobs", "OldLogitSource", "build_source"]
