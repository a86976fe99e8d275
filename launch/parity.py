"""Do DFLASH2 and plain decoding answer alike? Greedy, over HTTP, radix cache on.

    python launch/parity.py --dtype float32
    python launch/parity.py --dtype bfloat16
    python launch/parity.py --dtype float32 --params '{"repetition_penalty": 1.2}'

Answers of plain decoding at concurrency 1 are the reference. Where another run first differs, the target's
log-probabilities of the two tokens must be closer than the noise, which ``noise_of_gap`` measures on plain
decoding alone. Exit code 1 if not, or, in float32, if anything differs at all.

With ``--params``, which may be repeated, every request has these sampling parameters, any difference counts,
and plain decoding runs without overlap (with it, SGLang's penalties are a token late) at concurrency 4.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dflash2_sglang.bench.prompts import texts
from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model
from dflash2_sglang.cli.main import unwind_when_told_to_end
from dflash2_sglang.cli.servers import Server, running, wait_ready

SHARED = "You are a patient teacher. " * 12
TOP = 5


def generate(
    server: Server,
    ids: Sequence[int],
    tokens: int,
    params: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **(params or {})},
        **more,
    }
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def answers(
    server: Server,
    prompts: list[list[int]],
    tokens: int,
    concurrency: int,
    params: dict[str, Any] | None = None,
) -> list:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda ids: generate(server, ids, tokens, params), prompts))


def gaps_at_differences(
    server: Server, prompts: list[list[int]], reference: list, other: list
) -> list[float]:
    """At each first difference, how much likelier ``server``'s target finds one token than the other."""
    gaps = []
    for ids, a, b in zip(prompts, reference, other, strict=True):
        left, right = a["output_ids"], b["output_ids"]
        if left == right:
            continue
        pairs = enumerate(zip(left, right, strict=False))
        at = next((i for i, (x, y) in pairs if x != y), None)
        if at is None:
            raise SystemExit("One answer is a prefix of another: a length or stop rule was broken.")
        found = generate(server, ids + left[:at], 1, return_logprob=True, top_logprobs_num=TOP)
        top = {token: lp for lp, token, _ in found["meta_info"]["output_top_logprobs"][0]}
        missing = min(top.values())  # at least this far below the best
        gaps.append(abs(top.get(left[at], missing) - top.get(right[at], missing)))
    return gaps


def noise_of_gap(server: Server, prompts: list[list[int]], tokens: int) -> float:
    """Largest change of the gap between the two best tokens when plain decoding is done otherwise.

    The same positions are scored twice by the same server: token by token as they were decoded, and in
    one prefill of the finished answer with an empty cache. No speculative decoding is involved.
    """
    worst = 0.0
    for ids in prompts:
        decoded = generate(server, ids, tokens, return_logprob=True, top_logprobs_num=TOP)
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/flush_cache", b"")).close()
        again = generate(
            server,
            ids + decoded["output_ids"],
            1,
            return_logprob=True,
            top_logprobs_num=TOP,
            logprob_start_len=len(ids) - 1,
        )
        one = decoded["meta_info"]["output_top_logprobs"]
        two = again["meta_info"]["input_top_logprobs"][1 : len(one) + 1]
        for a, b in zip(one, two, strict=True):
            first, second = ({t: lp for lp, t, _ in side} for side in (a, b))
            x, y = list(first)[:2]
            if x in second and y in second:
                change = (first[x] - first[y]) - (second[x] - second[y])
                worst = max(worst, abs(change))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument(
        "--params",
        type=json.loads,
        action="append",
        default=[],
        help="sampling parameters of all requests, JSON",
    )
    args = parser.parse_args()
    unwind_when_told_to_end()
    target = ["--model-path", str(ensure_demo_model()), "--dtype", args.dtype]
    target += ["--max-total-tokens", "32768"]
    tree = ["--speculative-algorithm", "DFLASH2", "--speculative-draft-model-path"]
    tree += [str(demo_drafter()), "--speculative-num-draft-tokens", str(args.nodes)]
    with tempfile.TemporaryDirectory() as folder:
        late = ["--disable-overlap-schedule"] if args.params else []
        plain = Server("plain", target + late, Path(folder))
        ours = Server("DFLASH2", target + tree, Path(folder))
        with running([plain, ours]):
            wait_ready([plain, ours])
            run = compare_params if args.params else compare
            sys.exit(int(run(plain, ours, args) > 0))


def compare_params(plain: Server, ours: Server, args: argparse.Namespace) -> int:
    """How many answers with sampling parameters differ."""
    prompts = encoded(args, None)
    bad = 0
    for params in args.params:
        reference = answers(plain, prompts, args.max_tokens, 4, params)
        for concurrency in (1, 8):
            found = answers(ours, prompts, args.max_tokens, concurrency, params)
            pairs = list(zip(found, reference, strict=True))
            same = sum(
                a["output_ids"] == b["output_ids"] and a["text"] == b["text"] for a, b in pairs
            )
            tokens = sum(a["meta_info"]["completion_tokens"] for a in found)
            print(
                f"{args.dtype}, {json.dumps(params)}, DFLASH2, concurrency {concurrency}: {same} of "
                f"{len(pairs)} identical, {tokens} tokens",
                flush=True,
            )
            bad += len(pairs) - same
    return bad


def encoded(args: argparse.Namespace, system: str | None) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    return [encode(tokenizer, text, system) for text in texts(args.prompts, args.limit)]


def compare(plain: Server, ours: Server, args: argparse.Namespace) -> int:
    """How many answers differ where the target was not undecided."""
    bad = 0
    for name, system in (("own prefixes", None), ("a shared prefix", SHARED)):
        prompts = encoded(args, system)
        noise = noise_of_gap(plain, prompts[:10], args.max_tokens)
        reference = answers(plain, prompts, args.max_tokens, 1)
        print(f"{args.dtype}, {name}: noise of the gap {noise:.4f}", flush=True)
        for run, server, concurrency in (
            ("plain, concurrency 4", plain, 4),
            ("plain, concurrency 8", plain, 8),
            ("DFLASH2, concurrency 1", ours, 1),
            ("DFLASH2, concurrency 8", ours, 8),
        ):
            found = answers(server, prompts, args.max_tokens, concurrency)
            gaps = gaps_at_differences(plain, prompts, reference, found)
            strict = args.dtype == "float32"
            over = len(gaps) if strict else sum(gap > noise for gap in gaps)
            print(
                f"{args.dtype}, {name}, {run}: {len(prompts) - len(gaps)} of {len(prompts)} "
                f"identical; largest gap at a first difference {max(gaps, default=0.0):.4f}; "
                f"{over} not excused",
                flush=True,
            )
            bad += over if server is ours else 0
    return bad


def encode(tokenizer: Any, text: str, system: str | None) -> list[int]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(prompt, add_special_tokens=False).input_ids


if __name__ == "__main__":
    main()
