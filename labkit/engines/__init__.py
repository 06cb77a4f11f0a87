"""Reading what engines and load tools print: logs, metrics pages, result files, traces. No torch, no server needed."""
