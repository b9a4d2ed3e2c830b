"""Hybrid data parallelism at run time: buckets, tables of rows, look-ups and the steps of their owners."""
