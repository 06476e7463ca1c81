"""How rewards become advantages, and the value model that some estimators need; part of `config.schema`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_async.config.layout import LayoutConfig


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """How rewards become advantages. Groups are found by their id, never by position."""

    name: str = "grpo"
    """Estimator: grpo (group mean, optionally std), dr_grpo (group mean only), rloo (leave one out), batch_mean,
    running_mean (latest rewards of the same prompt), latest_mean (latest rewards of all prompts), gae (a critic's
    values, one advantage per token; see the section critic)."""
    normalise_std: bool = True
    """Divide by the group's standard deviation. Read by grpo and batch_mean. It lifts easy and hard prompts to the
    scale of the others."""
    singleton: Literal["error", "zero", "running_mean"] = "error"
    """What happens to a group of one, whose own mean says nothing: refuse, give it no gradient, or compare it with the
    running mean of its prompt."""
    drop_zero_variance_groups: bool = True
    """Leave groups whose rewards are all equal out of the loss. They carry no gradient; leaving them out saves their
    forward and keeps them out of the token mean's denominator, and the step has fewer trajectories. Must be false with
    groups of one and with a critic, which learns from every trajectory."""
    window: int | None = None
    """Rewards that running_mean (null: 8, per prompt) or latest_mean (null: 128, over all) look back on."""
    gamma: float = 1.0
    """Discount per action token (per turn with step values). Below 1 the reward fades with distance. Read by gae, as
    all that follow."""
    lambda_policy: float | Literal["adaptive"] = "adaptive"
    """λ of the advantages. 1 is reward minus value (unbiased, noisy), 0 trusts the critic alone; "adaptive" is
    1 - 1/(alpha * l) for l action tokens, so that long trajectories do not lose the reward."""
    lambda_critic: float | Literal["adaptive"] = 1.0
    """λ of the critic's targets. 1 regresses on Monte-Carlo returns; lower values bootstrap on the critic itself."""
    alpha: float = 1.5
    """α of the adaptive λ. Larger is closer to 1."""
    values: Literal["token", "step_mean", "step_last"] = "token"
    """Values the estimate runs on: of each token, or one per turn (mean or last of its tokens), which gives all tokens
    of a turn the same advantage."""
    bootstrap_truncated: bool = False
    """Continue a truncated trajectory with the critic's value of its last state. False takes what was cut off as worth
    0, so that running into a limit is punished like failing."""
    whiten: bool = False
    """Standardise the advantages over the batch's action tokens. Keeps the step's size when rewards or critic change
    scale, and hides how sure the critic is."""


@dataclass(frozen=True, slots=True)
class CriticConfig:
    """The value model of `advantage.name: gae`. Not read by other estimators."""

    path: str = ""
    """Checkpoint it starts from: a Hugging Face language model (its values then start at 0), or a critic that `train`
    or `pretrain-critic` saved. Empty: `model.path`."""
    ranks: Literal["shared", "own"] = "shared"
    """Where it lives. shared: on the actor's ranks and in its layout, in turn with the policy. own: on further ranks of
    the first machine, which `launch` starts; with `order: policy_first` its updates run while the policy is updated and
    published, and the actor's ranks have their memory to themselves. The numbers are the same."""
    layout: LayoutConfig | None = None
    """Layout of its own ranks: a section with the options and defaults of `layout`, whose `world_size` says how many
    there are. null: the actor's. Must be null with `ranks: shared`."""
    freeze: Literal["none", "attention"] = "attention"
    """attention keeps the attention of every layer as it is and trains MLPs, experts, routers and the value head: less
    memory, and values that drift less. none trains everything."""
    freeze_norms: bool = False
    """Keep the norms outside attention as they are too."""
    freeze_embeddings: bool = False
    """Keep the token embeddings as they are too. Saves 16 bytes per entry of a large vocabulary."""
    lr: float = 5e-6
    """Peak learning rate; the other settings of Adam are those of `optimizer`. Larger than the policy's: the critic has
    to keep up with it. A tiny model needs about 1e-3."""
    clip_grad: float = 1.0
    """Largest gradient norm of the critic. 0 switches clipping off."""
    lr_warmup_steps: int = 0
    """Value updates over which the rate rises from 0."""
    updates: int = 2
    """Value updates (K) on each batch, per policy update. More follow a changing policy faster and fit the batch's
    noise."""
    order: Literal["critic_first", "policy_first"] = "policy_first"
    """policy_first takes the advantages from the values before the batch's own updates, so that they do not know its
    rewards; critic_first takes them from the updated critic, which follows a shift at once and leaks a little of each
    trajectory's own reward into its baseline."""
    warmup_steps: int = 10
    """First steps of the run that train the critic alone; the policy, its version and the engines stay as they are."""
    loss: Literal["mse", "huber"] = "mse"
    """Regression loss, half the squared error, or Huber's with its bend at `huber_delta`."""
    huber_delta: float = 1.0
    """Error at which Huber's loss becomes linear. Smaller bounds the pull of outliers sooner."""
    value_clip: float | None = None
    """Largest change of a token's value per batch before its loss stops pulling (PPO's value clipping). null switches
    it off."""
    pretrain_runs: tuple[str, ...] = ()
    """Folders of recorded runs whose trajectories `pretrain-critic` learns from."""
