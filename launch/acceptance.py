"""Acceptance length in a running server, counted as the drafter's offline figures are.

    python launch/acceptance.py --prompts heldout.json

Answers are streamed, one piece for each verify pass, so every pass is seen. "Full windows" leaves out
the passes whose block reaches past the end of the answer, as ``tools/evaluate.py`` of the drafter does;
"all" cuts those passes at the end of the answer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from parity import encode

from dflash2_sglang.bench.prompts import texts
from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model
from dflash2_sglang.cli.main import unwind_when_told_to_end
from dflash2_sglang.cli.servers import Server, running, wait_ready

BLOCK = 8


def gains(server: Server, ids: Sequence[int], tokens: int) -> list[int]:
    """Tokens that each verify pass delivered, the last one cut at the end of the answer."""
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens},
        "stream": True,
    }
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    lengths, passes = [], 0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                meta = json.loads(line[6:])["meta_info"]
                lengths.append(meta["completion_tokens"])
                passes = meta.get("spec_verify_ct", passes)
    steps = [b - a for a, b in pairwise(lengths) if b > a]
    if len(steps) != passes:
        raise SystemExit(
            f"{passes} verify passes came in {len(steps)} pieces: cannot tell them apart."
        )
    return steps


def mean(steps: Sequence[int]) -> float:
    return sum(steps) / len(steps)


def full_windows(steps: Sequence[int]) -> list[int]:
    """The passes after whose anchor at least a whole block of the answer followed."""
    left, kept = sum(steps), []
    for gain in steps:
        if left >= BLOCK - 1:
            kept.append(gain)
        left -= gain
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    unwind_when_told_to_end()
    from transformers import AutoTokenizer

    model = ensure_demo_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [encode(tokenizer, text, None) for text in texts(args.prompts, args.limit)]
    common = ["--model-path", str(model), "--max-total-tokens", "16384"]
    common += ["--speculative-draft-model-path", str(demo_drafter()), "--speculative-algorithm"]
    with tempfile.TemporaryDirectory() as folder:
        servers = [
            Server("stock DFLASH chain", [*common, "DFLASH"], Path(folder)),
            Server(
                "DFLASH2 chain", [*common, "DFLASH2", "--speculative-eagle-topk", "1"], Path(folder)
            ),
            Server("DFLASH2, 16 nodes", [*common, "DFLASH2"], Path(folder)),
        ]
        print("| | full windows | all | passes |\n|---|---|---|---|")
        with running(servers), ThreadPoolExecutor(args.concurrency) as pool:
            wait_ready(servers)
            for server in servers:
                found = list(
                    pool.map(lambda ids, s=server: gains(s, ids, args.max_tokens), prompts)
                )
                whole = [gain for steps in found for gain in full_windows(steps)]
                every = [gain for steps in found for gain in steps]
                print(
                    f"| {server.name} | {mean(whole):.3f} | {mean(every):.3f} | {len(every)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
