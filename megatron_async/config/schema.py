"""The configuration of a run: every option, its default, what it means and what changing it does.

Invariants: all classes are frozen; nothing here imports torch or megatron; a legal value is listed once, either as
a `Literal` here or, for methods and estimators, in `config.methods`. The text under each field is its documentation
(`docs/configuration.md` is generated from it). A field that says "auto" or null is made concrete by `load`: code that
runs after loading never meets either in the fields that say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_async.config.credit import AdvantageConfig as AdvantageConfig
from megatron_async.config.credit import CriticConfig as CriticConfig
from megatron_async.config.history import OldLogitsConfig as OldLogitsConfig
from megatron_async.config.history import SnapshotsConfig as SnapshotsConfig
from megatron_async.config.layout import LayoutConfig as LayoutConfig
from megatron_async.config.megatron import MegatronConfig as MegatronConfig

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The policy, as a Hugging Face checkpoint."""

    path: str
    """Directory with config.json, safetensors shards and a tokenizer whose chat template knows tools. It is version 0:
    engines and trainer both start from it."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the weights in trainer and engines. bfloat16 halves memory, keeps fp32 masters in the optimiser and
    brings engine noise of about 1e-2 per token; float32 makes both engines agree to about 1e-6, for small models."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """How the trainer's processes run and how they cut a batch."""

    use_distributed_optimizer: bool = True
    """Shard optimiser states over data-parallel ranks. Saves 12 bytes per parameter times (1 - 1/ranks)."""
    micro_batch_tokens: int = 4096
    """Most tokens in one packed micro-batch of one rank. Activation memory grows with it; too small wastes kernels.
    No trajectory may be longer, so `rollout.max_tokens` must not exceed it times the context-parallel size."""
    recompute: bool = False
    """Recompute activations in the backward pass: about a third more compute, a fraction of the activation memory."""
    nodes: int = 1
    """Machines over which the trainer's ranks are spread."""
    nproc_per_node: int | None = None
    """Trainer ranks on each machine. null: world_size / nodes."""
    deadline_s: float = 1800.0
    """Longest silence of the rollouts, in seconds, while the trainer waits for a batch: no attempt began or ended, no
    token was written down. Then the run ends and says what was missing; also after twice the time that one trajectory
    may take with all its attempts, however much goes on. Must exceed what an episode may be silent for (twice
    `rollout.turn_deadline_s`, for a call of the environment and its `close`). Other parts get as long to answer."""
    stop_deadline_s: float = 300.0
    """Longest wait, in seconds, for the trainer to end its step and write a checkpoint after Ctrl-C or SIGTERM. Then,
    or at a second Ctrl-C, it is killed, and a resume trains that step again. Must exceed a step to be of use."""
    max_restarts: int = 3
    """How often in a row trainer or rollout are started again after they ended by themselves, without a further step
    being trained. The trainer goes on from its newest checkpoint. 0 ends the run at once; `launch --resume` goes on."""
    health_deadline_s: float = 600.0
    """Longest silence, in seconds, of a process of trainer, rollout, critic or dedicated model before it is taken for
    frozen, killed, and treated as one that ended by itself (`max_restarts`). A thread of each gives a sign of life
    every second, whatever the others compute: only a process that was stopped, or one held inside a single call of
    the interpreter, is silent. 0 waits for ever; use it with a debugger."""
    stage_deadline_s: float = 14400.0
    """Longest time, in seconds, in which nothing may move in the status of trainer, critic or dedicated model while it
    waits for nothing: one stage of a step, a checkpoint, the start. Then it is killed, and treated as above. Must
    exceed the longest stage, compilations of the first step included; 0 sets no limit."""
    routing_replay: Literal["off", "rollout", "trainer"] = "off"
    """rollout: the trainer's routers choose the experts that the engines' chose for the same token (R3), in scoring and
    training; needs `engines.routed_experts`. It removes the part of the engines' difference in log-probs that comes
    from other experts, which is most of it in bfloat16. trainer: the updates choose the experts that the trainer itself
    chose under the weights at the start of the step (R2), found by one more forward pass; it keeps the ratio's change
    free of other experts over several `updates_per_batch`. off: every pass routes by itself."""
    updates_per_batch: int = 1
    """Optimiser steps made on each batch. With 1, weights at the start and weights being optimised are the same, so a
    clip on their ratio cannot act; more use the data again and rely on the clip."""
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    """Further options of megatron-core."""


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, and the learning-rate schedule, counted in optimiser steps."""

    lr: float = 1e-6
    """Peak learning rate. 1e-6 suits models of billions of parameters; a tiny model needs about 3e-4. It also decides
    how many bits of the weights change per version, and so the size of the snapshot history."""
    adam_beta1: float = 0.9
    """Decay of the first moment. Higher smooths the direction over more steps, which carries stale gradients
    further."""
    adam_beta2: float = 0.98
    """Decay of the second moment. Lower reacts faster when the gradient's scale changes; RL uses less than
    pretraining."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment. Larger damps parameters whose gradients are tiny."""
    weight_decay: float = 0.0
    """Decoupled decay of the weights towards zero. RL from a good checkpoint usually wants none."""
    clip_grad: float = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 switches clipping off."""
    lr_warmup_steps: int = 0
    """Optimiser steps over which the rate rises linearly from 0 to `lr`."""
    lr_decay: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the way from `lr` to `min_lr` after the warm-up."""
    lr_decay_steps: int | None = None
    """Optimiser steps at which the decay reaches `min_lr`. null: the steps of the run (steps * updates_per_batch)."""
    min_lr: float = 0.0
    """Rate at the end of the decay. Not read when `lr_decay` is constant."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """The data of one training step."""

    groups: int = 16
    """Prompts per step. More lowers the variance between tasks and lengthens the step."""
    group_size: int = 8
    """Trajectories per prompt. Group baselines need at least 2; the batch has groups * group_size trajectories."""
    max_filtered_groups: int = 0
    """Dynamic sampling (DAPO): up to so many groups per step whose rewards are all equal are filtered while the batch
    is built, and later groups take their place, so that every group carries a gradient. Costs the filtered
    trajectories; beyond the cap groups are taken as they come. 0 is off: such groups are in the batch, and only left
    out of the loss (`advantage.drop_zero_variance_groups`)."""

    @property
    def trajectories(self) -> int:
        """Trajectories per training step."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    """The loss. `name` picks a method; fields left null or "auto" take the thresholds of the method's paper."""

    name: str = "decoupled"
    """The method (see docs/algorithms): which ratio, weight, mask and surrogate the loss is made of."""
    anchor: str = "auto"
    """Log-probs in the denominator of the surrogate's ratio. "auto": the method's own. A tight mask only means engine
    noise if the anchor is exact; with any other, version drift enters the mask and rejects usable tokens."""
    mask_low: float | None = None
    """Lower end of the window of the discrepancy ratio old/rollout; tokens below are rejected. 0 switches it off."""
    mask_high: float | None = None
    """Upper end of the window of the discrepancy ratio; tokens above are rejected. `.inf` switches it off."""
    clip_low: float | None = None
    """Epsilon below 1 at which the surrogate's ratio is clipped. Smaller is a smaller step per update."""
    clip_high: float | None = None
    """Epsilon above 1. Larger than `clip_low` (clip-higher) lets unlikely tokens grow and keeps the entropy up."""
    weight: str = "auto"
    """Detached factor on each token's loss: none, discrepancy (old/rollout), truncated (its minimum with a cap), total
    (current/rollout). "auto": the method's own. Weights correct a bias and add variance."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_sum"] = "token_mean"
    """How token losses become one number, over the global batch. token_mean weighs every token alike;
    sequence_mean_token_mean weighs every trajectory alike; sequence_sum is the unnormalised policy gradient divided by
    the number of trajectories."""
    rejected_in_denominator: bool = True
    """Count masked tokens in the mean's denominator. False makes the step larger the more tokens are rejected."""
    kl_coefficient: float = 0.0
    """Weight of the KL penalty towards the reference policy (version 0). 0 needs no reference forward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL per token: k1 = log ratio, k2 = its half square, k3 = ratio - 1 - log ratio (low
    variance)."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus. Positive keeps exploring, at the price of an entropy pass over the vocabulary."""
    dual_clip: float | None = None
    """For negative advantages, the largest multiple of the advantage the surrogate may reach. null switches it
    off."""
    options: dict[str, float | str | bool] = field(default_factory=dict)
    """Options of the method or of its anchor, by name; unknown ones are refused (see docs/algorithms)."""


MOST_ROLLOUTS = 64


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How agents are run against the engines."""

    max_staleness: int = 1
    """Most versions a token may lag behind the trainer when it is trained on, time in the queue included. 0 is
    synchronous; larger overlaps more and needs an objective that corrects for it."""
    admission: Literal["throttle", "drop", "wait", "window"] = "throttle"
    """Which groups start, and when. throttle: those that will be trained within `max_staleness`. window: likewise,
    and batches are formed in the order of start (see `window`). wait: rounds of what `max_staleness` has room for, the
    next one when all of the last has been trained. drop: always; what is too old when a batch is built is dropped."""
    window: int = 0
    """With admission window: groups started before a group that may still be unfinished when it is trained. 0 trains
    strictly in the order of start, and waits for the longest."""
    over_sampling: float = 0.0
    """Share of a batch's groups that are started beyond what it needs; the slowest are dropped when it is full. Hides
    stragglers, throws tokens away, and favours short answers (`length/dropped_over_kept`)."""
    concurrency: int = 32
    """Trajectories running at once. More keeps the engines busy and raises the version gap."""
    max_turns: int = 16
    """Turns of the policy after which a trajectory is truncated."""
    max_new_tokens: int = 512
    """Most tokens of one turn, over all its partial responses."""
    max_tokens: int = 4096
    """Most tokens of a whole trajectory, prompt and observations included. Longer ones end as truncated."""
    temperature: float = 1.0
    """Sampling temperature. The trainer applies it to its logits too, so both speak of the same policy."""
    top_p: float = 1.0
    """Nucleus of sampling. Below 1 the sampled distribution is not the trained one and ratios are biased; it
    warns."""
    top_k: int = -1
    """Tokens kept before sampling; -1 keeps all. Biases ratios like top_p."""
    chat_template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, in rollout, evaluation and warm start; `{enable_thinking: false}` switches the
    thinking of Qwen3 off. An endpoint that is evaluated gets them as `chat_template_kwargs`."""
    turn_deadline_s: float = 300.0
    """Longest wait for one turn of the policy or one step of the environment. Then the trajectory fails, and is not
    counted as reward 0. An environment that blocks the event loop for so long, whose calls no deadline can end, ends
    the rollout process, which names it and is started again (`trainer.max_restarts`)."""
    trajectory_deadline_s: float = 1800.0
    """Longest life of one attempt of a trajectory. Then it fails, and is played again (`max_retries`). One that goes on
    after a restart of the rollout gets it anew."""
    max_retries: int = 3
    """How often a request to an engine that failed is repeated before the trajectory counts as failed, and how often a
    trajectory that failed is played again (see `partial_groups`)."""
    partial_groups: Literal["drop", "keep"] = "drop"
    """What becomes of a group one of whose members failed `max_retries` + 1 times. drop: it is given up at once, with
    the members that finished. keep: the others go on, and it is trained with those that finish, at least 2 where the
    estimator compares the members of a group; the batch is smaller then, and members that fail more often the longer
    they get make the groups that are left shorter."""
    poll_s: float = 0.1
    """Seconds between two looks at the bank for a new version or free capacity. Smaller reacts faster, asks more."""
    process: int = 0
    """Number of this rollout process, from 0 to 63, when several fill one bank (`bank.url`). One process per number:
    started again, it goes on with what it left. `launch` starts number 0; give further ones theirs with --set."""
    takeover_s: float = 60.0
    """Seconds for which the number of another rollout process may be without a process, although it left groups
    unfinished, before this one goes on with them. Longer than a restart takes leaves them to their own number; until
    then they hold room that nobody uses."""
    flush_s: float = 2.0
    """Seconds between two rounds that write the tokens of running trajectories into the bank. A kill of the rollout
    loses at most what came since the last one; environments that can be replayed go on from there. A trajectory is
    written whole, so one of 16,384 tokens or more is written every n-th round only, n = tokens / 8,192 and at most 16.
    0 writes down finished trajectories only: those under way begin anew."""


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """What the agent acts in."""

    name: str = "desk"
    """The environment, by its registered name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that environment, checked by it."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The SGLang servers that sample."""

    count: int = 1
    """Servers to start. Generation scales with it; each holds a copy of the model."""
    host: str = "127.0.0.1"
    """Address the servers listen on. Use an address other nodes can reach when rollout or trainer run elsewhere; the
    servers then ask for a key, which is made for the run and lies in its folder (.engine_key)."""
    base_port: int = 0
    """Port of the first server; the others take the next ones. 0 picks free ports."""
    tensor_parallel_size: int = 1
    """Ranks of one server. Needed when the model does not fit one device."""
    max_total_tokens: int = 65536
    """Tokens the KV cache of one server holds. It bounds how many trajectories run at once without retraction."""
    mem_fraction_static: float = 0.8
    """Share of device memory for weights and KV cache. Lower it when trainer and engine share a device or the
    host."""
    start_deadline_s: float = 300.0
    """Longest wait for a server to answer. At the beginning the run then ends with the tail of the server's log; later,
    when the server is started again, that counts as a failure."""
    health_deadline_s: float = 60.0
    """Longest silence of a server, beyond `publish.deadline_s` (it may be deaf while it loads weights), before it is
    taken for frozen, killed and started again."""
    max_restarts: int = 3
    """How often one server (or the router) is started again within `restart_window_s` before it is given up. A server
    takes requests again once it holds the published version. 0 gives up at the first failure."""
    restart_window_s: float = 1800.0
    """Failures older than this are forgotten."""
    quorum: int = 1
    """Fewest servers with which the run goes on. Those being started again count; with fewer the run ends and says why
    each was given up."""
    max_in_flight: int = 1024
    """Most requests of the rollout on one server at once; further ones wait in the rollout, where they can still go to
    another server."""
    router: bool = False
    """Put sglang-router in front of the servers: it spreads requests by the prefixes that each server has in its cache.
    Weights and pauses still go to the servers directly."""
    routed_experts: bool = False
    """Record which experts each token was routed to, so that the trainer can replay them. Costs bytes per token."""
    extra_args: tuple[str, ...] = ()
    """Arguments added to SGLang's command line as they are."""


@dataclass(frozen=True, slots=True)
class PublishConfig:
    """How new weights reach the engines."""

    transport: Literal["distributed", "disk"] = "distributed"
    """distributed broadcasts over a process group; disk writes a checkpoint that the servers read, which needs a file
    system that both sides see and is slower."""
    pause_mode: Literal["retract", "abort", "in_place", "drain"] = "retract"
    """What happens to running requests: retract recomputes their KV cache under the new weights, so old log-probs stay
    exact; abort ends them as partial responses that are continued; in_place continues over the old cache, which is
    fastest and leaves the tokens after the switch without exact log-probs (they are flagged); drain gives an engine no
    new requests, lets the running ones end under the old weights, and then updates it while the other engines serve:
    no answer is interrupted, and the trainer waits for one engine after the other."""
    drain_s: float = 60.0
    """With pause_mode drain: longest wait for the running requests of an engine. Those that still run are retracted."""
    drain_at_once: int = 1
    """With pause_mode drain: engines that are drained at a time. More is a shorter wait, and fewer serve meanwhile."""
    bucket_bytes: int = 256 * MIB
    """Weights sent in one message. Larger is fewer messages and more memory on both sides."""
    verify: Literal["canary", "checksum", "off"] = "canary"
    """Proof that an engine has the trainer's weights: log-probs of a canary prompt, a position-sensitive checksum of
    every tensor, or none."""
    verify_every: int = 1
    """Verify each n-th publishing."""
    every: int = 1
    """Publish after each n-th training step. More lets engines run longer undisturbed and raises the version gap."""
    deadline_s: float = 120.0
    """Longest time for one publishing. Then the engine that did not answer is named, left out and started again, and
    the run goes on with the others."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The machines of a run and what they hold. Machines are numbered: those of the trainer first (`trainer.nodes`),
    then those that hold only engines; the first one also runs rollout, bank and evaluation."""

    devices_per_node: int = 0
    """Accelerators on each machine. Trainer ranks take the first ones, engines on the same machine the next. 0 assigns
    none: on a machine without any, or where the processes shall see them all."""
    device_memory_gib: float = 0.0
    """Memory of one accelerator. A plan that needs more is refused with the arithmetic; 0 checks nothing."""
    host_memory_gib: float = 0.0
    """Memory of one machine, for the part of the history that lies there. 0 checks nothing."""
    headroom: float = 0.1
    """Share of an accelerator's memory that the plan leaves to the runtime, communication buffers and fragmentation."""
    engine_nodes: int = 0
    """Machines that hold only engines, after the trainer's; the engines are spread evenly over them. 0: all engines run
    on the first machine, beside the trainer's ranks."""
    rendezvous_port: int = 29500
    """Port on the first machine where the trainer's ranks of several machines meet. Not used on one machine."""
    join_deadline_s: float = 900.0
    """Longest wait of a machine for the first one to get ready, and of the first one for the others' engines."""

    def nodes(self, trainer_nodes: int) -> int:
        """Machines in all."""
        return trainer_nodes + self.engine_nodes


@dataclass(frozen=True, slots=True)
class BankConfig:
    """Where trajectories, versions and steps are kept."""

    url: str = ""
    """SQLAlchemy address. Empty: an SQLite file in the run's folder. Several nodes need a PostgreSQL address. A
    password may stand in it, or come from PGPASSWORD or ~/.pgpass."""
    keep: Literal["auto", "all", "resumable"] = "auto"
    """Tokens, log-probs and experts of trajectories that were trained or thrown away. all: they stay, so that the run
    can be replayed and looked into. resumable: they are deleted once `checkpoint.keep_last` generations hold what they
    taught, and the disk holds no more than a resume needs. auto: resumable with `engines.routed_experts`, which takes
    bytes for every token, layer and expert, else all."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Generations from which `launch --resume` goes on: weights, optimiser, schedule, versions, baselines, random
    state. Any layout can read what another wrote."""

    every: int = 20
    """Training steps between generations; one more is made after the last step. A kill costs the work of at most so
    many steps, whose recorded batches are trained again; the history keeps the versions that this may ask for. 0 makes
    none: a resume then begins at the starting checkpoint, and the bank keeps everything (`bank.keep`)."""
    keep_last: int = 2
    """Complete generations that are kept; older ones are removed. Each takes 12 bytes per parameter beside the
    weights."""
    asynchronous: bool = True
    """Write while training goes on, which then waits only for the copy. false waits for the disk."""


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Measuring the policy on held-out tasks."""

    tasks: int = 100
    """Held-out tasks. The standard error of a success rate near one half is 50 / sqrt(tasks) points."""
    samples_per_task: int = 1
    """Trajectories per task; pass^k needs at least k."""
    every: int = 0
    """Training steps between evaluations; 0 evaluates only before and after. They share the engines with the rollouts,
    training does not wait for them, and each says which versions it saw; one at a time."""
    temperature: float = 1.0
    """Sampling temperature of evaluations; 0 is greedy. 1 measures the policy that is trained."""


@dataclass(frozen=True, slots=True)
class WarmStartConfig:
    """Supervised learning on demonstrations before RL (the command `sft`); steps, batch and optimiser are the run's."""

    demonstrations: int = 4000
    """Demonstrations taken from the environment. They are of mixed quality: RL needs something left to learn."""
    context_weight: float = 0.0
    """Weight of the loss on tokens the policy did not write (prompts, tool results). A little teaches a tiny model the
    language of the domain; 0 trains the actions alone."""


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    """What a run shows and writes."""

    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    progress: Literal["rich", "plain", "off"] = "rich"
    """rich redraws a table, plain prints a line per step (also chosen when the output is no terminal), off is
    silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run needs; its resolved form is written to the run's folder."""

    name: str
    """Name of the run and of its folder. A folder that already holds a run is refused, or emptied by --fresh."""
    run_dir: str = "runs"
    """Folder that holds the folders of runs."""
    seed: int = 0
    """Seed of tasks, sampling of prompts and initial random states. Asynchrony makes two runs differ all the same."""
    steps: int = 100
    """Training steps: batches taken from the bank."""
    model: ModelConfig
    """The policy."""
    layout: LayoutConfig = LayoutConfig()
    """Parallel layout of the trainer."""
    trainer: TrainerConfig = TrainerConfig()
    """Processes and micro-batches of the trainer."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimiser and schedule."""
    batch: BatchConfig = BatchConfig()
    """Size of a step."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """The loss."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    critic: CriticConfig = CriticConfig()
    """Value model."""
    old_logits: OldLogitsConfig = OldLogitsConfig()
    """Where old log-probs come from."""
    snapshots: SnapshotsConfig = SnapshotsConfig()
    """History of the weights."""
    rollout: RolloutConfig = RolloutConfig()
    """Agents and sampling."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Tasks and rewards."""
    engines: EngineConfig = EngineConfig()
    """Inference servers."""
    publish: PublishConfig = PublishConfig()
    """Weights from trainer to engines."""
    cluster: ClusterConfig = ClusterConfig()
    """The machines and their memory."""
    bank: BankConfig = BankConfig()
    """Storage of trajectories."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What a run resumes from."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out success."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised start."""
    observe: ObserveConfig = ObserveConfig()
    """Metrics and progress."""

    @property
    def run_path(self) -> Path:
        """Folder of this run: configuration, metrics, events, bank, checkpoints."""
        return Path(self.run_dir) / self.name

    @property
    def bank_url(self) -> str:
        """`bank.url`, or the SQLite file in the run's folder."""
        return self.bank.url or f"sqlite:///{self.run_path / 'bank.sqlite'}"

    @property
    def critic_layout(self) -> LayoutConfig:
        """Of the ranks that the critic lives on: `critic.layout`, or the actor's where it shares them."""
        return self.critic.layout or self.layout
