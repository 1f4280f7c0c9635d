"""What ``load()`` of our builders returns: one module per op, with the functions under the names scripts call."""
