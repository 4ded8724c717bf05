"""kvlens shows who holds the KV cache of an LLM serving engine, and catches KV leaks."""

__version__ = "0.1.0"


class KvlensError(Exception):
    """Something the person at the keyboard can put right: shown in one line, exit code 2."""
