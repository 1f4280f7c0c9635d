"""The modules that ``load()`` of our builders returns: one per op, with functions under the names that scripts call."""
