"""Where a benchmark files a look at the scheduler's stack."""

import importlib.util
import re
from pathlib import Path

import pytest

import dflash2_sglang
from dflash2_sglang.bench import rounds


def stack(*places):
    frames = ["Thread 1 (python)", "event_loop_overlap (sglang/srt/managers/scheduler.py:9)"]
    return ";".join([*frames, *(f"{name} (a/b/{file}:12)" for name, file in places)])


OURS = [("forward_batch_generation", "worker.py"), ("_round", "worker.py")]
STOCK = [("forward_batch_generation", "dflash_worker_v2.py")]
TARGET = [("forward_batch_generation", "tp_worker.py"), ("forward", "model_runner.py")]
EXTEND = ("_execute_extend", "eager_runner.py")


@pytest.mark.parametrize(
    ("places", "part"),
    [
        ([*OURS, *TARGET, EXTEND], "target forward"),
        ([*OURS, ("__call__", "draft.py")], "candidates, lattice, tree"),
        ([*OURS, ("__call__", "draft.py"), ("block", "draft.py"), *TARGET[1:]], "drafter forward"),
        (OURS, "rest of the round"),
        ([OURS[0], ("_prefill", "worker.py"), *TARGET], "prefill"),
        ([*STOCK, *TARGET, EXTEND], "target forward"),
        ([*STOCK, *TARGET[1:], EXTEND], "drafter forward"),
        (STOCK, "rest of the round"),
        ([*TARGET, ("_execute_decode", "eager_runner.py")], "target forward"),
        ([*TARGET, EXTEND], "prefill"),
        ([("recv_requests", "scheduler.py"), ("poll", "zmq.py")], "waiting for requests"),
        ([("process_batch_result", "scheduler.py")], "scheduler"),
    ],
)
def test_part_of_a_stack(places, part):
    assert rounds.part_of(stack(*places)) == part


def test_other_threads_are_left_out():
    assert rounds.part_of("Thread 2 (python);wait (threading.py:3)") is None


def test_why_a_round_is_not_split(monkeypatch):
    from dflash2_sglang.cli import checkup

    monkeypatch.setattr(rounds, "py_spy", lambda: None)
    assert "pip install py-spy" in rounds.why_not()
    monkeypatch.setattr(rounds, "py_spy", lambda: "/bin/py-spy")
    monkeypatch.setattr(checkup, "accelerators", lambda: ["a card, 80 GiB"])
    assert "accelerator" in rounds.why_not()
    monkeypatch.setattr(checkup, "accelerators", list)
    assert rounds.why_not() is None


def test_named_functions_exist():
    """A function that was renamed would have its time filed under its caller."""
    stock = importlib.util.find_spec("sglang").submodule_search_locations[0]
    folders = (Path(dflash2_sglang.__file__).parent, Path(stock) / "srt")
    for function, file in [*rounds.PARTS, rounds.STOCK, rounds.MODEL, rounds.EXTEND]:
        sources = [path.read_text() for folder in folders for path in folder.rglob(file)]
        assert any(re.search(rf"^ *def {function}\(", text, re.M) for text in sources), function
