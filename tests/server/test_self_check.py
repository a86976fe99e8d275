"""The trial before the first request: faults are caught, and nothing of it stays behind."""

from __future__ import annotations

from typing import Any

import pytest
from serving import ServerError, acceptance
from tinypair import Pairs
from workload import assert_same, prompts, run

HOOK = {"DFLASH2_TEST_HOOKS": "self_check_faults"}
# On a CPU there is neither a flat mask nor a graph.
CAUGHT = {
    "frozen mask": "a mask is wrong",
    "frozen mask in the pass": "otherwise than the same text",
    "swapped sibling link": "a link to a sibling is wrong",
    "wrong position": "a position is wrong",
    "wrong position in the pass": "otherwise than the same text",
}


def test_faults_are_caught_and_nothing_stays(serve: Any, pairs: Pairs, plain_server: Any) -> None:
    asked = prompts()[3:9]
    plain = run(plain_server, asked, tokens=24)
    pair = pairs.pair()
    with serve(pair.target, pair.drafter, env=HOOK) as server:
        log = server.log.read_text()
        for fault, said in CAUGHT.items():
            (line,) = (x for x in log.splitlines() if f"fault caught: {fault}: " in x)
            assert "DFLASH2 refuses to serve: " in line
            assert said in line
        assert log.count("fault caught") == len(CAUGHT)
        assert log.count("self-check: trees verified as text") == 1 + log.count("fault missed")
        assert_same(run(server, asked, tokens=24), plain)
        assert acceptance(run(server, asked, tokens=24)) > 1.8
        server.flush()  # fails if a slot is not free
        assert server.errors() == []


def test_a_server_with_a_fault_does_not_start(serve: Any, pairs: Pairs) -> None:
    pair = pairs.pair()
    fault = {**HOOK, "DFLASH2_TEST_FAULT": "wrong position in the pass"}
    with (
        pytest.raises(
            ServerError, match="DFLASH2 refuses to serve: the target sees a tree's paths"
        ),
        serve(pair.target, pair.drafter, env=fault),
    ):
        pass
