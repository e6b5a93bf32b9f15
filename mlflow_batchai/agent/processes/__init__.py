"""Processes of a node: start, watch, find and end them."""
