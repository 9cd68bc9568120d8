"""The part that lives inside a running vLLM server: follow the log, stage in the background, commit between two steps.

Importing this package pulls in no vLLM; `layout`, `engine`, `extension` and `stats` do when they are imported.
"""
