#!/usr/bin/env python3
"""Ask a server through OpenAI's own client. DFLASH2 changes nothing in how it is asked.

python docs/examples/openai_client.py --base-url http://127.0.0.1:30000
python docs/examples/openai_client.py --tools       # the server needs --tool-call-parser for these
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from openai import OpenAI

QUESTION: list[Any] = [{"role": "user", "content": "why is the sea salty?"}]

REVIEW = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "mixed", "bad"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "topic": {"type": "string", "pattern": "^[a-z]{3,12}$"},
    },
    "required": ["mood", "stars", "topic"],
    "additionalProperties": False,
}

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["berlin", "oslo", "paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,  # the answer is constrained to the schema
    },
}


class Examples:
    def __init__(self, base_url: str) -> None:
        # SGLang wants a key only if it was launched with --api-key.
        self.client = OpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=120)
        self.model = self.client.models.list().data[0].id

    def chat(self) -> str:
        answer = self.client.chat.completions.create(
            model=self.model, messages=QUESTION, temperature=0, max_tokens=64
        )
        return answer.choices[0].message.content or ""

    def stream(self) -> str:
        """A chunk brings what a round gained: often several tokens."""
        pieces = []
        for chunk in self.client.chat.completions.create(
            model=self.model, messages=QUESTION, temperature=0, max_tokens=64, stream=True
        ):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        return "".join(pieces)

    def json_schema(self) -> Any:
        """An answer that fits the schema; the tree holds only tokens that it allows."""
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": "review: warm soup, slow waiter. as json:"}],
            temperature=0,
            max_tokens=120,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "review", "schema": REVIEW},
            },
        )
        choice = answer.choices[0]
        if choice.finish_reason != "stop":  # "length": max_tokens cut it, so it is no JSON yet
            return choice.message.content
        return json.loads(choice.message.content or "")

    def several(self) -> list[str]:
        """Three answers to one prompt, sampled; the prompt is computed once."""
        answer = self.client.chat.completions.create(
            model=self.model, messages=QUESTION, temperature=0.8, top_p=0.95, max_tokens=24, n=3
        )
        return [choice.message.content or "" for choice in answer.choices]

    def logprobs(self) -> list[tuple[str, float]]:
        """Each token with the target's own log-probability: the drafter has no say in it."""
        answer = self.client.chat.completions.create(
            model=self.model, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True
        )
        told = answer.choices[0].logprobs
        return [(token.token, token.logprob) for token in (told.content or [] if told else [])]

    def seeded(self) -> list[str]:
        """The same seed, the same answer. Servers on a GPU need --enable-deterministic-inference."""
        answers = [
            self.client.chat.completions.create(
                model=self.model, messages=QUESTION, temperature=0.8, max_tokens=24, seed=7
            )
            for _ in range(2)
        ]
        return [answer.choices[0].message.content or "" for answer in answers]

    def tools(
        self, question: str = "what is the weather in oslo?", temperature: float = 0, seed: int = 0
    ) -> list[tuple[str, Any]]:
        """A tool call: name and arguments."""
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            tools=[WEATHER],
            tool_choice="required",
            temperature=temperature,
            seed=seed,
            max_tokens=120,
        )
        calls: Any = answer.choices[0].message.tool_calls or []
        return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Ask a server through OpenAI's own client.")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--tools", action="store_true", help="a tool call as well")
    args = parser.parse_args(argv)
    examples = Examples(args.base_url)
    names = ["chat", "stream", "json_schema", "several", "logprobs", "seeded"]
    found = {}
    for name in [*names, *(["tools"] if args.tools else [])]:
        found[name] = getattr(examples, name)()
        print(f"--- {name}\n{found[name]}")
    return found


if __name__ == "__main__":
    main()
