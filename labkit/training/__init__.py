"""Training of draft heads for a target: `python -m labkit.training --help`."""
