"""JSON records under a schema, on the demo pair: acceptance length and speed of constrained output.

    python launch/constrained.py --grammar-backend llguidance

Plain decoding, the stock DFLASH chain and DFLASH2 answer the same prompts, greedily and at a temperature.
Every answer is checked against the schema.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from parity import encode

from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model
from dflash2_sglang.cli.servers import Server, running, wait_ready

TEXT = {"type": "string", "pattern": "^[A-Za-z][A-Za-z ,.-]{0,38}$"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "kind": {"enum": ["person", "place", "animal", "object", "idea"]},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
        "known_for": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
        "alive": {"type": "boolean"},
        "summary": {"type": "string", "pattern": "^[A-Z][A-Za-z ,']{10,118}[.]$"},
    },
    "required": ["name", "kind", "year", "known_for", "alive", "summary"],
    "additionalProperties": False,
}
SUBJECTS = """Albert Einstein, Paris, the tiger, the telephone, gravity, Marie Curie, Mount Everest,
the honey bee, the bicycle, democracy, Leonardo da Vinci, the Amazon river, the blue whale,
the printing press, evolution, Amelia Earhart, Tokyo, the penguin, the piano, the internet"""
PROMPTS = [f"Describe {subject} as a JSON record." for subject in re.split(r",\s+", SUBJECTS)]


@dataclass(frozen=True)
class Result:
    tokens: int
    passes: int
    seconds: float
    finished: int

    @property
    def acceptance(self) -> float:
        return (self.tokens - len(PROMPTS)) / self.passes if self.passes else 1.0


def ask(server: Server, temperature: float, tokens: int, ids: Sequence[int]) -> dict[str, Any]:
    sampling = {"temperature": temperature, "max_new_tokens": tokens}
    body = {
        "input_ids": list(ids),
        "sampling_params": sampling | {"json_schema": json.dumps(SCHEMA)},
    }
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{server.url}/generate", data, kind)
    ) as answer:
        return json.load(answer)


def measure(server: Server, prompts: list[list[int]], heat: float, args: Any) -> Result:
    import jsonschema

    one = partial(ask, server, heat, args.max_tokens)
    with ThreadPoolExecutor(args.concurrency) as pool:
        list(pool.map(one, prompts[: args.concurrency]))  # compiles the grammar
        begin = time.perf_counter()
        answers = list(pool.map(one, prompts))
        seconds = time.perf_counter() - begin
    finished = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    for answer in finished:
        jsonschema.validate(json.loads(answer["text"]), SCHEMA)
    infos = [answer["meta_info"] for answer in answers]
    tokens = sum(info["completion_tokens"] for info in infos)
    passes = sum(info.get("spec_verify_ct", 0) for info in infos)
    return Result(tokens, passes, seconds, len(finished))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grammar-backend", default="xgrammar")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--only", help="names of servers that hold this word")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    model = ensure_demo_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [encode(tokenizer, text, None) for text in PROMPTS]
    common = ["--model-path", str(model), "--max-total-tokens", "16384"]
    common += ["--grammar-backend", args.grammar_backend]
    draft = ["--speculative-draft-model-path", str(demo_drafter()), "--speculative-algorithm"]
    with tempfile.TemporaryDirectory() as folder:
        servers = [
            Server("plain", common, Path(folder)),
            Server("stock DFLASH chain", [*common, *draft, "DFLASH"], Path(folder)),
            Server("DFLASH2 tree", [*common, *draft, "DFLASH2"], Path(folder)),
        ]
        servers = [server for server in servers if (args.only or "") in server.name]
        print("| | temperature | acceptance length | tokens/s | finished |\n|---|---|---|---|---|")
        with running(servers):
            wait_ready(servers)
            for heat in args.temperatures:
                for server in servers:
                    found = measure(server, prompts, heat, args)
                    print(
                        f"| {server.name} | {heat} | {found.acceptance:.3f} "
                        f"| {found.tokens / found.seconds:.1f} | {found.finished} of {len(prompts)} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
