"""A real model, a real trainer and a real vLLM server on one machine, kept in step and then compared bit for bit.

Does not hold anything that serving or training need.
"""
