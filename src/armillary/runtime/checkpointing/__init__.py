"""State on disk and back, for any number of workers and any plan."""
