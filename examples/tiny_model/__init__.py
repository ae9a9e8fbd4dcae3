"""The tiny Qwen3-VL and its world: shapes to look at, a tokenizer, a model, a warm-up and a test of how good it is."""
