"""All prompts of a workload asked once, for what the load generator does not keep.

That is token ids, the histogram of accepted drafts and, of the reference, the log-probabilities that
tell a near tie.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dflash2_sglang.bench.plan import Workload
from dflash2_sglang.cli.servers import Server, ServerError

SECONDS = 3600.0
TOP = 5
WARM_UP_TOKENS = 16


def ask_all(
    server: Server,
    workload: Workload,
    concurrency: int,
    settings: dict[str, Any],
    top: bool,
    on_answer: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """One record a prompt: ``ids``, ``passes`` and ``histogram`` (counts of passes by accepted drafts).

    With ``top``, also ``top``: per token a pair of lists, the likeliest ids and their log-probabilities.
    """
    import httpx

    params = {
        "temperature": settings["temperature"],
        "max_new_tokens": settings["max tokens"],
        "ignore_eos": settings["ignore eos"],
    }
    more: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": TOP} if top else {}

    def one(prompt: str) -> dict[str, Any]:
        found = _post(client, server, {"text": prompt, "sampling_params": params, **more})
        on_answer()
        return _record(found, top)

    pool = ThreadPoolExecutor(concurrency)
    with httpx.Client(trust_env=False, timeout=SECONDS) as client:  # no proxy
        try:
            if not settings["warm cache"]:
                _flush(client, server)
            return list(pool.map(one, workload.prompts))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, wait for no answer


def warm_up(
    server: Server,
    workload: Workload,
    concurrencies: Sequence[int],
    settings: dict[str, Any],
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Let a fresh server compile and allocate, at every batch size that will be measured."""
    few = {**settings, "max tokens": min(WARM_UP_TOKENS, settings["max tokens"])}
    for concurrency in concurrencies:
        some = Workload(workload.name, workload.prompts[:concurrency])
        ask_all(server, some, concurrency, few, False, on_answer)


def server_info(server: Server) -> dict[str, Any]:
    """What the server tells of its resolved arguments; empty where it does not."""
    import httpx

    try:
        with httpx.Client(trust_env=False, timeout=30.0) as client:
            found = client.get(f"{server.url}/server_info")
            return found.json() if found.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}


def _post(client: Any, server: Server, body: dict[str, Any]) -> dict[str, Any]:
    import httpx

    try:
        response = client.post(f"{server.url}/generate", json=body)
    except httpx.HTTPError as error:
        time.sleep(1.0)  # a server whose scheduler dies takes a moment to end
        server.check_alive("answering")
        raise ServerError(f"the {server.name} server did not answer: {error}") from error
    if response.status_code != 200:
        raise ServerError(f"the {server.name} server refused: {response.text[:500]}")
    return response.json()


def _flush(client: Any, server: Server) -> None:
    client.post(f"{server.url}/flush_cache", params={"timeout": 60})


def _record(found: dict[str, Any], top: bool) -> dict[str, Any]:
    info = found["meta_info"]
    record = {
        "ids": found["output_ids"],
        "passes": info.get("spec_verify_ct", 0),
        "histogram": info.get("spec_correct_drafts_histogram", []),
    }
    if top:
        rows = info.get("output_top_logprobs") or []
        record["top"] = [
            [[token for _, token, *_ in row], [round(lp, 4) for lp, *_ in row]] for row in rows
        ]
    return record
