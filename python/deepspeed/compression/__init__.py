"""Smaller models: helpers to exchange layers of a model. The methods themselves are not built yet; a call says so."""
