"""Constrained output: trees that hold only what a request's grammar allows.

``search`` grows such a tree from the lattice, ``legal`` and ``cursor`` read SGLang's grammar objects, and
``constrain`` does it for a batch. Nothing here runs for a batch without a grammar.
"""
