"""No call of a policy computes for ever: it is refused before it is made; honest calls get the benchmark's answer."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.rollout.chat_endpoint import _read
from megatron_async.rollout.environments import AssistantTurn, ToolCall, bfcl, bfcl_bounds
from megatron_async.rollout.environments.arithmetic import TooLarge, refuse_expression
from megatron_async.rollout.json_depth import DEEPEST, shallow
from tests.unit.tau2_support import domain, requires_tau2

NUMBERS = st.one_of(st.integers(0, 50).map(str), st.sampled_from(["0.5", "3.25", "1.", "()"]))
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" + ", "-", "*", "/", "//", "**"]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]})({pair[1]})"),
    ),
    max_leaves=8,
)


def evaluated(text: str) -> Any:
    """As the benchmark evaluates."""
    return str(round(float(eval(text, {"__builtins__": None}, {})), 2))


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@given(text=EXPRESSIONS)
def test_what_is_let_through_ends_and_only_powers_are_refused(text: str) -> None:
    try:
        refuse_expression(text)
    except TooLarge:
        assert "**" in text
    else:
        with contextlib.suppress(ArithmeticError, TypeError):
            evaluated(text)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "  2 - (9**9**9) * 0",
        "1/(10**(10**10))",
        "0*9**9**9",
        "()*5+9**9**9",
        "2(9**9**9)",
        "2(*9**9**9)",
        "(9**9999)**9999",
        "*".join(["9**9999"] * 9),
        "-" * 3000 + "(9**9**9)",
        "(" * 150 + "9**9**9" + ")" * 150,
        "+".join(["1"] * 3000),
    ],
)
def test_endless_expressions_are_refused(text: str) -> None:
    with pytest.raises(TooLarge):
        refuse_expression(text)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(
    "text", ["2 +", "(((", "2(3)", "1/0", "9.0**9**9", "2**-5", "1**9**9", "x", "", "+".join(["1"] * 2000)]
)
def test_what_is_small_or_fails_by_itself_is_left_alone(text: str) -> None:
    """A long sum is no deep one."""
    assert not is_refused(text)


def is_refused(text: str) -> bool:
    try:
        refuse_expression(text)
    except TooLarge:
        return True
    return False


@requires_tau2
@pytest.mark.parametrize("name", ["retail", pytest.param("airline", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_calculator_of_the_benchmark_is_bounded_wherever_it_is_run(name: str) -> None:
    from megatron_async.rollout.environments.tau2.episode import Episode, Said

    place = domain(name)
    kind = importlib.import_module("tau2.data_model.message").ToolCall
    unbounded = place._constructor()
    honest = ["2 + 2", "100 * (3 - 1) / 7", "x", "1/0", "2(3)", "9**400", " 1", "9**9999", None, ["9"], {"9": 1}]
    for environment in (place.environment(), place.official_constructor()):
        answers = [
            environment.get_response(kind(id="1", name="calculate", arguments={"expression": text})).content
            for text in [*honest, "9**40000//9**39999", "9**9**9"]
        ]
        for text, answer in zip(honest, answers):
            call = kind(id="1", name="calculate", arguments={"expression": text})
            assert answer == unbounded.get_response(call).content
        assert answers[-2:] == ["Error: int too large to convert to float"] * 2
        assert environment.tools.tool_type("calculate") == unbounded.tools.tool_type("calculate")
        assert [tool.openai_schema for tool in environment.get_tools()] == [
            tool.openai_schema for tool in unbounded.get_tools()
        ]
    episode = Episode(place, next(iter(place.tasks.values())))
    episode.start()
    episode.user(Said("hello"))
    heard = episode.agent(Said(calls=(("calculate", {"expression": "9**9**9"}),))).messages
    assert [message["content"] for message in heard] == answers[-1:]


installed = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed")


def apis(kind: str, category: str = "base") -> Any:
    entries, _ = bfcl._data(category)
    entry = next(entry for entry in entries if kind in entry["involved_classes"])
    return bfcl._load_apis(entry, category)


@installed
def test_mathematics_is_bounded_and_otherwise_the_benchmarks() -> None:
    ours = apis("MathAPI")
    theirs = ours.instances["MathAPI"]
    for name, arguments in (
        ("logarithm", {"value": 2, "base": 10, "precision": bfcl_bounds.MOST_DIGITS + 1}),
        ("logarithm", {"value": "1e" + "9" * 400, "base": 10, "precision": 10}),
        ("logarithm", {"value": 2, "base": 10, "precision": "1000000000"}),
        ("square_root", {"number": 2, "precision": 10**9}),
        ("power", {"base": 9, "exponent": 10**9}),
    ):
        assert ours.call(name, [], arguments).startswith("Error during execution: ")
    assert ours.call("round_number", [], {"number": 15, "decimal_places": -(10**9)}) == '{"result": 0}'
    large = ours.call("power", [9], {"exponent": 9999})  # computed, but not to be written
    assert large == ours.call("power", [9], {"exponent": 10**9})
    for name, arguments in (
        ("logarithm", {"value": 100, "base": 10, "precision": 5}),
        ("logarithm", {"value": "100", "base": "10", "precision": "5"}),
        ("square_root", {"number": 2, "precision": 30}),
        ("square_root", {"number": "x", "precision": 30}),
        ("power", {"base": 2.5, "exponent": 3}),
        ("power", {"base": -2, "exponent": -3}),
        ("power", {"base": "x", "exponent": 2}),
        ("round_number", {"number": 1234.56, "decimal_places": -2}),
        ("round_number", {"number": 1234}),
        ("round_number", {}),
        ("power", {"bass": 2}),
    ):
        try:
            expected = bfcl._as_text(getattr(theirs, name)(**arguments))
        except TypeError as error:
            expected = f"Error during execution: {error}"
        assert ours.call(name, [], arguments) == expected


@installed
@pytest.mark.parametrize("doubling", [True, False])
def test_file_system_that_grows_without_end_ends_the_episode(doubling: bool) -> None:
    tasks = bfcl.build({"category": "base"}, "heldout", 0)
    entries = bfcl._data("base")[0]
    index = next(i for i, entry in enumerate(entries) if "GorillaFileSystem" in entry["involved_classes"])
    environment = tasks.environment(tasks.task(index))
    cycle = [ToolCall("mkdir", {"dir_name": "d"}), ToolCall("cp", {"source": "d", "destination": "d"})]
    double = [
        *(ToolCall("cp", {"source": "d", "destination": "e"}), ToolCall("mv", {"source": "e", "destination": "d"})),
        *(ToolCall("mv", {"source": "d", "destination": "e"}), ToolCall("mkdir", {"dir_name": "d"})),
        ToolCall("mv", {"source": "e", "destination": "d"}),
    ]
    calls = cycle[:1] + double * 40 if doubling else cycle

    async def play() -> Any:
        await environment.reset()
        step = await environment.step(AssistantTurn("", (*calls, ToolCall("find", {}), ToolCall("du", {}))))
        return step, await environment.reward()

    step, (reward, info) = asyncio.run(play())
    assert step.done
    assert (reward, info["failure"]) == (0.0, "endless_file_system")
    assert "endless" in step.messages[-1].content


@given(depth=st.integers(1, 2 * DEEPEST))
def test_depth_of_json_is_counted(depth: int) -> None:
    value: Any = "leaf"
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    assert shallow(value) == (depth <= DEEPEST)


@pytest.mark.parametrize("written", ["[" * 100_000, '{"a":' * 100 + "1" + "}" * 100])
def test_deep_arguments_of_an_endpoint_are_a_problem_of_the_call(written: str) -> None:
    call = {"function": {"name": "f", "arguments": written}}
    answer = _read(json.dumps({"choices": [{"message": {"tool_calls": [call]}}]}))
    assert answer.calls == ()
    assert answer.problem is not None
    assert "nested too deeply" in answer.problem
