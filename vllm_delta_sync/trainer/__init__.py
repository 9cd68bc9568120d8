"""The trainer side: what changed since the last publish, written to the log in the background.

Does not import vLLM; talks to no engine.
"""
