"""The bank's tables. Rows stay small: payloads (tokens, log-probs, routed experts) live in a table of their own.

    prompts 1--n groups 1--n trajectories 1--1 payloads        trajectories n--1 steps        versions (a graph)

`groups` carries the counts of its members, so that taking a batch and polling read a few index entries, however
many trajectories the bank holds. `queue` is that index's key: the number of members waiting to be trained, 0 while
none waits or the group is done, CLOSED_QUEUE for a closed group that goes as it is.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from megatron_async.bank.texts import LONGEST_ID, ForeignId, Reason

SCHEMA = 2
"""Number of this layout; a bank of another number is refused, not guessed at."""

CLOSED_QUEUE = 1_000_000

metadata = MetaData()
# SQLite only numbers INTEGER primary keys by itself.
_Position = BigInteger().with_variant(Integer, "sqlite")
_RUNNING, _WAITS = text("state = 'running'"), text("min_updates IS NOT NULL")

schema = Table("bank_schema", metadata, Column("number", Integer, primary_key=True))

prompts = Table(
    "prompts",
    metadata,
    Column("prompt_id", ForeignId, primary_key=True),
    Column("task", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("position", _Position, primary_key=True, autoincrement=True),
    Column("group_id", String(LONGEST_ID), nullable=False, unique=True),
    Column("prompt_id", ForeignId, ForeignKey("prompts.prompt_id"), nullable=False),
    Column("running", Integer, nullable=False, default=0),
    Column("waiting", Integer, nullable=False, default=0),
    Column("failed", Integer, nullable=False, default=0),
    Column("min_updates", BigInteger),  # over the waiting members
    Column("closed", Boolean, nullable=False, default=False),
    Column("done", Boolean, nullable=False, default=False),
    Column("queue", Integer, nullable=False, default=0),
    CheckConstraint("running >= 0 AND waiting >= 0 AND failed >= 0", name="ck_groups_counts"),
    CheckConstraint("queue >= 0 AND (queue = 0 OR NOT done)", name="ck_groups_queue"),
    Index("ix_groups_queue", "queue", "position"),
    Index("ix_groups_min_updates", "min_updates", sqlite_where=_WAITS, postgresql_where=_WAITS),
    Index("ix_groups_open", "done", "position"),
    sqlite_autoincrement=True,
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("position", _Position, primary_key=True, autoincrement=True),
    Column("trajectory_id", String(LONGEST_ID), nullable=False, unique=True),
    Column("group_position", BigInteger, ForeignKey("groups.position"), nullable=False),
    Column("state", String(16), nullable=False),
    Column("status", String(32), nullable=False),
    Column("reward", Float),
    Column("tokens", Integer, nullable=False, default=0),
    Column("action_tokens", Integer, nullable=False, default=0),
    Column("min_version", BigInteger),
    Column("max_version", BigInteger),
    Column("min_updates", BigInteger),  # of a finished one: fewest updates behind the version of a token
    Column("step", BigInteger),
    Column("reason", Reason),
    Column("started_at", Float, nullable=False),
    Column("finished_at", Float),
    CheckConstraint("(state IN ('reserved', 'trained')) = (step IS NOT NULL)", name="ck_trajectories_step"),
    Index("ix_trajectories_group", "group_position", "position"),
    Index("ix_trajectories_step", "step", "position"),
    Index("ix_trajectories_running", "position", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
    sqlite_autoincrement=True,
)

payloads = Table(
    "payloads",
    metadata,
    Column("position", _Position, ForeignKey("trajectories.position"), primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

state_counts = Table(
    "state_counts",
    metadata,
    Column("state", String(16), primary_key=True),
    Column("n", BigInteger, nullable=False),
    CheckConstraint("n >= 0", name="ck_state_counts"),
)

versions = Table(
    "versions",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("parent", BigInteger, ForeignKey("versions.version")),
    Column("updates", BigInteger, nullable=False),  # of the starting checkpoint, that led here
    Column("step", BigInteger),
    Column("created_at", Float, nullable=False),
    CheckConstraint("parent IS NULL OR parent < version", name="ck_versions_parent"),
)

steps = Table(
    "steps",
    metadata,
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("state", String(16), nullable=False),
    Column("version_before", BigInteger),
    Column("version_after", BigInteger),
    Column("trajectories", Integer, nullable=False),
    Column("metrics", Text),
    Column("reserved_at", Float, nullable=False),
    Column("committed_at", Float),
    CheckConstraint("state IN ('reserved', 'committed', 'redo')", name="ck_steps_state"),
    Index("ix_steps_state", "state", "step"),
)

scores = Table(
    "old_logprobs",
    metadata,
    Column("trajectory_id", String(255), primary_key=True),
    Column("min_version", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

key_values = Table(
    "key_values",
    metadata,
    Column("key", String(255), primary_key=True),
    Column("value", Text, nullable=False),
)

cursors = Table(
    "cursors",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
