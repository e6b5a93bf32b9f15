"""Questions of clients to a node, answered over standard input and output."""
