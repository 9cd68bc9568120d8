"""Measurements of this machine beside the peers they are compared with, interleaved in one run.

Does not print: `cli/bench.py` does.
"""
