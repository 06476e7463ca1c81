"""Who may reach what: loopback and keys, nothing unpickled, no credentials for environments, no way out of a folder."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_async import fleet as fleets
from megatron_async.config import from_dict
from megatron_async.config.checks import is_local
from megatron_async.config.hf import checkpoint_problems
from megatron_async.config.placement import place
from megatron_async.config.schema import EngineConfig, RunConfig
from megatron_async.credentials import hidden_credentials, is_credential
from megatron_async.engine_key import ensure_key, read_key
from megatron_async.observe import RunFiles
from sglang_bridge import (
    EngineClient,
    EngineServer,
    EngineStartError,
    SamplingOptions,
    ServerOptions,
    addresses,
    lifetime,
    server,
)
from sglang_bridge.router import router_command
from tests.unit.bridge_endpoint import LENGTH, ScriptedEndpoint, event, has_ipv6

ROOT = Path(__file__).resolve().parents[2]
KEY = "k3y-of-the-run"


def run_config(tmp_path: Path, **sections: Any) -> RunConfig:
    config = from_dict({"name": "r", "run_dir": str(tmp_path), "model": {"path": "m"}, **sections})
    config.run_path.mkdir(parents=True, exist_ok=True)
    return config


# ---------------------------------------------------------------------- loopback and keys


def test_everything_listens_on_loopback_unless_told_otherwise(tmp_path: Path) -> None:
    assert addresses.is_loopback(EngineConfig().host)
    assert addresses.is_loopback(EngineServer("m", log_path=tmp_path / "log").host)
    command = router_command("127.0.0.1", 1, 2)
    assert [command[i + 1] for i, word in enumerate(command) if word.endswith("-host")] == ["127.0.0.1", "127.0.0.1"]


OTHERS_REACH = ["0.0.0.0", "::", "10.0.0.7", "gpu-node-3", "128.0.0.1", "fd00::5", "::ffff:10.0.0.7", "0", "",
                "127.0.0.1.example.com", "127-0-0-1", "localhost.example.com"]  # fmt: skip


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1", "0:0:0:0:0:0:0:1", *OTHERS_REACH])
def test_what_is_loopback_is_the_same_to_bridge_and_configuration(host: str) -> None:
    assert addresses.is_loopback(host) == (host not in OTHERS_REACH)
    assert is_local(host) == (addresses.is_loopback(host) or host in ("0.0.0.0", "::"))


@pytest.mark.parametrize("host", OTHERS_REACH)
def test_an_engine_that_others_could_reach_needs_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"could read and replace its weights: give it a key"):
        EngineServer("m", host, log_path=tmp_path / "log").start()


def test_the_key_is_in_no_command_line_and_in_no_log_that_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, Any] = {}

    def start(command: list[str], **options: Any) -> Any:
        started.update(command=command, **options)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(server.subprocess, "Popen", start)
    options = ServerOptions(api_key=KEY)
    EngineServer(str(tmp_path), "0.0.0.0", log_path=tmp_path / "engine.log", options=options).start()
    assert not any(KEY in word for word in started["command"])
    assert KEY not in repr(options)
    assert KEY not in (tmp_path / "engine.log").read_text()
    assert stat.S_IMODE((tmp_path / "engine.log").stat().st_mode) == 0o600
    monkeypatch.setenv(lifetime.KEY_VARIABLE, started["env"][lifetime.KEY_VARIABLE])
    assert lifetime.take_key(["--port", "1"]) == ["--port", "1", "--api-key", KEY]
    assert lifetime.KEY_VARIABLE not in os.environ  # what the server starts does not inherit it


def test_a_run_makes_a_key_only_where_others_could_reach_its_engines(tmp_path: Path) -> None:
    alone = run_config(tmp_path / "alone")
    fleet = fleets.fleet(alone, RunFiles(alone.run_path), place(alone)[0], "127.0.0.1", print)
    fleet.close()
    assert read_key(alone.run_path) == "" and fleet._options(()).api_key == ""
    spread = run_config(tmp_path / "spread")
    fleet = fleets.fleet(spread, RunFiles(spread.run_path), place(spread)[0], "10.0.0.7", print)
    fleet.close()
    key = read_key(spread.run_path)
    assert len(key) >= 32 and fleet._options(()).api_key == key
    assert ensure_key(RunFiles(spread.run_path)) == key
    assert stat.S_IMODE(RunFiles(spread.run_path).engine_key.stat().st_mode) == 0o600


def test_machines_that_make_the_key_at_once_agree(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    with ThreadPoolExecutor(8) as machines:
        keys = set(machines.map(lambda _: ensure_key(files), range(8)))
    assert keys == {read_key(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == [".engine_key"]


def test_all_interfaces_count_as_reachable(tmp_path: Path) -> None:
    config = run_config(tmp_path, engines={"host": "0.0.0.0"})
    fleet = fleets.fleet(config, RunFiles(config.run_path), place(config)[0], config.engines.host, print)
    fleet.close()
    assert read_key(config.run_path)


@pytest.mark.parametrize("host", ["", "[::1]", "node:80/x", "http://node"])
def test_what_is_no_address_is_refused_before_anything_starts(host: str, tmp_path: Path) -> None:
    from megatron_async.config import ConfigError, check

    with pytest.raises(ConfigError, match=r"engines.host: .* is no address"):
        check(run_config(tmp_path, engines={"host": host}), needs_weights=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::"])
def test_a_server_is_reached_under_its_url_wherever_it_listens(host: str, tmp_path: Path) -> None:
    async def run() -> None:
        engine = ScriptedEndpoint()
        engine.host = host
        async with engine:
            reached = EngineServer("m", host, engine.port, log_path=tmp_path / "log")
            async with EngineClient(reached.url, retries=0) as client:
                assert await client.version() == 7

    if host.startswith("::") and not has_ipv6():
        pytest.skip("no IPv6 here")
    asyncio.run(run())


def test_every_request_of_a_client_carries_the_key() -> None:
    seen: list[str | None] = []

    async def note(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({**event([11], 1, finish=LENGTH), "weight_version": "7"})

    async def run() -> None:
        async with ScriptedEndpoint(note) as engine, EngineClient(engine.url, api_key=KEY) as client:
            engine.control = note
            await client.version()
            await client.generate([1, 2, 3], SamplingOptions(max_new_tokens=4))

    asyncio.run(run())
    assert seen == [f"Bearer {KEY}"] * 2


def test_an_address_of_another_machine_is_named_as_what_it_is() -> None:
    with pytest.raises(EngineStartError, match="192.0.2.1: it is no address of this machine"):
        server.claim_port("192.0.2.1", 0)  # a documentation address: no machine has it


# ---------------------------------------------------------------------- nothing unpickled

_UNPICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
_OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
            "recv_object_list"}  # fmt: skip


def _unsafe(node: ast.AST) -> str | None:
    """Why a piece of code unpickles, or lets a library do it; None when it does not."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        return f"imports {module}" if (module or "").split(".")[0] in _UNPICKLE else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    called = ast.unparse(node.func)
    options = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if node.func.attr in _OBJECTS:
        return f"{called} unpickles what other ranks send"
    if called == "torch.load" and options.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if called in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
        return "np.load with allow_pickle"
    return None


def test_no_code_of_ours_unpickles() -> None:
    found = []
    for package in ("megatron_async", "sglang_bridge"):
        files = sorted((ROOT / package).rglob("*.py"))
        assert files
        for path in files:
            for node in ast.walk(ast.parse(path.read_text())):
                reason = _unsafe(node)
                if reason:
                    found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {reason}")
    assert found == []


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from pickle import loads", "torch.load(f)", "torch.load(f, weights_only=False)",
     "dist.all_gather_object(a, b)", "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(code: str) -> None:
    assert any(_unsafe(node) for node in ast.walk(ast.parse(code)))


# ---------------------------------------------------------------------- credentials


def test_what_looks_like_a_credential() -> None:
    secret = ["OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "WANDB_API_KEY",
              "GITHUB_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", lifetime.KEY_VARIABLE,
              "SLURM_JWT", "MYSQL_PWD", "SMTP_PASS", "SSHPASS", "SIGNING_PASSPHRASE", "GITHUB_PAT", "AWS_CREDS",
              "AZURE_STORAGE_CONNECTION_STRING", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "NETRC", "KUBECONFIG"]  # fmt: skip
    plain = ["PATH", "HOME", "PWD", "OLDPWD", "LD_LIBRARY_PATH", "SLURM_JOB_ID", "COMPASS", "PATTERN",
             "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES",
             "PYTHONPATH", "KEYBOARD", "LANG"]  # fmt: skip
    assert [name for name in secret if not is_credential(name, "x")] == []
    assert [name for name in plain if is_credential(name, "x")] == []
    assert is_credential("BANK", "postgresql://me:pa55@db/runs") and is_credential("PIP_INDEX_URL", "https://t0k@host/s")
    for address in ("postgresql://db/runs", "postgresql://me@db/runs", "http://proxy:3128", "https://host/a@b"):
        assert not is_credential("BANK", address)


def test_environment_code_sees_no_credentials_but_those_its_options_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("USER_MODEL_KEY", "asked for")
    options = {"user": {"api_key_env": "USER_MODEL_KEY", "url": "http://h"}}
    config = run_config(tmp_path, environment={"name": "desk", "options": options})
    with hidden_credentials(config.environment):
        assert "HF_TOKEN" not in os.environ
        assert os.environ["USER_MODEL_KEY"] == "asked for"
    assert os.environ["HF_TOKEN"] == "secret"


def test_they_come_back_when_the_work_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with pytest.raises(RuntimeError, match="x"), hidden_credentials(run_config(tmp_path).environment):
        raise RuntimeError("x")
    assert os.environ["HF_TOKEN"] == "secret"


# ---------------------------------------------------------------------- paths


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_a_checkpoints_index_names_files_of_its_own_directory_only(shard: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    problems = checkpoint_problems(str(tmp_path))
    assert any("is no file of that directory" in problem for problem in problems), problems


@pytest.mark.parametrize("name", ["../x", "a/b", "/tmp/x", "..", ".", ""])
def test_a_runs_name_cannot_lead_out_of_its_folder(name: str, tmp_path: Path) -> None:
    from megatron_async.config import ConfigError, check

    with pytest.raises(ConfigError, match="cannot name a folder"):
        check(from_dict({"name": name, "run_dir": str(tmp_path), "model": {"path": "m"}}), needs_weights=False)


def test_ids_that_look_like_paths_write_nothing_outside_the_run(tmp_path: Path) -> None:
    from megatron_async.bank import Bank
    from megatron_async.rollout.evaluation_journal import EvaluatedEpisode, EvaluationJournal
    from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan

    run = tmp_path / "run"
    run.mkdir()
    hostile = "../../../outside"
    trajectory = Trajectory(hostile, hostile, hostile, SamplingParams(), {"file": hostile})
    trajectory.append_context([1, 2])
    with Bank.open(f"sqlite:///{run / 'bank.sqlite'}") as bank:
        bank.start_trajectory(trajectory)
        trajectory.append_action([3], [-0.5], [VersionSpan(0, 0, 1)], "stop")
        trajectory.finish(Status.OK, 1.0, {"ending": hostile})
        bank.finish_trajectory(trajectory)
    EvaluationJournal(run / "evaluation", {"model": hostile}).save(0, 0, hostile, EvaluatedEpisode.of(trajectory))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not (tmp_path.parent / "outside").exists()
