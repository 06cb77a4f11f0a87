"""labkit: a research workbench for the cost of speculative decoding. Nothing is re-exported here."""

__version__ = "0.1.0"
