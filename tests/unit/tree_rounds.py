"""Three rounds of one answer, small enough to work out every figure by hand, and their document."""

from __future__ import annotations

from typing import Any

from dflash2_sglang.cli.tree_document import Spelling, document
from dflash2_sglang.cli.tree_trace import Answer, join

PROMPT_LENGTH = 7
OUTPUT = [10, 11, 12, 13, 14, 15]
EVIL = {
    11: "</script><script>window.hacked = 1</script>",
    12: "<!--<script>",
    21: " &amp;\u2028'\"",
}
TEXTS = {10: "Once", 13: "\n", 14: " of", 15: "<|end|>", 23: "\x07", 24: " ", 25: "é", **EVIL}


def record(rid: str, place: int, tokens: list[int], **columns: Any) -> dict[str, Any]:
    """As ``trace.Recorder`` writes it."""
    return {"rid": rid, "start": PROMPT_LENGTH + place, "tokens": tokens, "random": [], **columns}


def records(rid: str = "a") -> list[dict[str, Any]]:
    """The third round drafts beyond the end of the answer; the fourth one comes after it."""
    return [
        record(
            rid,
            0,
            [10, 11, 21, 12, 22],
            parent=[-1, 0, 0, 1, 1],
            prob=[1.0, 0.6, 0.3, 0.4, 0.1],
            candidates=[[11, 21], [12, 22], [30, 31]],
            chain=[11, 12, 40],
            chain_prob=[0.6, 0.4, 0.05],
            accepted=[0, 1, 3],
            bonus=13,
        ),
        record(
            rid,
            3,
            [13, 23, 24, 25],
            parent=[-1, 0, 0, 1],
            prob=[1.0, 0.5, 0.2, 0.1],
            candidates=[[23, 24], [15, 25], [1, 2]],
            chain=[14, 15, 50],
            chain_prob=[0.5, 0.1, 0.05],
            accepted=[0],
            bonus=14,
        )
        | {"random": [2]},
        record(
            rid,
            4,
            [14, 15, 60],
            parent=[-1, 0, 1],
            prob=[1.0, 0.9, 0.8],
            candidates=[[15, 3], [60, 4], [1, 2]],
            chain=[15, 60, 61],
            chain_prob=[0.9, 0.8, 0.7],
            accepted=[0, 1, 2],
            bonus=61,
        ),
        record(
            rid,
            7,
            [61, 62],
            parent=[-1, 0],
            prob=[1.0, 0.5],
            candidates=[[62, 5], [60, 4], [1, 2]],
            chain=[62, 60, 1],
            chain_prob=[0.5, 0.3, 0.1],
            accepted=[0, 1],
            bonus=63,
        ),
    ]


def answer(prompt: str = "Why?") -> Answer:
    response = {"output_ids": OUTPUT, "meta_info": {"finish_reason": {"type": "stop"}}}
    return join(prompt, PROMPT_LENGTH, response, records())


class Tokenizer:
    """Tokens are strings, or single bytes from 200 on: 200 + b is the byte b."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0]

    def decode(self, tokens: list[int], **_: bool) -> str:
        text = b"".join(self._bytes(token) for token in tokens).decode(errors="replace")
        return text.removeprefix(" ")  # as SentencePiece does

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<0x{token - 200:02X}>"

    def _bytes(self, token: int) -> bytes:
        if token >= 200:
            return bytes([token - 200])
        return b"a" if token == 0 else TEXTS.get(token, f" {token}").encode()


def whole(*answers: Answer, temperature: float = 0.0) -> dict[str, Any]:
    settings = {"target": "/m/target", "drafter": "org/drafter", "dtype": "float32"}
    settings |= {"temperature": temperature, "max_tokens": 6}
    settings |= {"depth": 3, "nodes": 5, "children": 2}
    return document(answers or (answer(),), settings, Spelling(Tokenizer()))
