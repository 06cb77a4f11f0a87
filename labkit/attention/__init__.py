"""Attention over a paged KV cache: one call signature, one file per backend. Use `labkit.attention.api`."""
