"""What a script without a server does: ``sglang.Engine``; prints its answers as JSON.

Arguments: the keywords of the engine, and a list of keywords for ``generate``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import sglang


async def awaited(engine: sglang.Engine, asked: list[dict[str, Any]]) -> list[Any]:
    return await asyncio.gather(*(engine.async_generate(**keywords) for keywords in asked))


async def streamed(engine: sglang.Engine, keywords: dict[str, Any]) -> list[Any]:
    pieces = await engine.async_generate(**keywords, stream=True)
    return [piece async for piece in pieces]


def main() -> None:
    keywords, asked = (json.loads(argument) for argument in sys.argv[1:])
    engine = sglang.Engine(**keywords)
    try:
        answers = {
            "alone": [engine.generate(**one) for one in asked],
            "awaited": engine.loop.run_until_complete(awaited(engine, asked)),
            "streamed": engine.loop.run_until_complete(streamed(engine, asked[0])),
            "together": engine.generate(
                input_ids=[one["input_ids"] for one in asked if "input_ids" in one],
                sampling_params={"temperature": 0, "max_new_tokens": 12},
            ),
        }
    finally:
        engine.shutdown()
    print("ANSWERS", json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
