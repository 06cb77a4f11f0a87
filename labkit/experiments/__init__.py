"""One module per data set: its axes and presets, its points, and what is measured at one point."""
