"""What a client asks of a node, over its standard input and output."""
