"""The first two steps of the one line beside DDP over sparse tables."""
