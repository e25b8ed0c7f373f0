"""Towers: what turns an image into features, which take the place of tokens' embeddings. A file for each kind."""
