"""Evaluations of one run at a time: none damages another, and a job does not end because of one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from megatron_async import launch
from megatron_async.claim import InUse, held
from megatron_async.evaluate import EvaluatedPolicy
from megatron_async.observe import RunFiles, read_evaluations
from megatron_async.rollout import evaluation
from megatron_async.rollout.evaluation_files import results_folder
from megatron_async.rollout.evaluation_journal import EvaluationJournal
from megatron_async.supervise import PartFailed
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.test_rollout_process import make_run


def test_a_second_evaluation_is_refused_and_the_first_is_not_disturbed(
    tmp_path: Path, smallest_checkpoint: Path
) -> None:
    async def scenario() -> None:
        async with ScriptedEngine(6) as engine:
            config = make_run(tmp_path, smallest_checkpoint, [engine.url])
            outcomes = await asyncio.gather(
                *(asyncio.to_thread(evaluation.evaluate_run, config, tmp_path / "here") for _ in range(3)),
                return_exceptions=True,
            )
            played = [one for one in outcomes if not isinstance(one, BaseException)]
            refused = [one for one in outcomes if isinstance(one, BaseException)]
            assert played and all(one.episodes == 6 for one in played), outcomes
            assert all(isinstance(one, InUse) for one in refused)
            assert not (tmp_path / "here/under_way").exists()

    asyncio.run(scenario())


def test_a_job_goes_on_beside_the_evaluation_of_a_command(tmp_path: Path, smallest_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with ScriptedEngine(6) as engine:
            config = make_run(tmp_path, smallest_checkpoint, [engine.url])
            results = EvaluatedPolicy().place(config)
            with held(results / evaluation.JOURNAL_CLAIM, "", "", ""):
                with pytest.raises(InUse, match=r"another evaluation writes to .*process \d+ runs there"):
                    await asyncio.to_thread(evaluation.evaluate_run, config, results)
                await asyncio.to_thread(launch._evaluate, config, [engine.url], 7)
            (row,) = read_evaluations(config.run_path)
            assert (row["step"], row["episodes"]) == (7, 6)
            kept = RunFiles(config.run_path).evaluation / "after_7_steps" / config.environment.name
            assert json.loads((kept / "evaluation.json").read_text())["episodes"] == 6

    asyncio.run(scenario())


def test_files_that_fail_cost_a_job_the_evaluation_alone(
    tmp_path: Path, smallest_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def died() -> None:
        raise PartFailed("an engine died")

    async def scenario() -> None:
        async with ScriptedEngine(6) as engine:
            config = make_run(tmp_path, smallest_checkpoint, [engine.url])
            journal = results_folder(config, "after_3_steps") / "under_way"
            journal.parent.mkdir(parents=True)
            journal.write_text("a file where the journal's folder should be")
            await asyncio.to_thread(launch._evaluate, config, [engine.url], 3)
            journal.unlink()
            with monkeypatch.context() as failing:
                failing.setattr(EvaluationJournal, "save", full)  # in the midst of it: raised as a group
                await asyncio.to_thread(launch._evaluate, config, [engine.url], 4)
            assert read_evaluations(config.run_path) == []
            engine.token_s = 1.0  # so that it is under way at the first tick
            with pytest.raises(PartFailed, match="an engine died"):
                await asyncio.to_thread(launch._evaluate, config, [engine.url], 5, died)

    asyncio.run(scenario())
    told = capsys.readouterr().out
    assert "the evaluation after 3 steps failed" in told and "the evaluation after 4 steps failed" in told


def test_results_say_which_weights_were_evaluated(tmp_path: Path, smallest_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with ScriptedEngine(6) as engine:
            engine.version = 3
            config = make_run(tmp_path, smallest_checkpoint, [engine.url])
            await asyncio.to_thread(evaluation.evaluate_run, config, tmp_path / "here")
            (row,) = read_evaluations(config.run_path)
            subject = row["subject"]
            assert (subject["kind"], subject["place"], row["versions"]) == ("engines", str(smallest_checkpoint), [3, 3])
            assert subject["digest"] and subject["sampling"]["temperature"] == 1.0
            assert subject["limits"] == {"max_turns": 3, "max_tokens": 512}
            json.dumps(row, allow_nan=False)

    asyncio.run(scenario())
