"""Drafters, one per file, behind the `Drafter` protocol of `labkit.speculation`."""
