"""What a model needs and how fast it would be, from config.json and tensor headers: no GPU, no weights."""
