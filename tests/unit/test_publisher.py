"""Publishing over real sockets to engines that answer nonsense, refuse or fail a proof: each is named, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sglang_bridge import Canary, Publisher, PublishError
from sglang_bridge.event_loop import BackgroundLoop
from tests.unit.bridge_endpoint import ScriptedEndpoint

LOAD = {"num_running_reqs": 1, "num_waiting_reqs": 0, "num_total_tokens": 5}
TRUTH = -0.5
CANARY = Canary([1, 2, 3, 4], [0.0, TRUTH, TRUTH, TRUTH])


class Engine:
    """Answers every control call well, but for ``says``: what it answers at a path. logprob: of every scored token."""

    def __init__(self, says: dict[str, Any] | None = None, logprob: float = TRUTH) -> None:
        self._says, self._logprob = says or {}, logprob
        self.endpoint = ScriptedEndpoint(*[self._score] * 4)
        self.endpoint.control = self._control

    async def _control(self, request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        if (said := self._says.get(request.path)) is not None:
            return web.Response(status=said) if isinstance(said, int) else web.json_response(said)
        return web.json_response({"success": True, "tp_size": 1, "device": "cpu", "loads": [LOAD], "ranks": []})

    async def _score(self, _request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked = body["input_ids"][body["logprob_start_len"]:]
        return web.json_response({"meta_info": {"input_token_logprobs": [[self._logprob, t, None] for t in asked]}})

    def stop(self, loop: BackgroundLoop) -> None:
        loop.run(self.endpoint.__aexit__(None, None, None))

    @property
    def paths(self) -> list[str]:
        """Where it was called, in order."""
        return [path for path, _ in self.endpoint.controls]

    @property
    def samples(self) -> bool:
        """Whether it was let go on after every pause."""
        return self.paths.count("/pause_generation") == self.paths.count("/continue_generation")


@contextmanager
def served(*engines: Engine) -> Iterator[list[str]]:
    """Their addresses."""
    with ExitStack() as stack:
        loop = BackgroundLoop("engines")
        stack.callback(loop.close)
        for engine in engines:
            loop.run(engine.endpoint.__aenter__())
            stack.callback(engine.stop, loop)
        yield [engine.endpoint.url for engine in engines]


def publish(urls: list[str], folder: Path, mode: Any = "retract", **proofs: Any) -> PublishError:
    """The error of a publication that fails."""
    (folder / "weights").mkdir()
    with Publisher(urls, transport="disk", pause_mode=mode, deadline_s=20) as publisher:
        with pytest.raises(PublishError) as caught:
            publisher.publish_from_disk(1, folder / "weights", **proofs)
        assert publisher.version is None
    return caught.value


@pytest.mark.parametrize("said", [[], [None], [7], ["ab"], [{}], [{**LOAD, "num_running_reqs": None}], {}, None, "x"])
def test_an_engine_whose_load_is_no_load_is_named_and_the_other_goes_on(said: Any, tmp_path: Path) -> None:
    good, bad = Engine(), Engine({"/v1/loads": {"loads": said}})
    with served(good, bad) as urls:
        error = publish(urls, tmp_path, "abort")
    assert error.urls == (urls[1],)
    assert "could not count running requests on 1 of 2 engines" in str(error)
    assert good.samples


@pytest.mark.parametrize("said", [{"tp_size": None}, {"tp_size": "two"}, {"tp_size": 0}, {"pp_size": [1]}])
def test_an_engine_that_does_not_say_how_many_it_is_is_named(said: Any) -> None:
    good, bad = Engine(), Engine({"/server_info": said})
    with served(good, bad) as urls, Publisher(urls, backend="gloo", deadline_s=20) as publisher:
        with pytest.raises(PublishError, match="/server_info says tp_size") as caught:
            publisher.publish(1, iter(()))
    assert caught.value.urls == (urls[1],)


@pytest.mark.parametrize(("mode", "path", "step"), [
    ("retract", "/server_info", "reach"),
    ("retract", "/pause_generation", "pause"),
    ("abort", "/abort_request", "abort running requests"),
    ("retract", "/update_weights_from_disk", "load"),
    ("retract", "/flush_cache", "flush the prefix cache"),
    ("in_place", "/update_weight_version", "set the version"),
    ("retract", "/continue_generation", "resume"),
])  # fmt: skip
@pytest.mark.parametrize("said", [500, {"success": False, "message": "no"}])
def test_a_refused_step_is_named_with_its_engine(mode: str, path: str, step: str, said: Any, tmp_path: Path) -> None:
    good, bad = Engine(), Engine({path: said})
    with served(good, bad) as urls:
        error = publish(urls, tmp_path, mode)
    assert error.urls == (urls[1],)
    assert f"could not {step}" in str(error)
    before_any_weight_moved = path in ("/server_info", "/pause_generation", "/abort_request")
    assert good.samples == (before_any_weight_moved or path == "/continue_generation")


def test_every_engine_that_fails_the_canary_is_paused_and_named(tmp_path: Path) -> None:
    engines = [Engine(logprob=-0.9), Engine(), Engine(logprob=-3.0)]
    with served(*engines) as urls:
        error = publish(urls, tmp_path, canary=CANARY)
    assert error.urls == (urls[0], urls[2])
    assert str(error).count("does not sample as version 1") == 2
    assert [engine.samples for engine in engines] == [False, True, False]
    assert [engine.paths[-1] for engine in engines] == ["/abort_request", "/continue_generation", "/abort_request"]


def test_every_engine_without_the_right_hashes_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torch import ones

    (tmp_path / "checkpoint").mkdir()
    save_file({"a": ones(3)}, tmp_path / "checkpoint" / "model.safetensors")
    digests = ({"a": "00"}, {"a": "11"})
    engines = [Engine({"/weights_checker": {"ranks": [{"checksums": digest}]}}) for digest in digests]
    with served(*engines) as urls, Publisher(urls, transport="disk", deadline_s=20) as publisher:
        with pytest.raises(PublishError, match="does not hold version 1.*does not hold version 1") as caught:
            publisher.publish_from_disk(1, tmp_path / "checkpoint", checksum=True)
    assert caught.value.urls == tuple(urls)
    assert not any(engine.samples for engine in engines)
