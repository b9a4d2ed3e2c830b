"""What codecs cost and lose: milliseconds a million numbers, bytes, error; beside what torch has of the kind."""
