"""GGUF files: what a checkpoint in one file, or in several shards, says of its model. Neither torch nor numpy."""
