#!/usr/bin/env python3
"""The engine without a server: for scripts that work through many prompts.

    python docs/examples/offline_engine.py                                  # the demo pair, on a CPU too
    python docs/examples/offline_engine.py --model-path TARGET --draft-model-path DRAFTER

With ``--base-url`` a running server answers the same prompts instead, over SGLang's own /generate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

PROMPTS = ["the capital of norway is", "one, two, three,", "a short poem about rain:"]
SAMPLING = {"temperature": 0, "max_new_tokens": 32}


def in_engine(target: str, drafter: str) -> list[dict[str, Any]]:
    import sglang

    # The keywords are the flags of sglang.launch_server, with underscores.
    engine = sglang.Engine(
        model_path=target,
        speculative_algorithm="DFLASH2",
        speculative_draft_model_path=drafter,
        log_level="error",
    )
    try:
        return engine.generate(prompt=PROMPTS, sampling_params=SAMPLING)
    finally:
        engine.shutdown()


def over_http(base_url: str) -> list[dict[str, Any]]:
    import requests

    body = {"text": PROMPTS, "sampling_params": SAMPLING}
    response = requests.post(f"{base_url}/generate", json=body, timeout=120)
    response.raise_for_status()
    return response.json()


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description="Generate without a server.")
    parser.add_argument("--model-path", help="the target; the demo's if left out")
    parser.add_argument("--draft-model-path", help="the drafter; the demo's if left out")
    parser.add_argument("--base-url", help="ask this server instead")
    args = parser.parse_args(argv)
    if args.base_url:
        answers = over_http(args.base_url)
    else:
        from dflash2_sglang.cli.demo_model import demo_drafter, ensure_demo_model

        target = args.model_path or str(ensure_demo_model())
        answers = in_engine(target, args.draft_model_path or str(demo_drafter()))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        told = answer["meta_info"]
        # The first token comes from prefill; each verify pass gained the rest.
        passes = told.get("spec_verify_ct", 0)
        gain = f", {(told['completion_tokens'] - 1) / passes:.2f} tokens a pass" if passes else ""
        print(f"--- {prompt}\n{answer['text']}\n({told['completion_tokens']} tokens{gain})")
    return answers


# The engine starts processes that import this file: without this line each would start its own.
if __name__ == "__main__":
    main()
