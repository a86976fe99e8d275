"""Do DFLASH2 and plain decoding answer alike? Greedy, over HTTP, radix cache on.

    python launch/parity.py --dtype float32
    python launch/parity.py --dtype bfloat16

Answers of plain decoding at concurrency 1 are the reference. Where another run first differs, the target's
log-probabilities of the two tokens are compared: they must be closer than twice the noise, which is measured
here as the largest change of a log-probability between computing it alone and in a batch. Exit code 1 if not,
or, in float32, if anything differs at all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import load_prompts

from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model
from dflash2_sglang.cli.servers import Server, running, wait_ready

SHARED = "You are a patient teacher. " * 12
TOP = 5


@dataclass(frozen=True)
class Difference:
    """Of two answers to one prompt, at their first unequal token."""

    gap: float  # log-probability of the reference's token minus the other's
    noise: float


def generate(server: Server, ids: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens},
        **more,
    }
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def answers(server: Server, prompts: list[list[int]], tokens: int, concurrency: int) -> list:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda ids: generate(server, ids, tokens), prompts))


def top_logprobs(server: Server, inputs: list[list[int]], concurrency: int) -> list:
    def ask(ids: list[int]) -> dict[int, float]:
        found = generate(server, ids, 1, return_logprob=True, top_logprobs_num=TOP)
        return {token: lp for lp, token, _ in found["meta_info"]["output_top_logprobs"][0]}

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, inputs))


def differences(
    server: Server, prompts: list[list[int]], reference: list, other: list
) -> list[Difference]:
    """Each first difference, with the target's view of it from ``server`` (plain decoding)."""
    inputs, tokens = [], []
    for ids, a, b in zip(prompts, reference, other, strict=True):
        left, right = a["output_ids"], b["output_ids"]
        if left == right:
            continue
        at = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), None)
        if at is None:
            raise SystemExit("One answer is a prefix of another: a length or stop rule was broken.")
        inputs.append(ids + left[:at])
        tokens.append((left[at], right[at]))
    # The cache would return the same bits twice, so the noise comes from two batch sizes.
    alone = top_logprobs(server, inputs, 1)
    batched = top_logprobs(server, inputs, 8)
    found = []
    for (x, y), one, many in zip(tokens, alone, batched, strict=True):
        lowest = min(one.values())
        noise = max((abs(one[t] - many[t]) for t in one.keys() & many.keys()), default=0.0)
        found.append(Difference(abs(one.get(x, lowest) - one.get(y, lowest)), noise))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--nodes", type=int, default=16)
    args = parser.parse_args()
    target = ["--model-path", str(ensure_demo_model()), "--dtype", args.dtype]
    target += ["--max-total-tokens", "32768"]
    tree = ["--speculative-algorithm", "DFLASH2", "--speculative-draft-model-path"]
    tree += [str(demo_drafter()), "--speculative-num-draft-tokens", str(args.nodes)]
    with tempfile.TemporaryDirectory() as folder:
        plain = Server("plain", target, Path(folder))
        ours = Server("DFLASH2", target + tree, Path(folder))
        with running([plain, ours]):
            wait_ready([plain, ours])
            sys.exit(compare(plain, ours, args))


def compare(plain: Server, ours: Server, args: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    bad = 0
    for name, system in (("own prefixes", None), ("a shared prefix", SHARED)):
        prompts = []
        for text in load_prompts(args.prompts, args.limit):
            messages = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": text})
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            prompts.append(tokenizer(prompt, add_special_tokens=False).input_ids)
        reference = answers(plain, prompts, args.max_tokens, 1)
        runs = {
            "plain, concurrency 8": answers(plain, prompts, args.max_tokens, 8),
            "DFLASH2, concurrency 1": answers(ours, prompts, args.max_tokens, 1),
            "DFLASH2, concurrency 8": answers(ours, prompts, args.max_tokens, 8),
        }
        for run, found in runs.items():
            diffs = differences(plain, prompts, reference, found)
            noise = max((d.noise for d in diffs), default=0.0)
            gap = max((d.gap for d in diffs), default=0.0)
            print(
                f"{args.dtype}, {name}, {run}: {len(prompts) - len(diffs)} of {len(prompts)} "
                f"identical; largest gap at a first difference {gap:.4f}, noise {noise:.4f}",
                flush=True,
            )
            if run.startswith("DFLASH2"):
                bad += (
                    len(diffs) if args.dtype == "float32" else sum(d.gap > 2 * noise for d in diffs)
                )
    return int(bad > 0)


if __name__ == "__main__":
    main()
