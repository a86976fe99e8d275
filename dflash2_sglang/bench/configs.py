"""Which servers are compared, and whether they fit beside each other."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from dflash2_sglang.bench import BenchError
from dflash2_sglang.bench.plan import Config

ALGORITHM, DRAFTER = "--speculative-algorithm", "--speculative-draft-model-path"
OURS = ("--host", "--port", "--nccl-port", "--model-path", "--model", DRAFTER, ALGORITHM)
LEAST_BYTES = 4 << 30  # of a server on the host: processes, KV pool, a small model
SPARE_BYTES = 2 << 30  # of a server, beside its weights


def reject(args: argparse.Namespace) -> None:
    """BenchError for arguments that contradict each other."""
    if bool(args.model_path) != bool(args.speculative_draft_model_path):
        raise BenchError(f"--model-path and {DRAFTER} go together: give both, or neither.")
    for option in _options(args.server_flags):
        name = option[0].partition("=")[0]
        if name in OURS:
            raise BenchError(
                f"{name} is set by the benchmark itself: describe another server with --config."
            )
        if not name.startswith("--"):
            raise BenchError(f"{name!r} belongs to no option of bench or of a server.")
        if name == "--speculative-num-draft-tokens":
            raise BenchError(f"{name} is what --widths sets: give that instead.")


def dtype_of(args: argparse.Namespace) -> str:
    """What ``--dtype`` says to the servers; ``auto`` where it is not given."""
    for option in _options(args.server_flags):
        name, _, value = option[0].partition("=")
        if name == "--dtype":
            return value or " ".join(option[1:])
    return "auto"


def configurations(args: argparse.Namespace, target: str, drafter: str) -> list[Config]:
    """Plain, the stock chain, DFLASH2 by width, and those of ``--config``; plain is the first.

    The stock chain is left out in float32, where SGLang 0.5.23 hands its drafter bfloat16 input and
    the server dies of the mismatch.
    """
    shared = ["--model-path", target]
    tree_only: list[str] = []
    for option in _options(args.server_flags):
        (tree_only if option[0].startswith("--speculative-") else shared).extend(option)
    draft = [DRAFTER, drafter]
    named: dict[str, list[str]] = {"plain": shared}
    if not args.no_chain and dtype_of(args) in ("bfloat16", "auto"):
        named["DFLASH"] = [*shared, ALGORITHM, "DFLASH", *draft]
    tree = [*shared, ALGORITHM, "DFLASH2", *draft, *tree_only]
    for width in dict.fromkeys(args.widths):
        named[f"DFLASH2 {width}"] = [*tree, "--speculative-num-draft-tokens", str(width)]
    if not args.widths and not args.config:
        named["DFLASH2"] = tree
    for text in args.config:
        name, flags = _named(text)
        if name in named:
            raise BenchError(f"Two configurations are called {name!r}: give --config another name.")
        named[name] = [*shared, *flags, *(draft if ALGORITHM in flags else [])]
    return [Config(name, tuple(named[name])) for name in _chosen(list(named), args.only)]


def _chosen(names: Sequence[str], only: Sequence[str] | None) -> list[str]:
    unknown = [name for name in only or [] if name not in names]
    if unknown:
        raise BenchError(f"--only {unknown[0]!r} is none of {', '.join(map(repr, names))}.")
    return list(dict.fromkeys(only or names))


def _named(text: str) -> tuple[str, list[str]]:
    name, equals, flags = text.partition("=")
    name = name.strip()
    if not equals or not name or name.startswith("-") or set(name) & set("|/"):
        raise BenchError(f"--config {text!r} is not NAME=FLAGS.")
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise BenchError(f"--config {name}: {error}.") from error
    return name, [word for option in _options(words) for word in option]


def _options(words: Sequence[str]) -> list[list[str]]:
    """Each option with its values; ``--name=value`` is split."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not options:
            name, equals, value = word.partition("=")
            options.append([name, value] if equals and word.startswith("--") else [word])
        else:
            options[-1].append(word)
    return options


def fit_together(
    configs: Sequence[Config], checkpoints: Sequence[str], flags: Sequence[str]
) -> bool:
    """Whether all servers may hold their memory at the same time.

    On a GPU, where SGLang gives most of the memory to the first one, only if the given
    ``--mem-fraction-static`` leaves room for all.
    """
    import psutil

    from dflash2_sglang.cli.checkup import weight_bytes
    from dflash2_sglang.cli.demo import fit_together as demo_fits

    weights = sum(weight_bytes(path) or 0 for path in checkpoints if Path(path).is_dir())
    need = max(LEAST_BYTES, weights + SPARE_BYTES)
    roomy = psutil.virtual_memory().available >= need * len(configs)
    share = next((o[1] for o in _options(flags) if o[0] == "--mem-fraction-static" and o[1:]), None)
    if share is not None and _has_gpu():
        return roomy and float(share) * len(configs) <= 0.9
    return roomy and demo_fits(len(configs))


def _has_gpu() -> bool:
    import os

    from dflash2_sglang.cli.demo import GPU_FILES

    return any(map(os.path.exists, GPU_FILES))
