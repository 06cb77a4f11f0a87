"""Replay: identical requests to live engines, rows of what came back, arms side by side."""
