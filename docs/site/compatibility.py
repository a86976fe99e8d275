"""Write docs/compatibility.md from the tables in the code: ``python docs/site/compatibility.py``.

``tests/unit/test_docs_tables.py`` fails when the page is not what this would write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

from dflash2_sglang.features import FEATURES, Feature, tree_backends
from dflash2_sglang.patches.base import TESTED_VERSIONS
from dflash2_sglang.support import REFUSALS, refuse_request

PAGE = Path(__file__).parents[1] / "compatibility.md"
HEAD = """\
<!-- Written by docs/site/compatibility.py from dflash2_sglang/features.py and support.py: edit these. -->

# Compatibility

SGLang {versions}. Request parameters, one by one: [losslessness](losslessness.md).

- **supported**: the tests named show it, on a CPU, with tiny models or the demo pair. Files lie in `tests/`.
- **refused**: the server does not start, or the request gets HTTP 400; the message is quoted below.
- **switched off**: the server starts without it and logs that.
- **not tested**: not refused, and no test shows it. It may work; compare texts with plain decoding first.

**Nothing here was run on a GPU.**
"""


def render() -> str:
    """The whole page."""
    lines = HEAD.format(versions=", ".join(TESTED_VERSIONS)).splitlines()
    for group in dict.fromkeys(feature.group for feature in FEATURES):
        lines += ["", f"## {group}", "", *_features(group)]
    lines += ["", "## Attention backends", "", *_backends()]
    lines += ["", "## Refused settings", "", *_refused_settings()]
    lines += ["", "## Refused requests", "", *_refused_requests()]
    return "\n".join(lines) + "\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _features(group: str) -> Iterator[str]:
    rows = ([_name(f), f.status, _shown(f)] for f in FEATURES if f.group == group)
    return _table(("Feature", "Status", "Shown by, or where it ends"), rows)


def _name(feature: Feature) -> str:
    flags = ", ".join(f"`{flag}`" for flag in feature.flags)
    return f"{feature.name} ({flags})" if flags else feature.name


def _shown(feature: Feature) -> str:
    files = dict.fromkeys(test.partition("::")[0] for test in feature.tests)
    parts = [", ".join(f"`{file}`" for file in files), feature.note]
    return "; ".join(part for part in parts if part)


def _backends() -> Iterator[str]:
    names = ", ".join(f"`{name}`" for name in tree_backends())
    yield f"Trees are masked by {names}. Others are refused at start-up, by the flag that names them."
    yield "Where you name none, SGLang chooses. On a CPU its choice, and those backends of its own that need"
    yield "other kernels (`torch_native`, `intel_amx`), are replaced by `dflash2_cpu`."


def _refused_settings() -> Iterator[str]:
    rows = ([_code(refusal.setting), _code(refusal.fix)] for refusal in REFUSALS)
    yield "The message is `DFLASH2 does not support SETTING: FIX.`, with these:"
    yield ""
    yield from _table(("Setting", "Fix"), rows)
    yield ""
    yield "SGLang 0.5.23 itself turns `--speculative-adaptive` off, with a warning, before it is seen here."


def _refused_requests() -> Iterator[str]:
    asked = {
        "multimodal_inputs": None,
        "return_sampling_mask": False,
        "origin_input_ids": [0],
        "vocab_size": 49152,
        "logprob": SimpleNamespace(top_logprobs_num=0),
    }
    wanted = {
        "images, audio, video, to a target that takes them": {"multimodal_inputs": True},
        "`return_sampling_mask`": {"return_sampling_mask": True},
        "a text of no tokens": {"origin_input_ids": []},
        "a token id that the target has not": {"origin_input_ids": [49152]},
        "more log-probabilities than tokens": {"logprob": SimpleNamespace(top_logprobs_num=60000)},
    }
    rows = (
        [what, str(refuse_request(SimpleNamespace(**asked | on)))] for what, on in wanted.items()
    )
    return _table(("Request", "Message"), rows)


def _code(words: str) -> str:
    """Flags in code type."""
    return re.sub(r"(?<![\w-])(--[a-z][a-z0-9-]*\w)", r"`\1`", words)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
