"""A stand-in for the Hugging Face Hub: bucket routes and the Xet store behind them, for the real client to talk to.

Does not check a hash and keeps nothing beyond its own life.
"""
