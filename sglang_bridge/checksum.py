"""The checksums an engine reports for its weights, computed here from the tensors that were sent.

SGLang hashes each of its parameters (first 64 bits of SHA-256 over the bytes), which are not the published ones:
it fuses q, k, v into ``qkv_proj``, gate and up into ``gate_up_proj``, all experts of a layer into ``w13_weight``
and ``w2_weight``. Fusing is stacking along the first axis, so the bytes of a fused parameter are those of its parts
in order, and its hash follows from them without building it.

Invariants
- Position-sensitive: swapped tensors, swapped rows or a part left out change the hash.
- Complete: a parameter only one side has is an error, since SGLang skips published names it does not know.

Holds for one engine process per model (tensor parallel 1) on a CPU; GPU engines hash with another function.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# SGLang pads vocabularies to a multiple of this with zero rows.
VOCABULARY_MULTIPLE = 64

_EXPERT = re.compile(r"^(?P<layer>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight$")
_STACKED = re.compile(r"^(?P<module>.*)\.(?P<part>[qkv]_proj|gate_proj|up_proj)\.(?P<kind>weight|bias)$")
_STACK_OF = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}


def engine_place(name: str) -> tuple[str, int]:
    """The engine's parameter a Hugging Face tensor becomes part of, and its place among the parts."""
    if expert := _EXPERT.match(name):
        number = int(expert["expert"])
        if expert["part"] == "down":
            return f"{expert['layer']}.w2_weight", number
        return f"{expert['layer']}.w13_weight", 2 * number + (expert["part"] == "up")
    if stacked := _STACKED.match(name):
        fused, place = _STACK_OF[stacked["part"]]
        return f"{stacked['module']}.{fused}.{stacked['kind']}", place
    return name, 0


@dataclass(slots=True)
class _Fused:
    """A hash over parts that may come in any order: parts wait until all before them have come."""

    sha: hashlib._Hash = field(default_factory=hashlib.sha256)
    next_place: int = 0
    waiting: dict[int, bytes] = field(default_factory=dict)

    def add(self, place: int, data: bytes) -> None:
        self.waiting[place] = data
        while self.next_place in self.waiting:
            self.sha.update(self.waiting.pop(self.next_place))
            self.next_place += 1


class EngineChecksums:
    """Feed every published tensor to ``add``; ``compare`` with what an engine reports."""

    def __init__(self) -> None:
        self._parameters: dict[str, _Fused] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one published tensor (any device, any order of names)."""
        parameter, place = engine_place(name)
        data = tensor.detach().cpu().contiguous()
        if parameter.endswith(("embed_tokens.weight", "lm_head.weight")):
            missing = -data.shape[0] % VOCABULARY_MULTIPLE
            data = torch.cat([data, data.new_zeros(missing, *data.shape[1:])]) if missing else data
        self._parameters.setdefault(parameter, _Fused()).add(place, data.view(-1).view(torch.uint8).numpy().tobytes())

    def digests(self) -> dict[str, str]:
        """Engine parameter name -> 16 hex digits. Raises ``ValueError`` when a part never came."""
        for parameter, fused in self._parameters.items():
            if fused.waiting:
                raise ValueError(f"{parameter}: part {fused.next_place} was not published, later parts "
                                 f"{sorted(fused.waiting)[:5]} were")
        return {parameter: fused.sha.hexdigest()[:16] for parameter, fused in self._parameters.items()}

    def compare(self, reported: Mapping[str, str]) -> None:
        """Raise ``ValueError`` naming the parameters in which the engine differs from what was published."""
        ours = self.digests()
        problems = [f"{name}: published {ours[name]}, engine has {reported[name]}"
                    for name in ours if name in reported and ours[name] != reported[name]]
        problems += [f"{name}: published, unknown to the engine" for name in ours if name not in reported]
        problems += [f"{name}: in the engine, not published" for name in reported if name not in ours]
        if problems:
            shown = "; ".join(problems[:4])
            raise ValueError(f"{len(problems)} of {len(ours)} parameters differ: {shown}. If all differ, the engine "
                             "computes in another dtype than the weights that were sent")
