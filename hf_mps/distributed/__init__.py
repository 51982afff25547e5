"""Several processes: which of them this is, and what they share."""
