"""Does staleness cost accuracy? The update rules, their remedies and their stability boundary, on two small tasks."""
