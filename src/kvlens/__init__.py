"""kvlens: who holds the KV cache of an LLM serving engine, and where it leaks."""

__version__ = "0.1.0"
