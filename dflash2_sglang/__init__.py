"""DFlash 2 tree speculative decoding for stock SGLang.

Importing this package imports neither torch nor sglang; SGLang finds the plugin and the CPU platform
through the entry points in ``setup.cfg``.
"""

__version__ = "0.1.0"
