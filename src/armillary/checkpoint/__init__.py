"""State on disk and back."""
