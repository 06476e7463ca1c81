"""The password of a bank's address: kept for the parts of the run, and shown to nobody else."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from sqlalchemy import event

from megatron_async import cli, launch
from megatron_async.bank import Bank
from megatron_async.bank.dialects import make_engine
from megatron_async.bank.errors import BankOpenError
from megatron_async.config import dump, load
from megatron_async.config.schema import RunConfig
from megatron_async.passwords import hide_password, holds_password
from megatron_async.training.checkpointing import places

SECRET = "pa55word"
NOWHERE = f"postgresql://me:{SECRET}@127.0.0.1:1/runs"
"""Nobody listens on port 1."""


def configured(tmp_path: Path, url: str = NOWHERE) -> RunConfig:
    file = tmp_path / "job.yaml"
    file.write_text(f"name: a\nrun_dir: {tmp_path / 'runs'}\nmodel: {{path: model}}\nbank: {{url: '{url}'}}\n")
    return load(file)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    "url",
    [
        NOWHERE,
        f"postgresql+psycopg://me:{SECRET}@/runs?host=/tmp",
        f"postgresql://:{SECRET}@db/runs",
        f"postgresql://me:p@/{SECRET}:@db/runs",
        f"postgresql://db/runs?user=me&password={SECRET}&connect_timeout=3",
        f"postgresql://db/runs?sslPassword={SECRET}",
        f"mysql://me:{SECRET}@db/runs",
        f"no address://me:{SECRET}@db",
    ],
)
def test_no_part_of_a_password_is_shown(url: str) -> None:
    shown = hide_password(url)
    assert SECRET not in shown and "***" in shown and holds_password(url)
    assert hide_password(shown) == shown
    with pytest.raises(BankOpenError) as failed:
        Bank.open(url if "postgresql" not in url else f"x{url}")
    assert SECRET not in str(failed.value)


@pytest.mark.parametrize(
    "url",
    ["", "sqlite:///runs/a@b/bank.sqlite", "sqlite:////a:b/bank.sqlite", "postgresql://me@db:5432/runs?options=-cx%3D1"],
)
def test_an_address_without_one_is_shown_as_it_is(url: str) -> None:
    assert hide_password(url) == url and not holds_password(url)


def test_a_bank_that_cannot_be_reached_is_named_without_it() -> None:
    with pytest.raises(BankOpenError, match=r"postgresql://me:\*\*\*@127.0.0.1:1/runs") as failed:
        Bank.open(NOWHERE)
    assert SECRET not in str(failed.value)
    with pytest.raises(BankOpenError, match=r"me:\*\*\*@") as failed:
        Bank.open_to_read(NOWHERE)
    assert SECRET not in str(failed.value)


def test_the_runs_folder_keeps_it_for_its_owner_alone(tmp_path: Path) -> None:
    files = launch.create_folder(configured(tmp_path, ""), fresh=False)
    assert mode(files.config) & 0o077, "an ordinary file: the user's mask decides"
    config = configured(tmp_path)
    assert launch.create_folder(config, fresh=False, resume=True).config == files.config
    assert mode(files.config) == 0o600
    assert load(files.config) == config and config.bank.url == NOWHERE


def test_a_dry_run_and_a_checkpoint_do_not_show_it(
    tmp_path: Path, smallest_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path)
    model = f"model.path={smallest_checkpoint}"
    assert cli.main(["launch", "--config", str(tmp_path / "job.yaml"), "--set", model, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "postgresql://me:***@127.0.0.1:1/runs" in printed.out
    assert SECRET not in printed.out + printed.err
    assert places(config)["bank"] == "postgresql://me:***@127.0.0.1:1/runs"
    assert SECRET in dump(config), "parts of the run read it"


def test_a_password_of_the_environment_outlives_its_hiding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are opened when they are needed, also after environment code has come into the process."""
    monkeypatch.setenv("PGPASSWORD", SECRET)
    engine, other = make_engine("postgresql://me@db/runs"), make_engine("postgresql://me:own@db/runs")
    monkeypatch.delenv("PGPASSWORD")
    assert (engine.url.password, other.url.password) == (SECRET, "own")
    assert SECRET not in str(engine.url)


def test_a_password_file_of_the_environment_outlives_its_hiding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSFILE", "/secret/pgpass")
    engines = [make_engine("postgresql://me@db/runs"), make_engine("postgresql://me@db/runs?passfile=/own")]
    monkeypatch.delenv("PGPASSFILE")
    asked: list[str] = []

    def note(_dialect: object, _record: object, _arguments: object, options: dict[str, str]) -> None:
        asked.append(options["passfile"])
        raise ConnectionError

    for engine in engines:
        event.listen(engine, "do_connect", note)
        with pytest.raises(ConnectionError):
            engine.connect()
    assert asked == ["/secret/pgpass", "/own"]
