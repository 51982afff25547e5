"""Sound and images: decoded, prepared, padded."""
