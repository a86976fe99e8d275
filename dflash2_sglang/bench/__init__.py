"""``dflash2-sglang bench``: configurations side by side on one pair, driven by SGLang's load generator.

``plan`` says what is measured in which order, ``runner`` does it and writes each finished cell to
``journal``; ``figures`` makes medians and spreads of the cells, ``report`` and ``plots`` show them.
"""


class BenchError(RuntimeError):
    """What the benchmark refuses or could not do; the message is a sentence for the user."""
