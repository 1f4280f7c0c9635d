"""``deepspeed script.py``: starts the ranks of a job and stays responsible for them. Imports no torch."""
