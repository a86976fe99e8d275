"""A grammar object of SGLang, moved from node to node of a tree and back to where it was."""

from __future__ import annotations

import copy
from typing import Any, Protocol

from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject

Path = tuple[int, ...]


class Cursor(Protocol):
    def at(self, path: Path) -> Any:
        """The grammar after the tokens of ``path``, which the grammar must allow one by one; a path
        must have been visited before those that go on from it."""

    def close(self) -> None:
        """Leave the request's own grammar as it was found."""


class Rewinding:
    """For grammars that can take tokens back: one object, moved along the tree's edges."""

    def __init__(self, grammar: Any) -> None:
        self.grammar = grammar
        self._path: list[int] = []

    def at(self, path: Path) -> Any:
        common = 0
        for ours, theirs in zip(self._path, path, strict=False):
            if ours != theirs:
                break
            common += 1
        if back := len(self._path) - common:
            self.grammar.rollback(back)
            del self._path[common:]
        for token in path[common:]:
            self.grammar.accept_token(token)
            self._path.append(token)
        return self.grammar

    def close(self) -> None:
        self.at(())


class Branching:
    """For grammars that cannot (outlines): a copy for each node, which is cheap, as their state is a
    number."""

    def __init__(self, grammar: Any) -> None:
        self._seen: dict[Path, Any] = {(): grammar}

    def at(self, path: Path) -> Any:
        if path not in self._seen:
            grammar = _twin(self._seen[path[:-1]])
            grammar.accept_token(path[-1])
            self._seen[path] = grammar
        return self._seen[path]

    def close(self) -> None:
        self._seen.clear()


def cursor(grammar: Any) -> Cursor:
    """The cheapest cursor for a grammar, which may wait for the end of a reasoning part."""
    inner = grammar.grammar if isinstance(grammar, ReasonerGrammarObject) else grammar
    rewinds = inner is None or type(inner).rollback is not BaseGrammarObject.rollback
    return Rewinding(grammar) if rewinds else Branching(grammar)


def _twin(grammar: Any) -> Any:
    """A copy in the same state; the objects' own ``copy`` starts from the beginning."""
    if isinstance(grammar, ReasonerGrammarObject):
        twin = grammar.copy()
        twin.grammar = copy.copy(grammar.grammar)
        return twin
    return copy.copy(grammar)
