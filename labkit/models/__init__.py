"""Models of the Llama/Qwen family on labkit's own attention and cache. Import `weights`, `decoder` or `tokenizer`."""
