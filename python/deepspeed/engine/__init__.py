"""The training engine that ``deepspeed.initialize`` returns."""
