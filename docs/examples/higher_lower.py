"""An environment of one's own: the agent finds a number with a tool that only says "higher" or "lower"."""

import random

from megatron_async.rollout.environments import AssistantTurn, EnvironmentFailure, Message, Start, Step, Task

GUESS = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        },
    },
}


class HigherLower:
    """One episode: reward 1 when the number is found within `guesses` guesses, else 0."""

    def __init__(self, secret: int, limit: int, guesses: int) -> None:
        self.secret, self.limit, self.left, self.found = secret, limit, guesses, False

    async def reset(self) -> Start:
        words = f"I think of a number from 1 to {self.limit}. You have {self.left} guesses."
        return Start([Message("system", "Find the number."), Message("user", words)], [GUESS])

    async def step(self, turn: AssistantTurn) -> Step:
        if (
            turn.parse_error or not turn.tool_calls
        ):  # the policy's mistake: it costs a guess, and is no failure
            answers = [Message("user", "Use the tool.")]
            self.left -= 1
        else:
            answers = [Message("tool", self._hint(call.arguments.get("number"))) for call in turn.tool_calls]
        return Step(answers, done=self.found or self.left <= 0)

    def _hint(self, number: object) -> str:
        self.left -= 1
        if not isinstance(number, int):
            return "not a number"
        self.found = self.found or number == self.secret
        return "found" if number == self.secret else "higher" if number < self.secret else "lower"

    async def reward(self) -> tuple[float, dict[str, object]]:
        if self.left < -100:  # something only the environment can be blamed for: never a reward
            raise EnvironmentFailure(f"{self.left} guesses left: the counter is broken")
        return float(self.found), {"guesses_left": self.left}

    async def close(self) -> None:
        """Nothing is held."""


class Numbers:
    """Tasks 0, 1, 2, ... of one split: even secrets are trained on, odd ones held out."""

    def __init__(self, split: str, seed: int, limit: int = 100, guesses: int = 7) -> None:
        self.split, self.seed, self.limit, self.guesses = split, seed, limit, guesses
        self.size = limit // 2

    def task(self, index: int) -> Task:
        secrets = list(range(2 if self.split == "train" else 1, self.limit + 1, 2))
        random.Random(self.seed).shuffle(secrets)
        return Task(f"number-{secrets[index]}", {"secret": secrets[index]})

    def environment(self, task: Task) -> HigherLower:
        return HigherLower(task.data["secret"], self.limit, self.guesses)


def build(options: dict[str, int], split: str, seed: int) -> Numbers:
    unknown = set(options) - {"limit", "guesses"}
    if unknown:
        raise ValueError(f"unknown options: {sorted(unknown)}")
    return Numbers(split, seed, **options)
