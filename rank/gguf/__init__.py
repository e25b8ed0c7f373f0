"""GGUF files: what a checkpoint in one file, or in several shards, tells about its model. Neither torch nor numpy."""
