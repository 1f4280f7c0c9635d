"""DeepSpeed: train and serve large models, with a C++ core."""
