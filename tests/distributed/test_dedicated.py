"""A second model on ranks of its own follows the actor by differences and scores what waits, exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.distributed.launch import start_world
from tests.engine_reference import make_model

ACTOR = Path(__file__).with_name("dedicated_actor.py")


def write_config(folder: Path, world_size: int) -> Path:
    make_model("moe").save_pretrained(folder / "model")
    config = {
        "name": "job",
        "run_dir": str(folder),
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "layout": {"world_size": world_size, "expert_model_parallel_size": world_size},
        "trainer": {"deadline_s": 60, "micro_batch_tokens": 256},
        "optimizer": {"lr": 1e-2},
        "objective": {"name": "ppo", "anchor": "dedicated"},
        "batch": {"groups": 7, "group_size": 1},
        "rollout": {"max_staleness": 3, "max_tokens": 256},
    }
    file = folder / "job" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.parametrize(("ranks", "first"), [(1, 4), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_the_dedicated_model_scores_every_version_as_the_actor_did(
    tmp_path: Path, ranks: int, first: int
) -> None:
    """first: the version that the actor starts with; 0 is the checkpoint, 4 as after a resume."""
    file, findings = write_config(tmp_path, ranks), tmp_path / "findings.json"
    score = ["-m", "megatron_async", "score", "--config", str(file)]
    scorer = start_world(score, ranks, tmp_path / "scorer.log")
    actor = start_world([str(ACTOR), str(file), str(findings), str(first)], ranks, tmp_path / "actor.log")
    try:
        codes = [actor.wait(timeout=200), scorer.wait(timeout=60)]
    finally:
        for process in (actor, scorer):
            process.kill()
    logs = "\n".join((tmp_path / f"{name}.log").read_text()[-3000:] for name in ("actor", "scorer"))
    assert codes == [0, 0], logs
    found = json.loads(findings.read_text())
    assert found["compared"] == 8 * 8
    assert found["missing"] == 0
    # bf16 products of other packings: the same weights, two units in the last place of a logit between 2 and 4. Another
    # version's weights give something else by far.
    assert found["worst"] <= 2 * 2**-6, found
    assert found["moved"] > 0.3, found
    assert found["sent_bytes"] > 0
    timeline = [json.loads(line) for line in (tmp_path / "job" / "timeline.jsonl").read_text().splitlines()]
    assert {row["stage"] for row in timeline if row["part"] == "scorer"} == {"follow", "score"}
