"""A saved model, written for others: merged, for other runtimes, for the hub."""
