"""Sound and images: decoded, prepared, padded; and the letters of a speech recogniser."""
