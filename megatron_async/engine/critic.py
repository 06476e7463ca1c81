"""The critic: the policy's body with a scalar head, which says how much reward is still to come after each prefix.

Invariants (beside those of ``engine/token_model.py``):
- ``values[t]`` is V of the state *before* token t, tokens < t: the state in which token t is chosen. So V(s_t) enters
  GAE at the action token t, and V(s_{t+1}) is the value of the next action token, whatever was observed in between.
  The value after the last token of a sequence is returned apart, for truncated trajectories.
- Frozen parameters take no gradient, have no place in DDP's buffers and no optimiser state; their bits never change.
- The head starts at 0 unless the checkpoint holds one, so that every layout starts from the same values.
- A saved critic is a Hugging Face checkpoint of ``…ForTokenClassification`` with one label (``score.weight``,
  ``score.bias``): transformers loads it, and so does ``load_hf``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor

from megatron_async.config.schema import CriticConfig
from megatron_async.engine.hf_config import HFConfig
from megatron_async.engine.hf_reader import CheckpointReader, load_pieces
from megatron_async.engine.hf_weights import NameTable
from megatron_async.engine.model import build_chunks
from megatron_async.engine.sequences import MicroBatch, Sequence
from megatron_async.engine.token_model import TokenModel, TokenValues


@dataclass(frozen=True, slots=True)
class Values:
    """State values of a batch's sequences.

    Attributes:
        before: float32 [L] per sequence, V of the state in which token t is chosen; 0 at position 0, where nothing is.
        after: float32 [sequences], V of the state after the last token.
    """

    before: TokenValues
    after: NDArray[np.float32]


class ValueHead(torch.nn.Module):
    """Hidden states → one number each, in fp32; takes the place of GPTModel's output layer on the last stage."""

    def __init__(self, config: TransformerConfig, device: torch.device) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))
        for parameter in (self.weight, self.bias):
            marks: Any = parameter
            # Each tensor-parallel rank sees its part of the tokens; Megatron sums the gradients of marked parameters.
            marks.sequence_parallel = config.sequence_parallel

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[S/tp or S, 1, H] → ([S, 1, 1], None), the output layer's interface."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # The loss is computed alike on every rank, so each takes back its own part of the gradient.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class Critic(TokenModel):
    """Build with ``Critic.build(..., critic=CriticConfig)``. Its ``loss_fn`` takes ``(packed, values [T])``.

    In ``values`` of a loss, position 0 of a sequence holds the value after its last token; mask it.
    """

    def __init__(self, *arguments: Any, critic: CriticConfig, **options: Any) -> None:
        self.critic_config = critic
        super().__init__(*arguments, **options)

    @staticmethod
    def name_table(hf: HFConfig) -> NameTable:
        """The body and the value head."""
        return NameTable(hf, head="value")

    @staticmethod
    def build_chunks(hf: HFConfig, config: TransformerConfig) -> list[GPTModel]:
        """GPTModels whose output layer is a ``ValueHead``."""
        chunks = build_chunks(hf, config, tied=False)
        for chunk in chunks:
            if chunk.post_process:
                chunk.output_layer = ValueHead(config, chunk.output_layer.weight.device)
        return chunks

    def _prepare(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not is_frozen(name, self.critic_config))

    def _readout(self, output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Output [1, S, 1] → (V before each token [T],), the value after the last one at position 0."""
        return (output[0, :, 0][micro_batch.take],)

    def values(self, sequences: list[Sequence]) -> Values:
        """State values under the present weights, equal on every rank.

        Raises:
            PackingError, TokenError: as ``train_step``.
        """
        (values,) = self._score(sequences, self._readout, self._kinds)
        after = np.array([value[0] for value in values], np.float32)
        for value in values:
            value[0] = 0.0
        return Values(values, after)

    def load_hf(self, path: str | Path) -> None:
        """Overwrite the weights with those of a language model (the head becomes 0) or of a saved critic.

        Raises:
            CheckpointMissing, WeightMismatch: nothing has been changed then.
        """
        has_head = "score.weight" in CheckpointReader(path).names()
        table = self.table if has_head else NameTable(self.hf_config, head="none")
        pieces = self.pieces()
        load_pieces(path, table, [piece for piece in pieces if piece.row.hf_name in table.by_name])
        for piece in pieces:
            if piece.row.hf_name not in table.by_name:
                piece.view.zero_()
        if self.optimizer is not None:
            self.optimizer.reload_weights()

    def save_hf(self, path: str | Path) -> None:
        """As of any model; the configuration names the token-classification architecture."""
        super().save_hf(path)
        if torch.distributed.get_rank() == 0:
            mark_as_critic(Path(path) / "config.json")
        torch.distributed.barrier()


def is_frozen(name: str, config: CriticConfig) -> bool:
    """Whether ``critic.freeze`` and its companions hold a parameter (Megatron's global name) as it is.

    >>> is_frozen("decoder.layers.0.self_attention.linear_qkv.weight", CriticConfig(freeze="attention"))
    True
    """
    if ".self_attention." in name:
        return config.freeze == "attention"
    if "layernorm" in name:
        return config.freeze_norms
    return config.freeze_embeddings and name.startswith("embedding.")


def mark_as_critic(config_file: Path) -> None:
    """Rewrite a language model's config.json as that of its token classifier with one label."""
    config = json.loads(config_file.read_text())
    config["architectures"] = [
        name.replace("ForCausalLM", "ForTokenClassification") for name in config.get("architectures", [])
    ]
    config["id2label"], config["label2id"] = {"0": "value"}, {"value": 0}
    config_file.write_text(json.dumps(config, indent=2))
