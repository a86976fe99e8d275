"""Workloads: the package's own prompt sets, the user's files, and SGLang's data sets.

A built-in set is ``assets/prompts/NAME.jsonl``, 40 lines ``{"prompt": ...}`` written for this package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash2_sglang.bench import BenchError
from dflash2_sglang.bench.plan import Workload

FOLDER = Path(__file__).parents[1] / "assets" / "prompts"
BUILT_IN = ("maths", "code", "chat", "summary", "json")
MIXED = "mixed"
SGLANG = "sglang:"

Chat = list[dict[str, str]]


def built_in(name: str) -> list[str]:
    """The 40 prompts of a set; of ``mixed``, all 200, one of each set in turn."""
    if name != MIXED:
        return [chat[-1]["content"] for chat in read(FOLDER / f"{name}.jsonl")]
    return [prompt for row in zip(*map(built_in, BUILT_IN), strict=True) for prompt in row]


def workload(
    source: str, count: int, tokenizer: Any, template: bool, rows: Callable[[str, int], list[str]]
) -> Workload:
    """``count`` prompts of a built-in set, a file, or, through ``rows``, a data set of SGLang's.

    Raises BenchError where there are none, or fewer than ``count`` in a file of the user's.
    """
    if source.startswith(SGLANG):
        name = source.removeprefix(SGLANG)
        return Workload(_short(name.partition("=")[0]), tuple(rows(name, count)))
    if source in (*BUILT_IN, MIXED):
        chats: list[Chat] = [[_user(text)] for text in built_in(source)]
    else:
        chats = read(Path(source))
    if not chats:
        raise BenchError(f"--workload {source} holds no prompt.")
    # "mixed" is in turns already, and an even spread would skip whole sets.
    chosen = chats[:count] if source == MIXED else spread(chats, count)
    as_sent = [as_served(tokenizer, chat, template) for chat in chosen]
    return Workload(_short(Path(source).stem), tuple(as_sent))


def _short(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name) or "prompts"


def spread(items: Sequence[Any], count: int | None) -> list[Any]:
    """``count`` of the items, evenly spread; all of them where there are not so many."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def texts(path: Path | None, count: int | None = None) -> list[str]:
    """The last user message of each chat of a file, or the demo's prompts; evenly spread."""
    if path is None:
        from dflash2_sglang.cli.demo import PROMPTS

        return spread(PROMPTS, count)
    return spread([chat[-1]["content"] for chat in read(path)], count)


def read(path: Path) -> list[Chat]:
    """The chats of a JSONL file, or of a JSON file with one list.

    An entry is a string, or a record with ``prompt`` (a string), ``messages`` (OpenAI's) or
    ``conversations`` (SGLang's own format). An answer that ends a chat is left out.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(
            f"--workload {path} is neither a built-in set ({', '.join((*BUILT_IN, MIXED))}), nor "
            f"{SGLANG}NAME, nor a file that can be read: {error}"
        ) from error
    return [_chat(entry, path, number) for number, entry in _entries(text, path)]


def _entries(text: str, path: Path) -> list[tuple[int, Any]]:
    if text.lstrip().startswith("["):
        try:
            return list(enumerate(json.loads(text), 1))
        except ValueError as error:
            raise BenchError(f"{path} is not JSON: {error}") from error
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                entries.append((number, json.loads(line)))
            except ValueError as error:
                raise BenchError(f"{path}, line {number} is not JSON: {error}") from error
    return entries


def _chat(entry: Any, path: Path, number: int) -> Chat:
    chat: Chat = []
    if isinstance(entry, str):
        chat = [_user(entry)]
    elif isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        chat = [_user(entry["prompt"])]
    elif isinstance(entry, dict):
        turns = entry.get("messages") or entry.get("conversations") or entry.get("conversation")
        chat = [_message(turn) for turn in turns or [] if isinstance(turn, dict)]
        if chat and chat[-1]["role"] == "assistant":
            chat.pop()
    if not chat or not all(turn["content"].strip() for turn in chat):
        raise BenchError(
            f"{path}, entry {number} holds no prompt: it should be a string, or a record with "
            "prompt, messages or conversations."
        )
    return chat


def _message(turn: dict[str, Any]) -> dict[str, str]:
    role = turn.get("role") or turn.get("from") or "user"
    names = {"human": "user", "gpt": "assistant"}
    content = turn.get("content") or turn.get("value") or ""
    return {"role": names.get(role, role), "content": content if isinstance(content, str) else ""}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def as_served(tokenizer: Any, chat: Chat, template: bool) -> str:
    """The text that a server turns into the tokens of the chat.

    SGLang's load generator sends text, and the server's tokenizer may put a BOS token before it.
    A template that begins with the same token would then give two of them, so it is left out, but
    only at the beginning: in some templates it stands before every turn.
    """
    if not template or not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(turn["content"] for turn in chat)
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    wanted = tokenizer(text, add_special_tokens=False).input_ids
    for candidate in (text, text.removeprefix(tokenizer.bos_token or "")):
        if tokenizer(candidate).input_ids == wanted:
            return candidate
    raise BenchError(
        "This tokenizer adds special tokens to a text that the chat template has already: "
        "give --no-chat-template and prompts as the model should see them."
    )
