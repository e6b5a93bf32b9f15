"""What ended jobs have left, and freeing it."""
