"""Memory that a model needs and its speed, from config.json and tensor headers: no GPU, no weights."""
