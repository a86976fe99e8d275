"""Ask a server for token ids, so that they can be joined with the recorded rounds."""

from __future__ import annotations

import time
from typing import Any

from dflash2_sglang.cli.servers import Server, ServerError

ANSWER_SECONDS = 600.0


class Asker:
    """Asks one server; prompts go through the model's chat template unless ``raw``."""

    def __init__(self, server: Server, max_tokens: int, temperature: float, raw: bool) -> None:
        import httpx

        self._server = server
        self._http = httpx.Client(base_url=server.url, trust_env=False, timeout=ANSWER_SECONDS)
        self._sampling = {"max_new_tokens": max_tokens, "temperature": temperature}
        self.info: dict[str, Any] = self._call("GET", "/server_info")
        self.tokenizer = _tokenizer(self.info)
        self._raw = raw or not getattr(self.tokenizer, "chat_template", None)

    def ask(self, name: str, prompt: str) -> tuple[int, dict[str, Any]]:
        """Length of the prompt in tokens, and the server's answer; ``name`` is the request's id."""
        ids = self.encode(prompt)
        body = {"input_ids": ids, "sampling_params": self._sampling, "rid": name}
        return len(ids), self._call("POST", "/generate", json=body)

    def encode(self, prompt: str) -> list[int]:
        if self._raw:
            return list(self.tokenizer.encode(prompt))
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _call(self, method: str, path: str, **keywords: Any) -> dict[str, Any]:
        import httpx

        name = self._server.name
        try:
            response = self._http.request(method, path, **keywords)
        except httpx.HTTPError as error:
            time.sleep(1.0)  # a server whose scheduler dies takes a moment to end
            self._server.check_alive("answering")
            raise ServerError(f"the {name} server did not answer: {error}") from error
        if response.status_code != 200:
            raise ServerError(f"the {name} server refused: {response.text}")
        return response.json()


def _tokenizer(info: dict[str, Any]) -> Any:
    """The server's own."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(
        info.get("tokenizer_path") or info["model_path"],
        tokenizer_mode=info.get("tokenizer_mode") or "auto",
        trust_remote_code=bool(info.get("trust_remote_code")),
        tokenizer_revision=info.get("revision"),
    )
