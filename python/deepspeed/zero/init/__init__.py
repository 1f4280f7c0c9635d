"""``zero.Init``: parameters that are sharded while a model is built."""
