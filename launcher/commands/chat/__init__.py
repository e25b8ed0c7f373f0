"""`phalanx chat`: a conversation in the terminal with a running server."""
