"""Has a server try its self-check with faults, one after the other, before the honest one.

Installed by ``DFLASH2_TEST_HOOKS=self_check_faults``; the log tells of each what the check said. Those named
"in the pass" are hidden from the comparison with the parents: only logits can tell. With
``DFLASH2_TEST_FAULT`` one of them stays, and the server must not start.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger(__name__)
Fault = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def changed(change: Callable[[Any, Any], None]) -> Fault:
    """``change(verify_input, state)`` after each verify input is made; ``state`` is kept."""

    def fault() -> contextlib.AbstractContextManager[None]:
        from dflash2_sglang.verify_input import VerifyInputs

        make, state = VerifyInputs.__call__, {}

        def faulty(self: Any, *args: Any) -> Any:
            verify = make(self, *args)
            change(verify, state)
            return verify

        return replaced(VerifyInputs, "__call__", faulty)

    return fault


def blinded(fault: Fault) -> Fault:
    @contextlib.contextmanager
    def blind() -> Iterator[None]:
        from dflash2_sglang import selfcheck

        with replaced(selfcheck, "inconsistency", lambda *_: None), fault():
            yield

    return blind


def freeze_mask(verify: Any, state: dict[str, Any]) -> None:
    first = state.setdefault("mask", verify.tree.mask)
    verify.tree = verify.tree._replace(mask=first)


def swap_siblings(verify: Any, state: dict[str, Any]) -> None:
    sibling = verify.retrieve_next_sibling
    first, second = (sibling[0] >= 0).nonzero()[:2, 0].tolist()
    swapped = sibling.clone()
    swapped[0, first], swapped[0, second] = sibling[0, second], sibling[0, first]
    verify.retrieve_next_sibling = swapped


def move_last_node(verify: Any, state: dict[str, Any]) -> None:
    verify.positions = verify.positions.clone()
    verify.positions[-1] += 1


def frozen_buffer() -> contextlib.AbstractContextManager[None]:
    """The flat mask is written once and never again."""
    from dflash2_sglang.tree_mask import FlatMask

    write = FlatMask.write

    def once(self: Any, *args: Any) -> None:
        if self.written is None or not getattr(self, "frozen", False):
            write(self, *args)
            self.frozen = True

    return replaced(FlatMask, "write", once)


def stale_positions() -> contextlib.AbstractContextManager[None]:
    """A replay reads the positions of the pass before."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    load = DecodeCudaGraphRunner.load_batch

    def faulty(self: Any, *args: Any, **keywords: Any) -> None:
        before = self.buffers.positions.clone()
        load(self, *args, **keywords)
        self.buffers.positions.copy_(before)

    return replaced(DecodeCudaGraphRunner, "load_batch", faulty)


def stale_rope() -> contextlib.AbstractContextManager[None]:
    """Sines and cosines outlive their forward; an eager pass, whose positions are a new tensor, hides it."""
    from dflash2_sglang.cpu import scratch

    return replaced(scratch, "new_forward", lambda: None)


def stale_draft() -> contextlib.AbstractContextManager[None]:
    """The tree at the end of the drafter's pass is that of the pass before."""
    from dflash2_sglang.folded import FoldedDraft

    return replaced(FoldedDraft, "__call__", lambda *_: None)


def frozen_anchor() -> contextlib.AbstractContextManager[None]:
    """The drafter's selector follows the first anchors it saw, though the root is right."""
    from dflash2_sglang.folded import FoldedDraft

    call, first = FoldedDraft.__call__, {}

    def faulty(self: Any, *args: Any) -> None:
        def lattice(hidden: Any, anchor: Any, heat: Any) -> Any:
            return honest(hidden, first.setdefault(anchor.shape[0], anchor.clone()), heat)

        honest, self.to_lattice = self.to_lattice, lattice
        call(self, *args)
        self.to_lattice = honest

    return replaced(FoldedDraft, "__call__", faulty)


FAULTS: dict[str, Fault] = {
    "frozen mask": changed(freeze_mask),
    "frozen mask in the pass": blinded(changed(freeze_mask)),
    "frozen buffer": frozen_buffer,
    "swapped sibling link": changed(swap_siblings),
    "wrong position": changed(move_last_node),
    "wrong position in the pass": blinded(changed(move_last_node)),
    "stale positions of a graph": stale_positions,
    "stale rope": stale_rope,
    "stale draft": stale_draft,
    "frozen anchor": frozen_anchor,
}


def install() -> None:
    from dflash2_sglang.selfcheck import SelfCheck, SelfCheckError

    honest = SelfCheck.__call__
    stays = os.environ.get("DFLASH2_TEST_FAULT")

    def check(self: Any) -> None:
        if stays:
            with FAULTS[stays]():
                honest(self)
            return
        for name, fault in FAULTS.items():
            try:
                with fault():
                    honest(self)
            except SelfCheckError as error:
                logger.info("fault caught: %s: %s", name, error)
            else:
                logger.info("fault missed: %s", name)
        self.verify_input.mask = None  # its buffer may be frozen
        honest(self)

    SelfCheck.__call__ = check
