"""Following a file of a share while others write it: all of its text, each character once, nothing lost at the end."""
