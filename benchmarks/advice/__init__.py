"""Advice beside what the network lab measures: are the first rows in the order that the page says?"""
