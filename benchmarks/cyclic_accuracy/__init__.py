"""Does staleness cost accuracy? The update rules, their corrections and their stability boundary, on two small
tasks."""
