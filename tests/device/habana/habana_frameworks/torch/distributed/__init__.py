"""Communication of Gaudi."""
