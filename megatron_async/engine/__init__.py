"""Everything that touches megatron-core.

Importing this package prepares the platform (see ``platform.setup``) before any Megatron module is loaded, so
every module inside may import Megatron at its top. Nothing outside this package imports Megatron.
"""

from megatron_async.engine import platform

platform.setup()
