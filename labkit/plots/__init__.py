"""Drawing: axes-level plots, whole figures, style, and saving with provenance."""
