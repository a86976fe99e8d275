"""Ask a server chat questions through the OpenAI API, and count what it took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from dflash2_sglang.cli.servers import Server, ServerError

MODEL = "default"  # SGLang serves its one model under any name
ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class Sampling:
    """How answers are asked for."""

    max_tokens: int
    temperature: float = 0.0
    concurrency: int = 1


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int
    verify_steps: int  # 0 where the server does not speculate


@dataclass(frozen=True)
class Round:
    """The answers to all prompts, in the order of the prompts, and the wall time they took."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def speed(self) -> float:
        """Tokens a second, all requests together."""
        return self.tokens / self.seconds


class Client:
    """Asks one server."""

    def __init__(self, server: Server, sampling: Sampling):
        import httpx
        import openai

        self._server = server
        self._sampling = sampling
        self._api = openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=ANSWER_SECONDS,
            http_client=httpx.Client(trust_env=False, timeout=ANSWER_SECONDS),  # no proxy
        )

    def ask(self, prompt: str) -> Answer:
        with self._errors_named():
            response = self._api.chat.completions.create(**self._request(prompt))
        return Answer(
            response.choices[0].message.content or "",
            response.usage.completion_tokens if response.usage else 0,
            _verify_steps(response),
        )

    def stream(self, prompt: str) -> Iterator[str]:
        """The answer in the pieces in which it arrives."""
        with self._errors_named():
            for chunk in self._api.chat.completions.create(**self._request(prompt), stream=True):
                if chunk.choices and chunk.choices[0].delta.content:
                    yield chunk.choices[0].delta.content

    def round(self, prompts: Sequence[str]) -> Round:
        """Ask all prompts, as many at a time as the sampling says."""
        pool = ThreadPoolExecutor(self._sampling.concurrency)
        try:
            begin = time.perf_counter()
            answers = tuple(pool.map(self.ask, prompts))
            return Round(answers, time.perf_counter() - begin)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, wait for no answer

    def _request(self, prompt: str) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._sampling.max_tokens,
            "temperature": self._sampling.temperature,
            "extra_body": {"return_spec_tokens_details": True},
        }

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        import openai

        try:
            yield
        except openai.APIStatusError as error:
            raise ServerError(f"the {self._server.name} server refused: {error}") from error
        except openai.OpenAIError as error:
            time.sleep(1.0)  # a server whose scheduler dies takes a moment to end
            self._server.check_alive("answering")
            raise ServerError(f"the {self._server.name} server did not answer: {error}") from error


def _verify_steps(response: Any) -> int:
    """SGLang's extension of the response: verify passes that this very request took part in."""
    extension = getattr(response, "sglext", None) or {}
    details = extension.get("spec_tokens_details") or {}
    return int(details.get("spec_verify_ct") or 0)


def acceptance_length(rounds: Sequence[Round]) -> float | None:
    """Tokens that a verify pass delivered, on average; None where there was no such pass.

    The first token of an answer comes from the prefill, so it is left out. What a last pass
    accepted beyond the end of the answer is not delivered, so it does not count either.
    """
    answers = [answer for one in rounds for answer in one.answers]
    steps = sum(answer.verify_steps for answer in answers)
    return sum(answer.tokens - 1 for answer in answers) / steps if steps else None


def median_speed(rounds: Sequence[Round]) -> float:
    return median(one.speed for one in rounds)


def identical_texts(rounds: Sequence[Round], reference: Round) -> int:
    """For how many prompts every round gave, to the letter, the text of ``reference``."""
    return sum(
        all(one.answers[index].text == answer.text for one in rounds)
        for index, answer in enumerate(reference.answers)
    )
