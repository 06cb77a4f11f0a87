"""labkit: a research workbench for the cost of speculative decoding. Import the modules; nothing is re-exported here."""

__version__ = "0.1.0"
