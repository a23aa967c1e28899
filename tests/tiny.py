"""The tiny model of the conformance suite: the tests' too."""

from conformance.model import IM_END, SPECIAL_TOKENS, VOCAB_SIZE, write_tiny_model

__all__ = ["IM_END", "SPECIAL_TOKENS", "VOCAB_SIZE", "write_tiny_model"]
